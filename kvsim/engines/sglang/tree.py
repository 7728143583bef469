"""The pages of SGLang 0.5.23: those that are free, and a radix tree of those that are cached.

```
 root ─┬─ [system prompt] ─┬─ [question of A] ── [answer to A]
       │                   └─ [question of B]
       └─ [another prompt]
```

A node is a part of the text of some request, and of the pages that hold it. It is locked by the
requests that hold it; a leaf without locks can be evicted. All nodes are in a ring in the order of
their last use, parents before their children.

`mem_cache/unified_cache/unified_tree_core.py`, `mem_cache/allocator/token.py` (pages of one token)
and `mem_cache/allocator/paged.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

from librt.vecs import append, extend, vec
from mypy_extensions import i64, mypyc_attr

from kvsim.core.vectors import EMPTY, zeros
from kvsim.errors import ConfigError
from kvsim.policies.named import callable_with, find_rule
from kvsim.policies.order import Order


@mypyc_attr(free_list_len=1)
class Text:
    """The pages of a stream in runs of consecutive numbers, equal for equal tokens after equal
    tokens."""

    page_size: i64
    runs: vec[i64]
    """Of each run, the number of a page less its place, and where the run ends
    (`kvsim.core.contents.Numbering.reach`)."""
    request: Any
    """Of which it is, for an outsider's rank of nodes; None: of nobody."""
    _stream: Any

    def __init__(
        self, page_size: i64, runs: vec[i64], stream: Any = None, request: Any = None
    ) -> None:
        self.page_size, self.runs = page_size, runs
        self._stream, self.request = stream, request

    def run_at(self, page: i64) -> i64:
        """Where the run that holds a page is in `runs`."""
        runs: vec[i64] = self.runs
        low: i64 = 0
        high: i64 = len(runs) // 2 - 1
        while low < high:
            middle: i64 = (low + high) >> 1
            if runs[2 * middle + 1] > page:
                high = middle
            else:
                low = middle + 1
        return 2 * low

    def number(self, page: i64) -> i64:
        """The number of a page."""
        return self.runs[self.run_at(page)] + page

    def agrees(self, other: Text, first: i64, last: i64) -> i64:
        """Of the pages `first .. last - 1`, how many leading ones are the same in another text."""
        if self is other:
            return last - first
        page: i64 = first
        own: i64 = self.run_at(first)
        its: i64 = other.run_at(first)
        while page < last and self.runs[own] == other.runs[its]:
            # Runs of the same base agree up to where the first of them ends.
            page = min(self.runs[own + 1], other.runs[its + 1])
            own += 2 if self.runs[own + 1] == page else 0
            its += 2 if other.runs[its + 1] == page else 0
        return min(page, last) - first

    def keys(self, first: i64, last: i64) -> list[int]:
        """The keys of the pages `first .. last - 1`, for those who look on."""
        keys: list[int] = list(self._stream.keys(first, last, self.page_size))
        return keys


NO_TEXT: Final = Text(1, EMPTY)


@mypyc_attr(free_list_len=1)
class Node:
    """The pages `begin .. end - 1` of a text, which are `pages[at]` and those behind it."""

    key: object
    """The number of its first page, which tells it from all others."""
    text: Text
    begin: i64
    end: i64
    pages: vec[i64]
    at: i64
    parent: Node | None
    branches: i64
    """Number of its children."""
    locks: i64
    """Number of requests that hold this node or one below it."""
    hits: i64
    """Number of requests that passed through it."""
    priority: i64
    """The best priority among the requests that inserted it."""
    history: i64
    """Pages from the root to the deepest end that was ever at or below it."""
    time: i64
    """Its place in the order of last use, where an outsider's rank asks for it."""
    older: Node
    newer: Node
    """Its neighbours in the ring; the root is between the newest and the oldest."""

    def __init__(
        self,
        key: object,
        text: Text,
        begin: i64,
        end: i64,
        pages: vec[i64],
        at: i64,
        parent: Node | None,
        priority: i64,
    ) -> None:
        self.key, self.text, self.begin, self.end = key, text, begin, end
        self.pages, self.at = pages, at
        self.parent, self.priority = parent, priority
        self.branches = self.locks = self.hits = self.history = self.time = 0
        self.older = self.newer = self

    @property
    def tokens(self) -> int:
        """Tokens of its pages."""
        return (self.end - self.begin) * self.text.page_size

    @property
    def history_tokens(self) -> int:
        """Tokens from the root to the deepest end that was ever at or below it."""
        return self.history * self.text.page_size

    def list_pages(self) -> list[int]:
        """Its pages."""
        return [self.pages[k] for k in range(self.at, self.at + self.end - self.begin)]

    def list_keys(self) -> list[int]:
        """The keys of its pages, for those who look on."""
        return self.text.keys(self.begin, self.end)


NOWHERE: Final = Node(None, NO_TEXT, 0, 0, EMPTY, 0, None, 0)
"""The node of a request that was never looked up."""


class Rank:
    """Grades the leaves that no request holds. Of those with the smallest grade, the one used
    longest ago is evicted (`mem_cache/evict_policy.py`)."""

    oldest: bool = False
    """Whether all grades are equal."""
    own: Callable[[Any], Any] | None = None
    """An outsider's rank, whose values of any kind are compared instead."""
    hears: Any = None
    """The policy that is told which request gives pages back; None: nobody."""

    def grade(self, node: Node) -> i64:
        """The grade of a leaf."""
        return 0


class LeastRecent(Rank):
    """Evicts the least recently used node first."""

    def __init__(self) -> None:
        self.oldest = True


class LeastFrequent(Rank):
    """Evicts the least frequently used node first."""

    def grade(self, node: Node) -> i64:
        return node.hits


class Segmented(Rank):
    """Evicts nodes used fewer than `protected_threshold` times first."""

    _threshold: i64

    def __init__(self, protected_threshold: int = 2) -> None:
        self._threshold = protected_threshold

    def grade(self, node: Node) -> i64:
        return 1 if node.hits >= self._threshold else 0


class ByPriority(Rank):
    """Evicts the node of the worst priority first."""

    def grade(self, node: Node) -> i64:
        return node.priority


class TailFirst(Rank):
    """Evicts nodes far from the expected end of the next prompt first: those more than `threshold`
    tokens away. That prompt is expected to be `next_prompt_estimate` tokens longer than the longest
    so far."""

    _ahead: i64

    def __init__(self, threshold: int = 0, next_prompt_estimate: int = 0) -> None:
        self._ahead = next_prompt_estimate - threshold

    def grade(self, node: Node) -> i64:
        bound: i64 = max(node.history_tokens + self._ahead, 0)
        return 1 if node.begin * node.text.page_size < bound else 0


RADIX_EVICTION: dict[str, Any] = {
    "lru": LeastRecent,
    "lfu": LeastFrequent,
    "slru": Segmented,
    "priority": ByPriority,
    "tlru": TailFirst,
}
"""Values of `radix_eviction_policy`."""


def make_rank(name: Any, config: Mapping[str, Any]) -> Rank:
    """Returns the rank called `name`: a key of the table, or `package.module:name` of a function of
    a node. Raises `ConfigError`."""
    if isinstance(name, Rank):
        return name

    def guard(label: str, found: Any) -> Any:
        callable_with(label, found, "node")
        return found

    if name in ("lru", "lfu", "priority") and config:
        raise ConfigError(f"radix_eviction_policy_config: {name} takes no settings; leave it out")
    found = find_rule("radix_eviction_policy", RADIX_EVICTION, name, guard, **config)
    if isinstance(found, Rank):
        return found
    rank = Rank()
    rank.own, rank.hears = found, found.hears if isinstance(found, Order) else None
    return rank


@mypyc_attr(free_list_len=1)
class Span:
    """Some pages of a vector."""

    pages: vec[i64]
    begin: i64
    end: i64
    behind: Span | None
    """The next one on the free list."""

    def __init__(self, pages: vec[i64], begin: i64, end: i64) -> None:
        self.pages, self.begin, self.end = pages, begin, end
        self.behind = None


class PagePool:
    """Pages 1 .. `size`. Free ones are taken at the head of a list. Returned pages of one token go
    to its tail; larger pages go in front of the head, in the given order. Memory is used only for
    pages that were taken once."""

    size: i64
    page_size: i64
    blank: i64
    """Pages on the free list."""
    fresh: i64
    """The first page that was never taken."""
    evictable: i64
    """Pages in the tree that no request holds."""
    tree: RadixTree
    _start: Span
    """What stands before the free list, where pages that were never taken are left out."""
    _before: Span
    """The span behind which returned pages go."""
    _collects: bool

    def __init__(self, size: int, page_size: int) -> None:
        self.size = self.blank = size
        self.page_size = page_size
        self.evictable, self.fresh = 0, 1
        self._start = self._before = Span(EMPTY, 0, 0)
        self._collects = False

    # -- for those who look on -------------------------------------------------------------------

    @property
    def first(self) -> int:
        """The first page."""
        return 1

    @property
    def free(self) -> int:
        """Pages on the free list, and those in the tree that no request holds."""
        return self.blank + self.evictable

    @property
    def used(self) -> int:
        """Pages that requests hold."""
        return self.size - self.blank - self.evictable

    @property
    def cached(self) -> int:
        """Pages in the tree that no request holds."""
        return self.evictable

    def cached_blocks(self) -> list[int]:
        """The pages in the tree that no request holds."""
        nodes = self.tree.nodes.values()
        return [page for node in nodes if not node.locks for page in node.list_pages()]

    @property
    def references(self) -> dict[int, int]:
        """Page → number of tables that hold it, of the pages in use."""
        held = dict.fromkeys(range(1, self.fresh), 1)
        k: i64
        for span in self._spans():
            for k in range(span.begin, span.end):
                del held[span.pages[k]]
        for node in self.tree.nodes.values():
            for page in node.list_pages():
                if node.locks:
                    held[page] = node.locks
                else:
                    del held[page]
        return held

    # -- moves -----------------------------------------------------------------------------------

    def take(self, pages: vec[i64], count: i64) -> vec[i64]:
        """Returns `pages` and `count` more."""
        self.blank -= count
        assert self.blank >= 0, "no free page left"
        while count:
            head: Span | None = self._start.behind
            # Pages of one token are returned behind those that were never taken, larger ones
            # before.
            if head is None or (self.page_size == 1 and self.fresh <= self.size):
                pages = append(pages, self.fresh)
                self.fresh += 1
                count -= 1
                continue
            taken: i64 = min(count, head.end - head.begin)
            if taken == 1:
                pages = append(pages, head.pages[head.begin])
            else:
                pages = extend(pages, head.pages[head.begin : head.begin + taken])
            head.begin += taken
            count -= taken
            if head.begin == head.end:
                self._start.behind = head.behind
                if head is self._before:
                    self._before = self._start
        return pages

    def give_back(self, pages: vec[i64], begin: i64, end: i64) -> None:
        """Returns some pages of a vector to the free list."""
        if begin >= end:
            return
        if 4 * (end - begin) < len(pages):  # A short span does not keep a long vector.
            pages, begin, end = pages[begin:end], 0, end - begin
        self.blank += end - begin
        span: Span = Span(pages, begin, end)
        before: Span = self._before
        span.behind, before.behind = before.behind, span
        if self._collects or self.page_size == 1:
            self._before = span

    def collect(self) -> None:
        """From now on until `apply`, returned pages stay in order."""
        self._collects = True

    def apply(self) -> None:
        """The pages that are returned next go in front of those collected."""
        self._collects = False
        if self.page_size > 1:
            self._before = self._start

    def _spans(self) -> list[Span]:
        spans: list[Span] = []
        span: Span | None = self._start.behind
        while span is not None:
            spans.append(span)
            span = span.behind
        return spans

    def audit(self, held: list[Span], ends: list[Node]) -> None:
        """Asserts that every page is in exactly one place, and that counts agree. `held`: pages of
        requests that are not in the tree; `ends`: where the pages end that each has in it."""
        places: vec[i64] = zeros(self.fresh)
        blank: i64 = self.size + 1 - self.fresh
        span: Span
        for span in self._spans():
            blank += span.end - span.begin
            _count(places, span.pages, span.begin, span.end)
        assert blank == self.blank, "free pages were miscounted"
        for span in held:
            _count(places, span.pages, span.begin, span.end)
        self.tree.audit(places, ends)
        k: i64
        for k in range(1, self.fresh):
            assert places[k] == 1, "a page is in no place, or in two"


def _count(places: vec[i64], pages: vec[i64], begin: i64, end: i64) -> None:
    """Counts some pages of a vector."""
    k: i64
    for k in range(begin, end):
        places[pages[k]] += 1


class RadixTree:
    """The cached pages of a pool."""

    pool: PagePool
    rank: Rank
    root: Node
    nodes: dict[object, Node]
    """All others by their key: the number of a page stands for all pages before it, too."""
    end: Node
    """Where the pages end that were looked up last."""
    locked_pages: i64
    """Pages in nodes that requests hold."""
    events: Any
    """Where it reports what comes and goes (`kvsim.core.blocks.CacheEvents`); None if
    nobody asks."""

    def __init__(self, pool: PagePool, rank: Rank) -> None:
        self.pool, self.rank = pool, rank
        self.root = self.end = Node(None, NO_TEXT, 0, 0, EMPTY, 0, None, 0)
        self.nodes = {}
        self.locked_pages = 0
        self.events = None
        pool.tree = self

    # -- lookups ---------------------------------------------------------------------------------

    def match(self, text: Text, pages: i64, uses: bool = True) -> i64:
        """Looks up the first `pages` pages of a text. Returns how many leading ones are cached.

        If it uses them, `end` is the node where they end. A node that matches only in part is
        split. The node and all above it count as used now.
        """
        node: Node = self.root
        at: i64 = 0
        while at < pages:
            child: Node | None = self.nodes.get(text.number(at))
            if child is None:
                break
            same: i64 = text.agrees(child.text, at, min(child.end, pages))
            at += same
            # It leaves the text within this node.
            if same < child.end - child.begin:
                if uses:
                    node = self._split(child, same)
                break
            node = child
        if uses:
            self.end = node
            self._use_path(node)
        return at

    def path(self, end: Node) -> list[int]:
        """The pages from the root to the end of a node."""
        parts: list[list[int]] = []
        node: Node | None = end
        while node is not None:
            parts.append(node.list_pages())
            node = node.parent
        return [page for part in reversed(parts) for page in part]

    # -- changes ---------------------------------------------------------------------------------

    def insert(
        self,
        own: Node,
        text: Text,
        number: i64,
        pages: vec[i64],
        first: i64,
        counted: i64,
        priority: i64,
    ) -> Node:
        """Puts the first `number` pages of a text into the tree, and returns the node where they
        end. Those up to the end of `own` are in it already; `pages` are those from `first` on.

        A node that ends behind page `counted` was used once more. Pages whose content is in the
        tree already are given back.
        """
        self._use_path(own)
        self._pass(own, counted, priority)
        node: Node = own
        at: i64 = own.end
        while at < number:
            key: object = text.number(at)
            child: Node | None = self.nodes.get(key)
            if child is None:
                node = Node(key, text, at, number, pages, at - first, node, priority)
                node.hits += number > counted
                self._add_leaf(node)
                break
            self._use(child, self.root)
            same: i64 = text.agrees(child.text, at, min(child.end, number))
            node = self._split(child, same) if same < child.end - child.begin else child
            # Somebody else has the same content in the tree: the request goes on with those pages.
            self.pool.give_back(pages, at - first, at + same - first)
            at += same
            node.hits += at > counted
            node.priority = max(node.priority, priority)
        return node

    def insert_again(self, end: Node, number: i64, priority: i64) -> None:
        """Inserts the first `number` pages up to the end of a node once more, so that one ends
        there. Nobody counts that."""
        node: Node = end
        while node.begin >= number:
            assert node.parent is not None
            node = node.parent
        self._use_path(node)
        if number < node.end:
            node = self._split(node, number - node.begin)
        self._pass(node, number, priority)

    def _pass(self, end: Node, counted: i64, priority: i64) -> None:
        """A request of some priority holds a node and all above it. Those that end behind page
        `counted` were used once more."""
        node: Node | None = end
        while node is not None:
            node.hits += node.end > counted
            node.priority = max(node.priority, priority)
            node = node.parent

    def lock(self, end: Node, number: i64 = 1) -> None:
        """Adds requests that hold a node and all nodes above it."""
        node: Node | None = end
        while node is not None:
            node.locks += number
            if node.locks == max(number, 0):  # It was free, or is now.
                pages: i64 = number * (node.end - node.begin)
                self.locked_pages += pages
                self.pool.evictable -= pages
            node = node.parent

    def unlock(self, end: Node) -> None:
        """Removes a request that held a node and all nodes above it."""
        self.lock(end, -1)

    def make_room(self, pages: i64) -> None:
        """Evicts leaves that no request holds until `pages` pages are on the free list, or nothing
        is left to evict. A parent becomes a candidate when its last child is gone."""
        pool: PagePool = self.pool
        # Whole leaves go, even if a part of the last one would do.
        while pool.blank < pages:
            leaf: Node = self._victim()
            if leaf is self.root:
                return
            if self.events is not None:
                self.events.removed(leaf.list_keys())
            pool.give_back(leaf.pages, leaf.at, leaf.at + leaf.end - leaf.begin)
            pool.evictable -= leaf.end - leaf.begin
            assert leaf.parent is not None
            leaf.parent.branches -= 1
            del self.nodes[leaf.key]
            leaf.older.newer, leaf.newer.older = leaf.newer, leaf.older
            leaf.older = leaf.newer = self.root

    def _victim(self) -> Node:
        """The leaf that is evicted next: of those with the smallest grade, the one used longest
        ago. The root, if there is none."""
        rank: Rank = self.rank
        root: Node = self.root
        best: Node = root
        node: Node
        if rank.own is not None:
            return self._own_victim(rank.own)
        least: i64 = 0
        node = root.newer
        while node is not root:
            if node.locks == 0 and node.branches == 0:
                if rank.oldest:
                    return node
                grade: i64 = rank.grade(node)
                if best is root or grade < least:
                    best, least = node, grade
            node = node.newer
        return best

    def _own_victim(self, rank: Any) -> Node:
        """The same by an outsider's rank."""
        leaves: list[Node] = []
        time: i64 = 0
        node: Node = self.root.newer
        while node is not self.root:
            time += 1
            node.time = time
            if node.locks == 0 and node.branches == 0:
                leaves.append(node)
            node = node.newer
        best: Node = min(leaves, key=rank, default=self.root)
        return best

    def _use_path(self, end: Node) -> None:
        """Makes a node and those above it the ones that were used last."""
        node: Node = end
        newer: Node = self.root
        while node is not self.root:
            self._use(node, newer)
            newer = node
            assert node.parent is not None
            node = node.parent

    def _use(self, node: Node, newer: Node) -> None:
        """Makes a node the one that was used last before `newer`; before the root: of all."""
        if node.newer is not newer:
            node.older.newer, node.newer.older = node.newer, node.older
            node.older, node.newer = newer.older, newer
            newer.older.newer = newer.older = node

    def _add_leaf(self, leaf: Node) -> None:
        self._use(leaf, self.root)
        self.nodes[leaf.key] = leaf
        assert leaf.parent is not None
        leaf.parent.branches += 1
        self.pool.evictable += leaf.end - leaf.begin
        above: Node | None = leaf
        # What is deeper already has ancestors that are.
        while above is not None and above.history < leaf.end:
            above.history = leaf.end
            above = above.parent
        if self.events is not None:
            self.events.labelled(leaf.text.keys(0, leaf.end), leaf.begin)

    def _split(self, child: Node, number: i64) -> Node:
        """Splits a node after its first `number` pages. These become a new node above it."""
        text, begin, middle = child.text, child.begin, child.begin + number
        above, priority = child.parent, child.priority
        upper: Node = Node(child.key, text, begin, middle, child.pages, child.at, above, priority)
        upper.hits, upper.locks, upper.history = child.hits, child.locks, child.history
        upper.branches = 1
        child.key, child.begin, child.parent = text.number(middle), middle, upper
        child.at += number
        self.nodes[upper.key], self.nodes[child.key] = upper, child
        # Both count as used now, the lower part, too, though only the upper one matched.
        self._use(upper, self.root)
        self._use(child, self.root)
        return upper

    def audit(self, places: vec[i64], ends: list[Node]) -> None:
        """Asserts that counts, locks and the order of use agree with the nodes, and adds its pages
        to `places`. `ends`: where the pages end that each request has in the tree."""
        holders: Counter[Node] = Counter()
        for end in ends:
            above: Node | None = end
            while above is not None:
                holders[above] += 1
                above = above.parent
        locked: i64 = 0
        evictable: i64 = 0
        branches: i64 = self.root.branches
        node: Node
        for node in self.nodes.values():
            branches += node.branches
            _count(places, node.pages, node.at, node.at + node.end - node.begin)
            assert node.locks == holders.get(node, 0), "locks and tables disagree"
            if node.locks:
                locked += node.end - node.begin
            else:
                evictable += node.end - node.begin
        assert locked == self.locked_pages, "pages were miscounted"
        assert evictable == self.pool.evictable, "pages were miscounted"
        used: i64 = 0
        node = self.root.newer
        while node is not self.root:
            assert self.nodes.get(node.key) is node, "a node is not in the tree any more"
            used += 1
            node = node.newer
        assert used == len(self.nodes), "a node is missing in the order of use"
        assert branches == used, "children were miscounted"

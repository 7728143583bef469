"""The radix tree of SGLang 0.5.23: cached pages as runs of nodes that share a beginning.

```
 root ─┬─ [system prompt] ─┬─ [question of A] ── [answer to A]
       │                   └─ [question of B]
       └─ [another prompt]
```

A node is locked by the requests that hold it; a leaf without locks can be evicted.

A page is known by a key that stands for its tokens and all before them, so a node is a sequence of
keys and of the pages that hold them. `mem_cache/unified_cache/unified_tree_core.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from kvsim.engine.cache_events import CacheEvents
from kvsim.engine.named import callable_with, find_rule
from kvsim.errors import ConfigError

Pages = Sequence[int]
Keys = Sequence[int]
Agreement = Callable[[Any, Any, int], int]
"""Returns how many leading keys of the first argument equal those of the second one from a place
on."""
Time = tuple[int, int]
"""A tick, and the number of nodes below that were touched at the same tick, so that a parent is
older than its child."""


class Node:
    """Consecutive pages of the tree."""

    __slots__ = (
        "children",
        "depth_tokens",
        "history_tokens",
        "hits",
        "key",
        "keys",
        "locks",
        "pages",
        "parent",
        "priority",
        "time",
        "tokens",
    )

    def __init__(
        self, parent: Node | None, key: int, keys: Keys, pages: Pages, page_size: int, priority: int
    ) -> None:
        self.parent = parent
        """None for the root, and for an evicted node."""
        self.key = key
        """The first of its keys."""
        self.keys = keys
        self.pages = pages
        self.tokens = len(pages) * page_size
        self.children: dict[int, Node] = {}
        """Children by the key of their first page."""
        self.locks = 0
        """Number of requests that hold this node or one below it."""
        self.time: Time = (0, 0)
        """When it was last used."""
        self.hits = 0
        """Number of requests that passed through it."""
        self.priority = priority
        """The best priority among the requests that inserted it."""
        self.depth_tokens = 0
        """Number of tokens from the root to its end when it was made."""
        self.history_tokens = 0
        """Number of tokens from the root to the deepest end that was ever at or below it."""


class Place(NamedTuple):
    """Where the keys of a request leave the tree."""

    node: Node
    """The node that ends there."""
    next_key: int | None
    """The key that follows; None if all keys are in the tree."""

    def holds(self) -> bool:
        """Whether a lookup of the same keys would still end here."""
        node = self.node
        evicted = node.parent is None and node.pages
        return not evicted and self.next_key not in node.children


Rank = Callable[[Node], Any]
"""Ranks evictable leaves. The leaf with the smallest rank is evicted."""


def lru(node: Node) -> Any:
    """Evicts the least recently used node first."""
    return node.time


def lfu(node: Node) -> Any:
    """Evicts the least frequently used node first."""
    return node.hits, node.time


class Segmented:
    """Evicts nodes used fewer than `protected_threshold` times first."""

    def __init__(self, protected_threshold: int = 2) -> None:
        self._threshold = protected_threshold

    def __call__(self, node: Node) -> Any:
        return node.hits >= self._threshold, node.time


def by_priority(node: Node) -> Any:
    """Evicts the node of the worst priority first."""
    return node.priority, node.time


class TailFirst:
    """Evicts nodes far from the expected end of the next prompt first: those more than `threshold`
    tokens away. That prompt is expected to be `next_prompt_estimate` tokens longer than the longest
    so far."""

    def __init__(self, threshold: int = 0, next_prompt_estimate: int = 0) -> None:
        self._ahead = next_prompt_estimate - threshold

    def __call__(self, node: Node) -> Any:
        bound = max(node.history_tokens + self._ahead, 0)
        return node.depth_tokens - node.tokens < bound, node.time


RADIX_EVICTION: dict[str, Any] = {
    "lru": lru,
    "lfu": lfu,
    "slru": Segmented,
    "priority": by_priority,
    "tlru": TailFirst,
}
"""Values of `radix_eviction_policy` (`mem_cache/evict_policy.py`)."""


def make_rank(name: str | Rank, config: Mapping[str, Any]) -> Rank:
    """Returns the rank called `name`: a key of the table, or `package.module:name`. Raises
    `ConfigError`."""

    def guard(label: str, found: Any) -> Any:
        callable_with(label, found, "node")
        return found

    taken = RADIX_EVICTION.get(name) if isinstance(name, str) else None
    if not isinstance(taken, type) and taken is not None and config:
        raise ConfigError(f"radix_eviction_policy_config: {name} takes no settings; leave it out")
    rank: Rank = find_rule("radix_eviction_policy", RADIX_EVICTION, name, guard, **config)
    return rank


class RadixTree:
    """The cached pages. The tree does not know which pages are free."""

    def __init__(self, page_size: int, rank: Rank, agreement: Agreement | None = None) -> None:
        """`agreement` compares keys; None for lists."""
        self._size = page_size
        self._rank = rank
        self._agreement = agreement or _listed_agreement
        self.root = Node(None, 0, (), (), page_size, 0)
        self._ticks = count(1)
        self._leaves: dict[Node, None] = {}
        """Leaves without locks."""
        self._rises = rank in RADIX_EVICTION.values() or type(rank) in RADIX_EVICTION.values()
        """Whether ranks only rise while a node stays as it is, so that an old rank is not too
        high."""
        self._heap: list[tuple[Any, int, Node]] = []
        """If so: (rank at some time, number, node) of all leaves without locks, and of others."""
        self._listed: set[Node] = set()
        """The nodes in the heap."""
        self._numbers = count()
        self.pages = 0
        """Number of pages in the tree."""
        self.events: CacheEvents | None = None
        """Where it reports what comes and goes; None if nobody asks."""
        self.locked_pages = 0
        """Number of these pages in nodes that requests hold."""

    # -- lookups ---------------------------------------------------------------------------------

    def match(self, keys: Keys, known: Node | None = None) -> tuple[int, Node]:
        """Returns the number of leading pages that are cached, and the node where they end. A node
        that matches only in part is split. The node and all above it count as used now.

        `known` is a node where an earlier match of these keys, or of a part of them, ended.
        """
        node, found, number = self.root, 0, len(keys)
        if not number:
            return 0, self.root
        if known is not None and known.parent is not None:
            depth = known.depth_tokens // self._size
            if depth <= number:
                node, found = known, depth
        while found < number:
            child = node.children.get(keys[found])
            if child is None:
                break
            same = self._agreement(child.keys, keys, found)
            node = child if same == len(child.pages) else self._split(child, same)
            found += same
            if node is not child:
                break
        self.touch(node)
        return found, node

    def touch(self, node: Node) -> None:
        """Counts a node and all above it as used now."""
        tick, behind = next(self._ticks), 0
        each: Node | None = node
        while each is not None:
            each.time = (tick, behind)
            each, behind = each.parent, behind - 1

    def found(self, keys: Keys) -> int:
        """Returns the number of leading pages that are cached. Nothing counts as used."""
        node, found, number = self.root, 0, len(keys)
        while found < number and (child := node.children.get(keys[found])) is not None:
            same = self._agreement(child.keys, keys, found)
            found += same
            if same < len(child.pages):
                break
            node = child
        return found

    def path(self, node: Node) -> list[int]:
        """Returns the pages from the root to the end of a node."""
        return [page for each in self._down_to(node) for page in each.pages]

    def _down_to(self, node: Node) -> list[Node]:
        """Returns the nodes from the root to a node."""
        found = []
        each: Node | None = node
        while each is not None:
            found.append(each)
            each = each.parent
        found.reverse()
        return found

    def cached_pages(self) -> Iterator[int]:
        """Iterates over the pages that no request holds."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            if not node.locks:
                yield from node.pages
            stack += node.children.values()

    # -- changes ---------------------------------------------------------------------------------

    def insert(
        self, keys: Keys, pages: Pages, own: int, counted: int, priority: int, known: Node
    ) -> tuple[list[Pages], Node]:
        """Puts pages of a request into the tree. The first `own` of them are already in it.

        The keys agree with those up to the end of node `known`, as far as both go. A node that ends
        behind page `counted` was used once more. The request must then hold the nodes up to the one
        that is returned (`move_lock`). Returns the pages whose content was there before,
        node by node, and the node where the keys end.
        """
        number, size = len(keys), self._size
        node = known
        while node.parent is not None and node.depth_tokens > number * size:
            node = node.parent
        at, twice = node.depth_tokens // size, []
        self.touch(node)
        each = node
        while each.parent is not None:
            if priority > each.priority:
                each.priority = priority
            each.hits += each.depth_tokens > counted * size
            each = each.parent
        while at < number:
            key = keys[at]
            child = node.children.get(key)
            if child is None:
                node = self._add_leaf(node, key, keys[at:], pages[at:], priority)
                node.hits = int(number > counted)
                break
            child.time = (next(self._ticks), 0)
            same = self._agreement(child.keys, keys, at)
            if same < len(child.pages):
                child = self._split(child, same)
            child.priority = max(child.priority, priority)
            end = at + same
            if max(at, own) < end:
                twice.append(pages[max(at, own) : end])
            child.hits += end > counted
            node, at = child, end
        return twice, node

    def lock(self, node: Node) -> None:
        """Adds a request that holds a node and all nodes above it."""
        each: Node | None = node
        while each is not None and each is not self.root:
            if not each.locks:
                self.locked_pages += len(each.pages)
                self._leaves.pop(each, None)
            each.locks += 1
            each = each.parent

    def move_lock(self, node: Node, end: Node) -> None:
        """Lets a request that held a node hold the nodes up to `end`, which is the same or below
        it."""
        each: Node | None = end
        while each is not node:
            assert each is not None, "a request lost pages of the tree"
            if not each.locks:
                self.locked_pages += len(each.pages)
                self._leaves.pop(each, None)
            each.locks += 1
            each = each.parent

    def unlock(self, node: Node) -> None:
        """Removes a request that held a node and all nodes above it."""
        each: Node | None = node
        while each is not None and each is not self.root:
            each.locks -= 1
            if not each.locks:
                self.locked_pages -= len(each.pages)
                if not each.children:
                    self._let_go(each)
            each = each.parent

    def evict(self) -> Iterator[Pages]:
        """Evicts leaves that no request holds, the smallest rank first, and yields the pages of
        each. A parent becomes a candidate when its last child is gone."""
        if not self._rises:
            self._heap, self._listed = [], set()
            for leaf in self._leaves:
                self._list(leaf)
        heap = self._heap
        while heap:
            rank, _, leaf = heapq.heappop(heap)
            self._listed.discard(leaf)
            if leaf not in self._leaves:
                continue
            if self._rises and self._rank(leaf) != rank:
                self._list(leaf)
                continue
            parent = leaf.parent
            assert parent is not None
            del parent.children[leaf.key], self._leaves[leaf]
            leaf.parent = None
            self.pages -= len(leaf.pages)
            if self.events is not None:
                self.events.removed(leaf.keys)
            if parent is not self.root and not parent.children and not parent.locks:
                self._leaves[parent] = None
                self._list(parent)
            yield leaf.pages

    def _let_go(self, leaf: Node) -> None:
        """Adds a node to the leaves that can be evicted."""
        self._leaves[leaf] = None
        if self._rises and leaf not in self._listed:
            self._list(leaf)

    def _list(self, node: Node) -> None:
        heapq.heappush(self._heap, (self._rank(node), next(self._numbers), node))
        self._listed.add(node)

    def _add_leaf(self, parent: Node, key: int, keys: Keys, pages: Pages, priority: int) -> Node:
        """Adds a node below another one; `key` is the first of its keys."""
        leaf = Node(parent, key, keys, pages, self._size, priority)
        leaf.time = (next(self._ticks), 0)
        self._leaves.pop(parent, None)
        self.pages += len(pages)
        parent.children[key] = leaf
        if self.events is not None:
            above = len(parent.keys)
            self.events.stored(parent.keys[above - 1] if above else None, keys)
        leaf.depth_tokens = leaf.history_tokens = parent.depth_tokens + leaf.tokens
        each: Node | None = parent
        while each is not None and each.history_tokens < leaf.depth_tokens:
            each.history_tokens = leaf.depth_tokens
            each = each.parent
        return leaf

    def _split(self, child: Node, number: int) -> Node:
        """Splits a node after its first `number` pages. These become a new node above it."""
        parent, size, keys, pages = child.parent, self._size, child.keys, child.pages
        assert parent is not None
        upper = Node(parent, child.key, keys[:number], pages[:number], size, child.priority)
        upper.time = (next(self._ticks), 0)
        upper.hits, upper.locks = child.hits, child.locks
        upper.history_tokens = child.history_tokens
        upper.depth_tokens = parent.depth_tokens + upper.tokens
        parent.children[upper.key] = upper
        child.parent, child.key = upper, keys[number]
        child.keys, child.pages = keys[number:], pages[number:]
        child.tokens = len(child.pages) * size
        child.time = (next(self._ticks), 0)
        upper.children[child.key] = child
        if self._rises and child in self._leaves:
            self._list(child)  # The rank of a shorter node may be lower.
        return upper

    def audit(self) -> None:
        """Asserts that counts, locks and leaves agree with the nodes."""
        pages = locked = 0
        leaves, stack = set(), list(self.root.children.values())
        while stack:
            node = stack.pop()
            pages += len(node.pages)
            locked += len(node.pages) if node.locks else 0
            assert node.locks >= sum(child.locks for child in node.children.values())
            if not (node.children or node.locks):
                leaves.add(node)
            stack += node.children.values()
        assert (pages, locked) == (self.pages, self.locked_pages), "pages were miscounted"
        assert leaves == self._leaves.keys(), "a leaf is missing, or is none"


def _listed_agreement(one: Keys, other: Keys, start: int) -> int:
    most = min(len(one), len(other) - start)
    if one[:most] == other[start : start + most]:
        return most
    # Keys stand for all that is before them: once they differ, they stay different.
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if one[middle] == other[start + middle]:
            low = middle + 1
        else:
            high = middle
    return low

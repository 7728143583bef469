"""What SGLang 0.5.23 records about a request, and which pages it holds
(`mem_cache/unified_radix_cache.py`).

A block is a page of `page_size` tokens, usually one token. Computed pages enter the tree at
*checkpoints*: when a chunk or a whole prefill is done, and when the request finishes. In a table,
the pages in the tree come first; the rest are the request's own.

```
 free list ─ take ─► own ─ checkpoint ─► in the tree, locked ─ unlock ─► evictable ─ make room ─┐
     ▲                └── release ──┐                                                           │
     └──────────────────────────────┴───────────────────────────────────────────────────────────┘
```
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from librt.vecs import vec
from mypy_extensions import i64, mypyc_attr

from kvsim.core.blocks import BlockManager
from kvsim.core.contents import Numbering
from kvsim.core.plan import Plan
from kvsim.core.pool import Pool
from kvsim.core.request import Request
from kvsim.core.vectors import EMPTY
from kvsim.engines.sglang.tree import (
    NOWHERE,
    LeastRecent,
    Node,
    PagePool,
    RadixTree,
    Rank,
    Span,
    Text,
    make_rank,
)
from kvsim.policies.tables import FULL_HITS, FullHit


@mypyc_attr(free_list_len=1)
class Standing:
    """A request in the engine's own books (`Request.standing`)."""

    text: Text | None
    """What its pages hold, once anybody asked."""
    limit: i64
    """The most tokens it may generate: what its client announced, as far as there is room."""
    longest: i64
    """Its tokens when it has generated as many."""
    rank: i64
    """Its priority; smaller values go first."""
    served: bool
    """False if its prompt is too long. One token is then computed in its place."""
    entry: i64
    """Number of its last entry into the queue."""
    since: i64
    """Tokens that the engine had computed at that time, by its own count."""
    considered: i64
    """Its tokens when an admission was last tried."""
    prefix: i64
    """Tokens with KV before the chunk in flight."""
    end: i64
    """Tokens up to which its last chunk goes."""
    middle: i64
    """Chunks in flight that are not the last one of its prompt."""
    leaves: bool
    """Whether it has left the running batch, as its last token is in flight."""
    retracted: bool
    """Whether it lost its pages since its last prefill. Results in flight are then dropped."""

    node: Node
    """The node where its last lookup ended."""
    matched: i64
    """Of its tokens, without the last one, those that were found by its last lookup in the order
    of the queue."""
    work: i64
    """The tokens that remained to be computed then, at least 1."""
    late: bool
    """Whether it had better wait for what another one computes."""

    lock: Node | None
    """The node where its pages in the tree end."""
    cached: i64
    """Its leading pages that are in the tree."""
    counted: i64
    """Its pages for which the nodes have already counted it as a user."""
    pages: vec[i64]
    """Its pages from page `first` on; those of them that are in the tree are not up to date."""
    first: i64

    def __init__(self, request: Request, limit: i64, rank: i64, served: bool) -> None:
        self.limit, self.longest = limit, request.input_length + limit
        self.rank, self.served = rank, served
        self.text = None
        self.entry = self.since = self.considered = self.prefix = self.end = self.middle = 0
        self.matched = self.work = self.cached = self.counted = self.first = 0
        self.leaves = self.retracted = self.late = False
        self.node, self.lock, self.pages = NOWHERE, None, EMPTY


@mypyc_attr(free_list_len=1)
class Group:
    """The requests of a step. The running batch is a group, too: it lives on while they decode."""

    members: list[Request]
    """A list that never changes, as steps in flight keep it; another one takes its place."""
    extends: bool
    """Whether it computed prompts in its last step."""
    chunked: Request | None
    """The request whose prompt was unfinished when the group was made."""
    silent: bool
    """Whether no request in it may generate a token."""
    computed_tokens: i64
    """Tokens that it computed when it was made; later steps count them again."""

    def __init__(self, members: list[Request]) -> None:
        self.members, self.chunked = members, None
        self.extends, self.silent = False, True
        self.computed_tokens = 0

    def let_go(self, one: Request | None = None, other: Request | None = None) -> bool:
        """Removes requests that are over, and the given ones. Returns whether there were any."""
        places: list[int] = []
        for place, each in enumerate(self.members):
            if each.finish_ns >= 0 or each is one or each is other:
                places.append(place)
        return self.drop(places)

    def drop(self, places: list[int]) -> bool:
        """Removes the requests at these places. Returns whether there are any."""
        if not places:
            return False
        self.members = self.members[:]
        for place in reversed(places):
            del self.members[place]
        return True


@mypyc_attr(allow_interpreted_subclasses=True)
class SglangTables(BlockManager):
    """Page tables without a radix cache (`disable_radix_cache`)."""

    gpu: PagePool
    tree: RadixTree
    numbering: Numbering
    refreshes: bool
    """Whether its evictions depend on waiting requests being looked up from time to time."""
    _lookups: i64
    _hits: i64

    def __init__(self, block_size: int, num_gpu_blocks: int) -> None:
        self.block_size = block_size
        self.gpu, self.cpu = PagePool(num_gpu_blocks, block_size), Pool(0)
        self.tree = RadixTree(self.gpu, LeastRecent())
        self.numbering = Numbering(block_size)
        self.tier = None
        self.needs_keys = self.refreshes = False
        self.empty_slots = self._lookups = self._hits = 0

    # -- for those who look on -------------------------------------------------------------------

    @property
    def full_hit(self) -> FullHit:
        """Its rule for full prefix hits."""
        return FULL_HITS["last-token"]

    @property
    def hears(self) -> Any:
        return self.tree.rank.hears

    @property
    def lookups(self) -> tuple[int, int]:
        return self._lookups, self._hits

    def observe(self, plan: Plan) -> None:
        pool: PagePool = self.gpu
        plan.used_blocks = pool.size - pool.blank - pool.evictable
        plan.cached_blocks, plan.free_blocks = pool.evictable, pool.blank
        plan.empty_slots = self.empty_slots

    def tables(self, request: Request) -> list[list[int]]:
        standing: Standing | None = request.standing
        if standing is None:
            return [[]]
        shared: list[int] = [] if standing.lock is None else self.tree.path(standing.lock)
        held: i64 = request.room // self.block_size - standing.first
        own = [standing.pages[k] for k in range(standing.cached - standing.first, held)]
        return [shared + own]

    def own_blocks(self, request: Request) -> int:
        standing: Standing | None = request.standing
        if standing is None:
            return 0
        own: i64 = request.room // self.block_size - standing.cached
        node: Node | None = standing.lock
        while node is not None and node.locks <= 1:
            own += node.end - node.begin
            node = node.parent
        return own

    @property
    def available_tokens(self) -> i64:
        """Token slots that are on the free list or can be evicted."""
        return (self.gpu.blank + self.gpu.evictable) * self.block_size

    def cached_tokens(self, request: Request) -> int:
        if not self.needs_keys:
            return 0
        size: i64 = self.block_size
        pages: i64 = (request.length - 1) // size
        return size * self.tree.match(self._text(None, request, pages), pages, uses=False)

    def report(self, events: Any) -> bool:
        if self.needs_keys:
            self.tree.events = events
        return self.needs_keys

    # -- moves -----------------------------------------------------------------------------------

    def pages_of(self, tokens: i64) -> i64:
        """The pages that hold so many tokens."""
        return (tokens + self.block_size - 1) // self.block_size

    def make_room(self, tokens: i64) -> None:
        """Evicts until `tokens` token slots are on the free list, or nothing is left to evict."""
        if self.needs_keys and self.gpu.blank * self.block_size < tokens:
            self.tree.make_room(self.pages_of(tokens))

    def look_up(self, request: Request, tokens: i64) -> i64:
        """Returns how many of the first `tokens` tokens of a request are cached, and notes the node
        where they end. They count as used now."""
        standing: Standing = request.standing
        if not self.needs_keys:
            standing.node = self.tree.root
            return 0
        size: i64 = self.block_size
        pages: i64 = tokens // size
        text: Text = self._text(standing.text, request, pages)
        standing.text = text
        pages = self.tree.match(text, pages)
        standing.node = self.tree.end
        return pages * size

    def _text(self, text: Text | None, request: Request, pages: i64) -> Text:
        """What the first `pages` pages of a request hold, and maybe more."""
        if text is None:
            owner = None if self.tree.rank.own is None else request
            text = Text(self.block_size, EMPTY, request._stream, owner)
        text.runs = self.numbering.reach(text.runs, text._stream, pages)
        return text

    def admit(self, request: Request) -> None:
        """Gives a request without a table the cached pages that were just found."""
        standing: Standing = request.standing
        if self.needs_keys:
            self.tree.lock(standing.node)
            standing.lock = standing.node
            self._lookups += request.length // self.block_size
            self._hits += standing.node.end
        standing.cached = standing.first = standing.node.end
        standing.counted = 0
        standing.pages = EMPTY
        request.filled = request.room = standing.cached * self.block_size

    def extend(self, request: Request, upto: i64) -> None:
        """Gives a request slots for its first `upto` tokens. The pages must be free."""
        slots: i64 = request.filled - upto
        if upto > request.room:
            standing: Standing = request.standing
            size: i64 = self.block_size
            missing: i64 = (upto - request.room + size - 1) // size
            standing.pages = self.gpu.take(standing.pages, missing)
            request.room += missing * size
            slots += missing * size
        self.empty_slots += slots
        request.filled = upto

    def checkpoint(self, request: Request, upto: i64) -> None:
        """Puts the full pages of the first `upto` tokens of a request into the tree."""
        if not self.needs_keys or upto <= 0:
            return
        tree: RadixTree = self.tree
        standing: Standing = request.standing
        number: i64 = upto // self.block_size
        text: Text = self._text(standing.text, request, number)
        own: Node | None = standing.lock
        assert own is not None
        priority: i64 = request.priority
        node: Node = tree.insert(
            own, text, number, standing.pages, standing.first, standing.counted, priority
        )
        standing.counted = max(standing.counted, number)
        prompt: i64 = request.input_length // self.block_size
        if 0 < prompt < number:
            # The leaf is cut between prompt and output, so that the output can be evicted alone.
            tree.insert_again(node, prompt, priority + 1)
        # Before the old lock ends, so that nothing on the path is free in between.
        tree.lock(node)
        tree.unlock(own)
        standing.lock = node
        standing.cached = number

    def release(self, request: Request) -> None:
        """Takes all pages of a request."""
        standing: Standing = request.standing
        hears = self.hears
        if hears is not None:
            hears.released(request, ())
        held: i64 = request.room // self.block_size
        first: i64 = standing.first
        self.empty_slots -= request.room - request.filled
        self.gpu.give_back(standing.pages, standing.cached - first, held - first)
        if standing.lock is not None:
            self.tree.unlock(standing.lock)
        standing.lock, standing.pages = None, EMPTY
        standing.cached = standing.first = request.filled = request.room = 0

    def fits(self, requests: list[Request]) -> bool:
        """Whether each of these requests can get a slot for one more token, evictions included."""
        # Their step makes room for a page each, so it is only counted how many need one where
        # there is no such room.
        self.make_room(len(requests) * self.block_size)
        if self.gpu.blank >= len(requests):
            return True
        pages: i64 = 0
        request: Request
        for request in requests:
            pages += request.filled == request.room
        return self.gpu.blank >= pages

    def audit(self, requests: Iterable[Request]) -> None:
        held: list[Span] = []
        ends: list[Node] = []
        empty: i64 = 0
        for request in requests:
            standing: Standing = request.standing
            first: i64 = standing.first
            pages: i64 = request.room // self.block_size
            held.append(Span(standing.pages, standing.cached - first, pages - first))
            if standing.lock is not None:
                ends.append(standing.lock)
            empty += request.room - request.filled
        self.gpu.audit(held, ends)
        assert empty == self.empty_slots, "empty slots were miscounted"


@mypyc_attr(allow_interpreted_subclasses=True)
class SglangRadixTables(SglangTables):
    """Page tables with SGLang's radix cache."""

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        *,
        radix_eviction_policy: Any = "lru",
        radix_eviction_policy_config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(block_size, num_gpu_blocks)
        rank: Rank = make_rank(radix_eviction_policy, radix_eviction_policy_config or {})
        self.tree.rank = rank
        self.refreshes, self.needs_keys = rank.oldest, True

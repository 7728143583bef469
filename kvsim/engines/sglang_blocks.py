"""Pages of SGLang 0.5.23: a free list, and a radix tree of cached pages.

A block is a page of `page_size` tokens, usually one token. Computed pages enter the tree at
*checkpoints*: when a chunk or a whole prefill is done, and when the request finishes. In a table,
the pages in the tree come first; the rest are private.

```
 free list ─ take ─► own ─ checkpoint ─► in the tree, locked ─ unlock ─► evictable ─ make room ─┐
     ▲                └── release ──┐                                                           │
     └──────────────────────────────┴───────────────────────────────────────────────────────────┘
```

`mem_cache/unified_radix_cache.py`, `mem_cache/allocator/token.py` (pages of one token) and
`mem_cache/allocator/paged.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvsim.engine.cache_events import CacheEvents
from kvsim.engine.order import Order
from kvsim.engine.pool import BlockPool
from kvsim.engine.request import Sequence
from kvsim.engine.sharing import FULL_HITS, HITS_SAVE, PUBLISH_AT
from kvsim.engine.tables import Tables
from kvsim.engines.sglang_radix import Keys, Node, Pages, Place, RadixTree, Rank, lru, make_rank


class FreeList(Order):
    """Free pages, taken from the head. Returned pages of one token go to the tail; larger pages go
    in front of the head, in the given order."""

    __slots__ = ("_at_tail", "_pages")

    def __init__(self, first: int, size: int, at_tail: bool) -> None:
        self._pages = deque(range(first, first + size))
        self._at_tail = at_tail

    def put(self, block: int, key: int | None, tokens: int, access_ns: int) -> None:
        self.give_back([block])

    def give_back(self, pages: Pages) -> None:
        """Puts pages back on the list."""
        if self._at_tail:
            self._pages.extend(pages)
        else:
            self._pages.extendleft(reversed(pages))

    def pop(self) -> int:
        return self._pages.popleft()

    def __len__(self) -> int:
        return len(self._pages)

    def __iter__(self) -> Iterator[int]:
        return iter(self._pages)


class PagePool(BlockPool):
    """The pages of one GPU. `free` counts those on the free list and those in the tree that no
    request holds."""

    def __init__(self, size: int, page_size: int, tree: RadixTree) -> None:
        self.size, self.first = size, 1
        self.references = {}
        self.tree = tree
        self._blank: FreeList = FreeList(1, size, at_tail=page_size == 1)
        self._later: list[int] | None = None
        """Pages returned since `collect`, in order."""

    @property
    def blank(self) -> int:
        """Number of pages on the free list."""
        return len(self._blank)

    @property
    def cached(self) -> int:
        return self.tree.pages - self.tree.locked_pages

    @property
    def idle(self) -> int:
        return self.blank + self.cached

    def cached_blocks(self) -> Iterable[int]:
        return self.tree.cached_pages()

    def hold(self, pages: Iterable[int]) -> None:
        """Adds a table that holds these pages of the tree."""
        references = self.references
        for page in pages:
            references[page] = references.get(page, 0) + 1

    def let_go(self, pages: Iterable[int]) -> None:
        """Removes a table that held these pages of the tree; they stay in the tree."""
        references = self.references
        for page in pages:
            if references[page] == 1:
                del references[page]
            else:
                references[page] -= 1

    def give_back(self, pages: Pages) -> None:
        """Returns private pages to the free list."""
        for page in pages:
            del self.references[page]
        self._return(pages)

    def make_room(self, pages: int) -> None:
        """Evicts until `pages` pages are on the free list, or nothing is left to evict."""
        if self.blank < pages:
            for evicted in self.tree.evict():
                self._return(evicted)
                if self.blank >= pages:
                    break

    def collect(self) -> None:
        """From now on, collects returned pages until `apply`."""
        self._later = []

    def apply(self) -> None:
        """Puts the collected pages on the free list."""
        pages, self._later = self._later or [], None
        self._blank.give_back(pages)

    def _return(self, pages: Pages) -> None:
        if self._later is None:
            self._blank.give_back(pages)
        else:
            self._later += pages

    def audit(self) -> None:
        super().audit()
        self.tree.audit()


class SglangTables(Tables):
    """Page tables without a radix cache (`disable_radix_cache`)."""

    publish_at = PUBLISH_AT["computed"]
    hits_save = HITS_SAVE["admission"]
    full_hit = FULL_HITS["last-token"]
    swaps = False
    refreshes = False
    """Whether its evictions depend on waiting requests being looked up from time to time."""
    gpu: PagePool

    def __init__(self, block_size: int, num_gpu_blocks: int) -> None:
        self._rank: Rank = make_rank("lru", {})
        super().__init__(block_size, num_gpu_blocks, 0)
        self.spare_block = False

    def make_pool(self, size: int, first: int) -> BlockPool:
        if first:
            return BlockPool(size, first + 1)
        return PagePool(size, self.block_size, RadixTree(self.block_size, self._rank))

    @property
    def unused_tokens(self) -> int:
        """Number of token slots on the free list."""
        return self.gpu.blank * self.block_size

    @property
    def evictable_tokens(self) -> int:
        """Number of cached tokens that no request holds."""
        return self.gpu.cached * self.block_size

    @property
    def available_tokens(self) -> int:
        """Number of token slots that are on the free list or can be evicted."""
        return self.gpu.idle * self.block_size

    @property
    def protected_tokens(self) -> int:
        """Number of cached tokens that requests hold."""
        return self.gpu.tree.locked_pages * self.block_size

    def make_room(self, tokens: int) -> None:
        """Evicts until `tokens` token slots are on the free list, or nothing is left to evict."""

    def look_up(self, sequence: Sequence, known: Node | None = None) -> tuple[int, Node]:
        """Returns how many known tokens of a sequence are cached, and the node where they end. They
        count as used now. `known` is the node that the last call returned for it."""
        return 0, self.gpu.tree.root

    def locate(self, sequence: Sequence, known: Node | None = None) -> Place:
        """Looks a sequence up as `look_up` does. Returns where its known tokens leave the tree."""
        return Place(self.gpu.tree.root, None)

    def find(self, sequence: Sequence, known: Node | None = None) -> tuple[int, Node]:
        """Returns what `look_up` would, without the last known token, which an admission always
        computes."""
        return 0, self.gpu.tree.root

    def admit(self, sequence: Sequence, node: Node) -> None:
        """Gives a sequence without a table the cached pages up to the end of a node."""

    def checkpoint(self, sequence: Sequence, upto: int, priority: int) -> None:
        """Puts the full pages of the first `upto` tokens of a sequence into the tree."""

    def release(self, sequence: Sequence, pool: BlockPool, access_ns: int) -> None:
        self.gpu.give_back(sequence.table)


class SglangRadixTables(SglangTables):
    """Page tables with SGLang's radix cache. `sequence.published` counts pages in the tree."""

    needs_keys = True

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        *,
        radix_eviction_policy: str | Rank = "lru",
        radix_eviction_policy_config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(block_size, num_gpu_blocks)
        rank = make_rank(radix_eviction_policy, radix_eviction_policy_config or {})
        self.gpu.tree = self.make_tree(rank)
        self.refreshes = rank is lru
        self._ends: dict[Sequence, Node] = {}
        """Sequence → the node where its pages in the tree end."""
        self._counted: dict[Sequence, int] = {}
        """Sequence → number of its pages for which the nodes have already counted it as a user."""
        self._lookups = self._hits = 0

    def report(self, events: CacheEvents) -> bool:
        self.gpu.tree.events = events
        return True

    def make_tree(self, rank: Rank) -> RadixTree:
        """Returns an empty tree."""
        return RadixTree(self.block_size, rank)

    def keys(self, sequence: Sequence, pages: int) -> Keys:
        """Returns the keys of the first `pages` pages of a sequence."""
        return sequence.block_keys(pages, self.block_size)

    @property
    def lookups(self) -> tuple[int, int]:
        return self._lookups, self._hits

    def make_room(self, tokens: int) -> None:
        self.gpu.make_room(-(-tokens // self.block_size))

    def look_up(self, sequence: Sequence, known: Node | None = None) -> tuple[int, Node]:
        return self._match(sequence, sequence.length, known)

    def locate(self, sequence: Sequence, known: Node | None = None) -> Place:
        keys = self.keys(sequence, sequence.length // self.block_size)
        found, node = self.gpu.tree.match(keys, known)
        return Place(node, keys[found] if found < len(keys) else None)

    def find(self, sequence: Sequence, known: Node | None = None) -> tuple[int, Node]:
        return self._match(sequence, sequence.length - 1, known)

    def cached_tokens(self, sequence: Sequence) -> int:
        size = self.block_size
        return size * self.gpu.tree.found(self.keys(sequence, (sequence.length - 1) // size))

    def _match(self, sequence: Sequence, tokens: int, known: Node | None) -> tuple[int, Node]:
        size = self.block_size
        pages, node = self.gpu.tree.match(self.keys(sequence, tokens // size), known)
        return pages * size, node

    def admit(self, sequence: Sequence, node: Node) -> None:
        assert not sequence.table
        self.gpu.tree.lock(node)
        pages = self.taken(node)
        self._ends[sequence] = node
        self._counted[sequence] = 0
        self._lookups += sequence.length // self.block_size
        self._hits += len(pages)
        sequence.table = pages
        sequence.published = len(pages)
        sequence.filled = len(pages) * self.block_size

    def taken(self, node: Node) -> list[int]:
        """Adds a table that holds the pages up to the end of a node. Returns these pages."""
        pages = self.gpu.tree.path(node)
        self.gpu.hold(pages)
        return pages

    def exchange(self, sequence: Sequence, node: Node, number: int) -> None:
        """Puts the pages up to the end of a node into a table, in place of its first `number`
        pages."""
        own, table = sequence.published, sequence.table
        new = self.gpu.tree.path(node)[own:]
        self.gpu.hold(
            page for page, before in zip(new, table[own:number], strict=True) if page != before
        )
        table[own:number] = new

    def scheduled(self, sequence: Sequence, now_ns: int) -> int:
        sequence.access_ns = now_ns
        return sequence.published * self.block_size

    def checkpoint(self, sequence: Sequence, upto: int, priority: int) -> None:
        size, pool, tree = self.block_size, self.gpu, self.gpu.tree
        if upto <= 0:
            return
        number, own = upto // size, sequence.published
        keys, table = self.keys(sequence, number), sequence.table
        counted, end = self._counted[sequence], self._ends[sequence]
        twice, node = tree.insert(keys, table[:number], own, counted, priority, end)
        self._counted[sequence] = max(counted, number)
        prompt = sequence.request.input_length // size
        if 0 < prompt < number:
            # The leaf is cut between prompt and output, so that the output can be evicted alone.
            tree.insert(keys[:prompt], table[:prompt], prompt, prompt, priority + 1, node)
        for pages in twice:
            pool.give_back(pages)
        self.exchange(sequence, node, number)
        tree.move_lock(end, node)
        self._ends[sequence] = node
        sequence.published = number

    def release(self, sequence: Sequence, pool: BlockPool, access_ns: int) -> None:
        table, shared = sequence.table, sequence.published
        self.gpu.let_go(table[:shared])
        self.gpu.give_back(table[shared:])
        self.gpu.tree.unlock(self._ends.pop(sequence))
        del self._counted[sequence]
        sequence.published = 0

    def audit_references(self, counted: dict[int, int], held: dict[int, int]) -> None:
        super().audit_references(counted, held)
        tree = self.gpu.tree
        for sequence, node in self._ends.items():
            assert tree.path(node) == sequence.table[: sequence.published], "a table left the tree"

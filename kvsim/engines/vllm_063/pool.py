"""How blocks are shared and given back in vLLM 0.6.3 and before, on the pool of all engines.

```
  free, never used ─┐                       ┌── last reference dropped, no content ──► free, blank
  free, blank ──────┼─ take ─► in use ──────┤
  free, content ────┘ (evicts)  ▲  ▲ share  └── last reference dropped, content ────► free, content
        └───────── hit ─────────┘  └─┘                                                      │
        ▲──────────────────────────────────────────────────────────────────────────────────┘
```

Sources: vLLM 0.6.3.post1, `core/block/naive_block.py`, `core/block/prefix_caching_block.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from librt.vecs import append, vec
from mypy_extensions import i64

from kvsim.core import guard
from kvsim.core.pool import CONTENT, END, FIELDS, NEXT, REFS, Pool
from kvsim.core.vectors import EMPTY
from kvsim.policies.eviction import Evictor
from kvsim.policies.order import BlankFirst, Stack

LABELLED: Final = 2
"""Of a block: the scheduling call in which it was given its content; -1: one that it outlived."""


class BlockPool(Pool):
    """Blocks of the GPU or of the CPU.

    Every content has at most one block, because equal ones are merged. A block counts as computed
    after the scheduling call that gave it its content (`core/block/prefix_caching_block.py`,
    `core/evictor_v2.py`).
    """

    lookups: i64
    hits: i64
    """Number of `lookups` that were found. vLLM 0.6.3's own hit-rate metric counts these."""
    _call: i64
    """Number of the scheduling call."""
    _last: dict[int, int]
    """Blocks in use that carry the access time of a table freed earlier."""
    _holds_blank: bool
    """Whether the order also holds the free blocks without content."""

    def __init__(
        self, size: int, unit: int, first: int, idle_order: Any = Stack, eviction: Any = None
    ) -> None:
        """`idle_order` and `eviction` make the orders of the free blocks without content and of
        those with content; None: no block has content."""
        self._holds_blank = idle_order is not Stack
        order = eviction
        if self._holds_blank:
            order = idle_order if eviction is None else partial(BlankFirst, idle_order, eviction)
        super().__init__(size, order, unit=unit, first=first)
        # The engine's own order asks for no keys, and others hear of several blocks at once.
        self.watched, self.tells = eviction not in (None, Evictor), False
        self.lookups = self.hits = self._call = 0
        self._last = {}
        if self._holds_blank and size:
            # The order hands out all blocks, those that were never used as well.
            self.order.put_many(list(range(first, first + size)))
            while self.fresh < self.end:
                self._open()

    # -- questions -------------------------------------------------------------------------------

    def computed(self, block: i64) -> bool:
        """Whether the content of a block is computed."""
        at: i64 = block * FIELDS
        return self._cells[at + CONTENT] != 0 and self._cells[at + LABELLED] < self._call

    def held(self, contents: vec[i64], number: i64, leading: bool = False) -> i64:
        """How many of the first `number` contents blocks in use have: hitting those costs no free
        block. `leading`: up to the first that no block has."""
        held: i64 = 0
        place: i64
        for place in range(number):
            block: i64 = self.find(contents[place])
            if block:
                held += self.refs(block) > 0
            elif leading:
                break
        return held

    # -- moves -----------------------------------------------------------------------------------

    def called(self) -> None:
        """A scheduling call ends; content given out during it counts as computed."""
        self._call += 1

    def take_table(self, contents: vec[i64], number: i64) -> vec[i64]:
        """Blocks with the first `number` of these contents. New ones of which nothing that follows
        is known, either, are taken and given their content together."""
        table: vec[i64] = EMPTY
        place: i64
        for place in range(number):
            block: i64 = self.find(contents[place])
            if block == 0:
                rest: i64 = place + 1
                while rest < number and self.find(contents[rest]) == 0:
                    rest += 1
                if rest == number:
                    # No eviction can matter to a later hit.
                    return self._take_new(table, contents, number)
            self.lookups += 1
            if block:
                self.hits += 1
                self.hit_block(block)
            else:
                block = self.take()
                self.give_content(block, contents[place], place)
            table = append(table, block)
        return table

    def take_leading(self, contents: vec[i64], number: i64) -> vec[i64]:
        """The same for the leading contents that are known."""
        here: i64 = 0
        while here < number and self.find(contents[here]):
            here += 1
        self.lookups += number - here
        return self.take_table(contents, here)

    def share(self, block: i64, holders: i64 = 1) -> None:
        """Adds references to a block in use."""
        self._cells[block * FIELDS + REFS] += holders

    def hit_block(self, block: i64) -> None:
        """Adds a reference to a block with content. That of a free one is computed."""
        if self.refs(block) == 0:
            self._cells[block * FIELDS + LABELLED] = -1
        self.touch(block)

    def fill(self, block: i64, content: i64, place: i64) -> i64:
        """Books that a block in use became full, `place` blocks behind the start of its sequence.
        Returns the block that holds the content from now on."""
        known: i64 = self.find(content)
        if known == 0:
            self.give_content(block, content, place)
            return block
        self.give_back(vec[i64]([block]), -1)
        self.hit_block(known)
        return known

    def give_content(self, block: i64, content: i64, place: i64) -> None:
        """Gives a block in use its content, which no other block has."""
        self.label(block, content, (place + 1) * self.unit)
        self._cells[block * FIELDS + LABELLED] = self._call
        if self.watched:
            self.order.store(block, self.keys[content])

    def give_back(self, blocks: vec[i64], access_ns: i64) -> None:
        """Drops one reference of each of these blocks, first to last.

        `access_ns` is when their table was last scheduled. With -1, each block keeps its own time.
        """
        cells, last = self._cells, self._last
        cached: list[int] = []
        blank: list[int] = []
        place: i64
        for place in range(len(blocks)):
            block: i64 = blocks[place]
            at: i64 = block * FIELDS
            cells[at + REFS] -= 1
            if cells[at + REFS]:
                if access_ns >= 0 and self.order is not None:
                    last[block] = access_ns
                continue
            self.num_free += 1
            if cells[at + CONTENT]:
                cached.append(block)
                continue
            if last:
                last.pop(block, None)
            if self._holds_blank:
                blank.append(block)
            else:
                cells[at + NEXT], self._blank = self._blank, block
        if blank:
            self.order.put_many(blank)
        if cached:
            self._put(cached, access_ns)

    def _put(self, blocks: list[int], access_ns: i64) -> None:
        """Blocks of a table became free, and keep their content."""
        cells, last = self._cells, self._last
        keys: list[int] = [0] * len(blocks)
        if self.watched:
            keys = [self.keys[self.content(block)] for block in blocks]
        tokens: list[int] = [cells[block * FIELDS + END] for block in blocks]
        times = [last.pop(block, -1) for block in blocks] if last else []
        self.num_cached += len(blocks)
        if access_ns >= 0 or not times or max(times) < 0:
            self.order.put_table(blocks, keys, tokens, access_ns)
        else:
            for k, block in enumerate(blocks):
                self.order.put(block, keys[k], tokens[k], times[k])

    def _take_new(self, table: vec[i64], contents: vec[i64], number: i64) -> vec[i64]:
        """Adds new blocks for the contents up to `number`, of which none is known, to a table."""
        first: i64 = len(table)
        table = self.extended(table, number - first)
        self.lookups += number - first
        place: i64
        for place in range(first, number):
            self.label(table[place], contents[place], (place + 1) * self.unit)
            self._cells[table[place] * FIELDS + LABELLED] = self._call
        if self.watched:
            keys = [self.keys[content] for content in contents[first:number]]
            self.order.store_table(list(table[first:number]), keys)
        return table


guard.keep(BlockPool, "keys")

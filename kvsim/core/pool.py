"""The blocks of one device: who is free, what each holds, and who is reused next.

```
free blocks    blank, last returned first │ never used │ with content, oldest first
               ◄── taken from this end                    released to this end ──►
```

Blocks without content are used up before any content is lost. A policy may choose another order
for the blocks with content (`Order`). Source: vLLM 0.33.0, `v1/core/block_pool.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from librt.vecs import append, vec
from mypy_extensions import i64

from kvsim.core import guard
from kvsim.core.request import Request, Table
from kvsim.core.vectors import EMPTY, longer, zeros

FIELDS: Final = 8
"""How many numbers are kept of each block, side by side: who reads one soon reads the others. Those
that every use reads come last, which is one line of a processor's cache where the vector is long.
The third is for the pools of engines (`kvsim.engines.vllm_063.pool`)."""
END: Final = 0
"""Of a block: tokens up to the end of its content."""
TWIN: Final = 1
"""Of a content that several blocks hold: the block labelled after this one; 0: none."""
REFS: Final = 3
"""The tables that hold it."""
CONTENT: Final = 4
"""The number of what it holds; 0: nothing that the cache knows."""
NEXT: Final = 5
"""Of a free block: its place in the queue, or the blank block returned before it."""
LAST: Final = 6
"""The block labelled before this one; of the first one, the last."""
BEHIND: Final = 7
"""The block behind it in its chain of the table of contents; 0: none."""

SPREAD: Final = 0x9E3779B1
"""Spreads the bases of contents over the table."""


def _home(content: i64, mask: i64) -> i64:
    """Where in the table a content belongs: consecutive units of one base lie side by side, as they
    are looked up one after another (`kvsim.core.contents`)."""
    # 30 bits of what numbers the base (`contents.WIDTH`): their product with `SPREAD` has 62.
    return (content + (((content >> 24) & 0x3FFFFFFF) * SPREAD >> 16)) & mask


class Pool:
    """Blocks `first` .. `end - 1`; block 0 is never used."""

    size: i64
    first: i64
    end: i64
    num_free: i64
    num_cached: i64
    """Free blocks whose content can be hit."""
    fresh: i64
    """The first block that was never used."""
    groups: i64
    """KV cache groups that share the pool: a content's number is that of its unit times so many,
    plus the group's own."""
    unit: i64
    """Tokens of a unit of content."""
    named: set[int]
    """Contents given to blocks in the current scheduling call, where somebody asks for them."""
    names: bool
    blank_last: bool
    """Whether blocks without content go to the end of the free blocks, too; with an `order`, before
    those that it holds."""
    evictions: i64
    """Blocks whose content was lost to another use."""
    order: Any
    """Which free block with content is reused first (`kvsim.policies.order.Order`); None: the one
    released first."""
    events: Any
    """Where the cache reports what comes and goes (`kvsim.core.blocks.CacheEvents`); None
    if nobody asks."""
    keys: dict[int, int]
    """Content → its key in the stream, for the order and the events."""
    watched: bool
    """Whether the order or the events want keys."""
    tells: bool
    """Whether `label` tells the order."""
    _blank: i64
    """The free block without content that was returned last."""
    _cells: vec[i64]
    """`FIELDS` numbers for each block that was ever used."""
    _queue: vec[i64]
    """The free blocks that no order holds, from `_head` to before `_tail`, oldest first; 0 where
    one was hit. A list of links would be walked block by block, each a miss of the processor's
    cache."""
    _head: i64
    _tail: i64
    _heads: vec[i64]
    """The table of contents: place → the first block of its chain, or 0. Of blocks with the same
    content, the first to be labelled is in a chain."""
    _mask: i64
    """Places of the table, less one."""

    def __init__(
        self, size: int, order: Any = None, groups: int = 1, unit: int = 1, first: int = 1
    ) -> None:
        """`order` makes the order of the free blocks with content from the first id and `size`."""
        self.size = self.num_free = size
        self.first = self.fresh = first
        self.end = first + size
        self.num_cached = self.evictions = self._blank = 0
        self.groups, self.unit = groups, unit
        self.named, self.names = set(), False
        self.blank_last = False
        self._cells, self._queue = zeros(FIELDS), zeros(FIELDS)
        self._head = self._tail = 0
        # A power of two, so that the mask picks a place; `_grow` doubles it.
        self._heads, self._mask = zeros(1024), 1023
        self.order = None if order is None else order(first, size)
        self.events = None
        self.keys = {}
        self.watched = self.tells = self.order is not None

    # -- for those who look on -------------------------------------------------------------------

    @property
    def free(self) -> int:
        """Blocks that can be taken."""
        return self.num_free

    @property
    def used(self) -> int:
        """Blocks that at least one table holds."""
        return self.size - self.num_free

    @property
    def cached(self) -> int:
        """Free blocks whose content can still be hit."""
        return self.num_cached

    @property
    def labelled(self) -> int:
        """Blocks with content, free or in use."""
        return sum([self.content(block) != 0 for block in range(self.first, self.fresh)])

    @property
    def references(self) -> dict[int, int]:
        """Block → number of tables that hold it, of the blocks in use."""
        blocks = range(self.first, self.fresh)
        return {block: held for block in blocks if (held := self.refs(block))}

    def cached_blocks(self) -> list[int]:
        """Ids of the free blocks whose content can still be hit."""
        blocks = range(self.first, self.fresh)
        return [block for block in blocks if self.content(block) and not self.refs(block)]

    def own(self, request: Request) -> i64:
        """The number of its blocks here that no other table holds."""
        own: i64 = 0
        k: i64
        table: Table
        for table in request.tables:
            for k in range(len(table.blocks)):
                block: i64 = table.blocks[k]
                own += self.first <= block < self.fresh and self.refs(block) == 1
        return own

    def refs(self, block: i64) -> i64:
        """The number of tables that hold a block."""
        return self._cells[block * FIELDS + REFS]

    def content(self, block: i64) -> i64:
        """The number of what a block holds; 0: nothing that the cache knows."""
        return self._cells[block * FIELDS + CONTENT]

    def end_of(self, block: i64) -> i64:
        """Tokens up to the end of the content of a block; 0 if it has none."""
        return self._cells[block * FIELDS + END] if self.content(block) else 0

    def find(self, content: i64) -> i64:
        """The first block with this content; 0: there is none."""
        cells: vec[i64] = self._cells
        block: i64 = self._heads[_home(content, self._mask)]
        while block and cells[block * FIELDS + CONTENT] != content:
            block = cells[block * FIELDS + BEHIND]
        return block

    def free_list(self) -> Iterator[int]:
        """The free blocks in the order in which they are reused."""
        block: i64 = self._blank
        while block:
            yield block
            block = self._cells[block * FIELDS + NEXT]
        yield from range(self.fresh, self.end)
        k: i64
        for k in range(self._head, self._tail):
            if self._queue[k]:
                yield self._queue[k]

    # -- moves -----------------------------------------------------------------------------------

    def take(self) -> i64:
        """Takes the next free block, whose content is forgotten."""
        return self.extended(EMPTY, 1)[0]

    def take_many(self, number: int) -> list[int]:
        """Takes so many blocks."""
        return list(self.extended(EMPTY, number))

    def extended(self, blocks: vec[i64], number: i64) -> vec[i64]:
        """`blocks`, and behind them the next free ones, so many, whose contents are forgotten
        (`get_new_blocks`)."""
        start: i64 = len(blocks)
        end: i64 = start + number
        place: i64
        blocks = longer(blocks, number)
        cells: vec[i64] = self._cells
        # First all are taken, then contents are forgotten: a processor fetches many at once.
        for place in range(start, end):
            block: i64 = self._blank
            if block:
                self._blank = cells[block * FIELDS + NEXT]
            # Books are kept of blocks that were used once, so a huge pool costs nothing before.
            elif self.fresh < self.end:
                block = self.fresh
                # It may make the vector of cells anew.
                self._open()
                cells = self._cells
            else:
                # Places of blocks that were hit meanwhile hold 0.
                while block == 0 and self._head < self._tail:
                    block = self._queue[self._head]
                    self._head += 1
                # The rest is with the order. Whoever takes blocks has compared with `num_free`.
                if block == 0:
                    self._evict(blocks, place, end)
                    break
            cells[block * FIELDS + REFS] = 1
            blocks[place] = block
        self.num_free -= number
        for place in range(start, end):
            if cells[blocks[place] * FIELDS + CONTENT]:
                self.num_cached -= 1
                self.evictions += 1
                self.forget(blocks[place])
        return blocks

    def touch(self, block: i64) -> None:
        """Adds a reference to a block in use, or to a free one: with content, or of those that
        `blank_last` lets wait in the queue."""
        at: i64 = block * FIELDS + REFS
        if self._cells[at] == 0:
            content: i64 = self.content(block)
            if content:
                self.num_cached -= 1
            # It leaves the queue where it stands; an order takes it out itself.
            if self.order is None or content == 0:
                self._queue[self._cells[block * FIELDS + NEXT]] = 0
            self.num_free -= 1
        if self.order is not None:
            self.order.hit(block)
        self._cells[at] += 1

    def release(self, blocks: vec[i64], start: i64, end: i64, access_ns: i64) -> None:
        """Drops one reference of each of `blocks[start:end]`, the last one first (`free_blocks`).

        Of those that become free, the ones with content are reused last, in this order; the others
        are reused next, the last one dropped before the others. Entries of 0 are no blocks.
        """
        if self._tail + end - start > len(self._queue):
            self._make_place(end - start)
        cells, queue = self._cells, self._queue
        blank: bool = False
        tail: i64 = self._tail
        k: i64
        for k in range(end - 1, start - 1, -1):
            block: i64 = blocks[k]
            if block == 0:
                continue
            at: i64 = block * FIELDS
            held: i64 = cells[at + REFS] - 1
            cells[at + REFS] = held
            if held == 0:
                self.num_free += 1
                content: i64 = cells[at + CONTENT]
                if content:
                    self.num_cached += 1
                if content and self.order is not None:
                    self.order.put(block, self.keys[content], cells[at + END], access_ns)
                elif content or self.blank_last:
                    queue[tail], cells[at + NEXT] = block, tail
                    tail += 1
                else:
                    blank = True
        self._tail = tail
        # Seldom: only a block that is not full has no content.
        if blank:
            self._stack_blank(blocks, start, end)

    def _stack_blank(self, blocks: vec[i64], start: i64, end: i64) -> None:
        """Puts those of `blocks[start:end]` that are free and without content where the next block
        is taken from."""
        cells: vec[i64] = self._cells
        k: i64
        # All were in use before, so what is free now became so in this call. Forwards: the last one
        # ends up on top and is taken first.
        for k in range(start, end):
            block: i64 = blocks[k]
            at: i64 = block * FIELDS
            if block and cells[at + REFS] == 0 and cells[at + CONTENT] == 0:
                cells[at + NEXT] = self._blank
                self._blank = block

    def drop(self, blocks: Sequence[int]) -> None:
        """Drops one reference of each of these blocks, the first one first."""
        reverse: vec[i64] = EMPTY
        for block in reversed(blocks):
            reverse = append(reverse, block)
        self.release(reverse, 0, len(reverse), -1)

    def hit(self, blocks: Sequence[int]) -> None:
        """Adds a reference to each of these blocks with content."""
        for block in blocks:
            self.touch(block)

    def label(self, block: i64, content: i64, end: i64) -> None:
        """Gives a block in use, which ends after `end` tokens, its content in place of another."""
        cells, heads = self._cells, self._heads
        at: i64 = block * FIELDS
        if cells[at + CONTENT]:
            self.forget(block)
        cells[at + CONTENT], cells[at + END] = content, end
        if self.names:
            self.named.add(content)
        home: i64 = _home(content, self._mask)
        first: i64 = heads[home]
        while first and cells[first * FIELDS + CONTENT] != content:
            first = cells[first * FIELDS + BEHIND]
        # Twins hang behind the first block with their content, which alone is in the chain.
        if first == 0:
            cells[at + LAST], cells[at + BEHIND] = block, heads[home]
            heads[home] = block
        else:
            last: i64 = cells[first * FIELDS + LAST]
            cells[last * FIELDS + TWIN], cells[at + TWIN] = block, 0
            cells[at + LAST], cells[first * FIELDS + LAST] = last, block
        if self.tells:
            self.order.store(block, self.keys[content])

    def forget(self, block: i64) -> None:
        """The content of a block is lost (`_maybe_evict_cached_block`)."""
        cells, heads = self._cells, self._heads
        at: i64 = block * FIELDS
        content: i64 = cells[at + CONTENT]
        last: i64 = cells[at + LAST]
        home: i64 = _home(content, self._mask)
        before: i64 = 0
        first: i64 = heads[home]
        while first != block and cells[first * FIELDS + CONTENT] != content:
            before, first = first, cells[first * FIELDS + BEHIND]
        heir: i64 = cells[at + BEHIND]
        twin: i64 = 0 if last == block else cells[at + TWIN]
        # A twin leaves the list of its first block; a first block hands its place in the chain on
        # to its oldest twin, or to the next content.
        if first != block:
            cells[last * FIELDS + TWIN] = twin
            cells[(twin if twin else first) * FIELDS + LAST] = last
        else:
            if twin:
                cells[twin * FIELDS + LAST], cells[twin * FIELDS + BEHIND] = last, heir
                heir = twin
            if before:
                cells[before * FIELDS + BEHIND] = heir
            else:
                heads[home] = heir
        cells[at + CONTENT] = 0
        if self.events is not None:
            self.events.removed([self.keys[content]])

    def unname(self, block: i64) -> None:
        """Takes the content of a block away, if it has one."""
        if self.content(block):
            if self.refs(block) == 0:
                self.num_cached -= 1
            self.forget(block)

    def _evict(self, blocks: vec[i64], start: i64, end: i64) -> None:
        """Takes `blocks[start:end]` from the order."""
        place: i64 = start
        for block in self.order.pop_many(end - start):
            blocks[place] = block
            self._cells[blocks[place] * FIELDS + REFS] = 1
            place += 1

    def _make_place(self, number: i64) -> None:
        """Makes room in the queue for so many blocks, in place of those that left it."""
        cells, queue = self._cells, self._queue
        blocks: i64 = 0
        k: i64
        for k in range(self._head, self._tail):
            block: i64 = queue[k]
            if block:
                queue[blocks], cells[block * FIELDS + NEXT] = block, blocks
                blocks += 1
        self._head, self._tail = 0, blocks
        # Twice as long as needed, so that the queue is seldom moved.
        if 2 * (blocks + number) > len(self._queue):
            self._queue = longer(self._queue, 2 * (blocks + number))

    def _open(self) -> None:
        """The first block that was never used is used; the books grow with the blocks in use."""
        self.fresh += 1
        known: i64 = len(self._cells) // FIELDS
        if known < self.fresh:
            more: i64 = max(self.fresh - known, min(known, self.end - known))
            self._cells = longer(self._cells, more * FIELDS)
        # At most a quarter full, so that chains are short.
        if 4 * self.fresh > self._mask:
            self._grow()

    def _grow(self) -> None:
        """Makes the table of contents twice as large."""
        before, cells = self._heads, self._cells
        size: i64 = 2 * len(before)
        heads: vec[i64] = zeros(size)
        k: i64
        for k in range(len(before)):
            block: i64 = before[k]
            while block:
                at: i64 = block * FIELDS
                after: i64 = cells[at + BEHIND]
                home: i64 = _home(cells[at + CONTENT], size - 1)
                # Chains are reversed, which nobody notices: a content is in one place of one chain.
                cells[at + BEHIND], heads[home] = heads[home], block
                block = after
        self._heads, self._mask = heads, size - 1

    def audit(self) -> None:
        """Asserts that every block is in exactly one place, and every content can be found."""
        idle: vec[i64] = self._audit_free()
        block: i64
        free: i64 = self.end - self.fresh  # Never used.
        cached: i64 = 0
        cells: vec[i64] = self._cells
        for block in range(self.first, self.fresh):
            refs: i64 = cells[block * FIELDS + REFS]
            assert refs >= 0, "a block in use has no holder"
            assert (refs == 0) == (idle[block] == 1), "blocks were lost or invented"
            free += idle[block]
            if cells[block * FIELDS + CONTENT]:
                cached += idle[block]
        assert free == self.num_free, "free blocks were miscounted"
        assert cached == self.num_cached, "free blocks with content were miscounted"
        self._audit_contents()

    def _audit_free(self) -> vec[i64]:
        """Of each block that was ever used, 1 if it is free. Asserts that none is so twice."""
        idle: vec[i64] = zeros(self.fresh)
        block: i64 = self._blank
        while block:
            self._audit_idle(idle, block)
            block = self._cells[block * FIELDS + NEXT]
        k: i64
        for k in range(self._head, self._tail):
            if self._queue[k]:
                self._audit_idle(idle, self._queue[k])
        if self.order is not None:
            for block in self.order:
                self._audit_idle(idle, block)
        return idle

    def _audit_idle(self, idle: vec[i64], block: i64) -> None:
        assert self.first <= block < self.fresh, "a block is free that was never used"
        assert idle[block] == 0, "a block is free twice"
        idle[block] = 1

    def _audit_contents(self) -> None:
        """Asserts that the table of contents has every content, and no others."""
        cells: vec[i64] = self._cells
        firsts: i64 = 0
        block: i64
        for block in range(self.first, self.fresh):
            content: i64 = cells[block * FIELDS + CONTENT]
            if content:
                first: i64 = self.find(content)
                assert first, "content was misfiled"
                firsts += first == block
        k: i64
        for k in range(len(self._heads)):
            block = self._heads[k]
            while block:
                firsts -= 1
                block = cells[block * FIELDS + BEHIND]
        assert firsts == 0, "content cannot be found"


guard.keep(Pool, "named keys")

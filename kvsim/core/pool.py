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
from typing import Any

from librt.vecs import append, extend, vec
from mypy_extensions import i64

from kvsim.core import guard
from kvsim.core.contents import Known
from kvsim.core.vectors import EMPTY, longer, zeros


class Pool:
    """Blocks 1 .. `size`; block 0 is never used, and heads the list of those with content."""

    size: i64
    num_free: i64
    num_cached: i64
    """Free blocks whose content can be hit."""
    refs: vec[i64]
    """Block → number of tables that hold it."""
    content: vec[i64]
    """Block → number of what it holds; 0: nothing that the cache knows."""
    ends: vec[i64]
    """Block → tokens up to the end of its content."""
    known: Known
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
    """Whether blocks without content go to the end of the free blocks, too."""
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
    _blank: i64
    _next: vec[i64]
    _prev: vec[i64]
    _twin: vec[i64]
    """Of a content that several blocks hold: the block labelled after this one; 0: none. Of one
    that a single block holds, anything."""
    _last: vec[i64]
    """The block labelled before this one; of the first one, the last."""

    def __init__(self, size: int, order: Any = None, groups: int = 1, unit: int = 1) -> None:
        """`order` makes the order of the free blocks with content from the first id and `size`."""
        self.size = self.num_free = size
        self.num_cached = self.evictions = self._blank = 0
        self.fresh = 1
        self.groups, self.unit = groups, unit
        self.named, self.names = set(), False
        self.blank_last = False
        self.refs = append(EMPTY, 0)
        self.content, self.ends = append(EMPTY, 0), append(EMPTY, 0)
        self._next, self._prev = append(EMPTY, 0), append(EMPTY, 0)
        self._twin, self._last = append(EMPTY, 0), append(EMPTY, 0)
        self.known = Known()
        self.order = None if order is None else order(1, size)
        self.events = None
        self.keys = {}
        self.watched = self.order is not None

    # -- for those who look on -------------------------------------------------------------------

    @property
    def first(self) -> int:
        """The first block id."""
        return 1

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
        return sum([self.content[block] != 0 for block in range(1, self.fresh)])

    @property
    def references(self) -> dict[int, int]:
        """Block → number of tables that hold it, of the blocks in use."""
        return {block: self.refs[block] for block in range(1, self.fresh) if self.refs[block]}

    def cached_blocks(self) -> list[int]:
        """Ids of the free blocks whose content can still be hit."""
        refs, content = self.refs, self.content
        return [block for block in range(1, self.fresh) if content[block] and not refs[block]]

    def free_list(self) -> Iterator[int]:
        """The free blocks in the order in which they are reused."""
        yield from self._chain(self._blank)
        yield from range(self.fresh, self.size + 1)
        yield from self._chain(self._next[0])

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
        place: i64 = len(blocks)
        end: i64 = place + number
        blocks = longer(blocks, number)
        after, before, refs = self._next, self._prev, self.refs
        while place < end:
            block: i64 = self._blank
            if block:
                self._blank = after[block]
            elif self.fresh <= self.size:
                block = self.fresh
                self._open()
                after, before, refs = self._next, self._prev, self.refs
            else:
                if self.order is None:
                    block = after[0]
                    after[0] = after[block]
                    before[after[0]] = 0
                else:
                    block = self.order.pop()
                if self.content[block]:
                    self.num_cached -= 1
                    self.evictions += 1
                    self.forget(block)
            refs[block] = 1
            self.num_free -= 1
            blocks[place] = block
            place += 1
        return blocks

    def touch(self, block: i64) -> None:
        """Adds a reference to a block with content, free or in use."""
        if self.refs[block] == 0:
            if self.order is None:
                self._unlink(block)
            self.num_cached -= 1
            self.num_free -= 1
        if self.order is not None:
            self.order.hit(block)
        self.refs[block] += 1

    def release(self, blocks: vec[i64], start: i64, end: i64, access_ns: i64) -> None:
        """Drops one reference of each of `blocks[start:end]`, the last one first (`free_blocks`).

        Of those that become free, the ones with content are reused last, in this order; the others
        are reused next, the last one dropped before the others. Entries of 0 are no blocks.
        """
        k: i64
        block: i64
        refs, content, after, before = self.refs, self.content, self._next, self._prev
        blank: bool = False
        freed: i64 = 0
        cached: i64 = 0
        newest: i64 = before[0]
        for k in range(end - 1, start - 1, -1):
            block = blocks[k]
            if block == 0:
                continue
            held: i64 = refs[block] - 1
            refs[block] = held
            if held == 0:
                freed += 1
                labelled: bool = content[block] != 0
                cached += labelled
                if labelled and self.order is not None:
                    self.order.put(block, self.keys[content[block]], self.ends[block], access_ns)
                elif labelled or self.blank_last:
                    after[newest], before[block] = block, newest
                    newest = block
                else:
                    blank = True
        before[0], after[newest] = newest, 0
        self.num_free += freed
        self.num_cached += cached
        if blank:
            for k in range(start, end):
                block = blocks[k]
                if block and refs[block] == 0 and content[block] == 0:
                    after[block] = self._blank
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
        contents: vec[i64] = self.content
        if contents[block]:
            self.forget(block)
        contents[block], self.ends[block] = content, end
        if self.names:
            self.named.add(content)
        first: i64 = self.known.claim(content, block)
        if first == 0:
            self._last[block] = block
        else:
            last: i64 = self._last[first]
            self._twin[last], self._twin[block] = block, 0
            self._last[block], self._last[first] = last, block
        if self.order is not None:
            self.order.store(block, self.keys[content])

    def forget(self, block: i64) -> None:
        """The content of a block is lost (`_maybe_evict_cached_block`)."""
        content: i64 = self.content[block]
        last: i64 = self._last[block]
        if last == block:
            self.known.remove(content)
        else:
            first: i64 = self.known.find(content)
            twin: i64 = self._twin[block]
            if first == block:
                self.known.put(content, twin)
                self._last[twin] = last
            else:
                self._twin[last] = twin
                self._last[twin if twin else first] = last
        self.content[block] = 0
        if self.events is not None:
            self.events.removed([self.keys[content]])

    def unname(self, block: i64) -> None:
        """Takes the content of a block in use away, if it has one."""
        if self.content[block]:
            self.forget(block)

    def end_of(self, block: i64) -> i64:
        """Tokens up to the end of the content of a block; 0 if it has none."""
        return self.ends[block] if self.content[block] else 0

    # --------------------------------------------------------------------------------------------

    def _chain(self, block: i64) -> Iterator[int]:
        """A block of a list, and those behind it."""
        while block:
            yield block
            block = self._next[block]

    def _open(self) -> None:
        """The first block that was never used is used; the books grow with the blocks in use."""
        self.fresh += 1
        known: i64 = len(self.refs)
        if known < self.fresh:
            more: vec[i64] = zeros(min(known, self.size + 1 - known))
            self.refs, self.content = extend(self.refs, more), extend(self.content, more)
            self.ends = extend(self.ends, more)
            self._next, self._prev = extend(self._next, more), extend(self._prev, more)
            self._twin, self._last = extend(self._twin, more), extend(self._last, more)

    def _unlink(self, block: i64) -> None:
        after, before = self._next, self._prev
        after[before[block]] = after[block]
        before[after[block]] = before[block]

    def audit(self) -> None:
        """Asserts that every block is in exactly one place, and every content can be found."""
        refs, content = self.refs, self.content
        idle: vec[i64] = zeros(self.fresh)
        block: i64
        for start in (self._blank, self._next[0]):
            block = start
            while block:
                self._audit_idle(idle, block)
                block = self._next[block]
        if self.order is not None:
            for block in self.order:
                self._audit_idle(idle, block)
        free: i64 = self.size + 1 - self.fresh  # Never used.
        cached: i64 = 0
        labelled: i64 = 0
        for block in range(1, self.fresh):
            assert refs[block] >= 0, "a block in use has no holder"
            assert (refs[block] == 0) == (idle[block] == 1), "blocks were lost or invented"
            free += idle[block]
            if content[block]:
                cached += idle[block]
                first: i64 = self.known.find(content[block])
                assert first and content[first] == content[block], "content was misfiled"
                labelled += first == block
        assert free == self.num_free, "free blocks were miscounted"
        assert cached == self.num_cached, "free blocks with content were miscounted"
        assert labelled == self.known.count, "content cannot be found"

    def _audit_idle(self, idle: vec[i64], block: i64) -> None:
        assert 0 < block < self.fresh, "a block is free that was never used"
        assert idle[block] == 0, "a block is free twice"
        idle[block] = 1


guard.keep(Pool, "refs content ends named keys")

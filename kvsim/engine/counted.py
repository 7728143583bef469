"""Block tables that know only how many blocks they hold.

Without sharing, the identity of a block decides nothing, because any block can hold any token. So a
table is a `range` of the right length, and a pool is a count of free blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from kvsim.engine.pool import BlockPool
from kvsim.engine.request import Request, Sequence
from kvsim.engine.tables import COUNTED, Pairs, Tables
from kvsim.schema import Census


class CountPool(BlockPool):
    """A pool that only counts its blocks."""

    free = 0

    def __init__(self, size: int, first: int = 0) -> None:
        super().__init__(size, first)
        self.free = size

    @property
    def used(self) -> int:
        return self.size - self.free

    def counts(self) -> tuple[int, int, int]:
        """Returns the numbers of used blocks, idle blocks with content, and blank blocks."""
        return self.size - self.free, 0, self.free

    def lend(self, number: int) -> None:
        """Takes `number` free blocks."""
        self.free -= number
        assert self.free >= 0, "no idle block left"

    def take_many(self, number: int) -> list[int]:
        self.lend(number)
        return cast("list[int]", range(self.first, self.first + number))

    def drop_table(self, table: list[int]) -> None:
        self.free += len(table)

    def give_back(self, number: int) -> None:
        """Returns `number` blocks to the pool, without content."""
        self.free += number

    def audit(self) -> None:
        assert 0 <= self.free <= self.size, "blocks were lost or invented"


class CachePool(CountPool):
    """A pool that also counts idle blocks with content. It gives out blank blocks first."""

    def __init__(self, size: int, first: int = 0) -> None:
        super().__init__(size, first)
        self._cached = 0
        """Free blocks with content; the other free blocks are blank."""

    @property
    def cached(self) -> int:
        return self._cached

    def counts(self) -> tuple[int, int, int]:
        free, cached = self.free, self._cached
        return self.size - free, cached, free - cached

    def lend(self, number: int) -> None:
        free = self.free = self.free - number
        assert free >= 0, "no idle block left"
        lost = self._cached - free
        if lost > 0:
            self._cached = free
            self._evict(lost)

    def _evict(self, number: int) -> None:
        """Forgets the content of `number` idle blocks and no longer counts them as cached."""
        raise NotImplementedError


class Counted(Tables):
    """The moves of `Tables` on tables that only count blocks, for requests of one sequence.

    Tables support length, comparison and iteration, as ranges do.
    """

    lockstep = COUNTED
    gpu: CountPool

    def allocate(self, sequence: Sequence) -> None:
        self.hold(sequence, sequence.length, [])

    def hold(self, sequence: Sequence, upto: int, hits: list[int]) -> None:
        size, found = self.block_size, len(hits)
        if upto < found * size:
            upto = found * size
        blocks = -(-upto // size)
        self.gpu.lend(blocks - found)
        first = self.gpu.first
        sequence.table = range(first, first + blocks)  # type: ignore[assignment]
        sequence.filled = upto
        sequence.seen = found
        sequence.gap = False
        sequence.access_ns = -1
        self.empty_slots += blocks * size - upto

    def append(self, sequence: Sequence) -> Pairs:
        held = self.extend(sequence, sequence.length)
        assert held, "too few free blocks were left"
        return []

    def extend(self, sequence: Sequence, upto: int) -> bool:
        size = self.block_size
        held = len(sequence.table)
        missing = -(-upto // size) - held
        if missing > 0:
            if missing > self.gpu.free:
                return False
            self.gpu.lend(missing)
            first = self.gpu.first
            sequence.table = range(first, first + held + missing)  # type: ignore[assignment]
            self.empty_slots += missing * size
        if upto > sequence.filled:
            self.empty_slots -= upto - sequence.filled
            sequence.filled = upto
        return True

    def free(self, sequence: Sequence) -> None:
        table, filled = sequence.table, sequence.filled
        if not table:
            return
        if table[0] >= self.cpu.first:
            self.free_swapped(sequence)
        else:
            # Its table may be shorter: it may have left a cohort just now.
            blocks = -(-filled // self.block_size)
            self.empty_slots -= blocks * self.block_size - filled
            self.give_back(sequence, blocks)
        sequence.table = []
        sequence.filled = 0

    def give_back(self, sequence: Sequence, blocks: int) -> None:
        """Frees `blocks` blocks of a sequence: all that it holds on the GPU."""
        self.gpu.give_back(blocks)

    def fork(self, parent: Sequence, child: Sequence) -> Pairs:
        raise AssertionError("counted blocks cannot be shared")

    def own_blocks(self, sequence: Sequence) -> int:
        return len(sequence.table)

    def census(self) -> Census:
        used, cached, blank = self.gpu.counts()
        return used, cached, blank, self.cpu.size - self.cpu.free, self.empty_slots, 0

    def open_together(self, blocks: int, tokens: int, lent: int = 0) -> None:
        if blocks:
            self.gpu.lend(blocks - lent)
        self.empty_slots += blocks * self.block_size - tokens

    def lend_together(self, blocks: int) -> None:
        self.gpu.lend(blocks)

    def recount(self, sequence: Sequence, known: int) -> None:
        first = self.gpu.first
        blocks = -(-sequence.filled // self.block_size)
        sequence.table = range(first, first + blocks)  # type: ignore[assignment]

    def audit(self, requests: Iterable[Request]) -> None:
        used = {self.gpu: 0, self.cpu: 0}
        empty = 0
        for request in requests:
            for sequence in request.sequences:
                swapped = self.swapped(sequence)
                used[self.cpu if swapped else self.gpu] += len(sequence.table)
                if not swapped:
                    empty += self._empty(sequence)
        for pool, blocks in used.items():
            pool.audit()
            assert pool.used == blocks, "blocks in use and tables disagree"
        assert empty == self.empty_slots, "empty slots were miscounted"

"""Block tables of nano-vllm, stored in runs: no work and no object per block.

They make the same decisions as `kvsim.engines.nano_blocks.NanoTables`, without block ids. Of
several blocks with equal content, the one registered last is hit. The others are never hit again,
although tables still hold them: their runs are *stale*. So invariant 5 of `kvsim.engine.runs` does
not hold, and content can be resident without its prefix. All idle blocks wait in one queue.

```
 taken next ► never used │ blank │ 8 7 6 .. 0  stale │ blank │ 12 11 .. 5 │ ◄ given back last
                           └── a table ──────────┘ └─ another, which shares 0 .. 4 ─┘
```
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import Any, cast

from kvsim.engine.pool import BlockPool
from kvsim.engine.request import Sequence
from kvsim.engine.run_tables import RunTables
from kvsim.engine.runs import Hits, Run, RunPool
from kvsim.engine.tables import COUNTED
from kvsim.engines.nano_blocks import NanoTables, NanoTables2025


class NanoRunPool(RunPool):
    """A pool that stores its content in runs, with one queue of idle blocks.

    It decides like `kvsim.engines.nano_blocks.NanoPool`. `_cached` counts the blocks in the queue,
    and `_stale` those of them without content that can be hit. Other free blocks were never used;
    they are given out first. Runs of stale and of blank blocks have an empty list of `copies`.
    """

    def __init__(self, size: int, first: int, block_size: int) -> None:
        super().__init__(size, first, block_size)
        self._stale = 0
        self._starts: dict[int, list[int]] = {}
        """Offset → the starts of its runs, ascending."""

    @property
    def cached(self) -> int:
        return self._cached - self._stale

    def counts(self) -> tuple[int, int, int]:
        free, cached = self.free, self.cached
        return self.size - free, cached, free - cached

    def give_back(self, number: int) -> None:
        if number:
            self.free += number
            self._cached += number
            self._stale += number
            blank = Run(0, number, 0, 0)
            blank.copies = []
            self._enter(blank, self._queue)

    def release(self, runs: list[Run], end: int) -> None:
        before = self._queue.prev
        super().release(runs, end)
        run = before.next
        while run is not self._queue:
            if run.copies is not None:
                self._stale += run.end - run.start
            run = run.next

    def evictions(self, opened: list[int]) -> list[int]:
        """Returns, after each of these takes, the total number of blocks with content lost."""
        lost: list[int] = []
        taken = gone = 0
        run, upto, kept = self._queue, self.free - self._cached, False
        for number in opened:
            taken += number
            while upto < taken:
                if kept:
                    gone += run.end - run.start
                run = run.next
                kept = run.copies is None
                upto += run.end - run.start
            lost.append(gone + (taken - upto + run.end - run.start if kept else 0))
        return lost

    # -- parts of moves --------------------------------------------------------------------------

    def _append(self, runs: list[Run], start: int, end: int, offset: int) -> Run:
        self._displace(start, end, offset)
        run = super()._append(runs, start, end, offset)
        if run.start == start:
            insort(self._starts.setdefault(offset, []), start)
        return run

    def _meet(self, runs: list[Run], known: Run) -> None:
        """Registers the blocks that the table has filled as the ones to be hit; the known run
        becomes stale."""
        self._append(runs, known.start, known.end, known.offset)

    def _displace(self, start: int, end: int, offset: int) -> None:
        """Makes runs stale as far as they hold any of these blocks."""
        starts = self._starts.get(offset)
        if starts is None:
            return
        place = bisect_right(starts, start) - 1
        if place >= 0 and starts[place] < start:
            run = self._at[starts[place] * self._block_size + offset]
            if run.end > start:
                self._cut(run, start)
        place = bisect_left(starts, start)
        while place < len(starts) and starts[place] < end:
            run = self._at[starts[place] * self._block_size + offset]
            if run.end > end:
                self._cut(run, end)
            self._forget(run)
            run.copies = []
            if not run.refs:
                self._stale += run.end - run.start

    def _cut(self, run: Run, depth: int) -> None:
        super()._cut(run, depth)
        insort(self._starts[run.offset], depth)

    def _evict(self, number: int) -> None:
        """Takes blocks from the head of the queue, from each run the last block first."""
        while number:
            run = self._queue.next
            taken = min(number, run.end - run.start)
            number -= taken
            if run.copies is not None:
                self._stale -= taken
            if taken < run.end - run.start:
                run.end, run.successor = run.end - taken, None
                continue
            self._leave(run)
            if run.copies is None:
                self._forget(run)

    def _forget(self, run: Run) -> None:
        starts = self._starts[run.offset]
        del starts[bisect_left(starts, run.start)]
        if not starts:
            del self._starts[run.offset]
        super()._forget(run)

    def audit(self) -> None:
        super().audit()
        stale = [run for run in self.idle_runs() if run.copies is not None]
        assert self._stale == sum(run.end - run.start for run in stale), "blocks are miscounted"
        assert sum(map(len, self._starts.values())) == len(self._at), "a run cannot be made stale"
        for offset, starts in self._starts.items():
            runs = [self._at[start * self._block_size + offset] for start in starts]
            ends = [run.end for run in runs]
            assert all(map(int.__le__, ends, starts[1:])), "a block is in two runs"


class NanoRuns(RunTables, NanoTables):
    """`NanoTables` stored in runs, with the engine's own eviction order."""

    label_moves = True
    gpu: NanoRunPool  # type: ignore[assignment]

    def __init__(self, *sizes: int, **rules: Any) -> None:
        super().__init__(*sizes, **rules)
        assert self.eviction is None, "all idle blocks wait in one queue"
        self.lockstep = COUNTED

    def make_pool(self, size: int, first: int) -> BlockPool:
        return NanoRunPool(size, first, self.block_size)

    def held(self, hits: list[int]) -> int:
        return len(hits) - cast(Hits, hits).idle if hits else 0

    def allocate(self, sequence: Sequence) -> None:
        hits = self.match(sequence)
        self._lookups += sequence.length // self.block_size
        self._hits += len(hits)
        self.hold(sequence, sequence.length, hits)
        if not self.publish_at.computed:
            self.publish(sequence, sequence.length)

    def evictions(self, opened: list[int]) -> list[int]:
        return self.gpu.evictions(opened)


class NanoRuns2025(NanoRuns, NanoTables2025):
    """`NanoTables2025` stored in runs, for requests whose tokens are unknown.

    With real tokens, that manager may hit an overwritten block if it holds the same tokens after
    another prefix. Then it matters which block holds what. With unknown tokens, equal content means
    an equal prefix, so a registration of an overwritten block is never accepted.
    """

    prefixes_only = True
    gpu: NanoRunPool  # type: ignore[assignment]

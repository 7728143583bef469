"""Block tables of vLLM 0.6.3.post1 with its prefix cache, stored in runs: no work and no object per
block.

They make the same decisions as `kvsim.engines.vllm_063_blocks.PrefixCaching`, without block ids.
They differ from vLLM V1 in two ways. Equal blocks are merged, so a run has no copies. And idle
content is evicted in the order of the engine's evictor, which considers when a table was last
scheduled and how long a prefix is (`kvsim.rules.eviction.Evictor`). Invariant 5 of
`kvsim.engine.runs` also holds under that order: a continuation becomes idle before its prefix or
with it, and is longer, so the evictor's walk ends on it first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush, heapreplace
from itertools import count, islice
from typing import cast

from kvsim.engine.pool import BlockPool
from kvsim.engine.request import Sequence
from kvsim.engine.run_tables import RunTables
from kvsim.engine.runs import Hits, Run, RunPool
from kvsim.engines.vllm_063_blocks import PrefixCaching

_Entry = tuple[int, int, int, Run]
"""−end, number of the release, number of the entry, run."""


class _Streak:
    """Idle runs released consecutively by tables that were last scheduled at the same time.

    Nothing ends the walk among them. The longest prefix goes first; among equals, the earliest
    release.
    """

    __slots__ = ("heap", "last_ns")

    def __init__(self, last_ns: int) -> None:
        self.last_ns = last_ns
        self.heap: list[_Entry] = []
        """Some of the runs may have left since, or be shorter now."""

    @property
    def longest(self) -> int:
        """Returns the blocks of the longest prefix, after `trim`."""
        return -self.heap[0][0]

    def take_longest(self, idle: _Idle, most: int) -> list[_Entry]:
        """Removes the longest prefixes, after `trim`. They have one length, the earliest release
        comes first, and there are at most `most`."""
        longest = [heappop(self.heap)]
        while len(longest) < most and self.trim(idle) and self.heap[0][0] == longest[0][0]:
            longest.append(heappop(self.heap))
        return longest

    def trim(self, idle: _Idle) -> bool:
        """Brings the longest prefix to the top. Returns False if nothing is left."""
        heap = self.heap
        while heap:
            end, release, entry, run = heap[0]
            place = idle.get(run)
            if place is None or place[1] != release:
                heappop(heap)
            elif run.end != -end:
                heapreplace(heap, (-run.end, release, entry, run))
            else:
                return True
        return False


_Idle = dict[Run, tuple[_Streak, int]]
"""Idle run → its streak, and the number of the release that made it idle."""


class MergedRunPool(RunPool):
    """A pool that stores its content in runs, each content once.

    It decides like `kvsim.engine.pool.PrefixPool` with its eviction `vllm-0.6.3`.
    """

    def __init__(self, size: int, first: int, block_size: int) -> None:
        super().__init__(size, first, block_size)
        self.access_ns = -1
        """When the table that is released next was last scheduled."""
        self.lookups = 0
        self.hits = 0
        """Number of `lookups` that were found."""
        self._streaks: deque[_Streak] = deque()
        """Streaks of idle runs, in order of release."""
        self._idle: _Idle = {}
        self._releases = 0
        self._entries = count()
        """Numbers for the entries of streaks."""
        self._fresh: dict[Run, int] = {}
        """Run in use → its first block whose content was given in the step being composed."""

    def idle_runs(self) -> Iterator[Run]:
        """Iterates over the runs that no table holds, in no particular order."""
        return iter(self._idle)

    def computed(self, hits: Hits) -> int:
        """Returns how many of the blocks that `find` has just returned are from before the step
        being composed."""
        fresh = self._fresh
        if fresh and hits.runs:
            ends = [run.start for run in hits.runs[1:]] + [hits.number]
            for run, end in zip(hits.runs, ends, strict=True):
                if fresh.get(run, end) < end:
                    return fresh[run]
        return hits.number

    def mark_computed(self) -> None:
        """Marks content given out during the scheduling call that has just ended as computed."""
        self._fresh.clear()

    def release(self, runs: list[Run], end: int) -> None:
        self._releases += 1
        super().release(runs, end)

    # -- parts of moves --------------------------------------------------------------------------

    def _append(self, runs: list[Run], start: int, end: int, offset: int) -> Run:
        run = super()._append(runs, start, end, offset)
        self._fresh.setdefault(run, start)
        return run

    def _meet(self, runs: list[Run], known: Run) -> None:
        """Lets the table hold the known run from now on; the blocks that it filled become blank."""
        blocks = known.end - known.start
        if not known.refs:
            self._leave(known)
            self._cached -= blocks
        else:
            self.free += blocks
        known.refs += 1
        runs.append(known)

    def _cut(self, run: Run, depth: int) -> None:
        super()._cut(run, depth)
        if run in self._fresh:
            assert run.successor is not None
            self._fresh[run.successor] = max(self._fresh[run], depth)

    def _enter(self, run: Run, follower: Run) -> None:
        place = self._idle.get(follower)
        if place is None:
            streaks = self._streaks
            if not streaks or streaks[-1].last_ns != self.access_ns:
                streaks.append(_Streak(self.access_ns))
            place = streaks[-1], self._releases
        self._idle[run] = place
        self._fresh.pop(run, None)
        streak, release = place
        heappush(streak.heap, (-run.end, release, next(self._entries), run))

    def _leave(self, run: Run) -> None:
        del self._idle[run]

    def _evict(self, number: int) -> None:
        """Evicts blocks in the order in which the evictor's walk ends on them."""
        while number:
            streak, floor = self._next()
            longest = streak.take_longest(self._idle, number)
            end = longest[0][3].end
            below = streak.longest if streak.trim(self._idle) else 0
            # Together down to what is next; each loses one block where there are as many as that.
            floor = max(floor, below, *(run.start for _, _, _, run in longest))
            taken = max(1, min(number // len(longest), end - floor))
            for _, release, entry, run in longest:
                number -= taken
                run.end, run.successor = end - taken, None
                if run.end > run.start:
                    heappush(streak.heap, (-run.end, release, entry, run))
                else:
                    self._leave(run)
                    self._forget(run)

    def _next(self) -> tuple[_Streak, int]:
        """Returns the streak whose longest prefix goes next, and the depth down to which it goes
        before prefixes of others."""
        streaks, idle = self._streaks, self._idle
        while not streaks[0].trim(idle):
            streaks.popleft()
        chosen, floor = streaks[0], 0
        for streak in islice(streaks, 1, None):
            if not streak.trim(idle):
                continue
            if streak.last_ns > chosen.last_ns:
                break
            if streak.longest > chosen.longest:
                # It must be longer than what is before it, and no shorter than what is behind it.
                chosen, floor = streak, chosen.longest
            else:
                floor = max(floor, streak.longest - 1)
        return chosen, floor


class Vllm063Runs(RunTables, PrefixCaching):
    """`PrefixCaching` stored in runs, with its eviction rule `vllm-0.6.3`, without swapping."""

    swaps = False
    label_moves = True
    gpu: MergedRunPool  # type: ignore[assignment]

    def make_pool(self, size: int, first: int) -> BlockPool:
        return MergedRunPool(size, first, self.block_size)

    def match(self, sequence: Sequence) -> list[int]:
        hits = self.find(sequence, self.full_hit.withheld)
        return cast("list[int]", range(self.gpu.computed(hits)))

    def allocate(self, sequence: Sequence) -> None:
        gpu, hits = self.gpu, self.find(sequence)
        computed = gpu.computed(hits)
        gpu.lookups += sequence.length // self.block_size
        gpu.hits += len(hits)
        self.hold(sequence, sequence.length, cast("list[int]", hits))
        if not self.publish_at.computed:
            self.publish(sequence, sequence.length)
        sequence.seen = min(computed, (sequence.length - self._withheld) // self.block_size)

    def composed(self) -> None:
        self.gpu.mark_computed()

    def publish(self, sequence: Sequence, upto: int) -> None:
        super().publish(sequence, upto)
        if self.publish_at.computed:
            self.gpu.mark_computed()

    def give_back(self, sequence: Sequence, blocks: int) -> None:
        assert sequence.access_ns >= 0, "a table is given back that no step made use of"
        self.gpu.access_ns = sequence.access_ns
        super().give_back(sequence, blocks)

    def _held(self, sequence: Sequence) -> int:
        hits = self.find(sequence)
        return hits.number - hits.idle

"""Blocks with content, stored in runs: one object for neighbouring blocks that are treated alike.

```
 table A   0 ······ 5 ········ 9              A and B begin alike, and part after 5 blocks
 table B   0 ······ 5 ············ 13

 runs      [0 ── 5)  refs 2
              ├─ successor ─► [5 ─── 9)  refs 1, of A
              └ (B's own)     [5 ─────── 13)  refs 1, of B

 A ends    [5 ─── 9) joins the tail of the queue as one entry; [0 ── 5) is B's alone
 evicted   from the queue's first run, its last block first: what begins a prefix goes last
```

Nothing that is decided depends on which physical block holds what, only on how many are blank,
which content is resident, and in which order idle content is evicted. All of that is true of whole
runs, because of these invariants:

1. The blocks of a run have the same holders; if there are none, they are neighbours in the order
   of eviction, the last of the run first.
2. A key is in one interval of keys. All copies of an interval (several blocks may hold the same)
   are cut at the same places.
3. The runs of a table cover its content without a hole: each of them, or what was cut off from it
   (`Run.successor`), reaches to where the next one starts.
4. The content of a table, and every hit, ends where a run ends.
5. If a key is resident, so are all before it. For a table holds a prefix, and gives its blocks back
   from the last to the first.

A hit that ends inside a run cuts it (4). A table lets a run grow, or joins two, only if no
other table holds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from kvsim.engine.counted import CachePool
from kvsim.engine.request import Span


class Run:
    """Consecutive blocks with content that are always treated alike."""

    __slots__ = ("copies", "end", "next", "offset", "prev", "refs", "start", "successor")

    def __init__(self, start: int, end: int, offset: int, refs: int) -> None:
        self.start = start
        """It holds the blocks `start .. end - 1` of every sequence that uses it."""
        self.end = end
        self.offset = offset
        """The key offset, as in a `Span`."""
        self.refs = refs
        """Number of tables that hold it."""
        self.copies: list[Run] | None = None
        """All runs with this content, the one labelled first in front. None if it is the only one;
        empty if it cannot be hit any more, so that it is in no books but the queue."""
        self.successor: Run | None = None
        """The run that was cut off behind it. Valid as long as a table holds both."""
        self.prev = self
        self.next = self
        """Its neighbours in the eviction queue, if no table holds it."""


class Hits(Sequence[int]):
    """The leading resident blocks of a sequence, as runs. Blocks have no ids, as in `Counted`
    tables."""

    __slots__ = ("idle", "number", "runs")

    def __init__(self, runs: list[Run], number: int, idle: int) -> None:
        self.runs = runs
        self.number = number
        """Number of blocks. Each run counts up to the start of the next one, the last one up to
        this number."""
        self.idle = idle
        """Number of these blocks that no table holds."""

    def __len__(self) -> int:
        return self.number

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...
    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        return range(self.number)[place]


_NO_HITS = Hits([], 0, 0)


class RunPool(CachePool):
    """A pool that stores its content in runs.

    Blank blocks are given out before any content is evicted. Idle content is evicted in the order
    in which it was freed, the last block of a table first. Of several blocks with equal content,
    the one labelled first is hit.
    """

    def __init__(self, size: int, first: int, block_size: int) -> None:
        super().__init__(size, first)
        self._block_size = block_size
        self._at: dict[int, Run] = {}
        """Key of the first block of a run → the run; of several copies, the one labelled first."""
        self._queue = Run(0, 0, 0, 0)
        """Sentinel of the circular queue of idle runs. Its successor is evicted next, its
        predecessor last."""

    def idle_runs(self) -> Iterator[Run]:
        """Iterates over the runs that no table holds, in order of eviction."""
        run = self._queue.next
        while run is not self._queue:
            yield run
            run = run.next

    def find(self, spans: list[Span], limit: int) -> Hits:
        """Returns the leading resident blocks of a sequence, at most `limit`."""
        at, size = self._at, self._block_size
        if not limit or spans[0][2] not in at:
            return _NO_HITS
        runs: list[Run] = []
        depth = idle = 0
        for _, last, offset in spans:
            stop = last if last < limit else limit
            while depth < stop:
                run = at.get(depth * size + offset)
                if run is None:
                    return Hits(runs, depth, idle)
                upto = run.end if run.end < stop else stop
                if not run.refs:
                    idle += upto - depth
                runs.append(run)
                depth = upto
        return Hits(runs, depth, idle)

    def hold(self, hits: Hits) -> list[Run]:
        """Adds a table that holds what `find` has just returned. Returns the runs of the table."""
        runs, end = hits.runs, hits.number
        for run in reversed(runs):
            if run.end > end:
                self._cut(run, end)
            end = run.start
            if not run.refs:
                self._leave(run)
                self.free -= run.end - end
                self._cached -= run.end - end
            run.refs += 1
        return runs

    def label(self, runs: list[Run], spans: list[Span], first: int, last: int) -> None:
        """Labels the blocks `first .. last - 1` of a table with the content of these spans. `runs`
        holds the content of the table so far."""
        at, size, depth = self._at, self._block_size, first
        known = True
        for _, end, offset in spans[-1:] if spans[-1][0] <= first else spans:
            stop = end if end < last else last
            while depth < stop:
                run = at.get(depth * size + offset) if known else None
                if run is None:
                    known = False  # Nor is anything behind it.
                    self._append(runs, depth, stop, offset)
                    depth = stop
                else:
                    if run.end > stop:
                        self._cut(run, stop)
                    self._meet(runs, run)
                    depth = run.end

    def release(self, runs: list[Run], end: int) -> None:
        """Releases a table whose first `end` blocks are covered by these runs."""
        queue, before = self._queue, self._queue
        for run in reversed(runs):
            start = run.start
            for part in [run] if run.end == end else reversed(list(parts(run, end))):
                part.refs -= 1
                if part.refs:
                    continue
                self.free += part.end - part.start
                self._cached += part.end - part.start
                # Neighbours in the queue are joined only along one table: offsets of two chains
                # may follow each other by chance.
                if (
                    before is not queue
                    and before.start == part.end
                    and before.offset == part.offset
                    and before.copies is None
                    and part.copies is None
                ):
                    part.end, part.successor = before.end, None
                    self._leave(before)
                    self._forget(before)
                self._enter(part, queue)
                before = part
            end = start

    def keep(self, spans: list[Span], end: int) -> None:
        """Releases a table of `end` full blocks that was never labelled, and keeps its content."""
        key = spans[0][2]
        if spans[0][1] < end or key in self._at:
            runs: list[Run] = []
            self.label(runs, spans, 0, end)
            self.release(runs, end)
            return
        run = self._at[key] = Run(0, end, key, 0)
        self._enter(run, self._queue)
        self.free += end
        self._cached += end

    def retire(self, blocks: int) -> None:
        """Releases a table of full blocks that was never labelled and whose content nobody will
        look up again. It still waits to be evicted, together with such content before it."""
        last = self._queue.prev
        if last.copies == []:
            last.end += blocks
        else:
            run = Run(0, blocks, 0, 0)
            run.copies = []
            self._enter(run, self._queue)
        self.free += blocks
        self._cached += blocks

    # -- parts of moves --------------------------------------------------------------------------

    def _append(self, runs: list[Run], start: int, end: int, offset: int) -> Run:
        """Adds new content behind the runs of a table. Returns the run that holds it."""
        if runs:
            tail = runs[-1]
            while tail.end < start:
                assert tail.successor is not None
                tail = tail.successor
            if tail.refs == 1 and tail.copies is None and tail.offset == offset:
                tail.end, tail.successor = end, None
                return tail
        run = self._at[start * self._block_size + offset] = Run(start, end, offset, 1)
        runs.append(run)
        return run

    def _meet(self, runs: list[Run], known: Run) -> None:
        """Adds a copy of a known run behind the runs of a table that computed the same content."""
        copy = Run(known.start, known.end, known.offset, 1)
        if known.copies is None:
            known.copies = [known]
        known.copies.append(copy)
        copy.copies = known.copies
        runs.append(copy)

    def _cut(self, run: Run, depth: int) -> None:
        """Cuts a run, and every copy of it, at a depth. The part behind the cut becomes a run of
        its own."""
        rests = []
        for front in run.copies or (run,):
            rest = Run(depth, front.end, front.offset, front.refs)
            front.end, rest.successor, front.successor = depth, front.successor, rest
            rests.append(rest)
            if not rest.refs:
                self._enter(rest, front)
        if len(rests) > 1:
            for rest in rests:
                rest.copies = rests
        self._at[depth * self._block_size + run.offset] = rests[0]

    def _evict(self, number: int) -> None:
        """Evicts `number` blocks, from the runs freed first, each from its end."""
        while number:
            run = self._queue.next
            here = run.end - run.start
            if here > number:
                if not run.copies:
                    self._report(run, number)
                    run.end, run.successor = run.end - number, None
                    return
                self._cut(run, run.end - number)
                continue
            number -= here
            self._leave(run)
            self._report(run, here)
            if run.copies != []:
                self._forget(run)

    def _report(self, run: Run, number: int) -> None:
        """Reports that the last `number` blocks of a run are evicted, the last one first."""
        if self.events is not None and run.copies != []:
            size, last = self._block_size, (run.end - 1) * self._block_size + run.offset
            self.events.removed(range(last, last - number * size, -size))

    def _forget(self, run: Run) -> None:
        """Removes a run from all books."""
        key = run.start * self._block_size + run.offset
        copies = run.copies
        if copies is None:
            del self._at[key]
            return
        copies.remove(run)
        self._at[key] = copies[0]
        if len(copies) == 1:
            copies[0].copies = None

    def _enter(self, run: Run, follower: Run) -> None:
        """Inserts a run into the queue before another one."""
        run.prev, run.next = follower.prev, follower
        run.prev.next = follower.prev = run

    def _leave(self, run: Run) -> None:
        run.prev.next, run.next.prev = run.next, run.prev
        # Else it would keep in memory who was beside it.
        run.prev = run.next = self._queue

    # -- audits ----------------------------------------------------------------------------------

    def audit(self) -> None:
        super().audit()
        cached = 0
        for run in self.idle_runs():
            cached += run.end - run.start
            assert run.refs == 0, "a run is idle and in use"
        assert self._cached == cached, "blocks are miscounted"
        size = self._block_size
        for key, run in self._at.items():
            assert run.start < run.end, "an empty run is kept"
            assert key == run.start * size + run.offset, "a run is misfiled"
            if run.copies is not None:
                assert run.copies[0] is run and len(run.copies) > 1, "copies are misfiled"
                alike = {(each.start, each.end, each.offset) for each in run.copies}
                assert len(alike) == 1, "copies are cut at different places"

    def audit_tables(self, tables: Iterable[tuple[list[Run], int]]) -> int:
        """Asserts that each run is held as often as it occurs in these tables. Each table is given
        as its runs and the number of blocks that they cover. Returns the number of blocks held."""
        held: dict[Run, int] = {}
        for runs, end in tables:
            ends = [run.start for run in runs[1:]] + [end]
            assert (runs[0].start if runs else end) == 0, "the content of a table has a hole"
            for run, upto in zip(runs, ends if runs else [], strict=True):
                pieces = list(parts(run, upto))
                assert pieces[-1].end == upto, "a table ends inside a run"
                for part in pieces:
                    held[part] = held.get(part, 0) + 1
        idle = {run for run in self.idle_runs() if run.copies != []}
        counted = {run: run.refs for run in held if run.copies == []}
        for first in self._at.values():
            for run in first.copies or (first,):
                if run.refs:
                    counted[run] = run.refs
                else:
                    assert run in idle, "a run that can be hit cannot be evicted"
                    idle.remove(run)
        assert held == counted, "references and tables disagree"
        assert not idle, "an idle run cannot be hit"
        return sum(run.end - run.start for run in held)


def parts(run: Run, end: int) -> Iterator[Run]:
    """Iterates over a run and the runs that were cut off behind it, up to a depth."""
    yield run
    while run.end < end:
        assert run.successor is not None, "the content of a table has a hole"
        run = run.successor
        yield run

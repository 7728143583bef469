"""Samples which request holds which block while a run goes on, evenly in time for any length.

```
 cells of time    │   │   │   │   │   │   │   │   one sample each, at the first step in it
 full             │       │       │       │       cells twice as long: one of two stays
 idle             │ ■ ┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄ │ ■           and one where an idle time begins
```
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvsim.core.batch import Batch
from kvsim.core.blocks import BlockManager
from kvsim.core.plan import Plan
from kvsim.core.request import Request
from kvsim.results.statistics import Ints

Counts = NDArray[np.int32]

STATES = ("free", "cached", "owned", "shared", "kept", "storing", "loading")
"""States of a block. `free`: in no table, without content. `cached`: in no table, its content can
be hit. `owned`: in tables of one request. `shared`: in tables of several requests. `kept`: held
outside all tables (a declared prefix, a reservation, a leak of the engine). In a tier in CPU
memory, whose places are its chunks: `storing`: it is being written; `loading`: it is being read."""
FREE, CACHED, OWNED, SHARED, KEPT, STORING, LOADING = range(len(STATES))

GPU, CPU = 0, 1


class Groups(NamedTuple):
    """Groups of blocks, one entry each: first those of the GPU, then those of the CPU."""

    device: Ints
    """`GPU` or `CPU`."""
    first: Ints
    """The first block of the group, counted from the first usable block of its pool."""
    blocks: Ints
    """Number of blocks."""


class BlockMap(NamedTuple):
    """Samples of one run."""

    groups: Groups
    time_ns: Ints
    """When each sample was taken, rising."""
    counts: Counts
    """Blocks of each state, of shape (samples, groups, `STATES`); they add up to the group's."""
    owner: Counts
    """Index of the request that owns most of the owned blocks of a group, of shape (samples,
    groups); of several, the first; -1 if no block is owned."""
    owner_blocks: Counts
    """Number of blocks of the group that this request owns."""

    def totals(self, device: int) -> Ints:
        """Blocks of each state on a device, of shape (samples, `STATES`)."""
        totals: Ints = self.counts[:, self.groups.device == device].sum(axis=1, dtype=np.int64)
        return totals


def make_groups(gpu_blocks: int, cpu_blocks: int, gpu_rows: int, cpu_rows: int) -> Groups:
    """Groups of equal size, but for the last of each pool; at most `gpu_rows` and `cpu_rows`."""
    columns = []
    for device, size, rows in ((GPU, gpu_blocks, gpu_rows), (CPU, cpu_blocks, cpu_rows)):
        each = -(-size // rows) or 1
        first = np.arange(0, size, each, dtype=np.int64)
        blocks = np.minimum(each, size - first)
        columns.append((np.full(len(first), device, dtype=np.int64), first, blocks))
    return Groups(*(np.concatenate(both) for both in zip(*columns, strict=True)))


class Tier(Protocol):
    """Memory below the pools, in equal places."""

    capacity: int
    """Number of places."""

    def contents(self) -> tuple[Iterable[int], Iterable[int]]:
        """Returns the places in use, and for each of them how many loads read it, or -1 while it is
        being written."""


class Held(NamedTuple):
    """Entries of block tables."""

    block: Ints
    request: Ints
    """Index of the request that has the table."""


class TableReader:
    """Reads block tables into arrays.

    It re-reads only what has changed since the last time, because most of a table never changes.
    """

    def __init__(self) -> None:
        self._known: dict[Request, tuple[list[int], Ints]] = {}

    def held_by(self, blocks: BlockManager, requests: Iterable[Request]) -> Held:
        """The blocks in all tables of these requests."""
        known, self._known = self._known, {}
        arrays: list[Ints] = [np.zeros(0, dtype=np.int64)]
        indexes = [0]
        for request in requests:
            for sequence in request.sequences:
                tables = blocks.tables(sequence)
                table = tables[0]
                if len(tables) > 1:
                    table = [block for table in tables for block in table if block]
                if table:
                    read = self._known[sequence] = _read(table, known.get(sequence))
                    arrays.append(read[1])
                    indexes.append(request.index)
        lengths = [len(array) for array in arrays]
        return Held(np.concatenate(arrays), np.repeat(np.array(indexes, np.int64), lengths))


def _read(table: list[int], known: tuple[list[int], Ints] | None) -> tuple[list[int], Ints]:
    """A copy of a table, as a list and as an array."""
    if known is not None:
        before, array = known
        if table == before:
            return known
        if table[: len(before)] == before:
            more = np.array(table[len(before) :], dtype=np.int64)
            return list(table), np.concatenate((array, more))
    return list(table), np.fromiter(table, np.int64, len(table))


def owners(pool: Any, held: Held) -> Ints:
    """For each block of a pool, by position: the index of the request that owns it, or ~state."""
    # Often all free blocks have content, and need not be listed one by one.
    all_cached = pool.cached == pool.free
    marks = np.full(pool.size, ~CACHED if all_cached else ~FREE, dtype=np.int64)
    if pool.cached and not all_cached:
        cached = np.fromiter(pool.cached_blocks(), np.int64, pool.cached)
        marks[cached - pool.first] = ~CACHED
    place = held.block - pool.first
    here = (place >= 0) & (place < pool.size)
    place, request = place[here], held.request[here]
    marks[place] = request
    # Of several requests that hold a block, the last was noted; the others now find another index.
    marks[place[marks[place] != request]] = ~SHARED
    # Seldom is a block held by no table, and only then are references listed.
    if np.count_nonzero((marks >= 0) | (marks == ~SHARED)) < pool.used:
        used = np.fromiter(pool.references, np.int64, pool.used) - pool.first
        marks[used[(marks[used] < 0) & (marks[used] != ~SHARED)]] = ~KEPT
    return marks


def kept_below(tier: Tier) -> Ints:
    """For each place of a tier: ~state."""
    marks = np.full(tier.capacity, ~FREE, dtype=np.int64)
    places, loads = (np.fromiter(each, np.int64) for each in tier.contents())
    marks[places] = np.choose(np.sign(loads) + 1, (~STORING, ~CACHED, ~LOADING))
    return marks


def count_up(marks: Ints, group: Ints, groups: int) -> tuple[Counts, Counts, Counts]:
    """Blocks of each state by group, which request owns most of a group, and how many blocks.

    `marks`: what `owners` and `kept_below` return; `group`: the group of each block, ascending.
    Shapes as in `BlockMap`.
    """
    # Neighbours are mostly alike, so counting stretches is much quicker than counting blocks.
    begins = np.ones(len(marks), dtype=bool)
    begins[1:] = (marks[1:] != marks[:-1]) | (group[1:] != group[:-1])
    first = np.flatnonzero(begins)
    length = np.diff(first, append=len(marks))
    mark, where = marks[first], group[first]
    owned = mark >= 0
    state = where * len(STATES) + np.where(owned, OWNED, ~mark)
    counts = np.bincount(state, length, groups * len(STATES)).reshape(groups, len(STATES))
    owner = np.full(groups, -1, dtype=np.int32)
    most = np.zeros(groups, dtype=np.int32)
    if owned.any():
        where, who, number = _summed(where[owned], mark[owned], length[owned])
        starts = np.flatnonzero(np.diff(where, prepend=-1))
        largest = np.maximum.reduceat(number, starts)
        leads = np.flatnonzero(number == np.repeat(largest, np.diff(starts, append=len(where))))
        # Of several requests with the most blocks, the first is written last and stays.
        owner[where[leads[::-1]]] = who[leads[::-1]]
        most[where[starts]] = largest
    return counts.astype(np.int32), owner, most


def _summed(group: Ints, request: Ints, length: Ints) -> tuple[Ints, Ints, Ints]:
    """Distinct pairs (group, request), each with the sum of its lengths."""
    width = int(request.max()) + 1
    keys, which = np.unique(group * width + request, return_inverse=True)
    return keys // width, keys % width, np.bincount(which, length).astype(np.int64)


SAMPLES = 1200
"""Most samples that are kept."""
GPU_ROWS, CPU_ROWS = 600, 150
"""Most groups of each pool."""
FIRST_CELL_NS = 1 << 20
"""Time per sample at first: a millisecond."""


class Sample(NamedTuple):
    """The state of both pools, or of the GPU's and the tier below, at one time."""

    time_ns: int
    idle: bool
    """No request runs from here on."""
    counts: Counts
    owner: Counts
    owner_blocks: Counts


class BlockMapWatcher:
    """A watcher of a replica (`kvsim.run.watchers.Watcher`); `block_map` returns what it saw."""

    def __init__(
        self, samples: int = SAMPLES, gpu_rows: int = GPU_ROWS, cpu_rows: int = CPU_ROWS
    ) -> None:
        self._most = samples
        self._rows = gpu_rows, cpu_rows
        self.begin()

    def begin(self) -> None:
        """Start over: the samples so far belong to an attempt that was given up."""
        self._samples: list[Sample] = []
        self._cell_ns = FIRST_CELL_NS
        self._tables = TableReader()
        self._idle: Sample | None = None
        """The state when the engine became idle; it is kept if the engine stays idle into another
        cell."""
        self._groups: Groups | None = None
        self._group_of: Ints = np.zeros(0, dtype=np.int64)
        """The group of each block: first of the GPU, then of the CPU."""

    def composed(self, batch: Batch, plan: Plan, now_ns: int, arrived: int) -> None:
        """Take a sample if this step is the first one of its cell."""
        if self._groups is None:
            self._prepare(batch)
        if plan.empty and not plan.waits:
            return
        idle, self._idle = self._idle, None
        if idle is not None and self._cell(now_ns) > self._cell(idle.time_ns):
            self._keep(idle)
        last = self._samples[-1] if self._samples else None
        if last is None or last.idle or self._cell(now_ns) > self._cell(last.time_ns):
            self._keep(self._sample(batch, now_ns, idle=False))

    def settled(self, batch: Batch, ended: list[Request]) -> None:
        """Take a sample if no request is left."""
        if ended and not len(batch):
            self._idle = self._sample(batch, batch.now_ns, idle=True)

    def block_map(self) -> BlockMap:
        """The samples so far, as a block map."""
        samples = self._samples + ([self._idle] if self._idle else [])
        groups = self._groups or make_groups(0, 0, *self._rows)
        shape = (len(samples), len(groups.first))
        return BlockMap(
            groups,
            np.array([sample.time_ns for sample in samples], dtype=np.int64),
            np.array([sample.counts for sample in samples], dtype=np.int32).reshape(
                *shape, len(STATES)
            ),
            np.array([sample.owner for sample in samples], dtype=np.int32).reshape(shape),
            np.array([sample.owner_blocks for sample in samples], dtype=np.int32).reshape(shape),
        )

    def _prepare(self, batch: Batch) -> None:
        blocks: Any = batch.blocks
        gpu, cpu, tier = blocks.gpu, blocks.cpu, blocks.tier
        below = cpu.size if tier is None else tier.capacity
        groups = self._groups = make_groups(gpu.size, below, *self._rows)
        self._group_of = np.repeat(np.arange(len(groups.blocks)), groups.blocks)

    def _cell(self, time_ns: int) -> int:
        return time_ns // self._cell_ns

    def _sample(self, batch: Batch, now_ns: int, idle: bool) -> Sample:
        queued = chain(batch.running, batch.swapped, batch.holding, batch.waiting)
        requests = chain(queued, batch.aside, batch.lost)
        blocks: Any = batch.blocks
        held = self._tables.held_by(blocks, requests)
        below = owners(blocks.cpu, held) if blocks.tier is None else kept_below(blocks.tier)
        marks = np.concatenate([owners(blocks.gpu, held), below])
        assert self._groups is not None
        return Sample(now_ns, idle, *count_up(marks, self._group_of, len(self._groups.first)))

    def _keep(self, sample: Sample) -> None:
        self._samples.append(sample)
        while len(self._samples) > self._most:
            self._cell_ns *= 2
            self._thin()

    def _thin(self) -> None:
        """Keep the first sample of each cell, and one of an idle time if it ends the cell."""
        cells = [self._cell(sample.time_ns) for sample in self._samples]
        last = len(cells) - 1
        self._samples = [
            sample
            for i, sample in enumerate(self._samples)
            if i == 0
            or cells[i] > cells[i - 1]
            or (sample.idle and (i == last or cells[i + 1] > cells[i]))
        ]

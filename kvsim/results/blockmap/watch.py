"""Watches a run and keeps samples of its block map, evenly in time for runs of any length.

```
 cells of time    │   │   │   │   │   │   │   │   one sample each, at the first step in it
 full             │       │       │       │       cells twice as long: one of two stays
 idle             │ ■ ┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄ │ ■           and one where an idle time begins
```
"""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from kvsim.core.batch import Batch
from kvsim.core.plan import Plan
from kvsim.core.request import Request
from kvsim.results.blockmap.blockmap import STATES, BlockMap, Counts, Groups, Ints, make_groups
from kvsim.results.blockmap.snapshot import TableReader, count_up, kept_below, owners

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

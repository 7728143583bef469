"""What a block map is: at some points in time, the state of the blocks of both pools.

Blocks are put into groups of neighbouring ids; where a pool is small, a group is one block. A
sample holds until the next one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Counts = NDArray[np.int32]

STATES = ("free", "cached", "owned", "shared", "kept")
"""In no table, without content; in no table, content can be hit; in tables of one request; in
tables of several; held by no table (a declared prefix, a reservation, a leak of the engine)."""
FREE, CACHED, OWNED, SHARED, KEPT = range(len(STATES))

GPU, CPU = 0, 1


class Groups(NamedTuple):
    """Groups of blocks, an entry each: those of the GPU, then those of the CPU."""

    device: Ints
    """`GPU` or `CPU`."""
    first: Ints
    """Its first block, counted from the first one of its pool that can be used."""
    blocks: Ints
    """How many there are."""


class BlockMap(NamedTuple):
    """Samples of one run."""

    groups: Groups
    time_ns: Ints
    """When each sample was taken, rising."""
    counts: Counts
    """Blocks of each state, of shape (samples, groups, `STATES`); they add up to the group's."""
    owner: Counts
    """Index of the request that owns most of the owned blocks of a group, of shape
    (samples, groups); the first one of several; -1: none are owned."""
    owner_blocks: Counts
    """How many of them it owns."""

    def totals(self, device: int) -> Ints:
        """Blocks of each state on a device, of shape (samples, `STATES`)."""
        totals: Ints = self.counts[:, self.groups.device == device].sum(axis=1, dtype=np.int64)
        return totals


def make_groups(gpu_blocks: int, cpu_blocks: int, gpu_rows: int, cpu_rows: int) -> Groups:
    """Groups of equal size, but for the last one of a pool; at most so many rows per pool."""
    columns = []
    for device, size, rows in ((GPU, gpu_blocks, gpu_rows), (CPU, cpu_blocks, cpu_rows)):
        each = -(-size // rows) or 1
        first = np.arange(0, size, each, dtype=np.int64)
        blocks = np.minimum(each, size - first)
        columns.append((np.full(len(first), device, dtype=np.int64), first, blocks))
    return Groups(*(np.concatenate(both) for both in zip(*columns, strict=True)))

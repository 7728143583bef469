"""Samples, while a run goes on, which request holds which block."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
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

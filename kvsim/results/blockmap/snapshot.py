"""Takes the state of a pool, block by block, and counts it by group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvsim.core.blocks import BlockManager
from kvsim.core.request import Request
from kvsim.results.blockmap.blockmap import (
    CACHED,
    FREE,
    KEPT,
    LOADING,
    OWNED,
    SHARED,
    STATES,
    STORING,
    Counts,
    Ints,
)


class Tier(Protocol):
    """Memory below the pools, in equal places."""

    capacity: int
    """Number of places."""

    def contents(self) -> tuple[Iterable[int], Iterable[int]]:
        """Returns the places in use, and for each of them how many loads read it, or -1 while it is
        being written."""
        ...


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

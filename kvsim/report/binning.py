"""Thins a long time line out to few bins without changing its means or its extremes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Bins(NamedTuple):
    """A time line cut at `edges_ns`; arrays have one entry per bin."""

    edges_ns: Ints
    exact: bool
    """Whether each bin is one state of the time line, so that mean, low and high are equal."""
    mean: dict[str, Floats]
    """Time-weighted means."""
    low: dict[str, Ints]
    high: dict[str, Ints]


def bin_states(
    start_ns: Ints,
    end_ns: int,
    names: Sequence[str],
    part: Callable[[str, int, int], Ints],
    limit: int,
) -> Bins:
    """Cut states that hold from `start_ns[i]` to `start_ns[i + 1]`, the last to `end_ns`.

    `part` returns the values `first .. last - 1` of a column of `names`. `start_ns` is sorted and
    begins at 0; states without duration do not count. There are at most `limit` bins: one per state
    if that suffices, else bins of equal width (but for the last).
    """
    lasting = int(np.count_nonzero(start_ns[1:] != start_ns[:-1])) + 1
    lasting -= int(start_ns[-1]) == end_ns
    exact = lasting <= limit
    edges = _distinct(np.append(start_ns, end_ns)) if exact else even_edges(end_ns, limit)
    pieces = [
        _cut(start_ns, edges[first : first + _AT_ONCE + 1], names, part)
        for first in range(0, len(edges) - 1, _AT_ONCE)
    ] or [{name: (np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64)) for name in names}]
    mean, low, high = (
        {name: np.concatenate([piece[name][each] for piece in pieces]) for name in names}
        for each in range(3)
    )
    return Bins(edges, exact, mean, low, high)


_AT_ONCE = 64
"""Bins that are filled at once, to bound the memory."""


def _cut(
    start_ns: Ints, edges: Ints, names: Sequence[str], part: Callable[[str, int, int], Ints]
) -> dict[str, tuple[Floats, Ints, Ints]]:
    """Mean, low and high of each column in the bins between `edges`."""
    begin = int(np.searchsorted(start_ns, edges[0], side="right")) - 1
    end = int(np.searchsorted(start_ns, edges[-1], side="left"))
    instants = np.maximum(start_ns[begin:end], edges[0])
    # Two sorted sequences, which a stable sort merges.
    cuts = _distinct(np.sort(np.concatenate((instants, edges)), kind="stable"))
    state = np.searchsorted(instants, cuts[:-1], side="right") - 1
    weight = np.diff(cuts).astype(float)
    first = np.searchsorted(cuts, edges[:-1])
    found = {}
    for name in names:
        values = part(name, begin, end)[state]
        found[name] = (
            np.add.reduceat(values * weight, first) / np.diff(edges),
            np.minimum.reduceat(values, first),
            np.maximum.reduceat(values, first),
        )
    return found


def even_edges(end_ns: int, limit: int) -> Ints:
    """Edges of at most `limit` bins of equal whole width that cover `0 .. end_ns`."""
    width = max(1, -(-end_ns // limit))
    return _distinct(np.append(np.arange(0, end_ns, width), end_ns))


def _distinct(ordered: Ints) -> Ints:
    """The distinct values of a sorted array; `np.unique` sorts again, and imports `numpy.ma`."""
    distinct: Ints = ordered[np.append(True, ordered[1:] != ordered[:-1])]
    return distinct


def bin_events(instants_ns: Ints, amounts: Ints, edges_ns: Ints) -> Ints:
    """The sum of the amounts whose instants lie in each bin; the last bin includes its end."""
    sums = np.zeros(max(len(edges_ns) - 1, 0), dtype=np.int64)
    if len(sums):
        np.add.at(sums, places(instants_ns, edges_ns), amounts)
    return sums


def places(instants_ns: Ints, edges_ns: Ints) -> NDArray[np.intp]:
    """The bin that each instant lies in; the last bin includes its end."""
    after = np.searchsorted(edges_ns, instants_ns, side="right")
    return np.clip(after - 1, 0, len(edges_ns) - 2)

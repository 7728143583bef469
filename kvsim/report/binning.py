"""Thins a long time line out to few bins without changing its means or its extremes."""

from __future__ import annotations

from collections.abc import Iterable
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
    start_ns: Ints, end_ns: int, columns: Iterable[tuple[str, Ints]], limit: int
) -> Bins:
    """Cut states that hold from `start_ns[i]` to `start_ns[i + 1]`, the last to `end_ns`.

    `columns`: names and values; an iterator may make each column when it is needed. `start_ns` is
    sorted and begins at 0; states without duration do not count. There are at most `limit` bins:
    one per state if that suffices, else bins of equal width (but for the last).
    """
    instants = _distinct(np.append(start_ns, end_ns))
    exact = len(instants) - 1 <= limit
    edges = instants if exact else even_edges(end_ns, limit)
    if len(edges) < 2:
        names = [name for name, _ in columns]
        empty: dict[str, Floats] = {name: np.zeros(0) for name in names}
        nothing = {name: np.zeros(0, dtype=np.int64) for name in names}
        return Bins(edges, exact, empty, nothing, nothing)

    # Two sorted sequences, which a stable sort merges.
    cuts = _distinct(np.sort(np.concatenate((instants, edges)), kind="stable"))
    del instants  # Of a long run these fill the memory.
    state = np.searchsorted(start_ns, cuts[:-1], side="right") - 1
    weight = np.diff(cuts).astype(float)
    first = np.searchsorted(cuts, edges[:-1])
    del cuts
    widths = np.diff(edges)
    mean, low, high = {}, {}, {}
    for name, column in columns:
        values = column[state]
        mean[name] = np.add.reduceat(values * weight, first) / widths
        low[name] = np.minimum.reduceat(values, first)
        high[name] = np.maximum.reduceat(values, first)
    return Bins(edges, exact, mean, low, high)


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
    bins = len(edges_ns) - 1
    index = np.clip(np.searchsorted(edges_ns, instants_ns, side="right") - 1, 0, bins - 1)
    sums = np.zeros(max(bins, 0), dtype=np.int64)
    if bins > 0:
        np.add.at(sums, index, amounts)
    return sums

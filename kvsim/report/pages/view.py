"""Cuts a run into the bins that its figures over time are drawn from; all share one axis.

Bins thin a long time line out without changing its means or its extremes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsim.core.schema import BLOCKED, SGLANG_COLUMNS
from kvsim.report.pages.figures import (
    Axis,
    Figure,
    Points,
    TimeAxis,
    Trace,
    bars,
    compact,
    ratios,
    step_line,
    time_axis,
    time_chart,
    titled,
)
from kvsim.results import timeline
from kvsim.results.numerals import seconds
from kvsim.results.statistics import Floats, Ints, durations_ns

FINE, COARSE, BARS = 1500, 240, 200
"""Numbers of bins: for levels, which are drawn as lines; for averages, which must not flicker; for
events, because a bar needs some pixels."""
RATES = 80
"""Number of bins of rates and percentiles, which need some requests each."""
DOTS = 1500
"""Most requests that are drawn one by one."""
LEAST_SHARE = 0.001
"""Parts of a whole below this share are not drawn."""

LEVELS = (
    *("used_blocks", "cached_blocks", "free_blocks", "cpu_used_blocks"),
    *("waiting", "running", "swapped"),
)
AVERAGES = (
    *("prefill_tokens", "decode_seqs", "used_blocks", "empty_slots", "stranded_blocks"),
    *("waiting", "running"),
)
"""Columns of `timeline.States` for the fine and for the coarse bins."""


class Sums(NamedTuple):
    """Instants in bins of equal width."""

    x: Points
    """Edges in the unit of the time axis."""
    edges_ns: Ints
    order: NDArray[np.intp] | None
    """The places of the instants in order of time; None: they are in order."""
    ends: NDArray[np.intp]
    """Where the instants of each bin begin in that order, and where the last ones end."""
    width: float
    """Of a bin, in the unit of the time axis."""

    def ordered(self, values: NDArray[Any]) -> NDArray[Any]:
        """These values, one for each instant, in order of time."""
        return values if self.order is None else values[self.order]

    def of(self, amounts: NDArray[Any] | None = None) -> Floats:
        """The sum of these whole amounts in each bin; without them, the number of instants."""
        sizes = np.diff(self.ends)
        if amounts is None:
            return sizes.astype(float)
        # Of an empty stretch `reduceat` gives an element, not 0: only bins that have some are
        # asked.
        sums, some = np.zeros(len(sizes)), np.flatnonzero(sizes)
        if len(some):
            sums[some] = np.add.reduceat(self.ordered(amounts), self.ends[some], dtype=np.int64)
        return sums

    def per_second(self, colour: str, label: str, amounts: NDArray[Any] | None = None) -> Trace:
        """A line of these amounts, or of instants, per second."""
        rates = self.of(amounts) / np.diff(self.edges_ns) * 1e9
        return step_line(self.x, rates, colour, label)

    def bars(self, amounts: Floats, colour: str, label: str) -> Trace:
        """A bar for each bin."""
        return bars(self.x[:-1], compact(amounts), self.width, colour, label)


def sums_of(axis: TimeAxis, end_ns: int, instants_ns: Ints, bins: int) -> Sums:
    """Instants until `end_ns` in at most so many bins."""
    edges = even_edges(end_ns, bins)
    width, order, ordered = int(edges[1] - edges[0]) / axis.ns, None, instants_ns
    if (instants_ns[1:] < instants_ns[:-1]).any():
        order = np.argsort(instants_ns, kind="stable")
        ordered = instants_ns[order]
    inner = np.searchsorted(ordered, edges[1:-1], side="left")
    ends = np.concatenate(([0], inner, [len(ordered)]))
    return Sums(axis.of(edges), edges, order, ends, width)


class View(NamedTuple):
    """A run, ready to be drawn."""

    summary: Mapping[str, Any]
    requests: Mapping[str, Any]
    steps: Mapping[str, Ints]
    durations: Mapping[str, Floats]
    """Durations of each request in ns, as returned by `durations_ns`."""
    end_ns: int
    axis: TimeAxis
    fine: Bins
    """Columns: `LEVELS` and those that SGLang alone has."""
    coarse: Bins
    """Columns: `AVERAGES` and `blocked_CAUSE`, the share of time with this cause."""
    fine_x: Points
    """Edges of the bins in the unit of the time axis; `coarse_x` those of the others."""
    coarse_x: Points

    def sums(self, instants_ns: Ints, bins: int) -> Sums:
        """These instants in at most so many bins."""
        return sums_of(self.axis, self.end_ns, instants_ns, bins)

    def figure(
        self, id: str, title: str, note: str, data: list[Trace], y: Axis, **further: Any
    ) -> Figure:
        """A figure over the time of the run; `further`: arguments of `time_chart`."""
        return time_chart(self.axis, id, title, note, data, y, **further)


def look_at(
    summary: Mapping[str, Any], requests: Mapping[str, Any], steps: Mapping[str, Ints]
) -> View:
    """Cut a run into at most `FINE` and at most `COARSE` bins."""
    end_ns = timeline.run_end_ns(steps, requests)
    axis = time_axis(end_ns)
    rows = timeline.States(steps, end_ns, summary["meta"])
    causes = {f"blocked_{name}": i for i, name in enumerate(BLOCKED) if i}

    def part(name: str, first: int, last: int) -> Ints:
        if name not in causes:
            return rows.part(name, first, last)
        blocked = rows.part("blocked", first, last)
        return np.where(blocked == causes[name], 1, 0)

    own, start_ns = [name for name in SGLANG_COLUMNS if name in steps], rows["start_ns"]
    fine = bin_states(start_ns, end_ns, (*LEVELS, *own), part, FINE)
    coarse = bin_states(start_ns, end_ns, (*AVERAGES, *causes), part, COARSE)
    return View(
        *(summary, requests, steps, durations_ns(requests), end_ns, axis, fine, coarse),
        fine_x=axis.of(fine.edges_ns),
        coarse_x=axis.of(coarse.edges_ns),
    )


def lined(
    x: Points, named: Iterable[tuple[NDArray[Any], str, str]], stack: str = ""
) -> list[Trace]:
    """Lines of (values of the bins, colour, label), or stacked areas."""
    lines = [step_line(x, y, colour, label) for y, colour, label in named]
    if stack:
        for drawn in lines:
            colour = drawn["line"]["color"]
            drawn["line"]["width"] = 0
            drawn |= {"stackgroup": stack, "fillcolor": colour}
    return lines


class Durations(NamedTuple):
    """Durations in bins of equal width, by when they ended."""

    x: Points
    """Edges in the unit of the time axis."""
    mean: Floats
    """Weighted; nanoseconds, NaN where there are none."""
    most: Floats
    ends_ns: Ints
    """The shortest and the longest of all; empty where there are none."""

    def lines(self, ns: float, colour: str, label: str) -> list[Trace]:
        """Lines of the mean and of the longest, in a unit of so many nanoseconds."""
        drawn = (self.mean / ns, colour, label), (self.most / ns, "peak", "Longest")
        return lined(self.x, drawn)


def durations_of(run: View, pieces: Iterable[tuple[Ints, Ints, Ints]]) -> Durations:
    """Durations of steps, piece by piece: when they ended, in order, how long they were, and how
    much each weighs."""
    edges = even_edges(run.end_ns, RATES)
    sums, weighed = np.zeros((2, len(edges) - 1), dtype=np.int64)
    most, all_ends = np.full(len(edges) - 1, np.nan), np.zeros(0, dtype=np.int64)
    for instants, values, weights in pieces:
        if not len(values):
            continue
        starts = np.append(0, np.searchsorted(instants, edges[1:-1]))
        some = np.flatnonzero(np.diff(starts, append=len(instants)))
        first = starts[some]
        sums[some] += np.add.reduceat(values * weights, first)
        weighed[some] += np.add.reduceat(weights, first)
        most[some] = np.fmax(most[some], np.maximum.reduceat(values, first))
        everything = (*all_ends, values.min(), values.max())
        all_ends = np.array((min(everything), max(everything)))
    return Durations(run.axis.of(edges), ratios(sums, weighed), most, all_ends)


def event_bars(
    run: View, id: str, title: str, note: str, unit: str, kinds: Sequence[tuple[str, int, str, str]]
) -> Iterator[Figure]:
    """Sums of columns of steps over short times, if there is anything to sum."""
    bins = run.sums(run.steps["start_ns"], BARS)
    sums = [
        (sign * bins.of(run.steps[column]), colour, label)
        for column, sign, colour, label in kinds
        if run.steps[column].any()
    ]
    if not sums:
        return
    y = titled(unit, dtick=1) if max(abs(each).max() for each, *_ in sums) < 5 else titled(unit)
    note = f"{note} A bar is {seconds(bins.width * run.axis.ns / 1e9)} wide."
    stacked: dict[str, Any] = {"barmode": "relative", "bargap": 0, "height": 180}
    yield run.figure(id, title, note, [bins.bars(*each) for each in sums], y, **stacked)


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
    # The last state may begin at the very end, and so hold for no time.
    lasting -= int(start_ns[-1]) == end_ns
    exact = lasting <= limit
    edges = _distinct(np.append(start_ns, end_ns)) if exact else even_edges(end_ns, limit)
    at_once = max(1, len(edges) * _AT_ONCE // len(start_ns))
    pieces = [
        _cut(start_ns, edges[first : first + at_once + 1], names, part)
        for first in range(0, len(edges) - 1, at_once)
    ] or [{name: (np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64)) for name in names}]
    mean, low, high = (
        {name: np.concatenate([piece[name][each] for piece in pieces]) for name in names}
        for each in range(3)
    )
    return Bins(edges, exact, mean, low, high)


_AT_ONCE = 1 << 16
"""States that are put into bins at once, about, to bound the memory."""


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

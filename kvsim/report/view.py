"""Cuts a run into pieces small enough to draw."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

from kvsim.report import binning, phases, timeline
from kvsim.report.binning import Bins, Ints
from kvsim.report.figures import Points, TimeAxis, time_axis
from kvsim.schema import BLOCKED

FINE, COARSE = 1500, 240
"""Number of bins: for levels, which are drawn as lines, and for averages, which must not
flicker."""

LEVELS = (
    *("used_blocks", "cached_blocks", "free_blocks", "cpu_used_blocks"),
    *("waiting", "running", "swapped"),
)
AVERAGES = (
    *("prefill_tokens", "decode_seqs", "used_blocks", "empty_slots", "stranded_blocks"),
    *("waiting", "running"),
)
"""Columns of `timeline.States` for the fine and for the coarse bins."""


class Cut(NamedTuple):
    """A time line in bins."""

    x: Points
    """Edges in the unit of the time axis."""
    bins: Bins
    """Columns: `LEVELS`; or `AVERAGES` and `blocked_CAUSE`, the share of time with this cause."""


class View(NamedTuple):
    """A run, ready to be drawn."""

    summary: Mapping[str, Any]
    requests: Mapping[str, Any]
    steps: Mapping[str, Ints]
    durations: Mapping[str, phases.Floats]
    """Durations of each request in ns, as returned by `phases.durations_ns`."""
    end_ns: int
    axis: TimeAxis
    fine: Cut
    coarse: Cut


def look_at(
    summary: Mapping[str, Any], requests: Mapping[str, Any], steps: Mapping[str, Ints]
) -> View:
    """Cut a run into at most `FINE` and at most `COARSE` bins."""
    end_ns = timeline.run_end_ns(steps, requests)
    axis = time_axis(end_ns)
    rows = timeline.States(steps, end_ns, summary["meta"])
    blocked = rows["blocked"]
    levels = ((name, rows[name]) for name in LEVELS)
    averages = ((name, rows[name]) for name in AVERAGES)
    causes = ((f"blocked_{name}", (blocked == i) * 1) for i, name in enumerate(BLOCKED) if i)

    def cut(columns: Iterable[tuple[str, Ints]], limit: int) -> Cut:
        bins = binning.bin_states(rows["start_ns"], end_ns, columns, limit)
        return Cut(axis.of(bins.edges_ns), bins)

    fine, coarse = cut(levels, FINE), cut(chain(averages, causes), COARSE)
    durations = phases.durations_ns(requests)
    return View(summary, requests, steps, durations, end_ns, axis, fine, coarse)

"""Draws runs over one another, and the differences between their requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvsim.report.figures import (
    Figure,
    compact,
    held,
    layout,
    over_time,
    step_line,
    time_axis,
    titled,
)
from kvsim.report.metrics import LATENCIES
from kvsim.report.pairing import Pairs
from kvsim.report.phases import Floats
from kvsim.report.view import View

COLOURS = 8
POINTS = 400
COMPARED = ("ttft", "e2el")
"""Latencies that are compared request by request."""

LEVELS = (
    ("used_blocks", "GPU blocks in use", "GPU blocks"),
    ("waiting", "Requests waiting", "requests"),
    ("running", "Requests running", "requests"),
)


def run_colour(i: int) -> str:
    """Name of the colour of run number `i`; they repeat after `COLOURS` runs."""
    return f"run-{i % COLOURS}"


def level_figures(views: Sequence[tuple[str, View]]) -> list[Figure]:
    """What each run held over time, as lines in one chart."""
    end_ns = max(view.end_ns for _, view in views)
    if not end_ns:
        return []
    axis = time_axis(end_ns)
    figures = []
    for column, title, unit in LEVELS:
        data = [
            step_line(
                axis.of(view.coarse.bins.edges_ns),
                held(view.coarse.bins.mean[column]),
                run_colour(i),
                name,
            )
            for i, (name, view) in enumerate(views)
        ]
        look = over_time(axis, titled(unit))
        figures.append(Figure(f"level-{column}", title, "", data, look, [], time=True))
    return figures


def difference_figures(paired: Sequence[tuple[int, str, Pairs]]) -> list[Figure]:
    """The differences of all pairs in ascending order, by latency.

    `paired`: number, name and pairs of each run that shares requests with the first.
    """
    return [_difference_figure(kind, paired) for kind in COMPARED] if paired else []


def _difference_figure(kind: str, paired: Sequence[tuple[int, str, Pairs]]) -> Figure:
    unit, ns = _unit([pairs.differences_ns(kind) for *_, pairs in paired])
    data = []
    for i, name, pairs in paired:
        ordered = np.sort(pairs.differences_ns(kind)) / ns
        ranks = np.unique(np.linspace(0, len(ordered) - 1, min(POINTS, len(ordered))).round())
        picked = ranks.astype(int)
        x = compact(100 * (picked + 0.5) / len(ordered))
        line = step_line(x, compact(ordered[picked]), run_colour(i), name)
        line["line"] = {**line["line"], "shape": "linear", "width": 2}
        data.append(line)
    zero: dict[str, Any] = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 0, "y1": 0}
    zero["line"] = {"color": "var(--ink)", "width": 1}
    label = LATENCIES[kind]
    look = layout(
        titled(
            "requests, ordered by their difference (%)",
            range=[0, 100],
            unifiedhovertitle={"text": "%{x:.3~g} % of the requests"},
        ),
        titled(f"{label} difference ({unit})", rangemode="normal"),
        shapes=[zero],
    )
    note = "Below the line a request was quicker than in the first run, above it slower."
    return Figure(f"paired-{kind}", f"{label} differences", note, data, look, [], height=260)


def _unit(samples: Sequence[Floats]) -> tuple[str, float]:
    largest = max((float(np.abs(values).max(initial=0)) for values in samples), default=0.0)
    return ("s", 1e9) if largest >= 1e9 else ("ms", 1e6)

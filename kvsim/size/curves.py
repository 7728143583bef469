"""Draws the bounded figures by the knob: all tried values, and those near the answer."""

from __future__ import annotations

from math import log10
from typing import Any

from kvsim.report.figures import Entry, Figure, Trace, compact, layout, titled
from kvsim.report.metrics import Metric
from kvsim.report.numerals import show
from kvsim.size.answer import Answer
from kvsim.size.cliffs import Cliff, Tried
from kvsim.size.search import Laboratory
from kvsim.sweep.marks import LOGARITHMIC, Side, side

_NEAR = 0.25
"""Share of an answer that the close view shows on either side."""


def curve_figures(lab: Laboratory, found: Answer) -> list[Figure]:
    """For each bounded figure, a curve of all tried values, and a closer one near an answer."""
    figures = []
    for metric in lab.objectives.metrics:
        whole = [(v, each) for v, each in lab.ascending if metric.key in each.figures]
        if whole:
            title = f"{metric.label} by {lab.knob.key}"
            figures.append(_curve(lab, found, metric, whole, "whole", title))
        if whole and found.value is not None and found.meets:
            reach = _NEAR * found.value
            close = [each for each in whole if abs(each[0] - found.value) <= reach]
            title = f"{metric.label} near the answer"
            figures.append(_curve(lab, found, metric, close, "near", title))
    return figures


def _curve(
    lab: Laboratory, found: Answer, metric: Metric, tried: Tried, name: str, title: str
) -> Figure:
    """A bounded figure by the knob: every seed as a point, the mean as a line."""
    limits = [o.limit for o in lab.objectives.each if o.metric.key == metric.key]
    up = side(metric, [each for _, each in tried], limits[0])
    first, last = tried[0][0], tried[-1][0]
    logarithmic = first > 0 and last / first >= LOGARITHMIC
    shapes = up.limit_line("y")
    if found.value is not None and found.meets:
        shapes.append(_answer_line(found.value))
    notes = []
    for cliff in found.cliffs:
        if cliff.metric.key == metric.key and first <= cliff.safe <= last:
            shapes.append(_span(cliff.safe, cliff.beyond))
            notes.append(_times(cliff, logarithmic))
    x = titled(lab.knob.key) | ({"type": "log", "dtick": "D2"} if logarithmic else {})
    look = layout(x, up.look(), hovermode="closest", shapes=shapes, annotations=notes)
    legend = [
        Entry("mean over the seeds", "var(--peak)", (1,), "line"),
        Entry("each seed", "var(--used)", (0,)),
    ]
    note = "Dotted: the limit. Green: the answer." + (" Red: the cliff." if notes else "")
    data = [_seeds(tried, up), _means(tried, up)]
    return Figure(f"{name}-{metric.key}", title, note, data, look, legend, height=360)


def _seeds(tried: Tried, up: Side) -> Trace:
    points = [
        (value, record["figures"][up.metric.key] / up.per_unit)
        for value, each in tried
        for record in each.records
    ]
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [x for x, _ in points],
        "y": compact(y for _, y in points),
        "hoverinfo": "skip",
        "marker": {"color": "var(--used)", "size": 5, "opacity": 0.45, "line": {"width": 0}},
    }


def _means(tried: Tried, up: Side) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [value for value, _ in tried],
        "y": compact(up.of(each) for _, each in tried),
        "text": [
            f"{value:,.6g}: {show(each.figures[up.metric.key], up.metric.unit)}"
            for value, each in tried
        ],
        "hovertemplate": "%{text}<extra></extra>",
        "line": {"color": "var(--peak)", "width": 1.6},
        "marker": {"color": "var(--peak)", "size": 5},
    }


def _answer_line(at: float) -> dict[str, Any]:
    line = {"color": "var(--good)", "width": 1.4}
    return {"type": "line", "yref": "paper", "x0": at, "x1": at, "y0": 0, "y1": 1, "line": line}


def _span(one: float, other: float) -> dict[str, Any]:
    return {
        "type": "rect",
        "yref": "paper",
        "x0": min(one, other),
        "x1": max(one, other),
        "y0": 0,
        "y1": 1,
        "fillcolor": "var(--bad)",
        "opacity": 0.35,
        "line": {"width": 2, "color": "var(--bad)"},
    }


def _times(cliff: Cliff, logarithmic: bool) -> dict[str, Any]:
    """How high a cliff is, written beside it."""
    middle = (cliff.safe + cliff.beyond) / 2
    return {
        "x": log10(middle) if logarithmic else middle,
        "y": 0.96,
        "yref": "paper",
        "text": f"<b>×{cliff.times:.1f}</b>",
        "showarrow": False,
        "xanchor": "right",
        "xshift": -6,
        "font": {"color": "var(--bad)", "size": 13},
    }

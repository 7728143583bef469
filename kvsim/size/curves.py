"""Draws the bounded figures by the knob: all that was tried, and what is near the answer."""

from __future__ import annotations

from math import log10
from typing import Any

from kvsim.report.figures import Entry, Figure, Trace, compact, layout, titled
from kvsim.report.metrics import Metric
from kvsim.report.numerals import show
from kvsim.size.answer import Answer
from kvsim.size.cliffs import Cliff, Tried
from kvsim.size.search import Laboratory

_WIDE = 20
_IN_SECONDS = 2000
_NEAR = 0.25


def curve_figures(lab: Laboratory, found: Answer) -> list[Figure]:
    """Two figures for each bounded figure of the summary; one where there is no answer."""
    figures = []
    for metric in lab.objectives.metrics:
        whole = [(v, each) for v, each in lab.ascending if metric.key in each.figures]
        if whole:
            figures.append(_curve(lab, found, metric, whole, near=False))
        if found.value is not None and found.meets:
            reach = _NEAR * found.value
            close = [each for each in whole if abs(each[0] - found.value) <= reach]
            figures.append(_curve(lab, found, metric, close, near=True))
    return figures


def _curve(
    lab: Laboratory, found: Answer, metric: Metric, tried: Tried, *, near: bool
) -> Figure:
    """A bounded figure by the knob: every seed as a point, the mean as a line."""
    values = [each.figures[metric.key] for _, each in tried]
    seconds = metric.unit == "ms" and max(values) >= _IN_SECONDS
    per, unit = (1e3, "s") if seconds else (1.0, metric.unit)
    limits = [o.limit / per for o in lab.objectives.each if o.metric.key == metric.key]
    data = [_seeds(tried, metric, per), _means(tried, metric, per)]
    shapes = [_line("y", limit, "bad", "dot") for limit in limits]
    if found.value is not None and found.meets:
        shapes.append(_line("x", found.value, "good", "solid"))
    x = titled(lab.knob.key)
    places = [value for value, _ in tried]
    logarithmic = places[0] > 0 and places[-1] / places[0] >= _WIDE
    if logarithmic:
        x |= {"type": "log", "dtick": "D2"}
    notes = []
    for cliff in found.cliffs:
        if cliff.metric.key == metric.key and places[0] <= cliff.safe <= places[-1]:
            shapes.append(_span(cliff.safe, cliff.beyond))
            notes.append(_times(cliff, logarithmic))
    y = titled(f"{metric.label} ({unit})" if unit and unit != "share" else metric.label)
    if min(values) > 0 and max(values) / min(values) >= _WIDE:
        y |= {"type": "log", "dtick": "D2"}
    legend = [
        Entry("mean over the seeds", "var(--peak)", (1,), "line"),
        Entry("each seed", "var(--used)", (0,)),
    ]
    look = layout(
        x,
        {**y, "exponentformat": "none"},
        hovermode="closest",
        shapes=shapes,
        annotations=notes,
    )
    note = "Dotted: the limit. Green: the answer." + (" Red: the cliff." if notes else "")
    title = f"{metric.label} {'near the answer' if near else f'by {lab.knob.key}'}"
    name = f"{'near' if near else 'curve'}-{metric.key}"
    return Figure(name, title, note, data, look, legend, height=360)


def _seeds(tried: Tried, metric: Metric, per: float) -> Trace:
    points = [
        (value, record["figures"][metric.key] / per)
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


def _means(tried: Tried, metric: Metric, per: float) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [value for value, _ in tried],
        "y": compact(each.figures[metric.key] / per for _, each in tried),
        "text": [
            f"{value:,.6g}: {show(each.figures[metric.key], metric.unit)}" for value, each in tried
        ],
        "hovertemplate": "%{text}<extra></extra>",
        "line": {"color": "var(--peak)", "width": 1.6},
        "marker": {"color": "var(--peak)", "size": 5},
    }


def _line(axis: str, at: float, colour: str, dash: str) -> dict[str, Any]:
    other = "y" if axis == "x" else "x"
    ends = {f"{axis}0": at, f"{axis}1": at, f"{other}0": 0, f"{other}1": 1}
    line = {"color": f"var(--{colour})", "width": 1.4, "dash": dash}
    return {"type": "line", f"{other}ref": "paper", **ends, "line": line}


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

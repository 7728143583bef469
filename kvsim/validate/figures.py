"""Draws how far prices are from measurements, step by step and request by request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.report.distribution_figures import curve, distribution_figures
from kvsim.report.figures import Entry, Figure, Trace, compact, layout, titled
from kvsim.validate.compare import LATENCIES, SIDES
from kvsim.validate.replay import KINDS

Floats = NDArray[np.float64]

POINTS = 400
"""Most points of each kind of step in a scatter plot."""

KIND_COLOURS = ("decode", "prefill", "waiting")
KIND_LABELS = ("decodes alone", "prompts alone", "both")
SIDE_COLOURS = ("run-0", "run-2", "run-1")
SIDE_LABELS = ("real", "real again", "simulated")


def step_figures(policy: Mapping[str, Any]) -> list[Figure]:
    """Predicted against measured, and the distribution of errors beside the noise."""
    points = {key: np.array(values) for key, values in policy["points"].items()}
    return [_scatter(policy["name"], points), _errors(policy["name"], points)]


def latency_figures(policy: Mapping[str, Any]) -> list[Figure]:
    """The distribution of each latency for the three runs, in one chart each."""
    sides = [
        (label, colour, {kind: _ns(policy["latencies_ms"][kind][side]) for kind in LATENCIES})
        for side, label, colour in zip(SIDES, SIDE_LABELS, SIDE_COLOURS, strict=True)
    ]
    return [
        figure._replace(id=f"{policy['name']}-{figure.id}")
        for figure in distribution_figures(sides, marks=False)
    ]


def _scatter(name: str, points: Mapping[str, Floats]) -> Figure:
    measured, predicted = points["measured_us"] / 1e3, points["predicted_us"] / 1e3
    data: list[Trace] = []
    legend: list[Entry] = []
    for kind in range(len(KINDS)):
        which = np.flatnonzero(points["kind"] == kind)
        if len(which):
            legend.append(Entry(KIND_LABELS[kind], f"var(--{KIND_COLOURS[kind]})", (len(data),)))
            data.append(_marks(measured, predicted, _thinned(which), kind))
    low, high = _range(measured, predicted)
    data.append(_line([low, high], [low, high]))
    ticks = _ticks(low, high)
    axis = {"type": "log", "range": [math.log10(low), math.log10(high)], **ticks}
    look = layout(
        titled("measured (ms)", showgrid=True, **axis),
        titled("predicted (ms)", **axis),
        hovermode="closest",
    )
    note = "Each point is a step of the real run. On the line, the profile is right."
    title = "Predicted against measured"
    return Figure(f"{name}-scatter", title, note, data, look, legend, height=320)


def _errors(name: str, points: Mapping[str, Floats]) -> Figure:
    """Cumulative distribution of the errors of single steps."""
    measured = points["measured_us"]
    curves = (
        ("prediction", "run-1", points["predicted_us"]),
        ("measured again", "run-0", points["again_us"]),
    )
    data, legend = [], []
    widest = 0.0
    for i, (label, colour, values) in enumerate(curves):
        distance = 100 * np.abs(values / measured - 1)
        widest = max(widest, float(np.percentile(distance, 98)))
        legend.append(Entry(label, f"var(--{colour})", (i,), "line"))
        data.append(curve(distance, colour, label))
    look = layout(
        titled(
            "distance from the measured time (%)",
            range=[0, max(widest, 1.0)],
            showgrid=True,
            unifiedhovertitle={"text": "within %{x:.3~g} %"},
        ),
        titled("steps (%)", range=[0, 103], dtick=25),
    )
    note = "The share of steps whose error is at most the value on the axis. Grey: the noise."
    return Figure(f"{name}-errors", "Errors of single steps", note, data, look, legend, height=320)


def _marks(x: Floats, y: Floats, which: NDArray[np.intp], kind: int) -> Trace:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": KIND_LABELS[kind],
        "x": compact(x[which]),
        "y": compact(y[which]),
        "marker": {"size": 5, "opacity": 0.55, "color": f"var(--{KIND_COLOURS[kind]})"},
        "hovertemplate": "measured %{x:.4~g} ms<br>predicted %{y:.4~g} ms",
    }


def _line(x: list[float], y: list[float]) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": compact(x),
        "y": compact(y),
        "line": {"color": "var(--ink)", "width": 1},
        "hoverinfo": "skip",
    }


def _thinned(which: NDArray[np.intp]) -> NDArray[np.intp]:
    """Positions spread evenly over the run, at most `POINTS`."""
    picked = np.linspace(0, len(which) - 1, min(POINTS, len(which))).round().astype(np.intp)
    return which[np.unique(picked)]


def _range(*values: Floats) -> tuple[float, float]:
    """A range that holds all positive values, with a margin."""
    together = np.concatenate(values)
    together = together[together > 0]
    return float(together.min()) / 1.15, float(together.max()) * 1.15


def _ticks(low: float, high: float) -> dict[str, Any]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    wide = high / low
    digits = (1, 1.5, 2, 3, 5, 7) if wide < 12 else (1, 2, 5) if wide < 1000 else (1,)
    ticks = [float(f"{digit}e{decade}") for decade in decades for digit in digits]
    return {"tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def _ns(times_ms: list[float | None]) -> Floats:
    return np.array([math.nan if ms is None else ms * 1e6 for ms in times_ms])

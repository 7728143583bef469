"""Draws how latencies are distributed over requests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvsim.report.figures import Figure, Trace, compact, layout, titled
from kvsim.report.metrics import LATENCIES
from kvsim.report.numerals import SPACE, seconds
from kvsim.report.phases import Floats, defined

POINTS = 400
MARKED = (50, 90, 99)
WIDE = 15.0
"""Ratio of the 90th to the 10th percentile from which a logarithmic axis reads better."""

KINDS = ("ttft", "tpot", "e2el")
NOTES = {
    "ttft": "From arrival to the first token.",
    "tpot": "Mean gap between the tokens of a request.",
    "e2el": "From arrival to the last token.",
}


def distribution_figures(
    runs: Sequence[tuple[str, str, Mapping[str, Floats]]], *, marks: bool
) -> list[Figure]:
    """One figure per latency: the share of requests whose latency is at most the value on the axis.

    Each run is (name, colour, durations in ns as returned by `phases.durations_ns`). With `marks`,
    p50, p90 and p99 are marked and written out, which is meant for a single run. Latencies that no
    run has are left out.
    """
    figures = [_figure(kind, runs, marks=marks) for kind in KINDS]
    return [figure for figure in figures if figure is not None]


def _figure(
    kind: str, runs: Sequence[tuple[str, str, Mapping[str, Floats]]], *, marks: bool
) -> Figure | None:
    samples = [(name, colour, defined(durations[kind]) / 1e9) for name, colour, durations in runs]
    samples = [(name, colour, values) for name, colour, values in samples if len(values)]
    if not samples:
        return None
    everything = np.concatenate([values for *_, values in samples])
    unit, scale = ("ms", 1e3) if np.percentile(everything, 99) < 1 else ("s", 1.0)
    data: list[Trace] = []
    for name, colour, values in samples:
        data.append(curve(values * scale, colour, name))
        if marks:
            data.append(_marks(values * scale, colour))
    x = titled(
        f"{LATENCIES[kind]} ({unit})",
        showgrid=True,
        unifiedhovertitle={"text": f"%{{x:.4~g}} {unit}"},
        **_scale(everything * scale),
    )
    y = titled("requests (%)", range=[0, 103], dtick=25)
    note = NOTES[kind]
    if marks:
        note = f"{note} {_percentiles(everything)}."
    return Figure(f"dist-{kind}", LATENCIES[kind], note, data, layout(x, y), [], height=260)


def _scale(values: Floats) -> dict[str, Any]:
    """A linear axis, or a logarithmic one with plain numbers where values differ widely."""
    low, high = np.percentile(values, (10, 90))
    if values.min() <= 0 or high / low <= WIDE:
        return {"nticks": 6}
    decades = range(math.floor(math.log10(values.min())), math.ceil(math.log10(values.max())) + 1)
    digits = (1, 2, 5) if len(decades) <= 3 else (1,)
    ticks = [float(f"{digit}e{decade}") for decade in decades for digit in digits]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def curve(values: Floats, colour: str, name: str) -> Trace:
    """The empirical distribution, thinned out to `POINTS` ranks if there are more."""
    ordered = np.sort(values)
    ranks = np.unique(np.linspace(0, len(ordered) - 1, min(POINTS, len(ordered))).round())
    picked = ranks.astype(int)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": compact(ordered[picked]),
        "y": compact(100 * (picked + 1) / len(ordered)),
        "line": {"color": f"var(--{colour})", "width": 2, "shape": "hv"},
        "hovertemplate": "%{y:.1f} %",
    }


def _marks(values: Floats, colour: str) -> Trace:
    cuts = np.percentile(values, MARKED)
    return {
        "type": "scatter",
        "mode": "markers+text",
        "x": compact(cuts),
        "y": list(MARKED),
        "text": [f"p{p}" for p in MARKED],
        "textposition": "bottom right",
        "cliponaxis": False,
        "textfont": {"size": 11, "color": "var(--ink)"},
        "marker": {"size": 7, "color": f"var(--{colour})"},
        "hoverinfo": "skip",
    }


def _percentiles(values_s: Floats) -> str:
    """`p50 9.54 s, p90 13.8 s, p99 14.9 s`."""
    cuts = np.percentile(values_s, MARKED)
    return ", ".join(f"p{p}{SPACE}{seconds(cut)}" for p, cut in zip(MARKED, cuts, strict=True))

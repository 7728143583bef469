"""Draws how latencies are distributed over requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvsim.report.pages.figures import (
    Figure,
    Trace,
    chart,
    compact,
    limit_line,
    line,
    points,
    scale,
    thinned,
    titled,
)
from kvsim.results.metrics import LATENCIES
from kvsim.results.numerals import SPACE, seconds
from kvsim.results.phases import Floats, defined
from kvsim.results.statistics import percentiles

POINTS = 400
MARKED = (50, 90, 99)
KINDS = {
    "ttft": "From arrival to the first token.",
    "tpot": "Mean gap between the tokens of a request.",
    "e2el": "From arrival to the last token.",
}
"""Latency → what it is."""


def distribution_figures(
    runs: Sequence[tuple[str, str, Mapping[str, Floats]]],
    *,
    goals: Mapping[str, float] | None = None,
) -> list[Figure]:
    """One figure per latency: the share of requests whose latency is at most the value on the axis.

    Each run is (name, colour, durations in ns as returned by `phases.durations_ns`). `goals`:
    limits in ms, drawn as lines. Percentiles of a single run are marked and written out. Latencies
    that no run has are left out.
    """
    figures = (_figure(kind, runs, (goals or {}).get(kind)) for kind in KINDS)
    return [figure for figure in figures if figure is not None]


def curve(values: Floats, colour: str, name: str) -> Trace:
    """The empirical distribution, thinned out to `POINTS` ranks if there are more."""
    ordered, picked = np.sort(values), thinned(len(values), POINTS)
    x, y = compact(ordered[picked]), compact(100 * (picked + 1) / len(ordered))
    return line(x, y, colour, name, shape="hv", hovertemplate="%{y:.1f} %")


def _figure(
    kind: str, runs: Sequence[tuple[str, str, Mapping[str, Floats]]], limit_ms: float | None
) -> Figure | None:
    samples = [(name, colour, defined(durations[kind]) / 1e9) for name, colour, durations in runs]
    samples = [(name, colour, values) for name, colour, values in samples if len(values)]
    if not samples:
        return None
    everything = np.concatenate([values for *_, values in samples])
    unit, per_s = ("ms", 1e3) if percentiles(everything, (99,))[0] < 1 else ("s", 1.0)
    data = [curve(values * per_s, colour, name) for name, colour, values in samples]
    note = KINDS[kind]
    if len(runs) == 1:
        cuts = np.array(percentiles(everything, MARKED))
        named = (f"p{p}{SPACE}{seconds(cut)}" for p, cut in zip(MARKED, cuts, strict=True))
        note = f"{note} {', '.join(named)}."
        data.append(_marks(cuts * per_s, samples[0][1]))
    low, high = percentiles(everything, (10, 90))
    wide = low > 0 and high / low > 15
    x = titled(
        f"{LATENCIES[kind]} ({unit})",
        showgrid=True,
        unifiedhovertitle={"text": f"%{{x:.4~g}} {unit}"},
        **((scale(everything * per_s, wide=15) if wide else {}) or {"nticks": 6}),
    )
    y = titled("requests (%)", range=[0, 103], dtick=25)
    shapes = [] if limit_ms is None else [limit_line("x", limit_ms / 1e3 * per_s)]
    id, title = f"dist-{kind}", LATENCIES[kind]
    return chart(id, title, note, data, x, y, keyed=False, height=260, shapes=shapes)


def _marks(cuts: Floats, colour: str) -> Trace:
    return points(compact(cuts), MARKED, colour, size=7, opacity=1) | {
        "mode": "markers+text",
        "text": [f"p{p}" for p in MARKED],
        "textposition": "bottom right",
        "cliponaxis": False,
        "textfont": {"size": 11, "color": "var(--ink)"},
        "hoverinfo": "skip",
    }

"""Draws figures of a sweep against each other, and against each setting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsim.report.figures import Entry, Figure, compact, layout, titled
from kvsim.report.metrics import Metric
from kvsim.sweep.axes import is_number, ordered
from kvsim.sweep.choose import (
    MEMORY,
    THROUGHPUT,
    TPOT,
    TTFT,
    Chosen,
    Configuration,
    pareto,
    value_words,
)
from kvsim.sweep.marks import LOGARITHMIC, groups, highlight, limit_of, line, markers, side

_MOST_EFFECTS = 9


def tradeoff_figures(chosen: Chosen) -> list[Figure]:
    """Pairs of figures against each other, with the Pareto front."""
    pairs = [(TTFT, THROUGHPUT), (TPOT, TTFT)]
    if chosen.by_memory:
        pairs.insert(0, (MEMORY, TTFT))
    return [
        _tradeoff(chosen, x, y, both) for x, y in pairs if (both := _having(chosen, x.key, y.key))
    ]


def effect_figures(chosen: Chosen, axes: Sequence[str]) -> list[Figure]:
    """The first figure against every setting; the line joins the best at each value."""
    metric = chosen.metrics[0]
    shown = _having(chosen, metric.key)
    return [_effect(chosen, shown, key, metric) for key in axes[:_MOST_EFFECTS] if shown]


def _having(chosen: Chosen, *keys: str) -> list[Configuration]:
    return [c for c in chosen.configurations if set(keys) <= c.figures.keys()]


def _tradeoff(chosen: Chosen, x: Metric, y: Metric, both: Sequence[Configuration]) -> Figure:
    front = pareto(both, x, y)
    across, up = (side(metric, both, limit_of(chosen, metric)) for metric in (x, y))
    shape = "hv" if y.better == "lower" else "vh"
    data = [line(compact(map(across.of, front)), map(up.of, front), shape)]
    legend = [Entry("not beaten", "var(--peak)", (0,), "line")]
    for label, colour, members in groups(chosen, both):
        legend.append(Entry(label, f"var(--{colour})", (len(data),)))
        data.append(markers(members, across.of, up.of, colour))
    data.append(highlight("markers"))
    look = layout(
        across.look(),
        {**up.look(), "fixedrange": False},
        hovermode="closest",
        shapes=across.limit_line("x") + up.limit_line("y"),
    )
    corner = " ".join(
        word[metric.better == "higher"]
        for metric, word in ((y, ("lower", "upper")), (x, ("left", "right")))
    )
    title = f"{x.label} against {y.label}"
    note = f"The {corner} corner is best."
    return Figure(f"tradeoff-{x.key}-{y.key}", title, note, data, look, legend, height=340)


def _effect(chosen: Chosen, shown: Sequence[Configuration], key: str, metric: Metric) -> Figure:
    values = ordered([c.settings[key] for c in shown])
    numeric = all(map(is_number, values))
    up = side(metric, shown, limit_of(chosen, metric))

    def place(value: Any) -> Any:
        return value if numeric else value_words(value)

    data = [
        markers(members, lambda c: place(c.settings[key]), up.of, colour)
        for _, colour, members in groups(chosen, shown)
    ]
    if 2 * len(values) <= len(shown):
        best = [chosen.best_of((c for c in shown if c.settings[key] == v), metric) for v in values]
        data.insert(0, line([place(value) for value in values], map(up.of, best)))
    data.append(highlight("markers"))
    x = titled(key)
    if not numeric:
        x |= {"type": "category", "categoryarray": [place(value) for value in values]}
    elif values[0] > 0 and values[-1] / values[0] >= LOGARITHMIC:
        x |= {"type": "log", "dtick": "D2"}
    look = layout(x, up.look(), hovermode="closest", shapes=up.limit_line("y"), margin={"l": 62})
    title = f"{metric.label} by {key}"
    return Figure(f"effect-{key.replace('.', '-')}", title, "", data, look, [])

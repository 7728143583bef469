"""Draws figures of configurations against each other, and against each setting.

Every figure ends with the trace of `highlight`. The page's script puts the configuration under the
pointer into it, in all figures at once; `customdata` names the configuration of a point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kvsim.machine.hardware import GIB
from kvsim.report.pages.figures import (
    Axis,
    Figure,
    Trace,
    chart,
    compact,
    limit_line,
    line,
    points,
    scale,
    titled,
    told,
)
from kvsim.results.metrics import Metric
from kvsim.results.numerals import show
from kvsim.search.sweep.choose import (
    MEMORY,
    THROUGHPUT,
    TPOT,
    TTFT,
    Chosen,
    Configuration,
    pareto,
    value_words,
)
from kvsim.search.sweep.page_axes import is_number, ordered

_IN_SECONDS = 2000
"""Milliseconds from which an axis is in seconds."""
_MOST_EFFECTS = 9


class Side(NamedTuple):
    """An axis of a figure of the summary."""

    metric: Metric
    unit: str
    per_unit: float
    """Units of the metric per unit of the axis."""
    limit: float | None
    look: Axis
    """The layout settings of the axis."""

    def of(self, configuration: Configuration) -> float:
        """The place of a configuration on the axis."""
        return configuration.figures[self.metric.key] / self.per_unit

    def limit_line(self, axis: str) -> list[Axis]:
        """The limit as a line across, on axis `x` or `y`; empty if there is none."""
        return [] if self.limit is None else [limit_line(axis, self.limit / self.per_unit)]


def side(metric: Metric, shown: Sequence[Configuration], limit: float | None) -> Side:
    """The axis of a figure that all `shown` have, bounded by `limit`."""
    values = [configuration.figures[metric.key] for configuration in shown]
    unit, per_unit = metric.unit if metric.unit in ("ms", "s", "tokens/s") else "", 1.0
    if metric.unit == "bytes":
        unit, per_unit = "GiB", GIB
    elif metric.unit == "ms" and max(values, default=0.0) >= _IN_SECONDS:
        unit, per_unit = "s", 1000.0
    title = f"{metric.label} ({unit})" if unit else metric.label
    if unit == "tokens/s":
        title = f"{metric.label.split()[0]} tokens/s"
    look = titled(title, exponentformat="none", **scale(value / per_unit for value in values))
    return Side(metric, unit, per_unit, limit, look)


def limit_of(chosen: Chosen, metric: Metric) -> float | None:
    """The limit that an objective sets for a figure."""
    if chosen.objectives is None:
        return None
    return next((o.limit for o in chosen.objectives.each if o.metric.key == metric.key), None)


def groups(
    chosen: Chosen, shown: Sequence[Configuration]
) -> Iterable[tuple[str, str, list[Configuration]]]:
    """(label, colour, members): those that miss an objective first, below the others."""
    if chosen.objectives is None:
        yield "configuration", "used", list(shown)
        return
    for label, colour, meets in (
        ("misses an objective", "other", False),
        ("meets all", "good", True),
    ):
        members = [configuration for configuration in shown if configuration.meets == meets]
        if members:
            yield label, colour, members


def highlight(mode: str) -> Trace:
    """An empty trace for the configuration under the pointer."""
    ring = {"color": "var(--waiting)", "width": 3}
    empty = points([None], [None], "waiting", size=15, opacity=1) | {"hoverinfo": "skip"}
    empty["marker"] |= {"color": "rgba(0,0,0,0)", "line": ring}
    return empty | {"mode": mode, "meta": "highlight", "line": {**ring, "width": 3.5}}


def about(configuration: Configuration) -> str:
    """A configuration in a few lines."""
    settings = [f"{key} {value_words(value)}" for key, value in configuration.settings.items()]
    figures = [
        f"{metric.label} {show(configuration.figures.get(metric.key), metric.unit)}"
        for metric in (TTFT, TPOT, THROUGHPUT)
    ]
    return "<br>".join([f"<b>#{configuration.number}</b>", *settings, *figures])


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


def _marks(
    group: Sequence[Configuration],
    x: Callable[[Configuration], Any],
    y: Callable[[Configuration], float],
    colour: str,
    name: str,
) -> Trace:
    """A point for each configuration."""
    marks = points(list(map(x, group)), compact(map(y, group)), colour, size=8, opacity=0.8)
    marks |= {"name": name, "customdata": [configuration.number for configuration in group]}
    return told(marks, list(map(about, group)))


def _tradeoff(chosen: Chosen, x: Metric, y: Metric, both: Sequence[Configuration]) -> Figure:
    front = pareto(both, x, y)
    across, up = (side(metric, both, limit_of(chosen, metric)) for metric in (x, y))
    shape = "hv" if y.better == "lower" else "vh"
    ends = compact(map(across.of, front)), compact(map(up.of, front))
    data = [line(*ends, "peak", "not beaten", shape=shape, width=1.5, hoverinfo="skip")]
    for label, colour, members in groups(chosen, both):
        data.append(_marks(members, across.of, up.of, colour, label))
    words = (y, ("lower", "upper")), (x, ("left", "right"))
    corner = " ".join(word[metric.better == "higher"] for metric, word in words)
    return chart(
        f"tradeoff-{x.key}-{y.key}",
        f"{y.label} against {x.label}",
        f"The {corner} corner is best.",
        [*data, highlight("markers")],
        across.look,
        {**up.look, "fixedrange": False},
        height=340,
        hovermode="closest",
        shapes=across.limit_line("x") + up.limit_line("y"),
    )


def _effect(chosen: Chosen, shown: Sequence[Configuration], key: str, metric: Metric) -> Figure:
    values = ordered([c.settings[key] for c in shown])
    numeric = all(map(is_number, values))
    up = side(metric, shown, limit_of(chosen, metric))

    def place(value: Any) -> Any:
        return value if numeric else value_words(value)

    data = [
        _marks(members, lambda c: place(c.settings[key]), up.of, colour, label)
        for label, colour, members in groups(chosen, shown)
    ]
    if 2 * len(values) <= len(shown):
        best = [chosen.best_of((c for c in shown if c.settings[key] == v), metric) for v in values]
        ends = [place(value) for value in values], compact(map(up.of, best))
        data.insert(0, line(*ends, "peak", width=1.5))
    kind = (
        scale(values) if numeric else {"type": "category", "categoryarray": [*map(place, values)]}
    )
    return chart(
        f"effect-{key.replace('.', '-')}",
        f"{metric.label} by {key}",
        "",
        [*data, highlight("markers")],
        titled(key, **kind),
        up.look,
        keyed=False,
        hovermode="closest",
        shapes=up.limit_line("y"),
        margin={"l": 62},
    )

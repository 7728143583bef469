"""The points and axes of a sweep's figures.

Every figure ends with a trace `highlight`. The page's script puts the configuration under the
pointer into it, in all figures at once; `customdata` names the configuration of a point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kvsim.hardware import GIB
from kvsim.report.figures import Trace, compact, titled
from kvsim.report.metrics import Metric
from kvsim.report.numerals import show
from kvsim.sweep.choose import THROUGHPUT, TPOT, TTFT, Chosen, Configuration, value_words

LOGARITHMIC = 20
"""An axis whose largest value is this many times its smallest one has a logarithmic scale."""

_IN_SECONDS = 2000
"""Milliseconds from which an axis is in seconds."""


class Side(NamedTuple):
    """An axis of a figure of the summary."""

    metric: Metric
    unit: str
    per_unit: float
    """Units of the axis per unit of the metric."""
    logarithmic: bool
    limit: float | None

    def of(self, configuration: Configuration) -> float:
        """The place of a configuration on the axis."""
        return configuration.figures[self.metric.key] / self.per_unit

    def look(self) -> dict[str, Any]:
        """The layout settings of the axis."""
        title = f"{self.metric.label} ({self.unit})" if self.unit else self.metric.label
        if self.unit == "tokens/s":
            title = f"{self.metric.label.split()[0]} tokens/s"
        axis = titled(title, exponentformat="none")
        return axis | ({"type": "log", "dtick": "D2"} if self.logarithmic else {})

    def limit_line(self, axis: str) -> list[dict[str, Any]]:
        """The limit as a line across, on axis `x` or `y`; empty if there is none."""
        if self.limit is None:
            return []
        at = self.limit / self.per_unit
        other = "y" if axis == "x" else "x"
        line = {"color": "var(--bad)", "width": 1.2, "dash": "dot"}
        ends = {f"{axis}0": at, f"{axis}1": at, f"{other}0": 0, f"{other}1": 1}
        return [{"type": "line", f"{other}ref": "paper", **ends, "line": line}]


def side(metric: Metric, shown: Sequence[Configuration], limit: float | None) -> Side:
    """The axis of a figure that all `shown` have, bounded by `limit`."""
    values = [configuration.figures[metric.key] for configuration in shown]
    low, high = min(values, default=0.0), max(values, default=0.0)
    seconds = metric.unit == "ms" and high >= _IN_SECONDS
    memory = metric.unit == "bytes"
    unit = metric.unit if metric.unit in ("ms", "s", "tokens/s") else ""
    return Side(
        metric,
        "s" if seconds else "GiB" if memory else unit,
        1000.0 if seconds else GIB if memory else 1.0,
        low > 0 and high / low >= LOGARITHMIC,
        limit,
    )


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


def markers(
    group: Sequence[Configuration],
    x: Callable[[Configuration], Any],
    y: Callable[[Configuration], float],
    colour: str,
) -> Trace:
    """A point for each configuration."""
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [x(configuration) for configuration in group],
        "y": compact(y(configuration) for configuration in group),
        "customdata": [configuration.number for configuration in group],
        "text": [about(configuration) for configuration in group],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"color": f"var(--{colour})", "size": 8, "opacity": 0.8, "line": {"width": 0}},
    }


def line(x: Sequence[Any], y: Iterable[float], shape: str = "linear") -> Trace:
    """A line without text under the pointer."""
    return {
        "type": "scatter",
        "mode": "lines",
        "x": list(x),
        "y": compact(y),
        "line": {"color": "var(--peak)", "width": 1.5, "shape": shape},
        "hoverinfo": "skip",
    }


def highlight(mode: str) -> Trace:
    """An empty trace for the configuration under the pointer."""
    ring = {"color": "var(--waiting)", "width": 3}
    return {
        "type": "scatter",
        "mode": mode,
        "x": [None],
        "y": [None],
        "name": "highlight",
        "hoverinfo": "skip",
        "line": {"color": "var(--waiting)", "width": 3.5},
        "marker": {"color": "rgba(0,0,0,0)", "size": 15, "line": ring},
    }


def about(configuration: Configuration) -> str:
    """A configuration in a few lines."""
    settings = [f"{key} {value_words(value)}" for key, value in configuration.settings.items()]
    figures = [
        f"{metric.label} {show(configuration.figures.get(metric.key), metric.unit)}"
        for metric in (TTFT, TPOT, THROUGHPUT)
    ]
    return "<br>".join([f"<b>#{configuration.number}</b>", *settings, *figures])

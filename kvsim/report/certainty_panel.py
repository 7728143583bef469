"""Writes and draws how sure the differences of a comparison are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsim.certainty.comparison import Comparison, Pair
from kvsim.report.certainty import (
    finding_words,
    method_words,
    ranking_words,
)
from kvsim.report.compare import Row
from kvsim.report.compare_figures import run_colour
from kvsim.report.figures import Figure, Trace, compact, layout, titled
from kvsim.report.html import Html, element, join, panel, table
from kvsim.report.metrics import HEADLINES

_ROW_PX, _FRAME_PX = 44, 64


def certainty_section(
    comparison: Comparison,
    rows: Sequence[Row],
    drawn: Html,
) -> Html:
    """Method, intervals as drawn, a verdict for each headline figure, and rankings."""
    parts: list[Html] = [element("p", sentence) for sentence in method_words(comparison)]
    parts.append(drawn)
    for other in range(1, len(comparison.names)):
        parts.append(_verdicts(comparison, rows, other))
    if len(comparison.names) > 2:
        parts.append(_ranking(comparison, rows))
    return join(parts)


def interval_figures(comparison: Comparison, rows: Sequence[Row]) -> list[Figure]:
    """Intervals of the headline figures as shares of the first run's value, if any is not 0."""
    shown = [
        row
        for row in rows
        if row.metric.key in HEADLINES and row.values[0] and any(map(_moved, row.verdicts))
    ]
    if not shown:
        return []
    others = len(comparison.names) - 1
    data = [_intervals(shown, i, others, comparison.names[i + 1]) for i in range(others)]
    zero: dict[str, Any] = {"type": "line", "yref": "paper", "x0": 0, "x1": 0, "y0": 0, "y1": 1}
    zero["line"] = {"color": "var(--ink)", "width": 1}
    look = layout(
        titled(f"difference to {comparison.names[0]} (%)", zeroline=False, showgrid=True),
        {
            "range": [len(shown) - 0.5, -0.5],
            "tickvals": list(range(len(shown))),
            "ticktext": [row.metric.label for row in shown],
            "rangemode": "normal",
            "showgrid": False,
        },
        shapes=[zero],
        hovermode="closest",
        margin={"l": 190},
    )
    note = "A filled mark: a significant difference. An open one: no significant difference."
    height = _FRAME_PX + _ROW_PX * len(shown)
    title = "Differences and their intervals"
    return [Figure("intervals", title, note, data, look, [], height=height)]


def _intervals(rows: Sequence[Row], i: int, others: int, name: str) -> Trace:
    """One mark with its interval for each row in which run `i + 1` has one."""
    x, less, more, y, symbols = [], [], [], [], []
    for place, row in enumerate(rows):
        verdict, first = row.verdicts[i], row.values[0]
        if verdict is None or not first:
            continue
        x.append(100 * verdict.difference / first)
        less.append(100 * (verdict.difference - verdict.low) / first)
        more.append(100 * (verdict.high - verdict.difference) / first)
        y.append(place + 0.6 * ((i + 0.5) / others - 0.5))
        symbols.append("circle" if verdict.finding == "significant" else "circle-open")
    colour = f"var(--{run_colour(i + 1)})"
    reach = {"type": "data", "symmetric": False, "thickness": 1.6, "width": 4, "color": colour}
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": compact(x),
        "y": compact(y),
        "error_x": {**reach, "array": compact(more), "arrayminus": compact(less)},
        "marker": {"size": 9, "color": colour, "symbol": symbols},
        "hovertemplate": "%{x:.3~g} %",
    }


def _moved(verdict: Any) -> bool:
    return verdict is not None and verdict.finding != "same"


def _verdicts(comparison: Comparison, rows: Sequence[Row], other: int) -> Html:
    lines = []
    for row in rows:
        verdict = row.verdicts[other - 1]
        if row.metric.key in HEADLINES and verdict is not None:
            words = finding_words(comparison, Pair(row.metric.key, 0, other), verdict)
            lines.append([row.metric.label, element("span", words, class_=row.judge(other - 1))])
    title = f"{comparison.names[other]} against {comparison.names[0]}"
    return panel(title, table(["", "Verdict"], lines, text_columns=2))


def _ranking(comparison: Comparison, rows: Sequence[Row]) -> Html:
    orders = [(row.metric.label, ranking_words(comparison, row.metric.key)) for row in rows]
    lines = [order for order in orders if order[1]]
    title = "Best first; ≈ between runs without a significant difference"
    return panel(title, table(["", "Order"], lines, text_columns=2))

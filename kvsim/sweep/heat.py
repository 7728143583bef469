"""Tables whose cells are coloured: a figure by two settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from statistics import fmean

from kvsim.report.html import Html, element
from kvsim.report.metrics import Metric
from kvsim.report.numerals import show
from kvsim.sweep.axes import ordered
from kvsim.sweep.choose import Chosen, Configuration, value_words
from kvsim.sweep.slo import Objective

MOST_VALUES = 16
"""Of a setting that can be a side of a map."""
MOST_MAPS = 6
_FULL = math.log(4)
"""Four times a limit, or a quarter of it, has the full colour."""


def heat_maps(chosen: Chosen, axes: Sequence[str]) -> Html | None:
    """Maps of the first figures for every pair of settings with few values; None if no pair has."""
    there = [c for c in chosen.configurations if c.figures]
    sides = [
        key for key in axes if 2 <= len(ordered([c.settings[key] for c in there])) <= MOST_VALUES
    ]
    pairs = list(combinations(sides, 2))
    if not pairs:
        return None
    bounds = {} if chosen.objectives is None else {o.metric: o for o in chosen.objectives.each}
    metrics = list(bounds) or list(chosen.metrics[:2])
    maps = [(a, b, metric) for a, b in pairs for metric in metrics][:MOST_MAPS]
    figures = (_map(there, axes, a, b, metric, bounds.get(metric)) for a, b, metric in maps)
    return element("div", *figures, class_="maps")


def _map(
    there: Sequence[Configuration],
    axes: Sequence[str],
    across: str,
    down: str,
    metric: Metric,
    objective: Objective | None,
) -> Html:
    if len(ordered([c.settings[across] for c in there])) > len(
        ordered([c.settings[down] for c in there])
    ):
        across, down = down, across
    columns = ordered([c.settings[across] for c in there])
    rows = ordered([c.settings[down] for c in there])
    cells: dict[tuple[str, str], float] = {}
    for row in rows:
        for column in columns:
            values = [
                c.figures[metric.key]
                for c in there
                if (c.settings[down], c.settings[across]) == (row, column)
                and metric.key in c.figures
            ]
            if values:
                cells[value_words(row), value_words(column)] = fmean(values)
    low, high = min(cells.values(), default=0.0), max(cells.values(), default=0.0)
    head = (
        element("tr", element("th"), element("th", across, colspan=len(columns))),
        element("tr", element("th", down), *(element("th", value_words(c)) for c in columns)),
    )
    body = [
        element(
            "tr",
            element("th", value_words(row), scope="row"),
            *(
                _cell(
                    cells.get((value_words(row), value_words(column))), metric, objective, low, high
                )
                for column in columns
            ),
        )
        for row in rows
    ]
    title = metric.label if objective is None else str(objective)
    note = "Mean over the other settings." if len(axes) > 2 else None
    whole = element("table", element("thead", *head), element("tbody", *body), class_="heat")
    return element(
        "figure",
        element("figcaption", element("h3", title), element("p", note) if note else None),
        element("div", whole, class_="scroll", tabindex="0"),
    )


def _cell(
    value: float | None,
    metric: Metric,
    objective: Objective | None,
    low: float,
    high: float,
) -> Html:
    if value is None:
        return element("td", "–", class_="number muted")
    colour, strength = _shade(value, metric, objective, low, high)
    return element(
        "td",
        show(value, metric.unit),
        class_="number shaded",
        style=f"--colour: var(--{colour}); --strength: {strength:.0f}%",
    )


def _shade(
    value: float, metric: Metric, objective: Objective | None, low: float, high: float
) -> tuple[str, float]:
    """Green below a limit and red beyond, the farther the stronger; else blue by size."""
    if objective is not None:
        load = objective.load({metric.key: value})
        far = min(abs(math.log(load)) / _FULL, 1.0) if 0 < load < math.inf else 1.0
        return ("good" if load <= 1 else "bad"), 14 + 56 * far
    if high == low:
        return "used", 20
    share = (value - low) / (high - low)
    if low > 0 and high / low > 20:
        share = math.log(value / low) / math.log(high / low)
    return "used", 6 + 60 * share


def key_to_maps(chosen: Chosen) -> Html:
    """What the colours of the maps mean."""
    if chosen.objectives is None:
        return element("p", "The more, the darker.")
    text = "Green is within the limit, red beyond it; full colour at a quarter or four times of it."
    return element("p", text)

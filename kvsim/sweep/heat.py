"""Tables whose cells are coloured: a figure by two settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

from kvsim.report.html import Html, element
from kvsim.report.metrics import Metric
from kvsim.report.numerals import show
from kvsim.sweep.axes import ordered
from kvsim.sweep.choose import Chosen, Configuration, value_words, words
from kvsim.sweep.slo import Objective

MOST_VALUES = 16
"""Most values of a setting that can be a side of a map."""
MOST_MAPS = 6
_FULL = math.log(4)
"""Full colour is reached at four times a limit, or at a quarter of it."""


def heat_maps(chosen: Chosen, axes: Sequence[str]) -> Html | None:
    """Maps of the first figures for every pair of settings with few values; None without a pair."""
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
    figures = (_map(chosen, there, axes, a, b, metric, bounds.get(metric)) for a, b, metric in maps)
    return element("div", *figures, class_="maps")


def _map(
    chosen: Chosen,
    there: Sequence[Configuration],
    axes: Sequence[str],
    one: str,
    other: str,
    metric: Metric,
    objective: Objective | None,
) -> Html:
    """A map of one figure; the setting with more values goes down."""
    sides = {key: ordered([c.settings[key] for c in there]) for key in (one, other)}
    across, down = sorted(sides, key=lambda key: len(sides[key]))
    best = _best(chosen, there, down, across, metric)
    values = [c.figures[metric.key] for c in best.values() if metric.key in c.figures]
    low, high = min(values, default=0.0), max(values, default=0.0)
    rows, names = ([value_words(v) for v in sides[key]] for key in (down, across))
    head = (
        element("tr", element("th"), element("th", across, colspan=len(names))),
        element("tr", element("th", down), *(element("th", name) for name in names)),
    )
    body = (
        element(
            "tr",
            element("th", row, scope="row"),
            *(_cell(best.get((row, name)), metric, objective, low, high) for name in names),
        )
        for row in rows
    )
    title = metric.label if objective is None else str(objective)
    note = "Each cell shows the best of the other settings." if len(axes) > 2 else None
    whole = element("table", element("thead", *head), element("tbody", *body), class_="heat")
    return element(
        "figure",
        element("figcaption", element("h3", title), element("p", note) if note else None),
        element("div", whole, class_="scroll", tabindex="0"),
    )


def _best(
    chosen: Chosen, there: Sequence[Configuration], down: str, across: str, metric: Metric
) -> dict[tuple[str, str], Configuration]:
    """The best configuration at each pair of values that some configuration has."""
    cells: dict[tuple[str, str], list[Configuration]] = {}
    for each in there:
        place = value_words(each.settings[down]), value_words(each.settings[across])
        cells.setdefault(place, []).append(each)
    return {place: chosen.best_of(members, metric) for place, members in cells.items()}


def _cell(
    configuration: Configuration | None,
    metric: Metric,
    objective: Objective | None,
    low: float,
    high: float,
) -> Html:
    value = None if configuration is None else configuration.figures.get(metric.key)
    if configuration is None or value is None:
        return element("td", "–", class_="number muted")
    colour, strength = _shade(value, metric, objective, low, high)
    return element(
        "td",
        show(value, metric.unit),
        title=f"#{configuration.number}: {words(configuration.settings)}",
        class_="number shaded",
        style=f"--colour: var(--{colour}); --strength: {strength:.0f}%",
    )


def _shade(
    value: float, metric: Metric, objective: Objective | None, low: float, high: float
) -> tuple[str, float]:
    """Green within a limit and red beyond it, stronger with distance; else blue by size."""
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
    """The legend of the maps."""
    if chosen.objectives is None:
        return element("p", "Darker cells have larger values.")
    text = (
        "Green is within the limit, red beyond it; full colour at a quarter of it or four times it."
    )
    return element("p", text)

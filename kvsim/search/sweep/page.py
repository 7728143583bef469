"""Writes a sweep as one HTML file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from kvsim.report.pages.figures import WIDE
from kvsim.report.pages.html import (
    Html,
    columns,
    document,
    element,
    facts,
    join,
    lead,
    panel,
    placed,
    strip,
    table,
)
from kvsim.report.pages.html import tags as tags_of
from kvsim.results.metrics import Metric
from kvsim.results.numerals import MISSING, SPACE, count, percent, plural, show
from kvsim.results.plain import to_toml
from kvsim.search.slo import Objective
from kvsim.search.store import Record
from kvsim.search.sweep.choose import Chosen, Configuration, sources, value_words, words
from kvsim.search.sweep.page_figures import (
    effect_figures,
    ordered,
    parallel_figure,
    rate_figures,
    tradeoff_figures,
)
from kvsim.search.sweep.sweep import Plan

PAGE = "sweep.html"
MOST_BEST, MOST_ROWS, MOST_ALIKE = 10, 300, 3
MOST_VALUES, MOST_MAPS = 16, 6
"""Most values of a setting that can be a side of a map, and most maps."""
_FULL = math.log(4)
"""Full colour is reached at four times a limit, or at a quarter of it."""


def build_page(plan: Plan, chosen: Chosen) -> str:
    """The page of a sweep."""
    rates = placed(rate_figures(chosen), "trio")
    sections = {"By request rate": rates, "Best": _best(chosen)}
    if sum(bool(configuration.figures) for configuration in chosen.configurations) > 1:
        sections |= {
            "Trade-offs": placed(tradeoff_figures(chosen), "trio"),
            "All at once": placed([parallel_figure(chosen, plan.axes)]),
            "Two settings at once": heat_maps(chosen, plan.axes),
            "Each setting": placed(effect_figures(chosen, plan.axes), "trio"),
        }
    sections |= {"Every configuration": _all(chosen), "To repeat it": _origin(plan, chosen)}
    runs, configurations = len(plan.points), plural(len(chosen.configurations), "configuration")
    seeds = max(len(configuration.records) for configuration in chosen.configurations)
    over = f", {plural(runs, 'run')} on {plural(seeds, 'seed')}" if seeds > 1 else ""
    trace = f"{plan.trace.name}, {_requests(plan)}"
    return document(
        "kvsim sweep",
        f"{configurations} of {', '.join(plan.axes) or 'seeds'}",
        sections,
        subject=f"{_engine(plan)} · {trace}{over}",
        about=[tags(configuration.records for configuration in chosen.configurations)],
        remarks=chosen.verdict,
    )


def _requests(plan: Plan) -> str:
    """How many requests of the trace were sent; the least and the most where that is varied."""
    whole = plan.trace.requests
    given = ({**plan.base, **point.settings}.get("num_prompts") for point in plan.points)
    sent = sorted({min(whole, number or whole) for number in given})
    fewest = f"{count(sent[0])} to " if sent[1:] else ""
    return f"{fewest}{plural(sent[-1], 'request')}"


def _engine(plan: Plan) -> str:
    """Engine, model and hardware, as far as they are not varied."""
    named = ("engine", "model", "hardware")
    told = (plan.base[key] for key in named if key not in plan.axes)
    return " · ".join(str(each) for each in told if each is not None)


def tags(groups: Iterable[Sequence[Record]]) -> Html:
    """Where step times come from, in colours that distinguish measured from estimated."""
    return tags_of((text, "good" if good else "warning") for text, good in sources(groups))


def _best(chosen: Chosen) -> Html:
    if not chosen.best:
        return panel(None, lead("No configuration meets all objectives."))
    listed = chosen.best[:MOST_BEST]
    keys = tuple(listed[0].first.settings)
    head = ["#", *keys, *(metric.label for metric in chosen.metrics)]
    if chosen.objectives is not None:
        head.append("Limit used")
    rows = [
        [
            f",{SPACE}".join(str(each.number) for each in place.members[:MOST_ALIKE]),
            *place.settings.values(),
            *_figures(place.first, chosen),
            *_use(place.first, chosen),
        ]
        for place in listed
    ]
    text = chosen.rule
    if len(chosen.best) > MOST_BEST:
        text += f" The first {MOST_BEST} of {count(len(chosen.best))}."
    return join((lead(text), panel(None, table(head, rows, text_columns=1 + len(keys)))))


def _figures(configuration: Configuration, chosen: Chosen) -> list[str]:
    return [show(configuration.figures.get(m.key), m.unit) for m in chosen.metrics]


def _use(configuration: Configuration, chosen: Chosen) -> list[object]:
    """How much of the tightest limit is used, as a bar."""
    if chosen.objectives is None:
        return []
    share = min(configuration.load, 1.0)
    return [
        element(
            "div",
            percent(configuration.load),
            strip((("good", share, ""), ("free", 1 - share, ""))),
            class_="used",
        )
    ]


def _all(chosen: Chosen) -> Html:
    listed = chosen.configurations[:MOST_ROWS]
    keys = tuple(listed[0].settings)
    objectives = chosen.objectives is not None
    head = ["#", *keys, *(["Meets"] if objectives else []), "Outcome"]
    head += [metric.label for metric in chosen.metrics]
    rows = []
    for c in listed:
        met = [_met(c)] if objectives else []
        settings = [value_words(c.settings[key]) for key in keys]
        rows.append([c.number, *settings, *met, _outcome(c), *_figures(c, chosen)])
    text = 2 + len(keys) + objectives
    parts: list[object] = [panel(None, table(head, rows, text_columns=text))]
    if len(chosen.configurations) > MOST_ROWS:
        rest = len(chosen.configurations) - MOST_ROWS
        parts.append(lead(f"{count(rest)} more are in sweep.parquet."))
    return join(parts)


def _met(configuration: Configuration) -> Html:
    seeds = len(configuration.records)
    if seeds == 1:
        text = "yes" if configuration.meets else "no"
    else:
        text = f"{configuration.met}{SPACE}of{SPACE}{seeds}"
    return element("span", text, class_="better" if configuration.meets else "muted")


def _outcome(configuration: Configuration) -> Html:
    text = configuration.outcome.replace("-", " ")
    if configuration.outcome == "finished":
        return element("span", text, class_="muted")
    return element(
        "details", element("summary", text, class_="worse"), configuration.reason or MISSING
    )


def _origin(plan: Plan, chosen: Chosen) -> Html:
    origin = {
        "Trace": plan.trace.name,
        "Trace SHA-256": plan.trace.sha256,
        "Requests in the trace": plan.trace.requests,
        "Objectives": plan.slo,
        "Runs": len(plan.points),
        "kvsim": chosen.configurations[0].records[0]["kvsim_version"],
    }
    return origin_panels(origin, plan.base)


def origin_panels(origin: Mapping[str, Any], settings: Mapping[str, Any]) -> Html:
    """Where runs come from, and the settings that they share."""
    return columns(
        (
            panel("Origin", facts(origin)),
            panel("Settings of every run", element("pre", to_toml(settings))),
        )
    )


def heat_maps(chosen: Chosen, axes: Sequence[str]) -> Html:
    """Maps of the first figures for every pair of settings with few values, if there is a pair."""
    there = [c for c in chosen.configurations if c.figures]
    values = {key: ordered([c.settings[key] for c in there]) for key in axes}
    pairs = list(combinations((k for k in axes if 2 <= len(values[k]) <= MOST_VALUES), 2))
    if not pairs:
        return Html()
    bounds = {} if chosen.objectives is None else {o.metric: o for o in chosen.objectives.each}
    metrics = list(bounds) or list(chosen.metrics[:2])
    maps = []
    for pair, metric in [(pair, metric) for pair in pairs for metric in metrics][:MOST_MAPS]:
        # The setting with more values goes down.
        across, down = sorted(pair, key=lambda key: len(values[key]))
        cells = _best_cells(chosen, there, down, across, metric)
        names = ([value_words(v) for v in values[key]] for key in (down, across))
        note = "Each cell shows the best of the other settings." if len(axes) > 2 else None
        maps.append(_map(cells, (down, across), tuple(names), metric, bounds.get(metric), note))
    text = "Stronger colours stand for larger values."
    if chosen.objectives is not None:
        text = "Green is within the limit, red beyond it; full colour at a quarter of it or four"
        text += " times it."
    return join((lead(text), element("div", *maps, class_="maps")))


def _map(
    cells: Mapping[tuple[str, str], Configuration],
    keys: tuple[str, str],
    names: Sequence[Sequence[str]],
    metric: Metric,
    objective: Objective | None,
    note: str | None,
) -> Html:
    """A map of one figure; `keys` and `names`: the settings and values down, then across."""
    values = [c.figures[metric.key] for c in cells.values() if metric.key in c.figures]
    ends = min(values, default=0.0), max(values, default=0.0)
    down, across = names
    head = (
        element("tr", element("th"), element("th", keys[1], colspan=len(across))),
        element("tr", element("th", keys[0]), *(element("th", name) for name in across)),
    )
    body = (
        element(
            "tr",
            element("th", row, scope="row"),
            *(_shaded(cells.get((row, name)), metric, objective, *ends) for name in across),
        )
        for row in down
    )
    title = metric.label if objective is None else str(objective)
    whole = element("table", element("thead", *head), element("tbody", *body), class_="heat")
    return element(
        "figure",
        element("figcaption", element("h3", title), lead(note) if note else None),
        element("div", whole, class_="scroll", tabindex="0"),
    )


def _best_cells(
    chosen: Chosen, there: Sequence[Configuration], down: str, across: str, metric: Metric
) -> dict[tuple[str, str], Configuration]:
    """The best configuration at each pair of values that some configuration has."""
    cells: dict[tuple[str, str], list[Configuration]] = {}
    for each in there:
        place = value_words(each.settings[down]), value_words(each.settings[across])
        cells.setdefault(place, []).append(each)
    return {place: chosen.best_of(members, metric) for place, members in cells.items()}


def _shaded(
    configuration: Configuration | None,
    metric: Metric,
    objective: Objective | None,
    low: float,
    high: float,
) -> Html:
    value = None if configuration is None else configuration.figures.get(metric.key)
    if configuration is None or value is None:
        return element("td", MISSING, class_="number muted")
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
    if low > 0 and high / low > WIDE:
        share = math.log(value / low) / math.log(high / low)
    return "used", 6 + 60 * share

"""Writes a sweep as one HTML file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvsim.report.document import document, figure_place, masthead
from kvsim.report.html import Html, element, join, panel, strip, table
from kvsim.report.numerals import MISSING, SPACE, count, percent, plural, show
from kvsim.report.provenance import facts, to_toml
from kvsim.sweep.choose import Chosen, Configuration, sources, value_words
from kvsim.sweep.figures import effect_figures, tradeoff_figures
from kvsim.sweep.heat import heat_maps, key_to_maps
from kvsim.sweep.parallel import parallel_figure
from kvsim.sweep.records import Record
from kvsim.sweep.sweep import Plan

PAGE = "sweep.html"
MOST_BEST, MOST_ROWS, MOST_ALIKE = 10, 300, 3


def build_page(plan: Plan, chosen: Chosen) -> str:
    """The page of a sweep. Equal inputs give equal bytes."""
    ran = any(c.figures for c in chosen.configurations)
    trade = tradeoff_figures(chosen)
    parallel = [parallel_figure(chosen, plan.axes)] if ran and plan.axes else []
    effects = effect_figures(chosen, plan.axes) if ran else []
    maps = heat_maps(chosen, plan.axes)
    places = {figure.id: figure_place(figure) for figure in (*trade, *parallel, *effects)}

    def placed(figures: Sequence[Any], class_: str) -> Html:
        return element("div", *(places[figure.id] for figure in figures), class_=class_)

    sections = {
        "Best": _best(chosen),
        "Trade-offs": placed(trade, "trio" if len(trade) > 2 else "duo") if trade else None,
        "All at once": placed(parallel, "one") if parallel else None,
        "Two settings at once": join((key_to_maps(chosen), maps)) if maps else None,
        "Each setting": placed(effects, "trio") if effects else None,
        "Every configuration": _all(chosen),
        "To repeat it": _origin(plan, chosen),
    }
    shown = {name: content for name, content in sections.items() if content is not None}
    title = _title(chosen)
    return document(title, _header(title, plan, chosen), shown, [*trade, *parallel, *effects])


def _title(chosen: Chosen) -> str:
    return plural(len(chosen.configurations), "configuration")


def _header(title: str, plan: Plan, chosen: Chosen) -> Html:
    runs = len(plan.points)
    seeds = max(len(configuration.records) for configuration in chosen.configurations)
    over = f", {plural(runs, 'run')} on {plural(seeds, 'seed')}" if seeds > 1 else ""
    trace = f"{plan.trace['name']}, {plural(int(plan.trace['requests']), 'request')}"
    return masthead(
        "kvsim sweep",
        f"{title} of {', '.join(plan.axes) or 'seeds'}",
        tags(configuration.records for configuration in chosen.configurations),
        subject=f"{_engine(plan)} · {trace}{over}",
        remarks=chosen.verdict,
    )


def _engine(plan: Plan) -> str:
    """Engine, model and hardware, as far as they are not varied."""
    named = ("engine", "model", "hardware")
    return " · ".join(str(plan.base[key]) for key in named if key not in plan.axes)


def tags(groups: Iterable[Sequence[Record]]) -> Html:
    """Where step times come from, in colours that distinguish measured from estimated."""
    spans = (
        element("span", text, class_=f"tag {'good' if measured else 'warning'}")
        for text, measured in sources(groups)
    )
    return element("div", *spans, class_="tags")


def _best(chosen: Chosen) -> Html:
    if not chosen.best:
        return panel(None, element("p", "No configuration meets all objectives."))
    listed = chosen.best[:MOST_BEST]
    keys = tuple(listed[0].first.settings)
    head = ["#", *keys, *(metric.label for metric in chosen.metrics)]
    if chosen.objectives is not None:
        head.append("Limit used")
    rows = [
        [
            ", ".join(str(each.number) for each in place.members[:MOST_ALIKE]),
            *place.settings.values(),
            *_figures(place.first, chosen),
            *_use(place.first, chosen),
        ]
        for place in listed
    ]
    lead = chosen.rule
    if len(chosen.best) > MOST_BEST:
        lead += f" The first {MOST_BEST} of {count(len(chosen.best))}."
    return join((element("p", lead), panel(None, table(head, rows, text_columns=1 + len(keys)))))


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
            strip((("var(--good)", share, ""), ("var(--free)", 1 - share, ""))),
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
        parts.append(element("p", f"{count(rest)} more are in sweep.parquet."))
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
        "Trace": plan.trace["name"],
        "Trace SHA-256": plan.trace["sha256"],
        "Requests in the trace": plan.trace["requests"],
        "Objectives": plan.slo,
        "Runs": len(plan.points),
        "kvsim": chosen.configurations[0].records[0]["kvsim_version"],
    }
    return origin_panels(origin, plan.base)


def origin_panels(origin: Mapping[str, Any], settings: Mapping[str, Any]) -> Html:
    """Where runs come from, and the settings that they share."""
    return element(
        "div",
        panel("Origin", facts(origin)),
        panel("Settings of every run", element("pre", to_toml(settings))),
        class_="columns",
    )

"""Sets searches for several routers side by side."""

from __future__ import annotations

from collections.abc import Sequence

from kvsim.fleet.settings import FleetConfig
from kvsim.report.wording import Remark
from kvsim.results.numerals import MISSING, show
from kvsim.search.size.answer import Search
from kvsim.search.size.verdict import cost_of, written

LOAD = [("request_rate", "requests/s"), ("request_throughput", "requests/s")]


def router_of(search: Search) -> str:
    """The router of a search over replicas."""
    base = search.lab.base
    assert isinstance(base, FleetConfig)
    return base.router


def head(searches: Sequence[Search], price: float | None) -> list[str]:
    """The columns of `rows`."""
    lab = searches[0].lab
    labels = [metric.label for metric in lab.objectives.metrics]
    cost = [] if price is None else ["$/M tokens"]
    return ["router", lab.knob.key, *labels, "offered", "served", *cost]


def rows(searches: Sequence[Search], price: float | None) -> list[list[str]]:
    """The answer of each search, what its figures are there, and what it costs."""
    return [_row(search, price) for search in searches]


def _row(search: Search, price: float | None) -> list[str]:
    lab, found = search
    shown = [(metric.key, metric.unit) for metric in lab.objectives.metrics] + LOAD
    costs = [] if price is None else [MISSING]
    if found.value is None or not found.meets:
        return [router_of(search), "none", *[MISSING] * len(shown), *costs]
    figures = lab.tried[found.value].figures
    if price is not None and (cost := cost_of(lab, found, price)) is not None:
        costs = [f"{cost.per_million_tokens:.3g}"]
    cells = (show(figures.get(key), unit) for key, unit in shown)
    return [router_of(search), f"{found.value:,.6g}", *cells, *costs]


def compared(searches: Sequence[Search]) -> Remark:
    """Which routers have the best answer."""
    knob = searches[0].lab.knob
    values = {
        router_of(search): search.found.value
        for search in searches
        if search.found.value is not None and search.found.meets
    }
    if not values:
        return Remark(f"No router has a {knob.name} that keeps the objectives.", "bad")
    best = max(values.values()) if knob.goal == "most" else min(values.values())
    names = " and ".join(name for name, value in values.items() if value == best)
    word = "Highest" if knob.goal == "most" else "Least"
    return Remark(f"{word} {knob.name}: {written(knob, best)}, behind {names}.")

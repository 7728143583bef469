"""Writes a search."""

from __future__ import annotations

from collections.abc import Sequence
from math import log10

from kvsim.report.pages.figures import (
    Axis,
    Figure,
    Trace,
    chart,
    compact,
    line,
    points,
    rule,
    scale,
    titled,
    told,
)
from kvsim.report.pages.html import Html, document, element, join, lead, panel, placed, table
from kvsim.results.metrics import Metric
from kvsim.results.numerals import count, plural, show, signed_percent
from kvsim.results.plain import plain
from kvsim.search.size.search import Answer, Cliff, Laboratory, Search, Tried, neighbourhood
from kvsim.search.size.verdict import (
    HEAD,
    compared,
    router_head,
    router_of,
    router_rows,
    row,
    slopes,
    verdict,
    written,
)
from kvsim.search.sweep import Side, origin_panels, side, tags
from kvsim.settings.config import to_table

PAGE = "size.html"
_NEAR = 0.25
"""Share of an answer that the close view shows on either side."""
_FEW = 8
"""Widest axis of whole numbers on which each one is written."""


def build_page(searches: Sequence[Search], price: float | None = None) -> str:
    """The page of a search, or of searches for several routers. `price`: of a GPU for an hour."""
    first, *others = searches
    lab, several = first.lab, bool(others)
    base, number = lab.base, len(lab.trace.rows)
    requests = plural(min(number, base.num_prompts or number), "request")
    subject = base.engine, base.model, base.hardware, f"{_name(lab)}, {requests}"
    sections: dict[str, Html | None] = {}
    if several:
        table_of_all = table(router_head(searches, price), router_rows(searches, price))
        sections["Routers"] = panel(None, table_of_all)
    for search in searches:
        name = router_of(search) if several else ""
        figures = _curves(*search, name)
        said = verdict(*search, price) if several else []
        leads = [lead(remark.text) for remark in said]
        where = f" of {name}" if several else ""
        sections[f"Curves{where}"] = join([*leads, placed(figures, "duo")])
        sections[f"Around the answer{where}"] = _table(*search)
    sections["To repeat it"] = _origin(lab)
    return document(
        "kvsim size",
        f"{lab.knob.name}: {', '.join(_answer(each, several) for each in searches)}",
        sections,
        subject=" · ".join(str(each) for each in subject if each is not None),
        about=[tags(each.records for search in searches for each in search.lab.tried.values())],
        remarks=[compared(searches)] if several else verdict(*first, price),
    )


def _answer(search: Search, several: bool) -> str:
    lab, found = search
    met = found.value is not None and found.meets
    value = written(lab.knob, found.value) if met and found.value is not None else "none"
    return f"{value} behind {router_of(search)}" if several else value


def _name(lab: Laboratory) -> str:
    return lab.trace.path.rpartition("/")[2]


def _table(lab: Laboratory, found: Answer) -> Html:
    metrics = lab.objectives.metrics
    head = [lab.knob.name, *HEAD, *(metric.label for metric in metrics)]
    rows = [_cells(lab, found, value) for value, _ in neighbourhood(lab, found.value)]
    parts: list[object] = [panel(None, table(head, rows))]
    if found.value is not None and found.meets:
        steep = (
            f"{metric.label} changes by {signed_percent(each / 100)} for each % of {lab.knob.name}"
            for metric, each in slopes(lab, found.value)
        )
        text = "; ".join(steep)
        parts.insert(0, lead(f"Around the answer, {text}.") if text else None)
    return join(parts)


def _cells(lab: Laboratory, found: Answer, value: float) -> list[object]:
    cells = row(lab, found.value, value)
    return [element("strong", cell) for cell in cells] if value == found.value else list(cells)


def _origin(lab: Laboratory) -> Html:
    origin = {
        "Trace": _name(lab),
        "Trace SHA-256": lab.trace.sha256,
        "Objectives": lab.objectives.text,
        "Values tried": count(len(lab.tried)),
        "Seeds": ", ".join(map(str, lab.seeds)),
        "kvsim": next(iter(lab.tried.values())).records[0]["kvsim_version"],
    }
    return origin_panels(origin, plain(to_table(lab.base)))


def _curves(lab: Laboratory, found: Answer, router: str) -> list[Figure]:
    """For each bounded figure, a curve of all tried values, and a closer one near an answer.

    `router`: what tells these figures from others on the page; empty if there are none.
    """
    of = f"-{router}" if router else ""
    figures = []
    for metric in lab.objectives.metrics:
        whole = [(v, each) for v, each in lab.ascending if metric.key in each.figures]
        if whole:
            title = f"{metric.label} by {lab.knob.name}"
            figures.append(_curve(lab, found, metric, whole, f"whole{of}", title))
        if whole and found.value is not None and found.meets:
            reach = _NEAR * found.value
            close = [each for each in whole if abs(each[0] - found.value) <= reach]
            title = f"{metric.label} near the answer"
            if len(close) > 1:
                figures.append(_curve(lab, found, metric, close, f"near{of}", title))
    return figures


def _curve(
    lab: Laboratory, found: Answer, metric: Metric, tried: Tried, name: str, title: str
) -> Figure:
    """A bounded figure by the knob: every seed as a point, the mean as a line."""
    limits = [o.limit for o in lab.objectives.each if o.metric.key == metric.key]
    up = side(metric, [each for _, each in tried], limits[0])
    first, last = tried[0][0], tried[-1][0]
    across = scale((first, last))
    if not across and last - first <= _FEW and all(value % 1 == 0 for value, _ in tried):
        across = {"dtick": 1}
    shapes, notes = up.limit_line("y"), []
    for cliff in found.cliffs:
        if cliff.metric.key == metric.key and first <= cliff.safe <= last:
            shapes.append(_span(cliff))
            notes.append(_times(cliff, across.get("type") == "log"))
    if found.value is not None and found.meets:
        shapes.append(rule("x", found.value, "good", 1.4))
    note = "Dotted: the limit. Green: the answer." + (" Red: the cliff." if notes else "")
    data, x = [_seeds(tried, up), _means(tried, up)], titled(lab.knob.name, **across)
    return chart(
        *(f"{name}-{metric.key}", title, note, data, x, up.look),
        height=360,
        hovermode="closest",
        shapes=shapes,
        annotations=notes,
    )


def _seeds(tried: Tried, up: Side) -> Trace:
    places = [
        (value, record["figures"][up.metric.key] / up.per_unit)
        for value, each in tried
        for record in each.records
    ]
    x, y = [x for x, _ in places], compact(y for _, y in places)
    return points(x, y, "used", size=5, opacity=0.45) | {
        "name": "each seed",
        "hoverinfo": "skip",
    }


def _means(tried: Tried, up: Side) -> Trace:
    texts = [
        f"{value:,.6g}: {show(each.figures[up.metric.key], up.metric.unit)}"
        for value, each in tried
    ]
    x, y = [value for value, _ in tried], compact(up.of(each) for _, each in tried)
    marker = {"color": "var(--peak)", "size": 5}
    mean = line(x, y, "peak", "mean over the seeds", width=1.6, mode="lines+markers", marker=marker)
    return told(mean, texts)


def _span(cliff: Cliff) -> Axis:
    ends = sorted((cliff.safe, cliff.beyond))
    box = {"type": "rect", "yref": "paper", "x0": ends[0], "x1": ends[1], "y0": 0, "y1": 1}
    look = {"fillcolor": "var(--bad)", "line": {"width": 5, "color": "var(--bad)"}}
    return {**box, **look, "opacity": 0.35}


def _times(cliff: Cliff, logarithmic: bool) -> Axis:
    """How high a cliff is, written beside it."""
    middle = (cliff.safe + cliff.beyond) / 2
    return {
        "x": log10(middle) if logarithmic else middle,
        "y": 0.66,
        "yref": "paper",
        "text": f"<b>×{cliff.times:.1f}</b>",
        "showarrow": False,
        "xanchor": "right",
        "xshift": -6,
        "font": {"color": "var(--bad)", "size": 13},
    }

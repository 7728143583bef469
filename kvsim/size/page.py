"""Writes a search as one HTML file."""

from __future__ import annotations

from math import log10
from typing import Any

from kvsim.report.document import document, figure_place
from kvsim.report.figures import Entry, Figure, Trace, compact, layout, titled
from kvsim.report.html import Html, element, join, panel, table
from kvsim.report.metrics import Metric
from kvsim.report.numerals import count, plural, show
from kvsim.report.plain import plain
from kvsim.report.provenance import facts, to_toml
from kvsim.size.answer import Answer, neighbourhood, slopes, written
from kvsim.size.cliffs import Cliff, Tried
from kvsim.size.rows import HEAD, row
from kvsim.size.search import Laboratory
from kvsim.sweep.page import tags

PAGE = "size.html"
_WIDE = 20
_IN_SECONDS = 2000
_NEAR = 0.25


def build_page(lab: Laboratory, found: Answer) -> str:
    """The page of a search. Equal inputs give equal bytes."""
    metrics = [objective.metric for objective in lab.objectives.each]
    figures = [
        _curve(lab, found, metric, tried)
        for metric in metrics
        for tried in _views(lab, found, metric)
    ]
    sections = {
        "Curves": element("div", *map(figure_place, figures), class_="duo"),
        "Around the answer": _table(lab, found),
        "To repeat it": _origin(lab),
    }
    title = f"{lab.knob.key} for {' and '.join(map(str, lab.objectives.each))}"
    return document(title, _header(title, lab, found), sections, figures)


def _header(title: str, lab: Laboratory, found: Answer) -> Html:
    name, requests = lab.trace.path.rpartition("/")[2], plural(len(lab.trace.rows), "request")
    base = lab.base
    value = "none" if found.value is None or not found.meets else written(lab.knob, found.value)
    return join(
        (
            element("p", "kvsim size", class_="eyebrow"),
            element("h1", f"{lab.knob.key}: {value}"),
            element(
                "p",
                f"{base.engine} · {base.model} · {base.hardware} · {name}, {requests}",
                class_="subject",
            ),
            tags(each.records for each in lab.tried.values()),
            element(
                "ul",
                *(element("li", text, class_=tone) for text, tone in found.verdict),
                class_="verdict",
            ),
        )
    )


def _views(lab: Laboratory, found: Answer, metric: Metric) -> list[Tried]:
    """All that was tried, and what is near an answer, as far as there is the figure."""
    whole = [(v, each) for v, each in lab.ascending if metric.key in each.figures]
    if found.value is None or not found.meets:
        return [whole] if whole else []
    reach = _NEAR * found.value
    return [whole, [each for each in whole if abs(each[0] - found.value) <= reach]]


def _curve(lab: Laboratory, found: Answer, metric: Metric, tried: Tried) -> Figure:
    """A bounded figure by the knob: every seed as a point, the mean as a line."""
    values = [each.figures[metric.key] for _, each in tried]
    seconds = metric.unit == "ms" and max(values) >= _IN_SECONDS
    per, unit = (1e3, "s") if seconds else (1.0, metric.unit)
    limits = [o.limit / per for o in lab.objectives.each if o.metric.key == metric.key]
    data = [_seeds(tried, metric, per), _means(tried, metric, per)]
    shapes = [_line("y", limit, "bad", "dot") for limit in limits]
    if found.value is not None and found.meets:
        shapes.append(_line("x", found.value, "good", "solid"))
    x = titled(lab.knob.key)
    places = [value for value, _ in tried]
    logarithmic = places[0] > 0 and places[-1] / places[0] >= _WIDE
    if logarithmic:
        x |= {"type": "log", "dtick": "D2"}
    notes = []
    for cliff in found.cliffs:
        if cliff.metric.key == metric.key and places[0] <= cliff.safe <= places[-1]:
            shapes.append(_span(cliff.safe, cliff.beyond))
            notes.append(_times(cliff, logarithmic))
    y = titled(f"{metric.label} ({unit})" if unit and unit != "share" else metric.label)
    if min(values) > 0 and max(values) / min(values) >= _WIDE:
        y |= {"type": "log", "dtick": "D2"}
    legend = [
        Entry("mean over the seeds", "var(--peak)", (1,), "line"),
        Entry("each seed", "var(--used)", (0,)),
    ]
    look = layout(
        x,
        {**y, "exponentformat": "none"},
        hovermode="closest",
        shapes=shapes,
        annotations=notes,
    )
    note = "Dotted: the limit. Green: the answer." + (" Red: the cliff." if notes else "")
    near = len(tried) < len([each for each in lab.tried.values() if metric.key in each.figures])
    title = f"{metric.label} {'near the answer' if near else f'by {lab.knob.key}'}"
    name = f"{'near' if near else 'curve'}-{metric.key}"
    return Figure(name, title, note, data, look, legend, height=360)


def _seeds(tried: Tried, metric: Metric, per: float) -> Trace:
    points = [
        (value, record["figures"][metric.key] / per)
        for value, each in tried
        for record in each.records
    ]
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [x for x, _ in points],
        "y": compact(y for _, y in points),
        "hoverinfo": "skip",
        "marker": {"color": "var(--used)", "size": 5, "opacity": 0.45, "line": {"width": 0}},
    }


def _means(tried: Tried, metric: Metric, per: float) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [value for value, _ in tried],
        "y": compact(each.figures[metric.key] / per for _, each in tried),
        "text": [
            f"{value:,.6g}: {show(each.figures[metric.key], metric.unit)}" for value, each in tried
        ],
        "hovertemplate": "%{text}<extra></extra>",
        "line": {"color": "var(--peak)", "width": 1.6},
        "marker": {"color": "var(--peak)", "size": 5},
    }


def _line(axis: str, at: float, colour: str, dash: str) -> dict[str, Any]:
    other = "y" if axis == "x" else "x"
    ends = {f"{axis}0": at, f"{axis}1": at, f"{other}0": 0, f"{other}1": 1}
    line = {"color": f"var(--{colour})", "width": 1.4, "dash": dash}
    return {"type": "line", f"{other}ref": "paper", **ends, "line": line}


def _span(one: float, other: float) -> dict[str, Any]:
    return {
        "type": "rect",
        "yref": "paper",
        "x0": min(one, other),
        "x1": max(one, other),
        "y0": 0,
        "y1": 1,
        "fillcolor": "var(--bad)",
        "opacity": 0.35,
        "line": {"width": 2, "color": "var(--bad)"},
    }


def _times(cliff: Cliff, logarithmic: bool) -> dict[str, Any]:
    """How high a cliff is, written beside it."""
    middle = (cliff.safe + cliff.beyond) / 2
    return {
        "x": log10(middle) if logarithmic else middle,
        "y": 0.96,
        "yref": "paper",
        "text": f"<b>×{cliff.times:.1f}</b>",
        "showarrow": False,
        "xanchor": "right",
        "xshift": -6,
        "font": {"color": "var(--bad)", "size": 13},
    }


def _table(lab: Laboratory, found: Answer) -> Html:
    metrics = [objective.metric for objective in lab.objectives.each]
    head = [lab.knob.key, *HEAD, *(metric.label for metric in metrics)]
    rows = [_cells(lab, found, value) for value, _ in neighbourhood(lab, found.value)]
    parts: list[object] = [panel(None, table(head, rows))]
    if found.value is not None and found.meets:
        steep = (
            f"{metric.label} changes by {each:+.1f} % for every % of {lab.knob.key}"
            for metric, each in slopes(lab, found.value)
        )
        text = "; ".join(steep)
        parts.insert(0, element("p", f"Around the answer, {text}.") if text else None)
    return join(parts)


def _cells(lab: Laboratory, found: Answer, value: float) -> list[object]:
    cells = row(lab, found.value, value)
    return [element("strong", cell) for cell in cells] if value == found.value else list(cells)


def _origin(lab: Laboratory) -> Html:
    origin = {
        "Trace": lab.trace.path.rpartition("/")[2],
        "Trace SHA-256": lab.trace.sha256,
        "Objectives": lab.objectives.text,
        "Values tried": count(len(lab.tried)),
        "Seeds": ", ".join(map(str, lab.seeds)),
        "kvsim": next(iter(lab.tried.values())).records[0]["kvsim_version"],
    }
    settings = plain({key: getattr(lab.base, key) for key in lab.base.__struct_fields__})
    return element(
        "div",
        panel("Origin", facts(origin)),
        panel("Settings of every run", element("pre", to_toml(settings))),
        class_="columns",
    )

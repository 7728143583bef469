"""Writes a search as one HTML file."""

from __future__ import annotations

from kvsim.config import to_table
from kvsim.report.document import document, figure_place, masthead
from kvsim.report.html import Html, element, join, panel, table
from kvsim.report.numerals import count, plural
from kvsim.report.plain import plain
from kvsim.size.answer import Answer, neighbourhood
from kvsim.size.curves import curve_figures
from kvsim.size.rows import HEAD, row
from kvsim.size.search import Laboratory
from kvsim.size.wording import slopes, verdict, written
from kvsim.sweep.page import origin_panels, tags

PAGE = "size.html"
_WIDE = 20
_IN_SECONDS = 2000
_NEAR = 0.25


def build_page(lab: Laboratory, found: Answer) -> str:
    """The page of a search. Equal inputs give equal bytes."""
    figures = curve_figures(lab, found)
    sections = {
        "Curves": element("div", *map(figure_place, figures), class_="duo"),
        "Around the answer": _table(lab, found),
        "To repeat it": _origin(lab),
    }
    title = f"{lab.knob.key} for {' and '.join(map(str, lab.objectives.each))}"
    return document(title, _header(lab, found), sections, figures)


def _header(lab: Laboratory, found: Answer) -> Html:
    name, requests = lab.trace.path.rpartition("/")[2], plural(len(lab.trace.rows), "request")
    base = lab.base
    value = "none" if found.value is None or not found.meets else written(lab.knob, found.value)
    return masthead(
        "kvsim size",
        f"{lab.knob.key}: {value}",
        tags(each.records for each in lab.tried.values()),
        subject=f"{base.engine} · {base.model} · {base.hardware} · {name}, {requests}",
        remarks=verdict(lab, found),
    )


def _table(lab: Laboratory, found: Answer) -> Html:
    metrics = lab.objectives.metrics
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
    return origin_panels(origin, plain(to_table(lab.base)))

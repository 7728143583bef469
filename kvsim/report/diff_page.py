"""Writes the difference of two runs as one HTML file."""

from __future__ import annotations

from kvsim.report import panels, wording
from kvsim.report.compare import cautions
from kvsim.report.document import document, figure_place, masthead
from kvsim.report.explanation import Explanation, Run, explain
from kvsim.report.explanation_panel import (
    blocks_panel,
    carriers_panel,
    divergence_panel,
    parts_table,
    waterfall_figures,
)
from kvsim.report.figures import Figure
from kvsim.report.html import Html, element, join, panel, table


def build_diff(first: Run, other: Run) -> str:
    """One page that says why the second run differs from the first. Equal inputs, equal bytes."""
    explanation = explain(first, other)
    figures = waterfall_figures(explanation)
    title = f"{other[0]} against {first[0]}"
    sections = {
        "Where the difference comes from": falls_section(explanation, figures),
        "First divergent decision": divergence_panel(explanation),
        "Requests that carry it": carriers_panel(explanation),
        "Blocks that carry it": blocks_panel(explanation),
        "All parts": parts_table(explanation),
        "Settings": _settings(explanation),
    }
    if not explanation.waterfalls:
        sections = {"Settings": sections["Settings"]}
    return document(title, _header(title, explanation, (first, other)), sections, figures)


def falls_section(explanation: Explanation, figures: list[Figure]) -> Html:
    """The waterfalls, two side by side."""
    if not figures:
        return panel(None, element("p", "No part of any latency differs."))
    lead = (
        "Of the requests that both runs completed. Parts are whole nanoseconds of every request's"
        " time and add up exactly; a p99 is split like the requests that it is interpolated from."
    )
    if not explanation.ledger:
        lead += " These runs were written without a time ledger, so there are three parts only."
    drawn = element("div", *(figure_place(figure) for figure in figures), class_="duo")
    return join((element("p", lead), drawn))


def _header(title: str, explanation: Explanation, runs: tuple[Run, Run]) -> Html:
    summaries = [(name, summary) for name, summary, *_ in runs]
    remarks = [(text, "plain") for text in explanation.headline]
    remarks += [(caution, "warning") for caution in cautions(summaries)]
    lines = [
        element(
            "div",
            element("strong", name),
            element("span", wording.subject(summary["meta"]), class_="muted"),
            panels.tags(summary),
            class_="run",
        )
        for name, summary in summaries
    ]
    return masthead("kvsim diff", title, *lines, remarks=remarks)


def _settings(explanation: Explanation) -> Html:
    if not explanation.settings:
        return panel(None, element("p", "No difference in any setting."))
    rows = ((key, *texts) for key, texts in explanation.settings)
    return panel(None, table(["Setting", *explanation.names], rows, text_columns=99))

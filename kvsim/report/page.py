"""Writes the report of one run as one HTML file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from kvsim.blockmap.blockmap import BlockMap
from kvsim.report import panels, wording
from kvsim.report.block_map_panel import block_map_panel
from kvsim.report.distribution_figures import distribution_figures
from kvsim.report.document import document, figure_place, masthead
from kvsim.report.event_figures import event_figures
from kvsim.report.figures import Figure
from kvsim.report.html import Html, element, join
from kvsim.report.ledger_panels import ledger_section
from kvsim.report.memory_panel import memory_panel
from kvsim.report.provenance import provenance_panels
from kvsim.report.state_figures import state_figures
from kvsim.report.view import View, look_at

ORDER = (
    "gpu-blocks",
    "cpu-blocks",
    "preemptions",
    "swaps",
    "queues",
    "blocked",
    "batch",
    "hit-rate",
    "fragmentation",
)
"""Figures over time, from cause to effect."""


def build_page(
    summary: Mapping[str, Any],
    requests: Mapping[str, Any],
    steps: Mapping[str, Any],
    block_map: BlockMap | None = None,
) -> str:
    """The report of a run, for `report.html`.

    Takes the result and the arguments of `summarise`. The file needs no other file and no network;
    equal inputs give equal bytes.
    """
    run = look_at(summary, requests, steps)
    timed = _time_figures(run)
    spread = distribution_figures([("requests", "used", run.durations)], marks=True)
    mapped, owners = block_map_panel(block_map, run)
    sections = {
        "Key figures": panels.cards(summary),
        "Latency": _latency(run, spread),
        "Where time went": ledger_section(summary),
        "Over time": _over_time(timed),
        "Block map": owners,
        "Requests": _requests(run),
        "Prefix cache": panels.hit_rate_table(summary),
        "Memory": memory_panel(summary["meta"]),
        "Provenance": provenance_panels(summary["meta"]),
    }
    if not summary["meta"].get("prefix_caching"):
        del sections["Prefix cache"]
    for optional in ("Where time went", "Block map"):
        if not sections[optional]:
            del sections[optional]
    return document(_name(summary), _header(summary), sections, [*spread, *timed, *mapped])


def _header(summary: Mapping[str, Any]) -> Html:
    return masthead(
        "kvsim run report",
        _name(summary),
        panels.tags(summary),
        subject=wording.subject(summary["meta"]),
        remarks=wording.verdict(summary),
    )


def _time_figures(run: View) -> list[Figure]:
    if not run.end_ns or not len(run.steps["start_ns"]):
        return []
    figures = [*state_figures(run), *event_figures(run)]
    return sorted(figures, key=lambda figure: ORDER.index(figure.id))


def _latency(run: View, figures: list[Figure]) -> Html:
    lead = "Of completed requests, from the arrival at the engine. Each curve shows the share"
    lead += " of requests whose latency is at most the value on the axis."
    trio = element("div", *(figure_place(figure) for figure in figures), class_="trio")
    return join((element("p", lead), trio, panels.latency_table(run.summary)))


def _over_time(figures: list[Figure]) -> Html:
    if not figures:
        return element("p", "No step was run, so there is nothing to draw.")
    lead = "Drag across a chart to zoom all of them, double-click to see the whole run again."
    return join((element("p", lead), *(figure_place(figure) for figure in figures)))


def _requests(run: View) -> Html:
    parts: list[object] = []
    if run.summary["completed"]:
        if not ledger_section(run.summary):
            parts += [
                element("h3", "Where the time of the mean request went"),
                panels.mean_phases(run.requests, run.durations),
            ]
        parts += [
            element("h3", "Slowest requests"),
            panels.slowest_table(run.requests, run.durations),
        ]
    if run.summary["rejected"]:
        parts += [
            element("h3", "Rejected requests"),
            panels.rejected_table(run.summary, run.requests),
        ]
    return join(parts or [element("p", "No request was completed or rejected.")])


def _name(summary: Mapping[str, Any]) -> str:
    path = (summary["meta"].get("trace") or {}).get("path")
    return PurePath(str(path)).name if path else "Run"

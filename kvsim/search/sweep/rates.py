"""Draws latency, throughput and goodput against the request rate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from kvsim.report.pages.figures import Figure, Trace, chart, compact, line, scale, titled, told
from kvsim.results.metrics import NAMED, Metric
from kvsim.search.sweep.choose import (
    GOODPUT,
    RATE,
    SERVED,
    TPOT,
    TTFT,
    Chosen,
    Configuration,
    words,
)
from kvsim.search.sweep.page_figures import (
    Side,
    about,
    highlight,
    is_number,
    limit_of,
    side,
)

_COLOURS = 5
"""Most combinations of other settings that are drawn, each in its colour."""
_PANELS = (
    ("TTFT", (TTFT, NAMED["p50_ttft_ms"]), "Solid: p99; dashed: p50."),
    ("TPOT", (TPOT, NAMED["p50_tpot_ms"]), "Solid: p99; dashed: p50."),
    ("Served", (SERVED, GOODPUT), "Solid: served; dotted: offered."),
)


def rate_figures(chosen: Chosen) -> list[Figure]:
    """Figures by request rate, a line for each combination of other settings; none if fewer than
    two rates ran. Of many combinations, the first are drawn."""
    ran = [c for c in chosen.configurations if c.figures and is_number(c.settings.get(RATE))]
    lines = [
        (label, sorted(members, key=lambda each: each.settings[RATE]))
        for label, members in groupby(sorted(ran, key=_others), _others)
    ]
    lines = [(label, members) for label, members in lines if members[1:]][:_COLOURS]
    return [_panel(chosen, lines, *panel) for panel in _PANELS] if lines else []


def _others(configuration: Configuration) -> str:
    """The settings besides the rate, in words."""
    others = {key: value for key, value in configuration.settings.items() if key != RATE}
    return words(others) if others else ""


def _panel(
    chosen: Chosen,
    lines: Sequence[tuple[str, list[Configuration]]],
    title: str,
    metrics: tuple[Metric, Metric],
    note: str,
) -> Figure:
    drawn = [each for _, members in lines for each in members]
    up = side(metrics[0], drawn, limit_of(chosen, metrics[0]))
    data: list[Trace] = []
    for i, (label, members) in enumerate(lines, 1):
        for metric, dash in zip(metrics, ("solid", "dash"), strict=True):
            having = [each for each in members if metric.key in each.figures]
            data += _line(having, up._replace(metric=metric), f"run-{i}", label, dash)
    rates, unit = [each.settings[RATE] for each in drawn], up.unit or "requests/s"
    if metrics[0] == SERVED:
        ends = [min(rates), max(rates)]
        data.insert(0, line(ends, ends, "muted", width=1.2, dash="dot"))
        if any(GOODPUT.key in each.figures for each in drawn):
            title, note = "Served and goodput", "Solid: served; dashed: goodput; dotted: offered."
    across = titled("request rate (requests/s)", showgrid=True, **scale(rates, 50))
    y = {**up.look, **titled(f"{title.partition(' ')[0]} ({unit})")}
    return chart(
        *(f"rate-{metrics[0].key}", title, note, [*data, highlight("markers")], across, y),
        keyed=len(lines) > 1,
        height=300,
        hovermode="closest",
        shapes=up.limit_line("y"),
    )


def _line(
    members: Sequence[Configuration], up: Side, colour: str, label: str, dash: str
) -> Iterator[Trace]:
    if members:
        x, y = [each.settings[RATE] for each in members], compact(map(up.of, members))
        owners = [each.number for each in members]
        look: dict[str, Any] = {"mode": "lines+markers", "legendgroup": label, "customdata": owners}
        drawn = line(x, y, colour, label or up.metric.label, dash=dash, **look)
        yield told(drawn, list(map(about, members)))

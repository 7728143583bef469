"""Writes a check of a prediction against a measured run as one HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvsim.report import wording
from kvsim.report.document import document, figure_place, masthead
from kvsim.report.figures import Figure, Trace, compact, layout, titled
from kvsim.report.html import Html, element, join, table
from kvsim.report.metrics import LATENCIES
from kvsim.report.numerals import percent, plural
from kvsim.report.provenance import provenance_panels

POINTS = 3000
"""Most requests of a scatter; more are thinned out evenly."""

Rows = Sequence[Sequence[str]]


def build_check(record: Mapping[str, Any], figures: Rows, parts: Rows, corrections: Rows) -> str:
    """The page of a record of `kvsim.check`, with the rows of its tables as texts.

    It needs no other file; equal records give equal bytes.
    """
    drawn = [_scatter(kind, record["points"]) for kind in LATENCIES if kind in record["points"]]
    sections = {
        "Predicted beside measured": table(("", "measured", "predicted", "error"), figures),
        "Request by request": _requests(record, drawn),
    }
    if parts:
        sections["Where the difference comes from"] = join(
            (
                table(("mean", "measured", "predicted", "difference"), parts),
                element("p", record["residual"]["method"]),
            )
        )
    if corrections:
        lead = "Each was fitted alone, by running the replay again."
        tried = table(("correction", "remedy", "mean error left"), corrections, text_columns=2)
        sections["What to correct"] = join((element("p", lead), tried))
    sections["Provenance"] = provenance_panels(record["meta"])
    title = str(record["meta"]["trace"]["path"]).rpartition("/")[2]
    header = masthead(
        "kvsim check",
        title,
        subject=f"{wording.subject(record['meta'])} · {wording.time_source(record['meta'])}",
        remarks=[(each["text"], each["tone"]) for each in record["verdict"]],
    )
    return document(title, header, sections, drawn)


def _requests(record: Mapping[str, Any], drawn: Sequence[Figure]) -> Html:
    lead = "A point per request; on the line, both are equal."
    rows = [
        [LATENCIES[kind], plural(each["requests"], "request"), *_sizes(each)]
        for kind, each in record["spread"].items()
    ]
    places = element("div", *map(figure_place, drawn), class_="trio")
    errors = table(("error of single requests", "compared", "median", "p90"), rows)
    return join((element("p", lead), places, errors))


def _sizes(spread: Mapping[str, Any]) -> list[str]:
    return ["–" if (size := spread[key]) is None else percent(size) for key in ("median", "p90")]


def _scatter(kind: str, points: Mapping[str, Any]) -> Figure:
    """Predicted against measured times of one kind, with the line on which they are equal."""
    both = [
        (name, one, other)
        for name, one, other in zip(
            points["id"], points[kind]["measured_ms"], points[kind]["predicted_ms"], strict=True
        )
        if one is not None and other is not None
    ]
    most = max(max(one, other) for _, one, other in both)
    unit, per_unit = ("ms", 1.0) if most < 1000 else ("s", 1e3)
    shown = both[:: -(-len(both) // POINTS)]
    data: list[Trace] = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": [0, most / per_unit],
            "y": [0, most / per_unit],
            "hoverinfo": "skip",
            "line": {"color": "var(--muted)", "width": 1, "dash": "dot"},
        },
        {
            "type": "scatter",
            "mode": "markers",
            "x": compact(one / per_unit for _, one, _ in shown),
            "y": compact(other / per_unit for *_, other in shown),
            "text": [name for name, *_ in shown],
            "hovertemplate": f"%{{text}}: %{{x:.4~g}} {unit} measured, %{{y:.4~g}} {unit} predicted"
            "<extra></extra>",
            "marker": {"color": "var(--used)", "size": 5, "opacity": 0.5, "line": {"width": 0}},
        },
    ]
    x = titled(f"measured ({unit})", rangemode="tozero", showgrid=True, nticks=6)
    look = layout(x, titled(f"predicted ({unit})"), hovermode="closest")
    note = "" if len(shown) == len(both) else f"{len(shown):,} of {len(both):,} requests."
    return Figure(f"scatter-{kind}", LATENCIES[kind], note, data, look, [], height=300)

"""Writes a check of a prediction against a measured run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvsim.against.check.remarks import correction_rows, figure_rows, part_rows
from kvsim.report import wording
from kvsim.report.pages.figures import Figure, chart, compact, line, points, titled
from kvsim.report.pages.html import Html, document, join, lead, panel, placed, table
from kvsim.report.pages.run import provenance_panels
from kvsim.results.metrics import LATENCIES
from kvsim.results.numerals import plural, show

POINTS = 3000
"""Most requests of a scatter; more are thinned out evenly."""


def build_check(record: Mapping[str, Any]) -> str:
    """The page of a record of `kvsim.against.check.check`."""
    parts, corrections = part_rows(record), correction_rows(record)
    drawn = [_scatter(kind, record["points"]) for kind in LATENCIES if kind in record["points"]]
    beside = table(("", "measured", "predicted", "error"), figure_rows(record))
    differences = table(("mean", "measured", "predicted", "difference"), parts)
    tried = table(("correction", "remedy", "mean error left"), corrections, text_columns=2)
    fitted = "Each was fitted alone, by running the replay again."
    sections = {
        "Predicted beside measured": panel(None, beside),
        "Request by request": _requests(record, drawn),
        "Where the difference comes from": join(
            (panel(None, differences), lead(record["residual"]["method"]))
        )
        if parts
        else None,
        "What to correct": join((lead(fitted), panel(None, tried))) if corrections else None,
        "Provenance": provenance_panels(record["meta"]),
    }
    return document(
        "kvsim check",
        str(record["meta"]["trace"]["path"]).rpartition("/")[2],
        sections,
        subject=wording.subject(record["meta"]),
        remarks=[(each["text"], each["tone"]) for each in record["verdict"]],
    )


def _requests(record: Mapping[str, Any], drawn: Sequence[Figure]) -> Html:
    rows = [
        [
            LATENCIES[kind],
            plural(each["requests"], "request"),
            *(show(each[key], "share") for key in ("median", "p90")),
        ]
        for kind, each in record["spread"].items()
    ]
    errors = table(("error of single requests", "compared", "median", "p90"), rows)
    words = "A point per request; on the line, both are equal."
    return join((lead(words), placed(drawn, "trio"), panel(None, errors)))


def _scatter(kind: str, found: Mapping[str, Any]) -> Figure:
    """Predicted against measured times of one kind, with the line on which they are equal."""
    both = [
        (name, one, other)
        for name, one, other in zip(
            found["id"], found[kind]["measured_ms"], found[kind]["predicted_ms"], strict=True
        )
        if one is not None and other is not None
    ]
    most = max(max(one, other) for _, one, other in both)
    unit, per_unit = ("ms", 1.0) if most < 1000 else ("s", 1e3)
    shown = both[:: -(-len(both) // POINTS)]
    ends = [0, most / per_unit]
    x = compact(one / per_unit for _, one, _ in shown)
    y = compact(other / per_unit for *_, other in shown)
    hover = f"%{{text}}: %{{x:.4~g}} {unit} measured, %{{y:.4~g}} {unit} predicted<extra></extra>"
    dots = points(x, y, "used", size=5, opacity=0.5)
    dots |= {"text": [name for name, *_ in shown], "hovertemplate": hover}
    note = "" if len(shown) == len(both) else f"{len(shown):,} of {len(both):,} requests."
    return chart(
        f"scatter-{kind}",
        LATENCIES[kind],
        note,
        [line(ends, ends, "muted", width=1, dash="dot"), dots],
        titled(f"measured ({unit})", rangemode="tozero", showgrid=True, nticks=6),
        titled(f"predicted ({unit})"),
        height=300,
        hovermode="closest",
    )

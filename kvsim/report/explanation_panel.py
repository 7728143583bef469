"""Writes and draws an explanation: waterfalls, the first divergence, requests and blocks."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any

from kvsim.report.attribution import LABELS, Place, Waterfall
from kvsim.report.carriers import BLOCKS, LISTED
from kvsim.report.divergence import DECISIONS, STATES, Divergence
from kvsim.report.document import figure_place
from kvsim.report.explanation import Explanation, title_of
from kvsim.report.figures import Figure, Points, compact, layout, titled
from kvsim.report.html import Html, element, join, panel, table
from kvsim.report.metrics import BLOCKED_BY
from kvsim.report.numerals import count, number, percent, plural, seconds, signed
from kvsim.schema import BLOCKED

_ROW_PX, _FRAME_PX, _LETTER_PX = 26, 78, 6.2
_GAP = 0.2
"""Part of a row that is free between its bar and the next."""


def why(explanation: Explanation, figures: Sequence[Figure]) -> Html:
    """The short explanation: sentences, waterfalls, and the first divergent decision."""
    words = (element("li", text, class_="plain") for text in explanation.headline)
    parts: list[Html] = [element("ul", *words, class_="verdict")]
    if figures:
        drawn = (figure_place(figure) for figure in figures)
        parts.append(element("div", *drawn, class_="duo"))
    if explanation.waterfalls:
        parts.append(divergence_panel(explanation))
    return join(parts)


def waterfall_figures(explanation: Explanation, prefix: str = "fall") -> list[Figure]:
    """One waterfall for each figure in which the runs differ; bars begin where the last ended."""
    return [
        _waterfall(fall, f"{prefix}-{fall.statistic}-{fall.metric}", explanation.names)
        for fall in explanation.waterfalls
        if fall.changes()
    ]


def parts_table(explanation: Explanation) -> Html:
    """Every part of every figure in both runs; the last line of each figure is the sum."""
    panels = []
    for fall in explanation.waterfalls:
        rows = [[LABELS[part], *_three(a, b)] for part, (a, b) in fall.parts.items() if a or b]
        rows.append([element("strong", "together"), *_three(*fall.totals)])
        head = ["", *explanation.names, "Difference"]
        panels.append(panel(title_of(fall), table(head, rows)))
    return join(panels)


def divergence_panel(explanation: Explanation) -> Html:
    """The first divergent decision in words, and the step in both runs side by side."""
    parts = [element("p", sentence) for sentence in explanation.divergence_words]
    found = explanation.divergence
    if found is not None and all(found.rows):
        head = [f"Step {count(found.step)}", *explanation.names]
        rows = [
            [element("span", name, class_="id"), *(_cell(name, row[name]) for row in found.rows)]
            for name in (*DECISIONS, *STATES)
            if name in found.columns or _differs(found, name)
        ]
        parts.append(table(head, rows))
    return panel(None, *parts)


def carriers_panel(explanation: Explanation) -> Html:
    """The requests whose E2EL changed most, and how the change is spread."""
    share = explanation.share
    if share is None or not share.changed:
        return panel(None, element("p", "Every request took the same time."))
    lead = (
        f"{count(share.changed)} of {plural(share.total, 'request')} took a different time. Half of"
        f" the total change is in {plural(share.half, 'request')}"
        f" ({percent(share.half / share.total)}); the {LISTED} that changed most:"
    )
    rows = [
        [
            element("span", each.id, class_="id"),
            f"{LABELS[each.part]} {signed(each.part_ns / 1e9, 's')}",
            *(seconds(ns / 1e9) for ns in each.e2el_ns),
            signed((each.e2el_ns[1] - each.e2el_ns[0]) / 1e9, "s"),
            " → ".join(map(count, each.preemptions)),
        ]
        for each in explanation.carriers
    ]
    head = ["Request", "Most of it", *(f"E2EL {name}" for name in explanation.names)]
    head += ["Difference", "Preemptions"]
    return join((element("p", lead), panel(None, table(head, rows, text_columns=2))))


def blocks_panel(explanation: Explanation) -> Html:
    """Blocks by fate, where their number changed."""
    if not explanation.blocks:
        return panel(None, element("p", "Every block had the same fate in both runs."))
    rows = [
        [
            BLOCKS[each.column],
            *(number(round(value, 1)) for value in each.blocks),
            signed(round(each.blocks[1] - each.blocks[0], 1), ""),
            element("span", each.id, class_="id"),
            signed(round(each.change, 1), ""),
        ]
        for each in explanation.blocks
    ]
    head = ["Blocks", *explanation.names, "Difference", "Most in request", "there"]
    return panel(None, table(head, rows))


def _waterfall(fall: Waterfall, id: str, names: tuple[str, str]) -> Figure:
    changes = fall.changes()
    labels = [LABELS[part] for part, _ in changes] + ["together"]
    largest = max(abs(ns) for _, ns in changes)
    unit, scale = ("s", 1e9) if largest >= 1e9 else ("ms", 1e6)
    lengths = [*(float(ns) / scale for _, ns in changes), float(fall.difference) / scale]
    ends = list(accumulate(lengths[:-1]))
    colours = ["recompute" if length > 0 else "prefill" for length in lengths[:-1]] + ["used"]
    data = {
        "type": "bar",
        "orientation": "h",
        "base": compact([0, *ends[:-1], 0]),
        "x": compact(lengths),
        "y": list(range(len(labels))),
        "marker": {"color": [f"var(--{colour})" for colour in colours], "line": {"width": 0}},
        "text": [signed(float(ns) / 1e9, "s") for _, ns in changes]
        + [signed(float(fall.difference) / 1e9, "s")],
        "hovertemplate": "%{text}<extra></extra>",
        "textposition": "none",
    }
    ticks = [f"{label}  {text}" for label, text in zip(labels, data["text"], strict=True)]
    look = layout(
        titled(f"difference ({unit})", showgrid=True, nticks=5, tickangle=0),
        {
            "range": [len(labels) - 0.5, -0.5],
            "tickvals": list(range(len(labels))),
            "ticktext": ticks,
            "rangemode": "normal",
            "showgrid": False,
        },
        hovermode="closest",
        margin={"l": round(_LETTER_PX * max(map(len, ticks))) + 16},
        bargap=_GAP,
        shapes=_connectors(compact(ends)),
    )
    title = f"{title_of(fall)} {signed(float(fall.difference) / 1e9, 's')}"
    height = _FRAME_PX + _ROW_PX * len(labels)
    return Figure(id, title, _made_of(names, fall), [data], look, [], height=height)


def _connectors(ends: Points) -> list[dict[str, Any]]:
    """Lines from the end of each bar to the next bar, which begins there."""
    line = {"color": "var(--rule)", "width": 1}
    half = (1 - _GAP) / 2
    return [
        {"type": "line", "x0": x, "x1": x, "y0": i + half, "y1": i + 1 - half, "line": line}
        for i, x in enumerate(ends)
    ]


def _made_of(names: tuple[str, str], fall: Waterfall) -> str:
    """The requests that a percentile is interpolated from; empty for a mean."""
    if not any(fall.places):
        return ""
    texts = [
        f"in {name} {_places(places)}" for name, places in zip(names, fall.places, strict=True)
    ]
    return f"Interpolated from these requests: {'; '.join(texts)}."


def _places(places: Sequence[Place]) -> str:
    return " and ".join(f"{percent(float(place.weight))} of {place.id}" for place in places)


def _three(first: Fraction, other: Fraction) -> list[str]:
    change = signed(float(other - first) / 1e9, "s") if first != other else "no difference"
    return [seconds(float(first) / 1e9), seconds(float(other) / 1e9), change]


def _cell(name: str, value: int) -> str:
    return BLOCKED_BY.get(BLOCKED[value], "no refusal") if name == "blocked" else count(value)


def _differs(found: Divergence, name: str) -> bool:
    return found.rows[0][name] != found.rows[1][name]

"""Writes why two runs differ: parts, decisions, requests, blocks; and the story of one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from types import MappingProxyType
from typing import Any

from kvsim.core.schema import BLOCKED
from kvsim.explain.differences import BLOCKS, DECISIONS, LABELS, LISTED, STATES, Waterfall
from kvsim.explain.story import Story, ledger_rows
from kvsim.report import wording
from kvsim.report.compare import cautions
from kvsim.report.explanation import Explanation, Run, explain, title_of
from kvsim.report.pages.figures import (
    Axis,
    Figure,
    Points,
    chart,
    compact,
    room_for,
    rows_axis,
    time_unit,
    titled,
    told,
)
from kvsim.report.pages.html import (
    Html,
    document,
    element,
    id_of,
    join,
    key_of,
    lead,
    panel,
    placed,
    shares,
    strip,
    table,
    tags,
)
from kvsim.report.pages.run import ended_label, source_label
from kvsim.results.ledger import PROMPT_LABELS, TIME_LABELS, standings
from kvsim.results.metrics import BLOCKED_BY
from kvsim.results.numerals import count, number, percent, plural, seconds, signed
from kvsim.results.summary import bare

_ROW_PX, _FRAME_PX = 26, 78
_GAP = 0.2
"""Part of a row that is free between its bar and the next."""


def build_diff(first: Run, other: Run) -> str:
    """The page that says why the second run differs from the first."""
    summaries = [(name, summary) for name, summary, *_ in (first, other)]
    return diff_page(explain(first, other), summaries)


def diff_page(
    explanation: Explanation,
    summaries: Sequence[tuple[str, Mapping[str, Any]]],
    further: Mapping[str, Html] = MappingProxyType({}),
) -> str:
    """The page of an explanation, with `further` sections before the settings."""
    settings = settings_panel(explanation.names, explanation.settings)
    sections = {
        "Where the difference comes from": _falls(explanation),
        "First divergent decision": _divergence(explanation),
        "Requests that changed most": _carriers(explanation),
        "Blocks that changed most": _blocks(explanation),
        "All parts": _parts(explanation),
    }
    remarks = [(text, "plain") for text in explanation.headline]
    return document(
        "kvsim diff",
        f"{explanation.names[1]} against {explanation.names[0]}",
        {**(sections if explanation.waterfalls else {}), **further, "Settings": settings},
        about=run_lines(summaries),
        remarks=[*remarks, *((caution, "warning") for caution in cautions(summaries))],
    )


def run_lines(
    runs: Sequence[tuple[str, Mapping[str, Any]]], colours: Sequence[str] = ()
) -> list[Html]:
    """The runs: colour, name, what was simulated, how it ended; and where step times come from,
    once if they all come from there."""
    sources = {source_label(summary["meta"]) for _, summary in runs}
    lines = []
    for i, (name, summary) in enumerate(runs):
        colour = colours[i] if colours else None
        swatch = element("span", class_="swatch", style=f"--colour: var(--{colour})")
        labels = [ended_label(summary), *([source_label(summary["meta"])] * (len(sources) > 1))]
        about = element("span", wording.subject(summary["meta"]), class_="muted")
        parts = swatch if colour else None, element("strong", name), about, tags(labels)
        lines.append(element("div", *parts, class_="run"))
    return [*lines, tags(sources)] if len(sources) == 1 else lines


def why(explanation: Explanation, prefix: str) -> Html:
    """The short explanation: sentences, waterfalls, and the first divergent decision."""
    words = (element("li", text, class_="plain") for text in explanation.headline)
    return join(
        (
            element("ul", *words, class_="verdict"),
            placed(_waterfalls(explanation, prefix), "duo"),
            _divergence(explanation) if explanation.waterfalls else None,
        )
    )


def _waterfalls(explanation: Explanation, prefix: str = "fall") -> list[Figure]:
    """One waterfall for each figure in which the runs differ; bars begin where the last ended."""
    return [
        _waterfall(fall, f"{prefix}-{fall.statistic}-{fall.metric}", explanation.names)
        for fall in explanation.waterfalls
        if fall.changes()
    ]


def settings_panel(names: Sequence[str], settings: Sequence[tuple[str, Sequence[str]]]) -> Html:
    """The settings that differ: key, and its text in each run."""
    if not settings:
        return panel(None, lead("No difference in any setting."))
    rows = ((key, *texts) for key, texts in settings)
    return panel(None, table(["Setting", *names], rows, text_columns=99))


def _falls(explanation: Explanation) -> Html:
    """The waterfalls, two side by side."""
    figures = _waterfalls(explanation)
    if not figures:
        return panel(None, lead("No part of any latency differs."))
    words = (
        "Of the requests that both runs completed. Parts are whole nanoseconds of every request's"
        " time and add up exactly; a p99 is split like the requests that it is interpolated from."
    )
    if not explanation.ledger:
        words += " These runs were written without a time ledger, so there are three parts only."
    return join((lead(words), placed(figures, "duo")))


def _divergence(explanation: Explanation) -> Html:
    """The first divergent decision in words, and the step in both runs side by side."""
    parts: list[Html] = [lead(sentence) for sentence in explanation.divergence_words]
    found = explanation.divergence
    if found is not None and all(found.rows):
        one, other = found.rows
        rows = [
            [id_of(name), *(_decision(name, row[name]) for row in found.rows)]
            for name in (*DECISIONS, *STATES)
            if name in found.columns or one[name] != other[name]
        ]
        parts.append(table([f"Step {count(found.step)}", *explanation.names], rows))
    return panel(None, *parts)


def _decision(name: str, value: int) -> str:
    return BLOCKED_BY.get(BLOCKED[value], "no refusal") if name == "blocked" else count(value)


def _carriers(explanation: Explanation) -> Html:
    """The requests whose E2EL changed most, and how the change is spread."""
    share = explanation.share
    if share is None or not share.changed:
        return panel(None, lead("Every request took the same time."))
    words = (
        f"{count(share.changed)} of {plural(share.total, 'request')} took a different time. Half of"
        f" the total change is in {plural(share.half, 'request')}"
        f" ({percent(share.half / share.total)}); the {LISTED} that changed most:"
    )
    rows = [
        [
            id_of(each.id),
            f"{LABELS[each.part]} {signed(each.part_ns / 1e9, 's')}",
            *_three(*each.e2el_ns),
            " → ".join(map(count, each.preemptions)),
        ]
        for each in explanation.carriers
    ]
    head = ["Request", "Most of it", *(f"E2EL {name}" for name in explanation.names)]
    head += ["Difference", "Preemptions"]
    return join((lead(words), panel(None, table(head, rows, text_columns=2))))


def _blocks(explanation: Explanation) -> Html:
    """Blocks by fate, where their number changed."""
    if not explanation.blocks:
        return panel(None, lead("Every block had the same fate in both runs."))
    rows = [
        [
            BLOCKS[each.column],
            *(number(round(value, 1)) for value in each.blocks),
            signed(round(each.blocks[1] - each.blocks[0], 1), ""),
            id_of(each.id),
            signed(round(each.change, 1), ""),
        ]
        for each in explanation.blocks
    ]
    head = ["Blocks", *explanation.names, "Difference", "Most in request", "there"]
    return panel(None, table(head, rows))


def _parts(explanation: Explanation) -> Html:
    """Every part of every figure in both runs; the last line of each figure is the sum."""
    head, panels = ["", *explanation.names, "Difference"], []
    for fall in explanation.waterfalls:
        rows = [[LABELS[part], *_three(a, b)] for part, (a, b) in fall.parts.items() if a or b]
        rows.append([element("strong", "together"), *_three(*fall.totals)])
        panels.append(panel(title_of(fall), table(head, rows)))
    return join(panels)


def _waterfall(fall: Waterfall, id: str, names: tuple[str, str]) -> Figure:
    changes = fall.changes()
    unit, ns = time_unit(abs(float(change)) for _, change in changes)
    lengths = [*(float(change) / ns for _, change in changes), float(fall.difference) / ns]
    ends = list(accumulate(lengths[:-1]))
    colours = ["recompute" if length > 0 else "prefill" for length in lengths[:-1]] + ["used"]
    texts = [signed(length * ns / 1e9, "s") for length in lengths]
    ticks = [
        f"{label}  {text}"
        for label, text in zip(
            [*(LABELS[part] for part, _ in changes), "together"], texts, strict=True
        )
    ]
    data = {
        "type": "bar",
        "orientation": "h",
        "base": compact([0, *ends[:-1], 0]),
        "x": compact(lengths),
        "y": list(range(len(ticks))),
        "marker": {"color": [f"var(--{colour})" for colour in colours], "line": {"width": 0}},
        "textposition": "none",
    }
    return chart(
        id,
        f"{title_of(fall)} {texts[-1]}",
        _made_of(names, fall),
        [told(data, texts)],
        titled(f"difference ({unit})", showgrid=True, nticks=5, tickangle=0),
        rows_axis(ticks),
        height=_FRAME_PX + _ROW_PX * len(ticks),
        hovermode="closest",
        margin=room_for(ticks),
        bargap=_GAP,
        shapes=_connectors(compact(ends)),
    )


def _connectors(ends: Points) -> list[Axis]:
    """Lines from the end of each bar to the next bar, which begins there."""
    stroke, half = {"color": "var(--rule)", "width": 1}, (1 - _GAP) / 2
    return [
        {"type": "line", "x0": x, "x1": x, "y0": i + half, "y1": i + 1 - half, "line": stroke}
        for i, x in enumerate(ends)
    ]


def _made_of(names: tuple[str, str], fall: Waterfall) -> str:
    """The requests that a percentile is interpolated from; empty for a mean."""
    if not any(fall.places):
        return ""
    weights = (
        " and ".join(f"{percent(float(place.weight))} of {place.id}" for place in places)
        for places in fall.places
    )
    texts = (f"in {name} {each}" for name, each in zip(names, weights, strict=True))
    return f"The percentile interpolates these requests: {'; '.join(texts)}."


def _three(first: Fraction | int, other: Fraction | int) -> list[str]:
    """Times in both runs, and their difference."""
    change = signed(float(other - first) / 1e9, "s") if first != other else "no difference"
    return [seconds(float(first) / 1e9), seconds(float(other) / 1e9), change]


MOST_SPELLS = 200
"""Most spells that are drawn one by one; with more, each standing is drawn once."""

_PARTS = (
    *("waiting_blocks", "own_prefill", "own_decode", "recompute", "preempted_waiting"),
    *("swapped_waiting", "waiting_tier", "waiting_load", "reload", "deferred_free"),
)
STANDING_COLOURS = {
    name: f"part-{part}" for name, part in zip(standings.NAMES, _PARTS, strict=True)
}
"""Standing → the colour of the part of the ledger that most of it becomes."""


def build_story(story: Story, tail: Sequence[str] = ()) -> str:
    """The whole file; equal stories give equal bytes. `tail`: why its like are slow."""
    sections = {
        "Time line": _time_line(story),
        "Where its time went": _ledger(story.times_ns, TIME_LABELS, "part", "Time"),
        "Its prompt tokens": _ledger(story.tokens, PROMPT_LABELS, "prompt", "Tokens"),
    }
    remarks = [(said, "plain") for said in (story.verdict, *tail) if said]
    title = f"Request {story.id}"
    return document("kvsim why", title, sections, subject=story.about, remarks=remarks)


def _time_line(story: Story) -> Html:
    lengths = [(spell.standing, spell.end_ns - spell.begin_ns) for spell in story.spells]
    seen = {standing for standing, _ in lengths}
    if len(lengths) > MOST_SPELLS:
        lengths = [(each, sum(ns for s, ns in lengths if s == each)) for each in sorted(seen)]
    whole = sum(ns for _, ns in lengths)
    bar = strip(
        (STANDING_COLOURS[standing], ns / whole, f"{standing}: {seconds(ns / 1e9)}")
        for standing, ns in lengths
    )
    key = key_of((colour, name) for name, colour in STANDING_COLOURS.items() if name in seen)
    rows = [
        (text, f"{time_ns / 1e9:,.6f} s", seconds((time_ns - story.arrival_ns) / 1e9))
        for time_ns, text in story.moments
    ]
    return panel(None, bar, key, table(["What happened", "At", "After its arrival"], rows))


def _ledger(values: Mapping[str, int], labels: Mapping[str, str], family: str, unit: str) -> Html:
    if not values:
        return Html()
    parts = ((f"{family}-{bare(name)}", n, labels[name]) for name, n in values.items())
    rows = ledger_rows(values, labels)
    return panel(None, shares(parts), table(["", unit, "Share"], rows))

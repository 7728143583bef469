"""Writes the comparison of runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvsim.explain.certainty import Comparison, Pair, Verdict
from kvsim.explain.differences import Pairs, pair
from kvsim.report import wording
from kvsim.report.compare import (
    INSIGNIFICANT,
    MEANING,
    NO_DIFFERENCE,
    Row,
    cautions,
    certain_table,
    change_words,
    compare_table,
    config_differences,
    difference_words,
    finding_words,
    interval_words,
    method_words,
    ranking_words,
    value_words,
)
from kvsim.report.explanation import Explanation, Run, explain
from kvsim.report.pages.diff import run_lines, settings_panel, why
from kvsim.report.pages.figures import (
    Figure,
    Trace,
    chart,
    compact,
    held,
    line,
    points,
    room_for,
    rows_axis,
    rule,
    step_line,
    thinned,
    time_axis,
    time_chart,
    time_unit,
    titled,
)
from kvsim.report.pages.html import (
    Html,
    card,
    cards,
    document,
    element,
    join,
    key_of,
    lead,
    panel,
    placed,
    table,
)
from kvsim.report.pages.latencies import distribution_figures
from kvsim.report.pages.view import View, look_at
from kvsim.report.routing import fleet_verdict
from kvsim.results.metrics import HEADLINES, LATENCIES
from kvsim.results.numerals import count, percent, plural, show, signed
from kvsim.results.phases import durations_ns

COLOURS = 8
POINTS = 400
COMPARED = ("ttft", "e2el")
"""Latencies that are compared request by request."""

LEVELS = (
    ("used_blocks", "GPU blocks in use", "GPU blocks"),
    ("waiting", "Requests waiting", "requests"),
    ("running", "Requests running", "requests"),
)
_ROW_PX, _FRAME_PX = 44, 64

Summaries = Sequence[tuple[str, Mapping[str, Any]]]


def build_comparison(runs: Sequence[Run], comparison: Comparison | None = None) -> str:
    """The page of two runs or more, each (name, summary, requests, steps).

    All runs are compared with the first. With a `comparison`, figures are its means and verdicts,
    and the runs are those of its first seed.
    """
    names = [name for name, *_ in runs]
    levels = placed(_level_figures(names, [look_at(*run) for _, *run in runs]))
    return comparison_page(
        [run[:3] for run in runs],
        [explain(runs[0], other) for other in runs[1:]],
        comparison,
        {"Over time": join((run_key(names), levels))},
    )


def comparison_page(
    runs: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]],
    explained: Sequence[Explanation],
    comparison: Comparison | None,
    further: Mapping[str, Html],
) -> str:
    """The page of runs, each (name, summary, requests), and of what explains each of the others;
    `further` are sections of one seed."""
    summaries, names = [run[:2] for run in runs], [name for name, *_ in runs]
    rows = compare_table(summaries) if comparison is None else certain_table(comparison)
    spread = distribution_figures(
        [
            (name, run_colour(i), durations_ns(requests))
            for i, (name, _, requests) in enumerate(runs)
        ]
    )
    paired = [(name, pair(runs[0][2], requests)) for name, _, requests in runs[1:]]
    of_one_seed = {
        "Why": _reasons(explained),
        "Request by request": _request_by_request(names, paired),
        "Latency": join((run_key(names), placed(spread, "trio"))),
        **further,
    }
    seeds = comparison.seeds if comparison is not None else ()
    if comparison is not None and comparison.method == "seeds":
        note = lead(f"Of seed {seeds[0]} alone.")
        of_one_seed = {name: join((note, section)) for name, section in of_one_seed.items()}
    sections = {
        "Differences": _headlines(names, rows),
        "Certainty": _certainty(comparison, rows) if comparison else None,
        "Why": of_one_seed.pop("Why"),
        "Settings": settings_panel(names, config_differences(summaries)),
        "All figures": _all_figures(names, rows),
        **of_one_seed,
    }
    return document(
        "kvsim compare",
        f"{', '.join(names[1:])} against {names[0]}",
        sections,
        about=run_lines(summaries, [run_colour(i) for i in range(len(names))]),
        remarks=(*_verdicts(names, rows), *_remarks(summaries, seeds)),
    )


def _reasons(explained: Sequence[Explanation]) -> Html:
    """Why each run differs from the first, with the name of the run if there are several."""
    return join(
        part
        for i, each in enumerate(explained)
        for part in (
            element("h3", each.names[1]) if explained[1:] else None,
            why(each, f"fall-{i}"),
        )
    )


def run_colour(i: int) -> str:
    """Name of the colour of run number `i`; they repeat after `COLOURS` runs."""
    return f"run-{i % COLOURS}"


def _verdicts(names: Sequence[str], rows: Sequence[Row]) -> Iterable[tuple[str, str]]:
    """In which main figures each run is better and worse than the first, in a sentence."""
    main = [row for row in rows if row.metric.key in HEADLINES]
    nothing = INSIGNIFICANT if any(row.verdicts for row in main) else NO_DIFFERENCE
    for i, name in enumerate(names[1:]):
        found = {
            tone: [f"{r.metric.label} {change_words(r, i)}" for r in main if r.judge(i) == tone]
            for tone in ("better", "worse")
        }
        told = "; ".join(f"{tone} in {', '.join(each)}" for tone, each in found.items() if each)
        yield f"{name} against {names[0]}: {told or f'{nothing} in the main figures'}.", "plain"


def _remarks(runs: Summaries, seeds: Sequence[int]) -> Iterable[tuple[str, str]]:
    which = f", seed {seeds[0]}" if seeds else ""
    for caution in cautions(runs, max(1, len(seeds))):
        yield caution, "warning"
    for name, summary in runs:
        several = "replicas" in summary
        fate, *others = fleet_verdict(summary) if several else wording.verdict(summary)
        for text, tone in (fate, *(remark for remark in others if remark.tone != "plain")):
            yield f"{name}{which}: {text}", tone


def _headlines(names: Sequence[str], rows: Sequence[Row]) -> Html:
    """Cards of the main differences, for each run."""
    shown = [row for row in rows if row.metric.key in HEADLINES]
    parts: list[Html] = []
    for i, name in enumerate(names[1:]):
        if names[2:]:
            parts.append(element("h3", name))
        known = (row for row in shown if (row.values[0], row.values[i + 1]) != (None, None))
        parts.append(cards(_card(row, i) for row in known))
    return join(parts)


def _card(row: Row, i: int) -> Html:
    judgement = row.judge(i)
    both = " → ".join(show(row.values[place], row.metric.unit) for place in (0, i + 1))
    words = "not significant" if judgement == "insignificant" else change_words(row, i)
    if not words:
        return card(row.metric.label, both)
    return card(row.metric.label, words, both, interval_words(row, i), tone=judgement)


def _all_figures(names: Sequence[str], rows: Sequence[Row]) -> Html:
    """Values and below them differences, in groups; the names are repeated at each group."""
    body: list[Html] = []
    group = ""
    for row in rows:
        if row.metric.group != group:
            group = row.metric.group
            heads = (element("td", name, class_="number") for name in names)
            body.append(element("tr", element("td", group), *heads, class_="group"))
        cells = (_cell(row, i) for i in range(len(names)))
        body.append(element("tr", element("td", row.metric.label), *cells))
    words = "Green is better, red is worse; where neither direction is better as such, no colour."
    words += f" {MEANING}"
    whole = element("table", element("tbody", *body), class_="stacked")
    return join((lead(words), panel(None, element("div", whole, class_="scroll"))))


def _cell(row: Row, i: int) -> Html:
    """A value, and below it its difference to the first run's with the interval."""
    below: list[str] = []
    if i:
        change = dict.fromkeys((difference_words(row, i - 1), change_words(row, i - 1)))
        below = [", ".join(filter(None, change)), interval_words(row, i - 1)]
    changes = (element("div", text, class_=row.judge(i - 1)) for text in below if text)
    return element("td", value_words(row, i), *changes, class_="number")


def _certainty(comparison: Comparison, rows: Sequence[Row]) -> Html:
    """Method, intervals as drawn, a verdict for each headline figure, and rankings."""
    names = comparison.names
    parts: list[Html] = [lead(sentence) for sentence in method_words(comparison)]
    if names[2:]:
        parts.append(run_key(names, skip=1))
    parts.append(placed(_interval_figures(comparison, rows)))
    for other, name in enumerate(names[1:], 1):
        lines = [
            (row.metric.label, _verdict(comparison, row, other))
            for row in rows
            if row.metric.key in HEADLINES and row.verdicts[other - 1] is not None
        ]
        verdicts = table(["", "Verdict"], lines, text_columns=2)
        parts.append(panel(f"{name} against {names[0]}", verdicts))
    if names[2:]:
        orders = ((row.metric.label, ranking_words(comparison, row.metric.key)) for row in rows)
        ranking = table(["", "Order"], (each for each in orders if each[1]), text_columns=2)
        parts.append(panel("Best first; ≈ between runs without a significant difference", ranking))
    return join(parts)


def _verdict(comparison: Comparison, row: Row, other: int) -> Html:
    verdict = row.verdicts[other - 1]
    assert verdict is not None
    words = finding_words(comparison, Pair(row.metric.key, 0, other), verdict)
    return element("span", words, class_=row.judge(other - 1))


def _interval_figures(comparison: Comparison, rows: Sequence[Row]) -> list[Figure]:
    """Intervals of the headline figures as shares of the first run's value, if any is not 0."""
    shown = [
        row
        for row in rows
        if row.metric.key in HEADLINES
        and row.values[0]
        and any(verdict is not None and verdict.finding != "same" for verdict in row.verdicts)
    ]
    if not shown:
        return []
    first, *others = comparison.names
    data = [_intervals(shown, i, len(others), name) for i, name in enumerate(others)]
    labels, across = [row.metric.label for row in shown], f"difference to {first} (%)"
    title = "Differences and their intervals"
    return [_interval_chart(title, across, data, labels, _ROW_PX)]


def _intervals(rows: Sequence[Row], i: int, others: int, name: str) -> Trace:
    """One mark with its interval for each row in which run `i + 1` has one."""
    known = [
        (place + 0.6 * ((i + 0.5) / others - 0.5), row.values[0], verdict)
        for place, row in enumerate(rows)
        if (verdict := row.verdicts[i]) is not None and row.values[0]
    ]
    return _marks(known, run_colour(i + 1)) | {"name": name}


def interval_figure(title: str, first: float, verdicts: Sequence[tuple[str, Verdict]]) -> Figure:
    """Verdicts on one figure, each with its name, as shares of its first value."""
    data = [_marks([(place, first, each) for place, (_, each) in enumerate(verdicts)], "run-1")]
    return _interval_chart(title, "difference (%)", data, [name for name, _ in verdicts], 28)


def _marks(known: Sequence[tuple[float, float, Verdict]], colour: str) -> Trace:
    """Marks with intervals, each at its height: a verdict as shares of the first value."""
    x = compact(100 * verdict.difference / first for _, first, verdict in known)
    reach = {
        "array": compact(100 * (v.high - v.difference) / first for _, first, v in known),
        "arrayminus": compact(100 * (v.difference - v.low) / first for _, first, v in known),
        "type": "data",
        "symmetric": False,
        "thickness": 1.6,
        "width": 4,
    }
    trace = points(x, compact(place for place, *_ in known), colour, size=9, opacity=1)
    trace["marker"]["symbol"] = [
        "circle" if v.finding == "significant" else "circle-open" for *_, v in known
    ]
    reach["color"] = f"var(--{colour})"
    return trace | {"error_x": reach, "hovertemplate": "%{x:.3~g} %"}


def _interval_chart(
    title: str, across: str, data: list[Trace], labels: Sequence[str], row_px: int
) -> Figure:
    note = "A filled mark: a significant difference. An open one: no significant difference."
    return chart(
        *("intervals", title, note, data),
        titled(across, zeroline=False, showgrid=True),
        rows_axis(labels),
        keyed=False,
        height=_FRAME_PX + row_px * len(labels),
        hovermode="closest",
        margin=room_for(labels),
        shapes=[rule("x", 0)],
    )


def _request_by_request(names: Sequence[str], paired: Sequence[tuple[str, Pairs | None]]) -> Html:
    first, parts = names[0], list[Html]()
    for name, pairs in paired:
        if paired[1:]:
            parts.append(element("h3", f"{name} against {first}"))
        if pairs is None:
            text = f"{name} and {first} had different requests, so that there are no pairs."
            parts.append(panel(None, lead(text)))
        elif not pairs.number:
            text = f"No request was completed by both {name} and {first}."
            parts.append(panel(None, lead(text)))
        else:
            parts += [_pairs_lead(first, name, pairs), _pairs_table(pairs)]
    if paired[1:]:
        parts.append(run_key(names, skip=1))
    return join((*parts, placed(_difference_figures(paired), "trio")))


def _pairs_lead(first: str, name: str, pairs: Pairs) -> Html:
    text = f"{plural(pairs.number, 'request')} completed by both, compared one by one"
    text += " with the same arrivals." if pairs.same_arrivals else ", though arrivals differ."
    for alone, number in ((first, pairs.only_first), (name, pairs.only_other)):
        if number:
            text += f" {count(number)} completed by {alone} alone are left out."
    return lead(text)


def _pairs_table(pairs: Pairs) -> Html:
    """The distribution of the differences of the pairs."""
    head = ["difference", "mean", "lowest", "p5", "p50", "p95", "highest"]
    head += ["quicker", "equal", "slower"]
    rows = []
    for kind in COMPARED:
        changes, label = pairs.differences_ns(kind), LATENCIES[kind]
        if not changes.any():
            rows.append([label, NO_DIFFERENCE, *[""] * (len(head) - 2)])
            continue
        cuts = (changes.mean(), *np.percentile(changes, (0, 5, 50, 95, 100)))
        shares = (float(np.mean(part)) for part in (changes < 0, changes == 0, changes > 0))
        rows.append([label, *(signed(float(ns) / 1e9, "s") for ns in cuts), *map(percent, shares)])
    return panel(None, table(head, rows))


def _difference_figures(paired: Sequence[tuple[str, Pairs | None]]) -> list[Figure]:
    """The differences of all pairs in ascending order, by latency."""
    there = [(i, name, pairs) for i, (name, pairs) in enumerate(paired, 1) if pairs]
    there = [(i, name, pairs) for i, name, pairs in there if pairs.number]
    return [_difference_figure(kind, there) for kind in COMPARED] if there else []


def _difference_figure(kind: str, paired: Sequence[tuple[int, str, Pairs]]) -> Figure:
    changes = [np.sort(pairs.differences_ns(kind)) for *_, pairs in paired]
    unit, ns = time_unit(float(np.abs(each).max(initial=0)) for each in changes)
    data = []
    for (i, name, _), ordered in zip(paired, changes, strict=True):
        picked = thinned(len(ordered), POINTS)
        ranks = compact(100 * (picked + 0.5) / len(ordered))
        data.append(line(ranks, compact(ordered[picked] / ns), run_colour(i), name))
    label = LATENCIES[kind]
    across = "requests, ordered by their difference (%)"
    x = titled(across, range=[0, 100], unifiedhovertitle={"text": "%{x:.3~g} % of the requests"})
    y = titled(f"{label} difference ({unit})", rangemode="normal")
    note = "Below the line a request was quicker than in the first run, above it slower."
    title, zero = f"{label} differences", [rule("y", 0)]
    return chart(f"paired-{kind}", title, note, data, x, y, keyed=False, height=260, shapes=zero)


def _level_figures(names: Sequence[str], views: Sequence[View]) -> list[Figure]:
    """What each run held over time, as lines in one chart."""
    end_ns = max(view.end_ns for view in views)
    if not end_ns:
        return []
    axis, figures = time_axis(end_ns), []
    for column, title, unit in LEVELS:
        levels = [
            (axis.of(v.coarse.bins.edges_ns), held(v.coarse.bins.mean[column])) for v in views
        ]
        data = [step_line(*levels[i], run_colour(i), name) for i, name in enumerate(names)]
        id, y = f"level-{column}", titled(unit)
        figures.append(time_chart(axis, id, title, "", data, y, keyed=False, height=240))
    return figures


def run_key(names: Sequence[str], skip: int = 0) -> Html:
    """A legend: the colour of each run."""
    return key_of([(run_colour(i), name) for i, name in enumerate(names)][skip:])

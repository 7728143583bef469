"""Writes runs beside each other: figures, and why they differ; and the story of one request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np

from kvsim.core.schema import BLOCKED
from kvsim.explain.certainty import Comparison, Verdict
from kvsim.explain.differences import (
    BLOCKS,
    DECISIONS,
    LABELS,
    LISTED,
    STATES,
    Pairs,
    Waterfall,
    pair,
)
from kvsim.explain.story import Story, ledger_rows
from kvsim.report import wording
from kvsim.report.compare import (
    INSIGNIFICANT,
    MEANING,
    NO_DIFFERENCE,
    Explanation,
    Named,
    Row,
    Summaries,
    cautions,
    certain_table,
    change_words,
    compare_table,
    config_differences,
    difference_words,
    explain,
    headline_findings,
    interval_words,
    method_words,
    ranking_words,
    value_words,
)
from kvsim.report.pages.figures import (
    Axis,
    Figure,
    Points,
    Trace,
    chart,
    compact,
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
    told,
)
from kvsim.report.pages.html import (
    Html,
    card,
    cards,
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
from kvsim.report.pages.latencies import distribution_figures
from kvsim.report.pages.run import ended_label, source_label
from kvsim.report.pages.view import View, look_at
from kvsim.report.wording import fleet_verdict
from kvsim.results.ledger import PROMPT_LABELS, TIME_LABELS, standings
from kvsim.results.metrics import BLOCKED_BY, HEADLINES, LATENCIES
from kvsim.results.numerals import count, number, percent, plural, seconds, show, signed
from kvsim.results.statistics import durations_ns
from kvsim.results.summary import bare

COLOURS = 8
POINTS = 400
COMPARED = ("ttft", "e2el")
"""Latencies that are compared request by request."""

LEVELS = (
    ("used_blocks", "GPU blocks in use", "GPU blocks"),
    ("waiting", "Requests waiting", "requests"),
    ("running", "Requests running", "requests"),
)
_INTERVAL_ROW_PX, _INTERVAL_FRAME_PX = 44, 64


def build_comparison(runs: Sequence[Named], comparison: Comparison | None = None) -> str:
    """The page of two runs or more, each of one engine.

    All are compared with the first. With a `comparison`, figures are its means and verdicts,
    and the runs are those of its first seed.
    """
    names = [name for name, _ in runs]
    views = [look_at(run.summary, run.requests, run.steps) for _, run in runs]
    levels = placed(_level_figures(names, views))
    return comparison_page(
        runs,
        [explain(runs[0], other) for other in runs[1:]],
        comparison,
        {"Over time": join((run_key(names), levels))},
    )


def comparison_page(
    runs: Sequence[Named],
    explained: Sequence[Explanation],
    comparison: Comparison | None,
    further: Mapping[str, Html],
) -> str:
    """The page of runs and of what explains each but the first; `further`: sections of one seed."""
    names, first = [name for name, _ in runs], runs[0][1]
    summaries = [(name, run.summary) for name, run in runs]
    rows = compare_table(summaries) if comparison is None else certain_table(comparison)
    spread = distribution_figures(
        [(name, run_colour(i), durations_ns(run.requests)) for i, (name, run) in enumerate(runs)]
    )
    paired = [(name, pair(first.requests, run.requests)) for name, run in runs[1:]]
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
    parts = []
    for i, each in enumerate(explained):
        if explained[1:]:
            parts.append(element("h3", each.names[1]))
        parts.append(why(each, f"fall-{i}"))
    return join(parts)


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
            (row.metric.label, element("span", words, class_=row.judge(other - 1)))
            for row, words in headline_findings(comparison, rows, other)
        ]
        verdicts = table(["", "Verdict"], lines, text_columns=2)
        parts.append(panel(f"{name} against {names[0]}", verdicts))
    if names[2:]:
        orders = ((row.metric.label, ranking_words(comparison, row.metric.key)) for row in rows)
        ranking = table(["", "Order"], (each for each in orders if each[1]), text_columns=2)
        parts.append(panel("Best first; ≈ between runs without a significant difference", ranking))
    return join(parts)


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
    return [_interval_chart(title, across, data, labels, _INTERVAL_ROW_PX)]


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
        height=_INTERVAL_FRAME_PX + row_px * len(labels),
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
    for alone, left_out in ((first, pairs.only_first), (name, pairs.only_other)):
        if left_out:
            text += f" {count(left_out)} completed by {alone} alone are left out."
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
    numbered = enumerate(paired, 1)
    there = [(i, name, pairs) for i, (name, pairs) in numbered if pairs and pairs.number]
    across = "requests, ordered by their difference (%)"
    x = titled(across, range=[0, 100], unifiedhovertitle={"text": "%{x:.3~g} % of the requests"})
    note = "Below the line a request was quicker than in the first run, above it slower."
    figures = []
    for kind in COMPARED if there else ():
        changes = [np.sort(pairs.differences_ns(kind)) for *_, pairs in there]
        unit, ns = time_unit(float(np.abs(each).max(initial=0)) for each in changes)
        data = []
        for (i, name, _), ordered in zip(there, changes, strict=True):
            picked = thinned(len(ordered), POINTS)
            ranks = compact(100 * (picked + 0.5) / len(ordered))
            data.append(line(ranks, compact(ordered[picked] / ns), run_colour(i), name))
        label, zero = LATENCIES[kind], [rule("y", 0)]
        y = titled(f"{label} difference ({unit})", rangemode="normal")
        id, title = f"paired-{kind}", f"{label} differences"
        look: dict[str, Any] = {"keyed": False, "height": 260, "shapes": zero}
        figures.append(chart(id, title, note, data, x, y, **look))
    return figures


def _level_figures(names: Sequence[str], views: Sequence[View]) -> list[Figure]:
    """What each run held over time, as lines in one chart."""
    end_ns = max(view.end_ns for view in views)
    if not end_ns:
        return []
    axis, figures = time_axis(end_ns), []
    for column, title, unit in LEVELS:
        data = [
            step_line(axis.of(v.coarse.edges_ns), v.coarse.mean[column], run_colour(i), name)
            for i, (v, name) in enumerate(zip(views, names, strict=True))
        ]
        id, y = f"level-{column}", titled(unit)
        figures.append(time_chart(axis, id, title, "", data, y, keyed=False, height=240))
    return figures


def run_key(names: Sequence[str], skip: int = 0) -> Html:
    """A legend: the colour of each run."""
    return key_of([(run_colour(i), name) for i, name in enumerate(names)][skip:])


_ROW_PX, _FRAME_PX = 26, 78
_GAP = 0.2
"""Part of a row that is free between its bar and the next."""


def build_diff(first: Named, other: Named) -> str:
    """The page that says why the second run differs from the first."""
    return diff_page(explain(first, other), (first, other), {})


def diff_page(explanation: Explanation, runs: Sequence[Named], further: Mapping[str, Html]) -> str:
    """The page of an explanation of two runs, with `further` sections before the settings."""
    summaries = [(name, run.summary) for name, run in runs]
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


def run_lines(runs: Summaries, colours: Sequence[str] = ()) -> list[Html]:
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
        panels.append(panel(fall.title, table(head, rows)))
    return join(panels)


def _waterfall(fall: Waterfall, id: str, names: tuple[str, str]) -> Figure:
    changes = fall.changes()
    unit, ns = time_unit(abs(float(change)) for _, change in changes)
    lengths = [*(float(change) / ns for _, change in changes), float(fall.difference) / ns]
    ends = list(accumulate(lengths[:-1]))
    colours = ["recompute" if length > 0 else "prefill" for length in lengths[:-1]] + ["used"]
    texts = [signed(length * ns / 1e9, "s") for length in lengths]
    labels = [*(LABELS[part] for part, _ in changes), "together"]
    ticks = [f"{label}  {text}" for label, text in zip(labels, texts, strict=True)]
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
        f"{fall.title} {texts[-1]}",
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

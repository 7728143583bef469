"""Writes the comparison of runs as one HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvsim.certainty.comparison import Comparison
from kvsim.report import panels, wording
from kvsim.report.certainty import certain_table
from kvsim.report.certainty_panel import certainty_section, interval_figures
from kvsim.report.compare import (
    NO_DIFFERENCE,
    Row,
    cautions,
    change_words,
    compare_table,
    config_differences,
    difference_words,
    interval_words,
    relative_words,
    value_words,
)
from kvsim.report.compare_figures import COMPARED, difference_figures, level_figures, run_colour
from kvsim.report.distribution_figures import distribution_figures
from kvsim.report.document import document, figure_place, masthead
from kvsim.report.explanation import Explanation, Run, explain
from kvsim.report.explanation_panel import waterfall_figures, why
from kvsim.report.figures import Figure
from kvsim.report.html import Html, element, join, key_of, panel, table
from kvsim.report.metrics import HEADLINES, LATENCIES
from kvsim.report.numerals import count, percent, plural, show, signed
from kvsim.report.pairing import Pairs, pair
from kvsim.report.view import look_at

Summaries = Sequence[tuple[str, Mapping[str, Any]]]

_ABREAST = 3
"""Up to this number of runs, differences have columns of their own; with more, they stand below the
values."""


def build_comparison(
    runs: Sequence[Run],
    comparison: Comparison | None = None,
) -> str:
    """One page on two runs or more, each (name, summary, requests, steps).

    All runs are compared with the first. With a `comparison`, figures are its means and verdicts,
    and the runs are those of its first seed. Equal inputs give equal bytes.
    """
    summaries = [(name, summary) for name, summary, *_ in runs]
    rows = compare_table(summaries) if comparison is None else certain_table(comparison)
    paired = [(name, pair(runs[0][2], requests)) for name, _, requests, _ in runs[1:]]
    views = [(name, look_at(*run)) for name, *run in runs]
    spread = distribution_figures(
        [(name, run_colour(i), view.durations) for i, (name, view) in enumerate(views)], marks=False
    )
    differences = difference_figures(
        [(i, name, pairs) for i, (name, pairs) in enumerate(paired, 1) if pairs and pairs.number]
    )
    levels = level_figures(views)
    explained = _explained(runs)
    reasons = [figure for _, figures in explained for figure in figures]
    intervals = [] if comparison is None else interval_figures(comparison, rows)
    sections = {
        "Differences": _headlines(summaries, rows),
        **_certainty(comparison, rows, intervals),
        "Why": _why(explained),
        "Settings": _settings(summaries),
        "All figures": _figures_table(summaries, rows),
        "Request by request": _request_by_request(summaries, paired, differences),
        "Latency": join((_key(summaries), _side_by_side(spread))),
        "Over time": join((_key(summaries), *(figure_place(figure) for figure in levels))),
    }
    names = [name for name, _ in summaries]
    title = f"{', '.join(names[1:])} against {names[0]}"
    if comparison is not None and comparison.method == "seeds":
        note = element("p", f"Of seed {comparison.seeds[0]} alone.")
        for name in ("Why", "Request by request", "Latency", "Over time"):
            sections[name] = join((note, sections[name]))
    header = _header(title, summaries, comparison)
    return document(title, header, sections, [*intervals, *reasons, *differences, *spread, *levels])


def _explained(runs: Sequence[Run]) -> list[tuple[Explanation, list[Figure]]]:
    """Why each run differs from the first, with its figures."""
    explanations = [explain(runs[0], other) for other in runs[1:]]
    return [(each, waterfall_figures(each, f"fall-{i}")) for i, each in enumerate(explanations)]


def _why(explained: Sequence[tuple[Explanation, Sequence[Figure]]]) -> Html:
    parts: list[Html] = []
    for explanation, figures in explained:
        if len(explained) > 1:
            parts.append(element("h3", explanation.names[1]))
        parts.append(why(explanation, figures))
    return join(parts)


def _certainty(
    comparison: Comparison | None,
    rows: Sequence[Row],
    figures: Sequence[Figure],
) -> dict[str, Html]:
    if comparison is None:
        return {}
    drawn = join(figure_place(figure) for figure in figures)
    if len(comparison.names) > 2:
        drawn = join((_key_of(comparison.names, skip=1), drawn))
    return {"Certainty": certainty_section(comparison, rows, drawn)}


def _header(title: str, runs: Summaries, comparison: Comparison | None) -> Html:
    seeds = comparison.seeds if comparison is not None else ()
    found = cautions(runs, max(1, len(seeds)))
    remarks: list[tuple[str, str]] = [(caution, "warning") for caution in found]
    which = f", seed {seeds[0]}" if seeds else ""
    for name, summary in runs:
        fate, *others = wording.verdict(summary)
        alarming = [remark for remark in others if remark.tone != "plain"]
        remarks += [(f"{name}{which}: {text}", tone) for text, tone in (fate, *alarming)]
    lines = (_run_line(i, name, summary) for i, (name, summary) in enumerate(runs))
    return masthead("kvsim comparison", title, *lines, remarks=remarks)


def _run_line(i: int, name: str, summary: Mapping[str, Any]) -> Html:
    return element(
        "div",
        element("span", class_="swatch", style=f"--colour: var(--{run_colour(i)})"),
        element("strong", name),
        element("span", wording.subject(summary["meta"]), class_="muted"),
        panels.tags(summary),
        class_="run",
    )


def _headlines(runs: Summaries, rows: Sequence[Row]) -> Html:
    """Cards of the main differences, for each run."""
    shown = [row for row in rows if row.metric.key in HEADLINES]
    parts: list[Html] = []
    for i, (name, _) in enumerate(runs[1:]):
        if len(runs) > 2:
            parts.append(element("h3", name))
        known = (row for row in shown if (row.values[0], row.values[i + 1]) != (None, None))
        parts.append(element("dl", *(_card(row, i) for row in known), class_="cards"))
    return join(parts)


def _card(row: Row, i: int) -> Html:
    unit = row.metric.unit
    words = change_words(row, i) or "–"
    if row.judge(i) == "insignificant":
        words = "not significant"
    before, after = show(row.values[0], unit), show(row.values[i + 1], unit)
    return element(
        "div",
        element("dt", row.metric.label),
        element("dd", words, class_=f"value {row.judge(i)}"),
        element("dd", f"{before} → {after}", class_="detail"),
        element("dd", interval_words(row, i), class_="detail") if row.verdicts else None,
        class_="card",
    )


def _settings(runs: Summaries) -> Html:
    """The settings that differ."""
    differing = config_differences(runs)
    if not differing:
        return panel(None, element("p", f"{NO_DIFFERENCE.capitalize()} in any setting."))
    head = ["Setting", *(name for name, _ in runs)]
    return panel(None, table(head, ((key, *texts) for key, texts in differing), text_columns=99))


def _figures_table(runs: Summaries, rows: Sequence[Row]) -> Html:
    """Values and differences, in groups; green is better, red is worse."""
    head: list[object] = ["", runs[0][0]]
    sure, stacked = any(row.verdicts for row in rows), len(runs) > _ABREAST
    beside = ["Difference", *(["Interval"] if sure else []), "Relative"]
    for name, _ in runs[1:]:
        head += [name, *([] if stacked else beside)]
    body: list[Html] = []
    group = ""
    for row in rows:
        if row.metric.group != group:
            group = row.metric.group
            body.append(_group_row(group, head, stacked))
        body.append(_stacked_row(row) if stacked else _figures_row(row, sure))
    lead = "Green is better, red is worse; where neither direction is better as such, no colour."
    header = element("tr", *(element("th", cell, class_="number") for cell in head))
    above = None if stacked else element("thead", header)
    whole = element("table", above, element("tbody", *body), class_="stacked" if stacked else None)
    return join((element("p", lead), panel(None, element("div", whole, class_="scroll"))))


def _figures_row(row: Row, sure: bool) -> Html:
    cells = [element("td", row.metric.label), _number(value_words(row, 0))]
    for i in range(len(row.differences)):
        cells.append(_number(value_words(row, i + 1)))
        cells.append(_number(difference_words(row, i), row.judge(i)))
        if sure:
            cells.append(_number(interval_words(row, i), row.judge(i)))
        cells.append(_number(relative_words(row, i), row.judge(i)))
    return element("tr", *cells)


def _group_row(group: str, head: Sequence[object], stacked: bool) -> Html:
    """The name of a group of figures; in a long table, the names of the runs are repeated there."""
    if not stacked:
        return element("tr", element("td", group, colspan=len(head)), class_="group")
    names = (element("td", name, class_="number") for name in head[1:])
    return element("tr", element("td", group), *names, class_="group")


def _stacked_row(row: Row) -> Html:
    """Change and interval below each value, so that many runs fit side by side."""
    cells = [element("td", row.metric.label), _number(value_words(row, 0))]
    for i in range(len(row.differences)):
        below = (text for text in (change_words(row, i), interval_words(row, i)) if text)
        changes = (element("div", text, class_=row.judge(i)) for text in below)
        cells.append(element("td", value_words(row, i + 1), *changes, class_="number"))
    return element("tr", *cells)


def _number(text: str, judgement: str = "") -> Html:
    return element("td", text, class_=f"number {judgement}".strip())


def _request_by_request(
    runs: Summaries, paired: Sequence[tuple[str, Pairs | None]], figures: Sequence[Figure]
) -> Html:
    first = runs[0][0]
    parts: list[Html] = []
    for name, pairs in paired:
        if len(paired) > 1:
            parts.append(element("h3", f"{name} against {first}"))
        if pairs is None:
            text = f"{name} and {first} had different requests, so that there are no pairs."
            parts.append(panel(None, element("p", text)))
        elif not pairs.number:
            text = f"No request was completed by both {name} and {first}."
            parts.append(panel(None, element("p", text)))
        else:
            parts += [_pairs_lead(first, name, pairs), _pairs_table(pairs)]
    if len(paired) > 1:
        parts.append(_key(runs, skip=1))
    return join((*parts, _side_by_side(figures)))


def _pairs_lead(first: str, name: str, pairs: Pairs) -> Html:
    text = f"{plural(pairs.number, 'request')} completed by both, compared one by one"
    text += " with the same arrivals." if pairs.same_arrivals else ", though arrivals differ."
    for alone, number in ((first, pairs.only_first), (name, pairs.only_other)):
        if number:
            text += f" {count(number)} completed by {alone} alone are left out."
    return element("p", text)


def _pairs_table(pairs: Pairs) -> Html:
    """The distribution of the differences of the pairs."""
    rows = []
    for kind in COMPARED:
        changes = pairs.differences_ns(kind)
        label = f"{LATENCIES[kind]} difference"
        if not changes.any():
            rows.append([label, NO_DIFFERENCE, *[""] * 7])
            continue
        cuts = np.percentile(changes, (5, 50, 95))
        shares = [float(np.mean(part)) for part in (changes < 0, changes == 0, changes > 0)]
        ends = (changes.min(), *cuts, changes.max())
        rows.append(
            [
                label,
                _signed_ns(float(changes.mean())),
                *(_signed_ns(float(cut)) for cut in ends),
                *(percent(share) for share in shares),
            ]
        )
    head = ["", "mean", "lowest", "p5", "p50", "p95", "highest", "quicker", "equal", "slower"]
    return panel(None, table(head, (row + [""] * (len(head) - len(row)) for row in rows)))


def _signed_ns(ns: float) -> str:
    return signed(ns / 1e9, "s")


def _key(runs: Summaries, skip: int = 0) -> Html:
    return _key_of([name for name, _ in runs], skip)


def _key_of(names: Sequence[str], skip: int) -> Html:
    """A legend: the colour of each run."""
    entries = [(f"var(--{run_colour(i)})", name) for i, name in enumerate(names)]
    return key_of(entries[skip:])


def _side_by_side(figures: Sequence[Figure]) -> Html:
    return element("div", *(figure_place(figure) for figure in figures), class_="trio")

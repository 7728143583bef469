"""Prints runs and comparisons on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from kvsim.core.vectors import added
from kvsim.report import wording
from kvsim.report.screen import make_table, print_remarks
from kvsim.results.ledger import KERNEL_LABELS, PROMPT_LABELS, TIME_LABELS
from kvsim.results.metrics import BLOCKED_BY, HEADLINES, NAMED
from kvsim.results.numerals import percent, show
from kvsim.results.statistics import LISTED
from kvsim.results.summary import bare

if TYPE_CHECKING:
    from rich.console import Console

    from kvsim.explain.certainty import Comparison
    from kvsim.report.compare import Row, Summaries

Line = tuple[str, list[str]]
"""A label, and the parts of what stands beside it."""

_JUDGEMENTS = {"better": "green", "worse": "red", "different": ""}
_MOST_PARTS = 5
"""Most parts of a line of the ledger."""
_LABEL_COLUMNS, _ENDLESS_COLUMNS = 22, 10_000
"""The longest word of a label, and more columns than any table has."""


def render(summary: Mapping[str, Any], console: Console) -> None:
    """Print the verdict, the latencies and the key figures of memory, preemption and cache."""
    meta = summary["meta"]
    console.print(wording.subject(meta), style="bold")
    console.print(wording.time_source(meta), style="green" if wording.measured(meta) else "yellow")
    if meta.get("assumed"):
        console.print(f"Assumed: {'; '.join(wording.assumed(meta))}", style="dim")
    console.print()
    print_remarks(console, wording.verdict(summary))
    console.print()
    console.print(_latencies(summary))
    grid = Table.grid(padding=(0, 3))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for label, parts in (
        *_figures(summary),
        *((f"tiers: {label}", parts) for label, parts in wording.tier_figures(summary)),
        *_ledger(summary),
        *_head_waits(summary),
    ):
        grid.add_row(label, " · ".join(part for part in parts if part))
    console.print(grid)


def render_fleet(summary: Mapping[str, Any], console: Console) -> None:
    """Print the verdict, the latencies of all requests, a line for each replica, and what the
    router's decisions cost."""
    console.print(wording.fleet_title(summary), style="bold")
    print_remarks(console, wording.fleet_verdict(summary))
    console.print()
    console.print(_latencies(summary))
    for head, rows in wording.routing_tables(summary).values():
        console.print(make_table(*head, rows=rows, pad_edge=False))


def _latencies(summary: Mapping[str, Any]) -> Table:
    """A row for each latency, with its statistics."""
    table = make_table("latency", *LISTED, rows=wording.latency_rows(summary), pad_edge=False)
    table.columns[1 + LISTED.index("p99")].style = "bold"
    return table


def render_comparison(
    runs: Summaries, console: Console, comparison: Comparison | None = None
) -> None:
    """Print figures and differences side by side; of many runs, only the headline figures.

    With a `comparison`, figures are its means, and differences have verdicts. Runs that are all
    configured alike have no differences to print.
    """
    from kvsim.report.compare import (
        MEANING,
        NO_DIFFERENCE,
        certain_table,
        compare_table,
        method_words,
        same_configurations,
    )

    _render_subjects(runs, console, 1 if comparison is None else len(comparison.seeds))
    if len(same_configurations(runs)) == len(runs) - 1:
        return
    for sentence in method_words(comparison) if comparison else ():
        console.print(sentence)
    names = [name for name, _ in runs]
    rows = compare_table(runs) if comparison is None else certain_table(comparison)
    _render_figures(names, rows, console)
    if comparison is not None:
        _render_verdicts(comparison, rows, console)
        return
    if all(row.judge(i) == "same" for row in rows for i in range(len(runs) - 1)):
        console.print(f"{NO_DIFFERENCE.capitalize()} in any figure.")
    console.print(MEANING, style="dim")


def _render_subjects(runs: Summaries, console: Console, seeds: int) -> None:
    """Print what to bear in mind, what is compared, and which settings differ."""
    from kvsim.report.compare import cautions, config_differences

    for caution in cautions(runs, seeds):
        console.print(caution, style="yellow")
    sources = [wording.time_source(summary["meta"]) for _, summary in runs]
    for i, (name, summary) in enumerate(runs):
        console.print(f"{name}: {wording.subject(summary['meta'])}")
        if len(set(sources)) > 1:
            console.print(f"  {sources[i]}", style="dim")
        first = wording.diagnosis(summary)[:1]
        print_remarks(console, ((f"  {text}", tone) for text, tone in first))
    if len(set(sources)) == 1:
        console.print(sources[0], style="dim")
    for key, texts in config_differences(runs):
        words = (", " if runs[2:] else " → ").join(texts)
        if len(set(texts)) < len(runs):
            others = zip(texts[1:], runs[1:], strict=True)
            unlike = (f"{text} in {name}" for text, (name, _) in others if text != texts[0])
            words = f"{texts[0]}, but {', '.join(unlike)}"
        console.print(f"{key}: {words}")


def _render_figures(names: Sequence[str], rows: Sequence[Row], console: Console) -> None:
    """Print all figures; of more than two runs that do not fit abreast, only the headlines."""
    whole = _whole_table(names, rows)
    if len(names) == 2 or _fits(whole, console):
        console.print(whole)
        return
    for table in _abreast(names, [row for row in rows if row.metric.key in HEADLINES], console):
        console.print(table)
    console.print("All figures are on the page that --out writes.")


def _render_verdicts(comparison: Comparison, rows: Sequence[Row], console: Console) -> None:
    """Print the findings on headline figures against the first run, then the rankings."""
    from kvsim.report.compare import headline_findings, ranking_words

    first, *others = comparison.names
    for other, name in enumerate(others, 1):
        console.print(f"{name} against {first}", style="bold")
        for row, words in headline_findings(comparison, rows, other):
            console.print(f"  {row.metric.label}: {words}", style=_style(row, other - 1))
    if others[1:]:
        console.print("Best first (≈: no significant difference)", style="bold")
        for row in rows:
            if ranking := ranking_words(comparison, row.metric.key):
                console.print(f"  {row.metric.label}: {ranking}")


def _whole_table(names: Sequence[str], rows: Sequence[Row]) -> Table:
    """Every figure, with a column of differences after each run but the first."""
    from kvsim.report.compare import change_words, difference_words, interval_words, value_words

    heads = [head for name in names[1:] for head in (name, "difference")]
    table = make_table("", names[0], *heads)
    for _, group in groupby(rows, key=lambda row: row.metric.group):
        for row in group:
            cells: list[str | Text] = [value_words(row, 0)]
            for i in range(len(names) - 1):
                # Both say the same where a share of the first value is undefined.
                changes = dict.fromkeys((difference_words(row, i), change_words(row, i)))
                words = interval_words(row, i) if row.verdicts else " ".join(filter(None, changes))
                cells += [value_words(row, i + 1), Text(words, style=_style(row, i))]
            table.add_row(row.metric.label, *cells)
        table.add_section()
    return table


def _abreast(names: Sequence[str], rows: Sequence[Row], console: Console) -> Iterator[Table]:
    """Tables of figures, each with as many runs beside the first as the width holds."""
    start = 1
    while start < len(names):
        others = range(start, len(names))
        while len(others) > 1 and not _fits(_some_runs(names, rows, others), console):
            others = others[:-1]
        yield _some_runs(names, rows, others)
        start = others.stop


def _some_runs(names: Sequence[str], rows: Sequence[Row], others: range) -> Table:
    """Values of the first run and of the runs `others`, with changes below them."""
    from kvsim.report.compare import change_words, interval_words, value_words

    table = make_table("", names[0], *(names[i] for i in others))
    for row in rows:
        cells: list[str | Text] = [value_words(row, 0)]
        for i in others:
            change = (interval_words if row.verdicts else change_words)(row, i - 1)
            words = Text(f"{value_words(row, i)}\n")
            cells.append(words.append(change, style=_style(row, i - 1)))
        table.add_row(row.metric.label, *cells)
    return table


def _fits(table: Table, console: Console) -> bool:
    """Whether every cell fits in one line, and every label breaks only between words."""
    labels, endless = table.columns[0], console.options.update(width=_ENDLESS_COLUMNS)
    # A label may take two lines: only its longest word counts.
    labels.max_width = _LABEL_COLUMNS
    needed = console.measure(table, options=endless).maximum
    labels.max_width = None
    return needed <= console.width


def _style(row: Row, i: int) -> str:
    return _JUDGEMENTS.get(row.judge(i), "dim")


_LINES = {
    "throughput": (
        ("request_rate", "{} offered"),
        ("request_throughput", "{} served"),
        ("output_throughput", "{} output"),
        ("request_goodput", "goodput {}"),
        ("max_concurrent_requests", "at most {} at once"),
    ),
    "KV cache": (
        ("kv_cache_usage_mean", "{} used"),
        ("kv_cache_usage_max", "at most {}"),
        ("internal_fragmentation", "{} of used slots empty"),
        ("external_fragmentation", "{} of blocks stranded"),
    ),
    "queues": (
        ("running_mean", "{} running"),
        ("waiting_mean", "{} waiting"),
        ("waiting_max", "at most {} waiting"),
        ("swapped_max", "at most {} swapped"),
    ),
    "prefix cache": (
        ("prefix_cache_hit_rate", "{} of prompt tokens hit"),
        ("prefix_cache_hit_rate_with_preempted", "{} with preempted"),
        ("prefix_cache_block_hit_rate", "{} of block look-ups"),
        ("prefix_cache_request_hit_share", "{} of requests"),
    ),
    "drafts": (
        ("spec_decode_draft_tokens", "{} verified"),
        ("spec_decode_accepted_tokens", "{} accepted"),
        ("spec_decode_acceptance_length", "{} tokens a step"),
    ),
    "pipeline": (("pipeline_bubble_share", "{} of its stages' time idle"),),
}
"""Label → figures of the line, in words."""
_IF_ANY = ("swapped_max",)
"""Figures that are left out where they are 0."""


def _figures(summary: Mapping[str, Any]) -> Iterator[Line]:
    """Label and parts of each line; the line of an unused feature is left out."""
    for label, figures in _LINES.items():
        parts = [
            words.format(show(summary[key], NAMED[key].unit))
            for key, words in figures
            if summary.get(key) is not None and (summary[key] or key not in _IF_ANY)
        ]
        if parts:
            yield label, parts


def _ledger(summary: Mapping[str, Any]) -> Iterator[Line]:
    """Label and parts of each line of the ledger, the largest first."""
    if not summary["completed"]:
        return
    slow = summary["time_ledger_requests"]["p99"]
    yield "mean request", _shares(summary["time_ledger_mean_ms"], TIME_LABELS)
    yield "p99 E2EL", [f"id {slow['id']}", *_shares(slow["parts_ms"], TIME_LABELS)]
    for label, key, labels in (
        ("step time", "step_time_s", KERNEL_LABELS),
        ("prompt tokens", "prompt_ledger_tokens", PROMPT_LABELS),
    ):
        if shares := _shares(summary.get(key, {}), labels):
            yield label, shares


def _shares(values: Mapping[str, float], labels: Mapping[str, str]) -> list[str]:
    named = {label: values.get(bare(name), 0) for name, label in labels.items()}
    order = sorted(named, key=lambda label: -named[label])[:_MOST_PARTS]
    whole = added(named.values())
    return [f"{label} {percent(named[label] / whole)}" for label in order if named[label]]


def _head_waits(summary: Mapping[str, Any]) -> Iterator[Line]:
    waits = summary["head_blocked_s"].items()
    if parts := [f"{BLOCKED_BY[cause]} {show(s, 's')}" for cause, s in waits if s]:
        yield "head waits", parts

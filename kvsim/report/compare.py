"""Says in which figures runs differ, by how much, and for better or worse."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from kvsim.certainty.verdicts import Verdict
from kvsim.report import wording
from kvsim.report.metrics import HEADLINES, METRICS, Metric, value
from kvsim.report.numerals import show, signed, signed_percent
from kvsim.report.provenance import flat
from kvsim.report.statistics import ratio

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

Judgement = Literal["same", "better", "worse", "different", "insignificant"]
NO_DIFFERENCE = "no difference"
INSIGNIFICANT = "no significant difference"
_LABEL_COLUMNS, _ENDLESS_COLUMNS = 22, 10_000
"""The longest word of a label, and more columns than any table has."""


class Row(NamedTuple):
    """One figure in every run; differences are to the first run."""

    metric: Metric
    values: tuple[float | None, ...]
    """One per run."""
    differences: tuple[float | None, ...]
    """Difference of each run to the first; None where either value is undefined."""
    relative: tuple[float | None, ...]
    """Differences as shares of the first run's value; None where that is 0, and for shares."""
    deviations: tuple[float | None, ...] = ()
    """Standard deviations over seeds, one per run; empty if each run has a single value."""
    verdicts: tuple[Verdict | None, ...] = ()
    """How sure the differences are, one each; empty if that was not tested."""

    def judge(self, i: int) -> Judgement:
        """How run number `i` after the first compares with the first in this figure."""
        first, other, better = self.values[0], self.values[i + 1], self.metric.better
        verdict = self.verdicts[i] if self.verdicts else None
        if first == other if verdict is None else verdict.finding == "same":
            return "same"
        if first is None or other is None:
            return "different"
        if self.verdicts and (verdict is None or verdict.finding != "significant"):
            return "insignificant"
        if not better:
            return "different"
        return "better" if (other < first) == (better == "lower") else "worse"


def compare_table(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Row]:
    """Every figure that some run has and that is not 0 in all runs, in the order of `METRICS`.

    Each run is (name, summary); the others are compared with the first.
    """
    rows = []
    for metric in METRICS:
        values = tuple(value(summary, metric.key) for _, summary in runs)
        if any(values):
            differences = tuple(_minus(other, values[0]) for other in values[1:])
            shares = metric.unit == "share"
            relative = tuple(None if shares else ratio(d, values[0]) for d in differences)
            rows.append(Row(metric, values, differences, relative))
    return rows


def difference_words(row: Row, i: int) -> str:
    """`+1.20 s`, `+3.1 points`, `no difference`; empty if it is undefined."""
    difference = row.differences[i]
    if row.values[0] is None and row.values[i + 1] is None:
        return ""
    if row.judge(i) == "same":
        return NO_DIFFERENCE
    return "" if difference is None else signed(difference, row.metric.unit)


def relative_words(row: Row, i: int) -> str:
    """`+12.3 %`; empty if there is no difference or it is undefined."""
    relative = row.relative[i]
    return "" if not relative else signed_percent(relative)


def change_words(row: Row, i: int) -> str:
    """The difference in its shortest form: `+12.3 %`, or `+3.1 points` where that is undefined."""
    return relative_words(row, i) or difference_words(row, i)


def value_words(row: Row, i: int) -> str:
    """The value of run `i`; with its deviation where there is one: `1,107 ± 70`."""
    words = show(row.values[i], row.metric.unit)
    deviation = row.deviations[i] if row.deviations else None
    return words if deviation is None else f"{words} ± {show(deviation, row.metric.unit)}"


def interval_words(row: Row, i: int) -> str:
    """`−2.41 s … −1.44 s`; empty if there is no interval or no difference."""
    verdict = row.verdicts[i] if row.verdicts else None
    if verdict is None or verdict.finding == "same":
        return ""
    return " … ".join(signed(end, row.metric.unit) for end in (verdict.low, verdict.high))


def config_differences(
    runs: Sequence[tuple[str, Mapping[str, Any]]],
) -> list[tuple[str, tuple[str, ...]]]:
    """Settings and origins that differ between runs: (dotted key, text per run)."""
    tables = [_settings(summary["meta"]) for _, summary in runs]
    keys = dict.fromkeys(key for settings in tables for key in settings)
    listed = []
    for key in keys:
        texts = tuple(_text(settings.get(key)) for settings in tables)
        if len(set(texts)) > 1:
            listed.append((key, texts))
    return listed


def same_configurations(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """One sentence on each run that is configured like one before it, and what made them equal."""
    sentences = []
    for i, other in enumerate(runs):
        twins = [each for each in runs[:i] if not config_differences((each, other))]
        if twins:
            names = f"{twins[0][0]} and {other[0]}"
            said = f"{names} are the same configuration, so all their figures are equal."
            sentences.append(" ".join([said, *_made_equal(twins[0], other)]))
    return sentences


def _made_equal(
    one: tuple[str, Mapping[str, Any]], other: tuple[str, Mapping[str, Any]]
) -> Iterator[str]:
    """The settings that one of two equal runs gives and the other leaves to a default."""
    for giver, taker in ((one, other), (other, one)):
        given, left = (summary["meta"].get("assumed") or {} for _, summary in (giver, taker))
        for key, default in left.items():
            if key not in given:
                yield (
                    f"{giver[0]} sets {key} to {default['value']}, which is also the default of"
                    f" {default['source']} in {taker[0]}."
                )


def cautions(runs: Sequence[tuple[str, Mapping[str, Any]]], seeds: int = 1) -> list[str]:
    """What a reader must know before comparing these runs, which have `seeds` seeds each."""
    metas = [summary["meta"] for _, summary in runs]
    found = same_configurations(runs)
    for name, summary in runs:
        if not wording.finished(summary):
            found.append(f"{name} did not finish: {wording.outcome_title(summary).lower()}.")
    if len({(meta.get("trace") or {}).get("sha256") for meta in metas}) > 1:
        found.append("The runs replay different traces.")
    if len({wording.time_source(meta) for meta in metas}) > 1:
        found.append("Step times come from different sources, so that all times differ anyway.")
    random = any((m.get("config") or {}).get("request_rate") not in (None, "inf") for m in metas)
    if random and seeds == 1:
        found.append(
            "Arrivals were drawn at random: another seed would give somewhat other differences."
        )
    if len({summary["completed"] for _, summary in runs}) > 1:
        found.append(
            "The runs completed different numbers of requests; latencies count only those."
        )
    return found


def render_comparison(runs: Sequence[tuple[str, Mapping[str, Any]]], console: Console) -> None:
    """Print figures and differences side by side; of many runs, only the headline figures.

    Runs that are all configured alike have no differences to print.
    """
    from rich.text import Text

    render_subjects(runs, console)
    if len(same_configurations(runs)) == len(runs) - 1:
        return
    names, rows = [name for name, _ in runs], compare_table(runs)
    whole = _whole_table(names, rows)
    if len(runs) == 2 or fits(whole, console):
        console.print(whole)
    else:
        shown = [row for row in rows if row.metric.key in HEADLINES]
        print_abreast(lambda others: _headline_table(names, shown, others), len(names), console)
    if all(row.judge(i) == "same" for row in rows for i in range(len(runs) - 1)):
        console.print(Text(f"{NO_DIFFERENCE.capitalize()} in any figure."))


def print_abreast(build: Callable[[range], Table], runs: int, console: Console) -> None:
    """Print tables of headline figures, each with as many runs side by side as the width holds.

    `build` makes a table of the first run and of the runs with the given numbers.
    """
    from rich.text import Text

    start = 1
    while start < runs:
        others = range(start, runs)
        while len(others) > 1 and not fits(build(others), console):
            others = others[:-1]
        console.print(build(others))
        start = others.stop
    console.print(Text("All figures are on the page that --out writes."))


def fits(table: Table, console: Console) -> bool:
    """Whether every cell fits in one line, and every label breaks only between words."""
    labels, endless = table.columns[0], console.options.update(width=_ENDLESS_COLUMNS)
    labels.max_width = _LABEL_COLUMNS
    needed = console.measure(table, options=endless).maximum
    labels.max_width = None
    return needed <= console.width


def empty_table() -> Table:
    """A table with a first column for the names of figures."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, header_style="dim")
    table.add_column("")
    return table


def render_subjects(
    runs: Sequence[tuple[str, Mapping[str, Any]]], console: Console, seeds: int = 1
) -> None:
    """Print what to bear in mind, what is compared, and which settings differ."""
    from rich.text import Text

    for caution in cautions(runs, seeds):
        console.print(Text(caution, style="yellow"))
    sources = [wording.time_source(summary["meta"]) for _, summary in runs]
    for i, (name, summary) in enumerate(runs):
        console.print(Text(f"{name}: {wording.subject(summary['meta'])}"))
        if i == len(runs) - 1 or len(set(sources)) > 1:
            console.print(Text(f"  {sources[i]}", style="dim"))
    for key, texts in config_differences(runs):
        console.print(Text(f"{key}: {_setting_words([name for name, _ in runs], texts)}"))


def _setting_words(names: Sequence[str], texts: Sequence[str]) -> str:
    """`480 → 960`; of more than two runs, `0.0, but 0.05 in B, 0.15 in C`."""
    if len(texts) == 2:
        return " → ".join(texts)
    others = zip(texts[1:], names[1:], strict=True)
    unlike = (f"{text} in {name}" for text, name in others if text != texts[0])
    return f"{texts[0]}, but {', '.join(unlike)}"


_STYLES = {
    "same": "dim",
    "better": "green",
    "worse": "red",
    "different": "",
    "insignificant": "dim",
}


def _whole_table(names: Sequence[str], rows: Sequence[Row]) -> Table:
    """Every figure, with a column of differences after each run but the first."""
    from rich.text import Text

    table = empty_table()
    for i, name in enumerate(names):
        table.add_column(Text(name), justify="right")
        if i:
            table.add_column(Text("difference"), justify="right")
    for _, group in groupby(rows, key=lambda row: row.metric.group):
        for row in group:
            table.add_row(*_cells(row))
        table.add_section()
    return table


def _headline_table(names: Sequence[str], rows: Sequence[Row], others: range) -> Table:
    """Values of the first run and of the runs `others`, with changes below them."""
    from rich.text import Text

    table = empty_table()
    for name in (names[0], *(names[i] for i in others)):
        table.add_column(Text(name), justify="right")
    for row in rows:
        cells = [Text(show(row.values[0], row.metric.unit))]
        for i in others:
            words = Text(f"{show(row.values[i], row.metric.unit)}\n")
            cells.append(words.append(change_words(row, i - 1), style=_STYLES[row.judge(i - 1)]))
        table.add_row(row.metric.label, *cells)
    return table


def _cells(row: Row) -> list[Text]:
    from rich.text import Text

    unit = row.metric.unit
    cells = [Text(row.metric.label), Text(show(row.values[0], unit))]
    for i, other in enumerate(row.values[1:]):
        words = " ".join(
            part for part in (difference_words(row, i), relative_words(row, i)) if part
        )
        cells += [Text(show(other, unit)), Text(words, style=_STYLES[row.judge(i)])]
    return cells


def _minus(other: float | None, first: float | None) -> float | None:
    return None if other is None or first is None else other - first


def _settings(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What decides a run: its configuration, its trace, its pool, its source of times."""
    trace, cost = meta.get("trace") or {}, meta.get("cost") or {}
    return {
        **flat(meta.get("config") or {}),
        "trace sha256": trace.get("sha256"),
        "GPU blocks": meta.get("num_gpu_blocks"),
        "CPU blocks": meta.get("num_cpu_blocks"),
        "watermark blocks": meta.get("watermark_blocks"),
        "step times": cost.get("source"),
        "seed": meta.get("seed"),
        "kvsim version": meta.get("kvsim_version"),
    }


def _text(setting: Any) -> str:
    return "default" if setting is None else str(setting)

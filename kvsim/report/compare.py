"""Tells in which figures runs differ, by how much, and for better or worse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from kvsim.certainty.verdicts import Verdict
from kvsim.report import wording
from kvsim.report.metrics import METRICS, Metric, value
from kvsim.report.numerals import show, signed, signed_percent
from kvsim.report.provenance import flat
from kvsim.report.statistics import ratio

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

Judgement = Literal["same", "better", "worse", "different", "untold"]
NO_DIFFERENCE = "no difference"
UNTOLD = "no difference can be told"


class Row(NamedTuple):
    """One figure in every run; differences are to the first run."""

    metric: Metric
    values: tuple[float | None, ...]
    """One per run."""
    differences: tuple[float | None, ...]
    """One per run after the first; None where either is undefined."""
    relative: tuple[float | None, ...]
    """The same over the first run's value; None where that is 0, and for shares."""
    deviations: tuple[float | None, ...] = ()
    """Standard deviations over seeds, one per run; empty: there is one value of each."""
    verdicts: tuple[Verdict | None, ...] = ()
    """How sure the differences are, one each; empty: nobody asked."""

    def judge(self, i: int) -> Judgement:
        """What the run after the first number `i` made of this figure."""
        first, other, better = self.values[0], self.values[i + 1], self.metric.better
        verdict = self.verdicts[i] if self.verdicts else None
        if first == other if verdict is None else verdict.finding == "same":
            return "same"
        if first is None or other is None:
            return "different"
        if self.verdicts and (verdict is None or verdict.finding != "told"):
            return "untold"
        if not better:
            return "different"
        return "better" if (other < first) == (better == "lower") else "worse"


def compare_table(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Row]:
    """Every figure that some run has and that is not 0 in all, in the order of `METRICS`.

    Each run is (name, summary); the first is what the others are compared with.
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
    """`+1.20 s`, `+3.1 points`, `no difference`, or nothing where it is undefined."""
    difference = row.differences[i]
    if row.judge(i) == "same":
        return NO_DIFFERENCE
    return "" if difference is None else signed(difference, row.metric.unit)


def relative_words(row: Row, i: int) -> str:
    """`+12.3 %`, or nothing where there is no difference or it is undefined."""
    relative = row.relative[i]
    return "" if not relative else signed_percent(relative)


def value_words(row: Row, i: int) -> str:
    """The value of run `i`; with its deviation where there is one: `1,107 ± 70`."""
    words = show(row.values[i], row.metric.unit)
    deviation = row.deviations[i] if row.deviations else None
    return words if deviation is None else f"{words} ± {show(deviation, row.metric.unit)}"


def interval_words(row: Row, i: int) -> str:
    """`−2.41 s … −1.44 s`; nothing where there is no interval, or no difference."""
    verdict = row.verdicts[i] if row.verdicts else None
    if verdict is None or verdict.finding == "same":
        return ""
    return " … ".join(signed(end, row.metric.unit) for end in (verdict.low, verdict.high))


def config_differences(
    runs: Sequence[tuple[str, Mapping[str, Any]]],
) -> list[tuple[str, tuple[str, ...]]]:
    """Settings and origins that are not the same in all runs: (dotted key, text per run)."""
    tables = [_settings(summary["meta"]) for _, summary in runs]
    keys = dict.fromkeys(key for settings in tables for key in settings)
    listed = []
    for key in keys:
        texts = tuple(_text(settings.get(key)) for settings in tables)
        if len(set(texts)) > 1:
            listed.append((key, texts))
    return listed


def cautions(runs: Sequence[tuple[str, Mapping[str, Any]]], seeds: int = 1) -> list[str]:
    """What a reader must know before comparing these runs, made of so many seeds each."""
    metas = [summary["meta"] for _, summary in runs]
    found = []
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
    """Print figures and differences side by side."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    render_subjects(runs, console)
    table = Table(box=box.SIMPLE_HEAD, header_style="dim")
    table.add_column("")
    for i, (name, _) in enumerate(runs):
        table.add_column(Text(name), justify="right")
        if i:
            table.add_column(Text("difference"), justify="right")
    rows = compare_table(runs)
    for _, group in groupby(rows, key=lambda row: row.metric.group):
        for row in group:
            table.add_row(*_cells(row))
        table.add_section()
    console.print(table)
    if all(row.judge(i) == "same" for row in rows for i in range(len(runs) - 1)):
        console.print(Text(f"{NO_DIFFERENCE.capitalize()} in any figure."))


def render_subjects(
    runs: Sequence[tuple[str, Mapping[str, Any]]], console: Console, seeds: int = 1
) -> None:
    """Print what is compared, what to bear in mind, and in which settings the runs differ."""
    from rich.text import Text

    for name, summary in runs:
        console.print(Text(f"{name}: {wording.subject(summary['meta'])}"))
        console.print(Text(f"  {wording.time_source(summary['meta'])}", style="dim"))
    for caution in cautions(runs, seeds):
        console.print(Text(caution, style="yellow"))
    for key, texts in config_differences(runs):
        console.print(Text(f"{key}: {' → '.join(texts)}"))


_STYLES = {"same": "dim", "better": "green", "worse": "red", "different": "", "untold": "dim"}


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

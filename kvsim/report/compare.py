"""Says in which figures runs differ, by how much, and for better or worse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from kvsim.explain import MARGIN, matters
from kvsim.explain.certainty import Verdict
from kvsim.report import wording
from kvsim.results.metrics import METRICS, Metric, value
from kvsim.results.numerals import interval, percent, show, signed, signed_percent
from kvsim.results.plain import flat
from kvsim.results.statistics import ratio

Judgement = Literal["same", "better", "worse", "different", "insignificant"]
NO_DIFFERENCE = "no difference"
MEANING = f"{NO_DIFFERENCE.capitalize()}: none of more than {percent(MARGIN)}."
"""What `NO_DIFFERENCE` means between single runs."""
INSIGNIFICANT = "no significant difference"


class Row(NamedTuple):
    """One figure in every run; differences are to the first run."""

    metric: Metric
    values: tuple[float | None, ...]
    """One per run."""
    deviations: tuple[float | None, ...] = ()
    """Standard deviations over seeds, one per run; empty if each run has a single value."""
    verdicts: tuple[Verdict | None, ...] = ()
    """How sure the differences are, one each; empty if that was not tested."""

    def difference(self, i: int) -> float | None:
        """Run number `i` after the first, minus the first; None where either is undefined."""
        first, other = self.values[0], self.values[i + 1]
        return None if first is None or other is None else other - first

    def relative(self, i: int) -> float | None:
        """The difference as a share of the first run's value; None where that is 0, and for
        shares."""
        share = self.metric.unit == "share"
        return None if share else ratio(self.difference(i), self.values[0])

    def _shows(self, difference: float) -> bool:
        """Whether a difference from the first run's value matters, and can be read."""
        first, unit = self.values[0] or 0.0, self.metric.unit
        return matters(difference, first) and show(first, unit) != show(first + difference, unit)

    def judge(self, i: int) -> Judgement:
        """How run number `i` after the first compares with the first in this figure."""
        first, other, better = self.values[0], self.values[i + 1], self.metric.better
        difference, verdict = self.difference(i), self.verdicts[i] if self.verdicts else None
        if first is None or difference is None:
            return "same" if first == other else "different"
        if verdict.finding == "same" if verdict else not self._shows(difference):
            return "same"
        if self.verdicts and (verdict is None or verdict.finding != "significant"):
            return "insignificant"
        if not better:
            return "different"
        return "better" if (difference < 0) == (better == "lower") else "worse"


def compare_table(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Row]:
    """Every figure that some run has and that is not 0 in all runs, in the order of `METRICS`.

    Each run is (name, summary); the others are compared with the first.
    """
    rows = (
        Row(metric, tuple(value(summary, metric.key) for _, summary in runs)) for metric in METRICS
    )
    return [row for row in rows if any(row.values)]


def table_record(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """The table as plain values, for a JSON file: as `comparison_record`, without certainty."""
    names = [name for name, _ in runs]
    figures = {
        row.metric.key: {
            **metric_record(row.metric),
            "runs": dict(zip(names, row.values, strict=True)),
            "differences": [
                {
                    "first": names[0],
                    "other": name,
                    "difference": row.difference(i),
                    "finding": row.judge(i),
                    "words": change_words(row, i),
                }
                for i, name in enumerate(names[1:])
            ],
        }
        for row in compare_table(runs)
    }
    return {"runs": names, "method": "one run", "figures": figures}


def metric_record(metric: Metric) -> dict[str, str]:
    """What a record says of a figure besides its values."""
    return {"label": metric.label, "unit": metric.unit, "better": metric.better}


def difference_words(row: Row, i: int) -> str:
    """`+1.20 s`, `+3.1 points`, `no difference`; empty if it is undefined."""
    difference = row.difference(i)
    if row.values[0] is None and row.values[i + 1] is None:
        return ""
    if row.judge(i) == "same":
        return NO_DIFFERENCE
    return "" if difference is None else signed(difference, row.metric.unit)


def change_words(row: Row, i: int) -> str:
    """The difference in its shortest form: `+12.3 %`, or `+3.1 points` where that is undefined."""
    relative = None if row.judge(i) == "same" else row.relative(i)
    return signed_percent(relative) if relative else difference_words(row, i)


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
    return interval(verdict.low, verdict.high, row.metric.unit)


def config_differences(
    runs: Sequence[tuple[str, Mapping[str, Any]]],
) -> list[tuple[str, tuple[str, ...]]]:
    """Settings and origins that differ between runs: (dotted key, text per run)."""
    tables = [_settings(summary["meta"]) for _, summary in runs]
    keys = dict.fromkeys(key for settings in tables for key in settings)
    listed = []
    for key in keys:
        texts = tuple(
            "default" if (found := settings.get(key)) is None else wording.setting_words(found)
            for settings in tables
        )
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


def _settings(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What decides a run: its configuration, its trace, its pool, its source of times."""
    trace, cost, router = (meta.get(key) or {} for key in ("trace", "cost", "router"))
    return {
        "router": router.get("name"),
        **flat(router.get("args") or {}, "router."),
        "replicas": meta.get("replicas"),
        **flat(meta.get("config") or {}),
        "trace sha256": trace.get("sha256"),
        "GPU blocks": meta.get("num_gpu_blocks"),
        "CPU blocks": meta.get("num_cpu_blocks"),
        "watermark blocks": meta.get("watermark_blocks"),
        "step times": cost.get("source"),
        "seed": meta.get("seed"),
        "kvsim version": meta.get("kvsim_version"),
    }

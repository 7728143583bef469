"""Says in which figures runs differ, by how much, for better or worse, how sure that is, and why.

Only runs that differ significantly are ranked. What policies do to sessions is said in sentences to
quote where these policies are discussed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import mean, stdev
from typing import Any, Literal, NamedTuple

import numpy as np

from kvsim.explain import MARGIN, matters
from kvsim.explain.certainty import (
    FEWEST_STRETCHES,
    Comparison,
    Pair,
    Values,
    Verdict,
    judge,
    paired,
)
from kvsim.explain.differences import (
    BLOCKS,
    LABELS,
    Blocks,
    Carrier,
    Divergence,
    Pairs,
    Share,
    Waterfall,
    blocks,
    carriers,
    concerned_words,
    divergence_words,
    first_divergence,
    pair,
    waterfalls,
)
from kvsim.report import wording
from kvsim.results.metrics import HEADLINES, LATENCIES, METRICS, NAMED, Metric, value
from kvsim.results.numerals import (
    count,
    interval,
    number,
    percent,
    plural,
    seconds,
    show,
    signed,
    signed_percent,
)
from kvsim.results.plain import flat, plain
from kvsim.results.statistics import ratio

Summed = tuple[str, Mapping[str, Any]]
"""Name and summary of a run."""
Summaries = Sequence[Summed]
Named = tuple[str, Any]
"""A run and its name; it has a `summary`, `requests` and, if it is of one engine, `steps`."""

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
        # Where it was tested, the test decides; otherwise what a reader can see.
        if verdict.finding == "same" if verdict else not self._shows(difference):
            return "same"
        if self.verdicts and (verdict is None or verdict.finding != "significant"):
            return "insignificant"
        if not better:
            return "different"
        return "better" if (difference < 0) == (better == "lower") else "worse"


def compare_table(runs: Summaries) -> list[Row]:
    """Every figure that some run has and that is not 0 in all runs, in the order of `METRICS`.

    Each run is (name, summary); the others are compared with the first.
    """
    rows = (
        Row(metric, tuple(value(summary, metric.key) for _, summary in runs)) for metric in METRICS
    )
    return [row for row in rows if any(row.values)]


def table_record(runs: Summaries) -> dict[str, Any]:
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


def config_differences(runs: Summaries) -> list[tuple[str, tuple[str, ...]]]:
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


def same_configurations(runs: Summaries) -> list[str]:
    """One sentence on each run that is configured like one before it, and what made them equal."""
    sentences = []
    for i, other in enumerate(runs):
        twins = [each for each in runs[:i] if not config_differences((each, other))]
        if twins:
            names = f"{twins[0][0]} and {other[0]}"
            said = f"{names} are the same configuration, so all their figures are equal."
            sentences.append(" ".join([said, *_made_equal(twins[0], other)]))
    return sentences


def _made_equal(one: Summed, other: Summed) -> Iterator[str]:
    """The settings that one of two equal runs gives and the other leaves to a default."""
    for giver, taker in ((one, other), (other, one)):
        given, left = (summary["meta"].get("assumed") or {} for _, summary in (giver, taker))
        for key, default in left.items():
            if key not in given:
                yield (
                    f"{giver[0]} sets {key} to {default['value']}, which is also the default of"
                    f" {default['source']} in {taker[0]}."
                )


def cautions(runs: Summaries, seeds: int = 1) -> list[str]:
    """What a reader must know before comparing these runs, which have `seeds` seeds each."""
    metas = [summary["meta"] for _, summary in runs]
    found = same_configurations(runs)
    found += [
        f"{name} did not finish: {wording.outcome_title(summary).lower()}."
        for name, summary in runs
        if not wording.finished(summary)
    ]
    traces = {(meta.get("trace") or {}).get("sha256") for meta in metas}
    rates = {(meta.get("config") or {}).get("request_rate") for meta in metas}
    sentences = {
        "The runs replay different traces.": len(traces) > 1,
        "Step times come from different sources, so that all times differ anyway.": (
            len(set(map(wording.time_source, metas))) > 1
        ),
        "Arrivals were drawn at random: another seed would give somewhat other differences.": (
            seeds == 1 and not rates <= {None, "inf"}
        ),
        "The runs completed different numbers of requests; latencies count only those.": (
            len({summary["completed"] for _, summary in runs}) > 1
        ),
    }
    return found + [sentence for sentence, holds in sentences.items() if holds]


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


_FEW = 5
"""Seeds below which intervals say little."""


def few_seeds(planned: int) -> list[str]:
    """A warning, if no more seeds than that were asked for."""
    return [f"Fewer than {_FEW} seeds: intervals are wide; give more."] * (planned < _FEW)


def certain_table(comparison: Comparison) -> list[Row]:
    """Means over the seeds, their deviations and the verdicts, figure by figure."""
    return [
        Row(
            NAMED[key],
            tuple(map(_mean, series)),
            tuple(map(_deviation, series)),
            tuple(comparison.verdicts.get(Pair(key, 0, i)) for i in range(1, len(series))),
        )
        for key, series in comparison.values.items()
    ]


def method_words(comparison: Comparison) -> list[str]:
    """How the intervals were computed, and what they mean."""
    sure = percent(1 - comparison.level)
    together = f"All intervals and verdicts hold together with {sure} confidence (Holm)."
    if comparison.method == "stretches":
        return [
            "Nothing in these runs is random: the trace is replayed as it is, so every"
            " seed gives the same figures. Their differences are exact for this trace.",
            "Intervals say what other stretches of the same traffic would give: requests are drawn"
            " again in long stretches, the same ones in every run. Figures of the run as a whole,"
            f" and those correlated over more than 1/{FEWEST_STRETCHES} of the trace, have none.",
            together,
        ]
    drawn = " and ".join(comparison.redrawn)
    number = plural(len(comparison.seeds), "seed")
    words = [f"{number}, the same for every run. Seeds differ in {drawn}."]
    words += few_seeds(comparison.planned)
    if len(comparison.seeds) < comparison.planned:
        words.append(
            f"Stopped before the planned {comparison.planned}: no further seed was needed to settle"
            " the headline figures."
        )
    for name, seed, outcome in comparison.unfinished:
        words.append(f"{name} did not finish seed {seed}: {outcome.replace('-', ' ')}.")
    words.append(f"{together} ± is the standard deviation over seeds.")
    if any("kernel times" in each for each in comparison.redrawn):
        words.append(
            "The error of a profile does not average out, so intervals are those of one machine"
            " drawn from it, not of the mean."
        )
    return words


def finding_words(comparison: Comparison, pair: Pair, verdict: Verdict) -> str:
    """`B is better than A by 1.90 s (−2.41 s … −1.44 s)`, or that no difference is significant."""
    metric = NAMED[pair.key]
    first, other = comparison.names[pair.first], comparison.names[pair.other]
    ends = interval(verdict.low, verdict.high, metric.unit)
    if verdict.finding == "same":
        return NO_DIFFERENCE
    if verdict.finding == "equal":
        return f"{NO_DIFFERENCE} of more than {percent(comparison.margin)} ({ends})"
    if verdict.finding == "insignificant":
        return f"{INSIGNIFICANT} ({ends})"
    size = signed(abs(verdict.difference), metric.unit).removeprefix("+")
    degree = "lower" if verdict.difference < 0 else "higher"
    if metric.better:
        degree = "better" if degree == metric.better else "worse"
    return f"{other} is {degree} than {first} by {size} ({ends})"


def headline_findings(
    comparison: Comparison, rows: Sequence[Row], other: int
) -> Iterator[tuple[Row, str]]:
    """What was found on the headline figures of run number `other` against the first."""
    for row in rows:
        verdict = row.verdicts[other - 1]
        if row.metric.key in HEADLINES and verdict is not None:
            yield row, finding_words(comparison, Pair(row.metric.key, 0, other), verdict)


def ranking_words(comparison: Comparison, key: str) -> str:
    """`C, B ≈ A`: best first; `≈` between runs without a significant difference.

    Empty for a figure that is no headline, has no better direction, or is undefined in a run.
    """
    means = [_mean(values) for values in comparison.values[key]]
    if key not in HEADLINES or not NAMED[key].better or None in means:
        return ""
    downwards = NAMED[key].better == "higher"
    order = sorted(range(len(means)), key=lambda i: means[i] or 0.0, reverse=downwards)
    text = comparison.names[order[0]]
    for before, after in pairwise(order):
        # Pairs are in the order of the runs, whichever is better.
        verdict = comparison.verdicts.get(Pair(key, min(before, after), max(before, after)))
        significant = verdict is not None and verdict.finding == "significant"
        text += f"{', ' if significant else ' ≈ '}{comparison.names[after]}"
    return text


def comparison_record(comparison: Comparison) -> dict[str, Any]:
    """Everything as plain values, for a JSON file."""
    names = comparison.names
    figures: dict[str, Any] = {}
    for key, series in comparison.values.items():
        figures[key] = {
            **metric_record(NAMED[key]),
            "runs": {
                name: {"mean": _mean(v), "std": _deviation(v), "values": list(v)}
                for name, v in zip(names, series, strict=True)
            },
            "differences": [
                {
                    "first": names[pair.first],
                    "other": names[pair.other],
                    **verdict._asdict(),
                    "words": finding_words(comparison, pair, verdict),
                }
                for pair, verdict in comparison.verdicts.items()
                if pair.key == key
            ],
        }
    return {
        "runs": list(names),
        "method": comparison.method,
        "redrawn": list(comparison.redrawn),
        "seeds": list(comparison.seeds),
        "planned_seeds": comparison.planned,
        "confidence": 1 - comparison.level,
        "margin": comparison.margin,
        "settled": comparison.settled,
        "unfinished": [list(each) for each in comparison.unfinished],
        "figures": figures,
    }


def _mean(values: Values) -> float | None:
    there = [value for value in values if value is not None]
    return mean(there) if len(there) == len(values) else None


def _deviation(values: Values) -> float | None:
    there = [value for value in values if value is not None]
    return stdev(there) if len(there) == len(values) > 1 else None


_MEAN, _SLOWEST = "sessions.mean_s", "sessions.slowest_tenth_served_s"
_LOST = {
    "sessions.lost_in_pauses_tokens": "in pauses",
    "sessions.lost_between_sessions_tokens": "between sessions",
}
_COMPUTED = "sessions.computed_tokens"
_OF_SESSIONS = (_MEAN, _SLOWEST, *_LOST, _COMPUTED)


def session_words(runs: Summaries, comparison: Comparison | None = None) -> Iterator[str]:
    """What every run does to sessions, beside the first one; those that see the future come last.
    Nothing where a run has no whole session."""
    if any(value(summary, _MEAN) is None for _, summary in runs):
        return
    seeds = comparison if comparison is not None and len(comparison.seeds) > 1 else None
    figures = _session_figures(runs) if seeds is None else seeds.values
    means = {key: [*map(_mean_of_known, figures.get(key, ()))] for key in _OF_SESSIONS}
    (first, summary), base = runs[0], means[_MEAN][0]
    over = f", {len(seeds.seeds)} seeds" if seeds else ""
    yield (
        f"Sessions ({wording.subject(summary['meta'])}{over}): with {first}, the mean of"
        f" {plural(summary['sessions']['num'], 'session')} takes {seconds(base)}, pauses included;"
        f" it {_counts(means, 0)}."
    )
    margin = seeds.margin if seeds else MARGIN
    yield from _others_beside(runs, means, _session_changes(figures[_MEAN], seeds), margin)
    for name, summary in runs:
        for note in summary["meta"].get("notes", ()):
            if note.startswith("hints: "):
                yield f"Hints given to {name}: {note.removeprefix('hints: ')}."


def _session_figures(runs: Summaries) -> dict[str, Sequence[Values]]:
    """The figures of `_OF_SESSIONS` in runs of a single seed."""
    return {key: [(value(summary, key),) for _, summary in runs] for key in _OF_SESSIONS}


def _session_changes(series: Sequence[Values], seeds: Comparison | None) -> list[str | None]:
    """How much sooner or later each other run ends the mean session, in words; None where that is
    no difference."""
    base, *means = map(_mean_of_known, series)
    changes = [mean / base - 1 for mean in means]
    if seeds is None:
        return [_sooner(change) if matters(change, 1.0) else None for change in changes]
    first, *others = (np.array(each, dtype=float) for each in series)
    estimates = [paired(first, other, whole=False, percentile=False) for other in others]
    verdicts = judge(estimates, [seeds.margin * base] * len(others), seeds.level)
    return [
        None if verdict.finding in ("same", "equal") else _sooner(change) + _how_sure(verdict, base)
        for change, verdict in zip(changes, verdicts, strict=True)
    ]


def _others_beside(
    runs: Summaries,
    means: Mapping[str, Sequence[float]],
    changes: Sequence[str | None],
    margin: float,
) -> Iterator[str]:
    """A sentence on each run whose mean session changes, then one on all others."""
    alike, slowest = [], means[_SLOWEST]
    for i in sorted(range(1, len(runs)), key=lambda i: _oracle(runs[i][1])):
        name, summary = runs[i]
        if change := changes[i - 1]:
            yield (
                f"{name}{_oracle(summary)} ends the mean session {change}, the slowest tenth"
                f" {_sooner(slowest[i] / slowest[0] - 1)}; it {_counts(means, i)}."
            )
        else:
            alike.append(name)
    if alike:
        yield f"No difference of more than {percent(margin)} to {runs[0][0]}: {', '.join(alike)}."


def _oracle(summary: Mapping[str, Any]) -> str:
    """What to say of a run that sees the future; empty for others."""
    return ", which sees the future," if summary["meta"].get("oracles") else ""


def _how_sure(verdict: Verdict, base: float) -> str:
    """The interval of a change in brackets."""
    sure = "" if verdict.finding == "significant" else "not significant: "
    low, high = (signed_percent(end / base) for end in (verdict.low, verdict.high))
    return f" ({sure}{low} … {high})"


def _mean_of_known(series: Values) -> float:
    return float(np.mean([each for each in series if each is not None] or [0.0]))


def _sooner(change: float) -> str:
    return f"{percent(abs(change))} {'later' if change > 0 else 'sooner'}"


def _counts(means: Mapping[str, Sequence[float]], i: int) -> str:
    """What was lost and computed, of the figures that some run has."""
    known = {key: f"{number(values[i] / 1e6)} M" for key, values in means.items() if any(values)}
    lost = [f"on {known[key]} tokens {when}" for key, when in _LOST.items() if key in known]
    found = [f"lost hits {', '.join(lost)}"] if lost else []
    found += [f"computed {known[_COMPUTED]} prompt tokens"] if _COMPUTED in known else []
    return " and ".join(found)


_MANY_PREEMPTIONS, _MANY_HITS = 0.1, 0.05
"""Relative changes from which preemptions, or prompt tokens found in the cache, count as the
reason."""
_NAMED = 3
"""Parts that a sentence names; it sums the others up where they matter."""


class Explanation(NamedTuple):
    """How the other run differs from the first, and why."""

    names: tuple[str, str]
    pairs: Pairs | None
    """None if the runs had different requests."""
    headline: list[str]
    settings: list[tuple[str, tuple[str, ...]]]
    divergence: Divergence | None
    divergence_words: list[str]
    waterfalls: list[Waterfall]
    """Empty if no request was completed by both runs, as are all fields below."""
    share: Share | None = None
    carriers: tuple[Carrier, ...] = ()
    blocks: tuple[Blocks, ...] = ()

    @property
    def same(self) -> bool:
        """Whether every request took the same time and every decision was the same."""
        changed = any(waterfall.changes() for waterfall in self.waterfalls)
        return self.pairs is not None and self.divergence is None and not changed


def explain(first: Named, other: Named) -> Explanation:
    """Compare the second run, of one engine as the first, with the first."""
    explanation = explain_requests(first, other)
    if not explanation.waterfalls:
        return explanation
    names, pairs, one, two = explanation.names, explanation.pairs, first[1], other[1]
    assert pairs is not None, "waterfalls are of pairs"
    found = first_divergence(one.steps, two.steps)
    pools = tuple(run.summary["meta"].get("num_gpu_blocks") for run in (one, two))
    words = [
        *divergence_words(found, names, pools),
        *concerned_words(pairs, names),
    ]
    return explanation._replace(divergence=found, divergence_words=words)


def explain_requests(first: Named, other: Named) -> Explanation:
    """What names, figures and requests alone explain: all but the first divergent decision."""
    (name, one), (other_name, two) = first, other
    names, pairs = (name, other_name), pair(one.requests, two.requests)
    settings = config_differences([(name, one.summary), (other_name, two.summary)])
    if pairs is None or not pairs.number:
        what = "had different requests" if pairs is None else "completed no request both"
        text = f"{names[1]} and {names[0]} {what}, so there is nothing to compare."
        return Explanation(names, pairs, [text], settings, None, [], [])
    falls = waterfalls(pairs)
    share, listed = carriers(pairs)
    block_size = int(one.summary["meta"].get("block_size") or 1)
    return Explanation(
        names,
        pairs,
        headline_words(names, one.summary, two.summary, falls),
        settings,
        None,
        [],
        falls,
        share,
        tuple(listed),
        tuple(blocks(pairs, block_size)),
    )


def headline_words(
    names: tuple[str, str],
    first: Mapping[str, Any],
    other: Mapping[str, Any],
    falls: list[Waterfall],
) -> list[str]:
    """`B avoided 412 preemptions: −38 % recomputed tokens, −1.9 s p99 TTFT.`

    Preemptions or cache hits are named as the reason only if their number changed much and
    latencies moved with them. Otherwise the part of time that changed most is named.
    """
    changed = [fall for fall in falls if fall.changes()]
    if not changed:
        return [f"Every request took the same time in {names[1]} as in {names[0]}."]
    tails = [fall for fall in falls if fall.statistic == "p99"]
    results = ", ".join(map(_result, tails))
    reasons = _reasons(names[1], first, other, tails)
    facts = [words for words, _ in reasons]
    if reasons and reasons[0][1]:
        sentences = [_lead(facts.pop(0), results)]
    else:
        sentences = [f"{names[1]}: {results}. What changed most: {_most_changed(changed)}."]
    return [*sentences, *(f"{fact}." for fact in facts), *map(fall_words, changed)]


def _reasons(
    name: str, first: Mapping[str, Any], other: Mapping[str, Any], tails: Sequence[Waterfall]
) -> list[tuple[str, bool]]:
    """What the other run did about preemptions and hits, and whether that explains the `tails` of
    latency; what does comes first."""
    moved = sum(float(fall.difference) for fall in tails if _matters(fall))
    reasons = []
    preemptions = other["num_preemptions"] - first["num_preemptions"]
    if preemptions or _by_swap(other) != _by_swap(first):
        most = max(run["num_preemptions"] for run in (first, other))
        weighty = preemptions * moved > 0 and abs(preemptions) >= _MANY_PREEMPTIONS * most
        reasons.append((_preemption_words(name, first, other), weighty))
    hits = other["prefix_cache_hit_tokens"] - first["prefix_cache_hit_tokens"]
    if hits:
        tokens = plural(abs(hits), f"{'more' if hits > 0 else 'fewer'} prompt token")
        asked = first["prefix_cache_query_tokens"]
        weighty = hits * moved < 0 and abs(hits) >= _MANY_HITS * asked
        reasons.append((f"{name} found {tokens} in the cache", weighty))
    return sorted(reasons, key=lambda reason: not reason[1])


def _most_changed(falls: Sequence[Waterfall]) -> str:
    """The part of time that changed most, in words."""
    part, _ = max((c for fall in falls for c in fall.changes()), key=lambda c: abs(c[1]))
    return LABELS[part]


def _matters(fall: Waterfall) -> bool:
    return matters(float(fall.difference), float(fall.totals[0]))


def _result(fall: Waterfall) -> str:
    """`−1.9 s p99 TTFT`, or `no difference in p99 TTFT`."""
    change = _seconds(fall.difference) if _matters(fall) else f"{NO_DIFFERENCE} in"
    return f"{change} {fall.statistic} {LATENCIES[fall.metric]}"


def fall_words(fall: Waterfall) -> str:
    """`Mean E2EL −14.4 s: −12.1 s waiting for free blocks; −0.1 s other parts.`"""
    changes = sorted(fall.changes(), key=lambda change: -abs(change[1]))
    named = [f"{_seconds(ns)} {LABELS[part]}" for part, ns in changes[:_NAMED]]
    rest = sum((ns for _, ns in changes[_NAMED:]), changes[0][1] * 0)
    if matters(float(rest), float(fall.difference)):
        named.append(f"{_seconds(rest)} other parts")
    return f"{fall.title} {_seconds(fall.difference)}: {'; '.join(named)}."


def explanation_record(explanation: Explanation) -> dict[str, Any]:
    """Everything as plain values; nanoseconds as exact fractions in text and as numbers."""
    divergence = explanation.divergence
    return dict(
        plain(
            {
                "first": explanation.names[0],
                "other": explanation.names[1],
                "same": explanation.same,
                "words": explanation.headline,
                "settings": [
                    {"key": key, "first": texts[0], "other": texts[1]}
                    for key, texts in explanation.settings
                ],
                "pairs": explanation.pairs.number if explanation.pairs else 0,
                "first_divergence": None if divergence is None else divergence._asdict(),
                "first_divergence_words": explanation.divergence_words,
                "waterfalls": [_fall_record(fall) for fall in explanation.waterfalls],
                "share": explanation.share._asdict() if explanation.share else None,
                "requests": [carrier._asdict() for carrier in explanation.carriers],
                "blocks": [
                    {**each._asdict(), "label": BLOCKS[each.column]} for each in explanation.blocks
                ],
            }
        )
    )


def _fall_record(fall: Waterfall) -> dict[str, Any]:
    first, other = fall.totals
    return {
        "metric": fall.metric,
        "statistic": fall.statistic,
        "first_ns": float(first),
        "other_ns": float(other),
        "difference_ns": float(fall.difference),
        "difference_ns_exact": str(fall.difference),
        "parts": {
            part: {"first_ns": str(a), "other_ns": str(b), "difference_ns": str(b - a)}
            for part, (a, b) in fall.parts.items()
        },
        "made_of": [
            [{"request": place.id, "weight": str(place.weight)} for place in places]
            for places in fall.places
        ],
    }


def _preemption_words(name: str, first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """`B avoided 412 preemptions (−38 % recomputed tokens)`; both modes if their mix changed."""
    number = other["num_preemptions"] - first["num_preemptions"]
    degree = "" if number < 0 else "more "
    what = plural(abs(number), f"{degree}preemption")
    before, after = first["recomputed_tokens"], other["recomputed_tokens"]
    detail = ""
    if before and after != before:
        detail = f" ({signed_percent((after - before) / before)} recomputed tokens)"
    if _by_swap(first) != _by_swap(other) and first["num_preemptions"] and other["num_preemptions"]:
        return f"{name} made {_modes(other)} instead of {_modes(first)}{detail}"
    return f"{name} {'avoided' if number < 0 else 'made'} {what}{detail}"


def _by_swap(summary: Mapping[str, Any]) -> int:
    return int(summary["num_preemptions_by_mode"]["swap"])


def _modes(summary: Mapping[str, Any]) -> str:
    """`304 preemptions by recompute and 201 by swap`."""
    modes = [(mode, n) for mode, n in summary["num_preemptions_by_mode"].items() if n]
    numbers = [plural(modes[0][1], "preemption"), *(count(n) for _, n in modes[1:])]
    named = zip(numbers, modes, strict=True)
    return " and ".join(f"{number} by {mode}" for number, (mode, _) in named)


def _lead(fact: str, results: str) -> str:
    """`B avoided 412 preemptions: −38 % recomputed tokens, −1.9 s p99 TTFT.`"""
    what, parenthesis, detail = fact.rstrip(")").partition(" (")
    return f"{what}: {f'{detail}, ' if parenthesis else ''}{results}."


def _seconds(ns: Any) -> str:
    return signed(float(ns) / 1e9, "s")

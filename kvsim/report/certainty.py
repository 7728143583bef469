"""Says how sure the differences between runs are, and ranks only runs that differ significantly."""

from __future__ import annotations

from itertools import pairwise
from statistics import mean, stdev
from typing import Any

from kvsim.explain.certainty import FEWEST_STRETCHES, Comparison, Pair, Values, Verdict
from kvsim.report.compare import INSIGNIFICANT, NO_DIFFERENCE, Row, metric_record
from kvsim.results.metrics import HEADLINES, NAMED, Metric
from kvsim.results.numerals import interval, percent, plural, signed

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
    return f"{other} is {_comparative(metric, verdict)} than {first} by {size} ({ends})"


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
        verdict = comparison.verdicts.get(Pair(key, min(before, after), max(before, after)))
        significant = verdict is not None and verdict.finding == "significant"
        text += f"{', ' if significant else ' ≈ '}{comparison.names[after]}"
    return text


def comparison_record(comparison: Comparison) -> dict[str, Any]:
    """Everything as plain values, for a JSON file."""
    names = comparison.names
    figures: dict[str, Any] = {}
    for key, series in comparison.values.items():
        found = [(pair, v) for pair, v in comparison.verdicts.items() if pair.key == key]
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
                for pair, verdict in found
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


def _comparative(metric: Metric, verdict: Verdict) -> str:
    if not metric.better:
        return "lower" if verdict.difference < 0 else "higher"
    return "better" if (verdict.difference < 0) == (metric.better == "lower") else "worse"


def _mean(values: Values) -> float | None:
    there = [value for value in values if value is not None]
    return mean(there) if len(there) == len(values) else None


def _deviation(values: Values) -> float | None:
    there = [value for value in values if value is not None]
    return stdev(there) if len(there) == len(values) > 1 else None

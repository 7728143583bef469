"""What policies do to sessions, in sentences to quote where these policies are discussed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvsim.explain import MARGIN, matters
from kvsim.explain.certainty import Comparison, Values, judge, paired
from kvsim.report import wording
from kvsim.results.metrics import value
from kvsim.results.numerals import number, percent, plural, seconds, signed_percent

_MEAN, _SLOWEST = "sessions.mean_s", "sessions.slowest_tenth_served_s"
_COUNTS = {
    "sessions.lost_in_pauses_tokens": "lost hits on {} tokens in pauses",
    "sessions.lost_between_sessions_tokens": "on {} between sessions",
    "sessions.computed_tokens": "computed {} prompt tokens",
}
"""Figures in millions."""


def quote(
    runs: Sequence[tuple[str, Mapping[str, Any]]], comparison: Comparison | None = None
) -> Iterator[str]:
    """What every run does to sessions, beside the first one; those that see the future come last.
    Nothing where a run has no whole session."""
    figures: dict[str, Sequence[Values]] = {
        key: [(value(summary, key),) for _, summary in runs] for key in (_MEAN, _SLOWEST, *_COUNTS)
    }
    if any(None in series for series in figures[_MEAN]):
        return
    if comparison is not None and len(comparison.seeds) < 2:
        comparison = None
    if comparison:
        figures = {key: comparison.values[key] for key in figures if key in comparison.values}
    means = {key: [_mean(series) for series in figures.get(key, ())] for key in figures}
    (first, summary), base = runs[0], means[_MEAN][0]
    over = f", {len(comparison.seeds)} seeds" if comparison else ""
    yield (
        f"Sessions ({wording.subject(summary['meta'])}{over}): with {first}, the mean of"
        f" {plural(summary['sessions']['num'], 'session')} takes {seconds(base)}, pauses included;"
        f" it {_counts(means, 0)}."
    )
    verdicts = _verdicts(figures[_MEAN], comparison) if comparison else []
    alike = []
    order = sorted(range(1, len(runs)), key=lambda i: bool(runs[i][1]["meta"].get("oracles")))
    for i in order:
        change, ends = means[_MEAN][i] / base - 1, ""
        verdict = verdicts[i - 1] if verdicts else None
        if verdict.finding in ("same", "equal") if verdict else not matters(change, 1.0):
            alike.append(runs[i][0])
            continue
        if verdict:
            sure = "" if verdict.finding == "significant" else "not significant: "
            low, high = (signed_percent(end / base) for end in (verdict.low, verdict.high))
            ends = f" ({sure}{low} … {high})"
        oracle = ", which sees the future," if runs[i][1]["meta"].get("oracles") else ""
        slowest = means[_SLOWEST][i] / means[_SLOWEST][0] - 1
        yield (
            f"{runs[i][0]}{oracle} ends the mean session {_sooner(change)}{ends}, the slowest tenth"
            f" {_sooner(slowest)}; it {_counts(means, i)}."
        )
    if alike:
        margin = percent(comparison.margin if comparison else MARGIN)
        yield f"No difference of more than {margin} to {first}: {', '.join(alike)}."
    for name, summary in runs:
        for note in summary["meta"].get("notes", ()):
            if note.startswith("hints: "):
                yield f"Hints given to {name}: {note.removeprefix('hints: ')}."


def _mean(series: Values) -> float:
    return float(np.mean([each for each in series if each is not None] or [0.0]))


def _sooner(change: float) -> str:
    return f"{percent(abs(change))} {'later' if change > 0 else 'sooner'}"


def _counts(means: Mapping[str, Sequence[float]], i: int) -> str:
    """What was lost and computed, of the figures that some run has."""
    found = [
        words.format(f"{number(means[key][i] / 1e6)} M")
        for key, words in _COUNTS.items()
        if any(means.get(key, ()))
    ]
    return " and ".join([", ".join(found[:-1]), found[-1]] if found[1:] else found)


def _verdicts(figures: Sequence[Values], comparison: Comparison) -> list[Any]:
    """How sure the differences in the mean session are, all of them together."""
    first, *others = (np.array(series, dtype=float) for series in figures)
    margins = [comparison.margin * float(first.mean())] * len(others)
    estimates = [paired(first, other, whole=False, percentile=False) for other in others]
    return judge(estimates, margins, comparison.level)

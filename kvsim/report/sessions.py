"""What policies do to sessions, in sentences to quote where these policies are discussed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvsim.explain.certainty import MARGIN, matters
from kvsim.explain.certainty.estimates import paired
from kvsim.explain.certainty.verdicts import Comparison, Verdict, judge
from kvsim.report import wording
from kvsim.results.metrics import value
from kvsim.results.numerals import number, percent, plural, seconds, signed_percent

_MEAN = "sessions.mean_s"
_SLOWEST = "sessions.slowest_tenth_served_s"
_COUNTS = {
    "sessions.lost_in_pauses_tokens": "lost hits on {} tokens in pauses",
    "sessions.lost_between_sessions_tokens": "on {} between sessions",
    "sessions.computed_tokens": "computed {} prompt tokens",
}
"""Figures in millions."""

Runs = Sequence[tuple[str, Mapping[str, Any]]]


def quote(runs: Runs, comparison: Comparison | None = None) -> Iterator[str]:
    """What every run does to sessions, beside the first one; those that see the future come last.
    Nothing where a run has no whole session."""
    first, summary = runs[0]
    means = [_mean(comparison, run, _MEAN) for run in runs]
    if None in means:
        return
    seeds = 1 if comparison is None else len(comparison.seeds)
    over = f", {seeds} seeds" if seeds > 1 else ""
    yield (
        f"Sessions ({wording.subject(summary['meta'])}{over}): with {first}, the"
        f" mean of {plural(summary['sessions']['num'], 'session')} takes {seconds(means[0] or 0)},"
        f" pauses included; it {_figures(comparison, runs[0])}."
    )
    verdicts = _verdicts(comparison) if seeds > 1 else {}
    alike = []
    for run in sorted(runs[1:], key=lambda run: bool(run[1]["meta"].get("oracles"))):
        name, change = run[0], _change(comparison, runs[0], run, _MEAN)
        verdict = verdicts.get(name)
        if verdict.finding in ("same", "equal") if verdict else not matters(change, 1.0):
            alike.append(name)
            continue
        oracle = ", which sees the future," if run[1]["meta"].get("oracles") else ""
        ends = ""
        if verdict is not None:
            low, high = (end / (means[0] or 1) for end in (verdict.low, verdict.high))
            sure = "" if verdict.finding == "significant" else "not significant: "
            ends = f" ({sure}{signed_percent(low)} … {signed_percent(high)})"
        yield (
            f"{name}{oracle} ends the mean session {_sooner(change)}{ends}, the slowest tenth"
            f" {_sooner(_change(comparison, runs[0], run, _SLOWEST))}; it"
            f" {_figures(comparison, run)}."
        )
    if alike:
        yield f"No difference of more than {percent(MARGIN)} to {first}: {', '.join(alike)}."
    for name, summary in runs:
        for note in summary["meta"].get("notes", ()):
            if note.startswith("hints: "):
                yield f"Hints given to {name}: {note.removeprefix('hints: ')}."


def _mean(comparison: Comparison | None, run: tuple[str, Any], key: str) -> float | None:
    """A figure of a run, over all seeds."""
    if comparison is None:
        return value(run[1], key)
    values = comparison.values.get(key, ((None,),) * len(comparison.names))
    series = [each for each in values[comparison.names.index(run[0])] if each is not None]
    return float(np.mean(series)) if series else None


def _change(comparison: Comparison | None, first: Any, other: Any, key: str) -> float:
    before, after = _mean(comparison, first, key), _mean(comparison, other, key)
    return (after or 0) / before - 1 if before else 0.0


def _sooner(change: float) -> str:
    return f"{percent(abs(change))} {'later' if change > 0 else 'sooner'}"


def _figures(comparison: Comparison | None, run: tuple[str, Any]) -> str:
    found = []
    for key, words in _COUNTS.items():
        tokens = _mean(comparison, run, key)
        if tokens is not None:
            found.append(words.format(f"{number(tokens / 1e6)} M"))
    return " and ".join([", ".join(found[:-1]), found[-1]] if found[1:] else found)


def _verdicts(comparison: Comparison | None) -> dict[str, Verdict]:
    """Other run → how sure its difference in the mean session is, all of them together."""
    if comparison is None or any(None in series for series in comparison.values[_MEAN]):
        return {}
    first, *others = (np.array(series, dtype=float) for series in comparison.values[_MEAN])
    estimates = [paired(first, other, whole=False, percentile=False) for other in others]
    margins = [comparison.margin * float(np.mean(first))] * len(others)
    found = judge(estimates, margins, comparison.level)
    return dict(zip(comparison.names[1:], found, strict=True))

"""Judges many differences at once, so that all verdicts hold together.

Holm's procedure: the surest difference is judged at the level divided by the number of differences,
the next at the level divided by one less, and so on. After the first difference that fails its
test, all others count as failed. The chance that even one verdict of `significant` is wrong is at
most the level (S. Holm, Scandinavian Journal of Statistics, 1979).

A difference that is too small to matter is none, however sure it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import ceil
from typing import Literal, NamedTuple

from kvsim.core.sums import added
from kvsim.explain.certainty.estimates import Estimate

Finding = Literal["same", "significant", "equal", "insignificant"]


class Verdict(NamedTuple):
    """One difference and its verdict."""

    finding: Finding
    """`same`: equal in every pair; `equal`: any difference is within the margin; `significant`: the
    sample shows a difference and its sign, and it is beyond the margin; `insignificant`: the sample
    says neither."""
    difference: float
    low: float
    """Lower end of the interval, at the level at which this difference was judged; `high` is the
    upper end."""
    high: float
    p: float
    level: float

    @property
    def settled(self) -> bool:
        """Whether more seeds would leave the verdict as it is."""
        return self.finding != "insignificant"


def judge(estimates: Sequence[Estimate], margins: Sequence[float], level: float) -> list[Verdict]:
    """A verdict for each estimate; `margins` are differences too small to matter, one each."""
    p = [estimate.p for estimate in estimates]
    order = sorted(range(len(p)), key=p.__getitem__)
    levels: dict[int, float] = {}
    share = level
    for rank, i in enumerate(order):
        share = level / (len(p) - rank)
        if p[i] > share:
            break
        levels[i] = share
    return [
        _verdict(estimate, margin, levels.get(i), share)
        for i, (estimate, margin) in enumerate(zip(estimates, margins, strict=True))
    ]


def _verdict(
    estimate: Estimate, margin: float, significant_at: float | None, share: float
) -> Verdict:
    level = share if significant_at is None else significant_at
    low, high = estimate.interval(level)
    finding: Finding = "insignificant"
    if -margin <= low and high <= margin:
        finding = "same" if low == high == 0 else "equal"
    elif significant_at is not None and abs(estimate.difference) > margin:
        finding = "significant"
    return Verdict(finding, estimate.difference, low, high, estimate.p, level)


Values = tuple[float | None, ...]


class Pair(NamedTuple):
    """Two configurations, by number, and a figure to compare them in."""

    key: str
    """Key of the figure in the summary; `a.b` is key `b` of table `a`."""
    first: int
    other: int


HEADLINE_SHARE = 0.8
"""Part of the chance of error that the headline figures may spend; the others share the rest."""


class Comparison(NamedTuple):
    """Figures of all configurations, and verdicts on their differences."""

    names: tuple[str, ...]
    method: Literal["seeds", "stretches"]
    """`seeds`: paired replicates; `stretches`: one replay, resampled (`certainty.stretches`)."""
    redrawn: tuple[str, ...]
    """What differs from seed to seed, in words."""
    seeds: tuple[int, ...]
    planned: int
    """The most seeds to run; fewer were run if every verdict was settled before."""
    level: float
    """Chance that even one reported difference does not exist."""
    margin: float
    """Relative margin: differences up to this share of the first value do not matter."""
    values: Mapping[str, tuple[Values, ...]]
    """Key of a figure -> its values, by configuration, then by seed."""
    verdicts: dict[Pair, Verdict]
    """A pair has no verdict if its figure is undefined or the replay is too short."""
    unfinished: tuple[tuple[str, int, str], ...] = ()
    """(configuration, seed, outcome) of every run that did not finish."""

    @property
    def settled(self) -> bool:
        """Whether more seeds would leave every verdict as it is."""
        return all(verdict.settled for verdict in self.verdicts.values())


def judge_pairs(
    estimates: Mapping[Pair, Estimate],
    values: Mapping[str, tuple[Values, ...]],
    headlines: Collection[str],
    *,
    level: float,
    margin: float,
) -> dict[Pair, Verdict]:
    """A verdict per pair; the chance that any of them reports a false difference is up to `level`.

    Headline figures are judged apart from the rest, with `HEADLINE_SHARE` of the level. So the many
    other figures do not drown them.
    """
    verdicts: dict[Pair, Verdict] = {}
    for share, head in ((HEADLINE_SHARE, True), (1 - HEADLINE_SHARE, False)):
        group = [pair for pair in estimates if (pair.key in headlines) == head]
        margins = [margin * abs(_mean(values[pair.key][pair.first])) for pair in group]
        found = judge([estimates[pair] for pair in group], margins, share * level)
        verdicts |= dict(zip(group, found, strict=True))
    return {pair: verdicts[pair] for pair in estimates}


def _mean(values: Values) -> float:
    return added(value for value in values if value is not None) / len(values)


FEWEST = 4
"""Number of seeds before the first look, if at least that many are planned."""
EARLY_SHARE = 0.02
"""Part of the chance of error that each look before the last may spend."""
_SHARES = (0.5, 0.75, 1.0)


class Look(NamedTuple):
    """One time at which the sample is judged."""

    seeds: int
    """Seeds that have been run by then."""
    level: float
    """Chance of error that this look may spend."""


def plan_looks(seeds: int, level: float) -> list[Look]:
    """Looks at half, three quarters and all of the planned seeds; their levels add up to `level`.

    There is no look before `FEWEST` seeds, except a last one.
    """
    *early, last = sorted({min(seeds, max(FEWEST, ceil(share * seeds))) for share in _SHARES})
    spent = EARLY_SHARE * level
    return [*(Look(size, spent) for size in early), Look(last, level - spent * len(early))]

"""What came of comparing configurations on many seeds, or on one exact replay."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

from kvsim.certainty.estimates import Estimate
from kvsim.certainty.verdicts import Verdict, judge

Values = tuple[float | None, ...]


class Pair(NamedTuple):
    """Two configurations, by number, and a figure in which they may differ."""

    key: str
    """Of the summary; `a.b` is key `b` of table `a`."""
    first: int
    other: int


HEADLINE_SHARE = 0.8
"""Part of the chance of error that the headline figures may spend; all others share the rest."""


class Comparison(NamedTuple):
    """Figures of all configurations, and what can be said of their differences."""

    names: tuple[str, ...]
    method: Literal["seeds", "stretches"]
    """`seeds`: paired replicates; `stretches`: one replay, resampled (`certainty.stretches`)."""
    redrawn: tuple[str, ...]
    """What differs from seed to seed, in words."""
    seeds: tuple[int, ...]
    planned: int
    """Seeds at most; fewer were run where all was settled before."""
    level: float
    """Chance that even one difference that is told is none."""
    margin: float
    """Differences of this share of the first value or less do not matter."""
    values: Mapping[str, tuple[Values, ...]]
    """Key of a figure -> its values, by configuration, then by seed."""
    verdicts: dict[Pair, Verdict]
    """Pairs without one: the figure is undefined, or the replay too short."""
    unfinished: tuple[tuple[str, int, str], ...] = ()
    """(configuration, seed, outcome) of every run that did not come to its end."""

    @property
    def settled(self) -> bool:
        """Whether every verdict would stay what it is."""
        return all(verdict.settled for verdict in self.verdicts.values())


def judge_pairs(
    estimates: Mapping[Pair, Estimate],
    values: Mapping[str, tuple[Values, ...]],
    headlines: Collection[str],
    *,
    level: float,
    margin: float,
) -> dict[Pair, Verdict]:
    """A verdict for each pair; the chance that any of them tells too much is at most `level`.

    Headline figures are judged apart from the rest, with `HEADLINE_SHARE` of the level, so that
    the many others do not drown them.
    """
    verdicts: dict[Pair, Verdict] = {}
    for share, head in ((HEADLINE_SHARE, True), (1 - HEADLINE_SHARE, False)):
        group = [pair for pair in estimates if (pair.key in headlines) == head]
        margins = [margin * abs(_mean(values[pair.key][pair.first])) for pair in group]
        found = judge([estimates[pair] for pair in group], margins, share * level)
        verdicts |= dict(zip(group, found, strict=True))
    return {pair: verdicts[pair] for pair in estimates}


def _mean(values: Values) -> float:
    return sum(value for value in values if value is not None) / len(values)

"""The result of comparing configurations on many seeds, or on one exact replay."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

from kvsim.core.sums import added
from kvsim.explain.certainty.estimates import Estimate
from kvsim.explain.certainty.verdicts import Verdict, judge

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

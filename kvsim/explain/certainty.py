"""How sure a difference is: estimates with their error, verdicts, and when to stop sampling.

Figures come as arrays; which of them differ is returned. Nothing here knows the simulator.

```
difference ± t(level, freedom) x error          Student's t, for every figure
quantiles of bootstrap draws                    for percentiles and maxima as well
```
Differences of percentiles are skewed. With few seeds, the bootstrap's interval is too short for
them and Student's is too symmetric. So such a figure gets both, and its interval is the range that
they cover together. It excludes 0 only where both of them do.

*Stretches.* The exact replay of a recorded trace has nothing random in it, and no seed changes it.
Its requests, in order of arrival, are therefore taken as a sample of the traffic. Neighbouring
requests share queues and blocks, so single requests must not be drawn. Whole stretches are drawn
instead, with replacement, the same ones in both runs (the circular block bootstrap of Politis and
Romano, 1992). A stretch is long enough that differences one stretch apart are independent. A replay
with fewer than `FEWEST_STRETCHES` says nothing about other traffic, and gets no interval.

*Verdicts.* Many differences are judged so that all verdicts hold together, by Holm's procedure: the
surest difference is judged at the level divided by the number of differences, the next at the level
divided by one less, and so on. After the first difference that fails its test, all others count as
failed. The chance that even one verdict of `significant` is wrong is at most the level (S. Holm,
Scandinavian Journal of Statistics, 1979). A difference that is too small to matter is none, however
sure it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from math import ceil
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsim.core.vectors import added
from kvsim.results.statistics import Floats

_TINY = 1e-300
_PRECISION = 1e-15
_MOST_TERMS = 10_000


def two_sided(t: float, freedom: int) -> float:
    """The chance that a t-distributed value is at least `t` away from 0; `t` is not negative."""
    square = t * t
    if math.isinf(square):
        return 0.0
    return _beta(freedom / 2, 0.5, freedom / (freedom + square), square / (freedom + square))


@lru_cache(maxsize=4096)
def reach(level: float, freedom: int) -> float:
    """The distance from 0 that a t-distributed value exceeds with a chance of `level`.

    The inverse of `two_sided`. `level` is above 0 and at most 1.
    """
    low, high = 0.0, 1.0
    while two_sided(high, freedom) > level:
        low, high = high, 2 * high
    while low < (t := (low + high) / 2) < high:
        low, high = (t, high) if two_sided(t, freedom) > level else (low, t)
    return high


def _beta(a: float, b: float, x: float, rest: float) -> float:
    """`I_x(a, b)`; `rest` is `1 - x`, given apart because it may be too small to subtract."""
    if x == 0 or rest == 0:
        return float(rest == 0)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side
        return 1 - _beta(b, a, rest, x)
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    powers = a * _log(x, rest) + b * _log(rest, x)
    return math.exp(scale + powers) / a / _fraction(a, b, x)


def _log(part: float, rest: float) -> float:
    """The logarithm of `part`, where `part + rest = 1`: exact even if `part` is nearly 1."""
    return math.log1p(-rest) if rest < 0.5 else math.log(part)


def _fraction(a: float, b: float, x: float) -> float:
    """The continued fraction `1 + d1 / (1 + d2 / (1 + ...))`, by Lentz's method."""
    value, upper, lower = 1.0, 1.0, 0.0
    for term in range(1, _MOST_TERMS):
        m, odd = divmod(term, 2)
        if odd:
            d = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            d = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        lower = 1 / ((1 + d * lower) or _TINY)
        upper = (1 + d / upper) or _TINY
        value *= upper * lower
        if abs(upper * lower - 1) < _PRECISION:
            break
    return value


LEVEL = 0.05
"""Chance that a statement that names a confidence is wrong."""
DRAWS = 9999
"""Bootstrap draws: enough to resolve a chance of 1 in 5,000."""
_ROUNDING = 12**-0.5
"""Standard deviation of the error of rounding to whole numbers."""


class Estimate(NamedTuple):
    """An estimated difference."""

    difference: float
    error: float
    """The standard error; 0 if the difference is known exactly."""
    freedom: int
    """Degrees of freedom of the error."""
    draws: Floats | None = None
    """Bootstrap draws of the difference, ascending."""

    @property
    def p(self) -> float:
        """The chance of a difference at least this large if the true difference is 0."""
        if self.error == 0:
            return 1.0 if self.difference == 0 else 0.0
        p = two_sided(abs(self.difference) / self.error, self.freedom)
        if self.draws is None:
            return p
        beyond = min((self.draws <= 0).sum(), (self.draws >= 0).sum())
        return max(p, min(1.0, 2 * int(beyond) / (len(self.draws) + 1)))

    def interval(self, level: float) -> tuple[float, float]:
        """The range that misses the true difference with a chance of `level` at most.

        It excludes 0 if and only if `p` is at most `level`.
        """
        half = reach(level, self.freedom) * self.error if self.error else 0.0
        low, high = self.difference - half, self.difference + half
        if self.draws is None:
            return low, high
        tail = int((len(self.draws) + 1) * level / 2)
        return min(low, float(self.draws[tail])), max(high, float(self.draws[-1 - tail]))


def paired(first: Floats, other: Floats, *, whole: bool, percentile: bool) -> Estimate:
    """The mean of `other - first`, paired by entry (the same seed).

    `whole`: the figure is a count, so that equal differences may be equal by rounding alone.
    `percentile`: the figure is a percentile or a maximum, and is bootstrapped as well.
    """
    changes = other - first
    number = len(changes)
    spread = float(np.std(changes, ddof=1))
    if not changes.any():
        return Estimate(0.0, 0.0, number - 1)
    if whole:
        spread = max(spread, _ROUNDING)
    mean, error = float(np.mean(changes)), spread / number**0.5
    draws = None
    if percentile and error:
        # The same draws every time, so that equal samples get equal verdicts.
        drawn = np.random.default_rng(0).integers(0, number, (DRAWS, number))
        draws = np.sort(changes[drawn].mean(axis=-1))
    return Estimate(mean, error, number - 1, draws)


def single(first: Floats, other: Floats, *, whole: bool) -> Estimate:
    """The difference `other - first` that one more pair would have; pairs vary among themselves.

    The error of a single pair does not shrink with the number of pairs, unlike that of a mean.
    """
    estimate = paired(first, other, whole=whole, percentile=False)
    number = len(first)
    # From spread / sqrt(n) to spread x sqrt(1 + 1 / n).
    return estimate._replace(error=estimate.error * (number + 1) ** 0.5)


FEWEST_STRETCHES = 10
"""The fewest stretches from which intervals are made."""
STRETCH_DRAWS = 999
_AT_ONCE = 1 << 21
"""Numbers drawn at once, to bound the memory."""

Statistic = Callable[[Floats], Floats]
"""A statistic: reduces the last axis."""


class Figure(NamedTuple):
    """A figure that is computed from a value per request."""

    first: Floats
    """Values of the first run, one per pair of requests, in order of arrival; `other` has those of
    the other run."""
    other: Floats
    statistic: Statistic


def together(figures: Mapping[str, Figure]) -> dict[str, Estimate]:
    """The difference of each figure for which the replay is long enough.

    All figures have the same requests, and all are drawn together.
    """
    if not figures:
        return {}
    number = len(next(iter(figures.values())).first)
    lengths = {name: stretch(each.other - each.first) for name, each in figures.items()}
    long_enough = [name for name, own in lengths.items() if FEWEST_STRETCHES * own <= number]
    if not long_enough:
        return {}
    figures = {name: figures[name] for name in long_enough}
    length = max(lengths[name] for name in figures)
    freedom = number // length - 1
    draws = _drawn(list(figures.values()), number, length)
    return {
        name: _estimate(figure, draws[:, i], freedom)
        for i, (name, figure) in enumerate(figures.items())
    }


def stretch(changes: Floats) -> int:
    """The number of requests after which differences are independent of each other.

    It is twice the distance at which the autocorrelation first falls within noise (2 / sqrt n), and
    at least the cube root of the number of requests.
    """
    number = len(changes)
    least: int = max(1, round(math.cbrt(number)))
    centred = changes - changes.mean()
    # Padded to twice its length: the end must not meet the beginning.
    power = np.abs(np.fft.rfft(centred, 2 * number)) ** 2
    covariance = np.fft.irfft(power)[:number]
    if covariance[0] <= 0:
        return least
    quiet = np.flatnonzero(covariance / covariance[0] < 2 / number**0.5)
    return max(least, 2 * int(quiet[0]) if len(quiet) else number)


def _drawn(figures: Sequence[Figure], number: int, length: int) -> NDArray[np.float64]:
    """Differences of every figure in every draw, of shape (draws, figures)."""
    random = np.random.default_rng(0)
    starts = -(-number // length)
    batches = []
    left = STRETCH_DRAWS
    while left > 0:
        size = min(left, max(1, _AT_ONCE // number))
        first = random.integers(0, number, (size, starts, 1))
        # Stretches that run over the end go on at the beginning; surplus requests of the last are
        # cut.
        places = ((first + np.arange(length)) % number).reshape(size, -1)[:, :number]
        drawn = [e.statistic(e.other[places]) - e.statistic(e.first[places]) for e in figures]
        batches.append(np.array(drawn).reshape(len(figures), -1).T)
        left -= size
    return np.concatenate(batches)


def _estimate(figure: Figure, draws: Floats, freedom: int) -> Estimate:
    difference = float(figure.statistic(figure.other) - figure.statistic(figure.first))
    if np.array_equal(figure.first, figure.other):
        return Estimate(0.0, 0.0, freedom)
    return Estimate(difference, float(np.std(draws, ddof=1)), freedom, np.sort(draws))


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
    """`seeds`: paired replicates; `stretches`: one replay, resampled (`together`)."""
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


FEWEST_SEEDS = 4
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

    There is no look before `FEWEST_SEEDS` seeds, except a last one.
    """
    *early, last = sorted({min(seeds, max(FEWEST_SEEDS, ceil(share * seeds))) for share in _SHARES})
    spent = EARLY_SHARE * level
    return [*(Look(size, spent) for size in early), Look(last, level - spent * len(early))]

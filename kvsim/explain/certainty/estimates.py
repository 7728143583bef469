"""Differences with their error: what a paired sample says, and how far it can be trusted.

```
difference ± t(level, freedom) x error          Student's t, for every figure
quantiles of bootstrap draws                    for percentiles and maxima as well
```
Differences of percentiles are skewed. With few seeds, the bootstrap's interval is too short for
them and Student's is too symmetric. So such a figure gets both, and its interval is the range that
they cover together. It excludes 0 only where both of them do.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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


Floats = NDArray[np.float64]

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


def paired(
    first: Floats, other: Floats, *, whole: bool, percentile: bool, seed: int = 0
) -> Estimate:
    """The mean of `other - first`, paired by entry (the same seed).

    `whole`: the figure is a count, so that equal differences may be equal by rounding alone.
    `percentile`: the figure is a percentile or a maximum, and is bootstrapped as well, from `seed`.
    """
    changes = other - first
    number = len(changes)
    spread = float(np.std(changes, ddof=1))
    if not changes.any():
        return Estimate(0.0, 0.0, number - 1)
    if whole:
        spread = max(spread, _ROUNDING)
    mean, error = float(np.mean(changes)), spread / number**0.5
    draws = _bootstrapped(changes, seed) if percentile and error else None
    return Estimate(mean, error, number - 1, draws)


def single(first: Floats, other: Floats, *, whole: bool) -> Estimate:
    """The difference `other - first` that one more pair would have; pairs vary among themselves.

    The error of a single pair does not shrink with the number of pairs, unlike that of a mean.
    """
    estimate = paired(first, other, whole=whole, percentile=False)
    number = len(first)
    return estimate._replace(error=estimate.error * (number + 1) ** 0.5)


def _bootstrapped(changes: Floats, seed: int) -> Floats:
    """Ascending means of samples drawn with replacement from the pairs."""
    drawn = np.random.default_rng(seed).integers(0, len(changes), (DRAWS, len(changes)))
    return np.sort(changes[drawn].mean(axis=-1))

"""Student's t distribution for whole degrees of freedom.

The chance is a regularised incomplete beta function, `I_x(a, b)`, computed as a continued fraction
(Press et al., Numerical Recipes, 3rd edition, section 6.4; DLMF 8.17.22). That holds far into the
tail, where `1 - cdf` would round to 0.
"""

from __future__ import annotations

import math
from functools import lru_cache

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

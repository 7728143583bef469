"""Differences with their error: what a paired sample says, and how far it can be trusted.

```
difference ± t(level, freedom) x error          Student's t, for every figure
quantiles of bootstrap draws                    for percentiles and maxima as well
```

Differences of percentiles are skewed, and with few seeds neither interval alone keeps its level
(the bootstrap's is too short, Student's too symmetric). So such a figure gets both, and its
interval is the range that they cover together: it is told apart only where both tell it apart.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

DRAWS = 9999
"""Bootstrap draws; with them a chance of 1 in 5,000 can still be told."""
_ROUNDING = 12**-0.5
"""Standard deviation of what rounding to whole numbers takes away."""


class Estimate(NamedTuple):
    """A difference as far as it is known."""

    difference: float
    error: float
    """Its standard error; 0: known exactly."""
    freedom: int
    """Degrees of freedom of the error."""
    draws: Floats | None = None
    """Bootstrap draws of the difference, ascending."""

    @property
    def p(self) -> float:
        """The chance of a difference at least so far from 0 where there is none."""
        from scipy.stats import t

        if self.error == 0:
            return 1.0 if self.difference == 0 else 0.0
        p = float(2 * t.sf(abs(self.difference) / self.error, self.freedom))
        if self.draws is None:
            return p
        beyond = min((self.draws <= 0).sum(), (self.draws >= 0).sum())
        return max(p, min(1.0, 2 * int(beyond) / (len(self.draws) + 1)))

    def interval(self, level: float) -> tuple[float, float]:
        """The range that misses the true difference with a chance of `level` at most.

        It excludes 0 where `p` is at most `level`, and only there.
        """
        from scipy.stats import t

        reach = float(t.isf(level / 2, self.freedom)) * self.error if self.error else 0.0
        low, high = self.difference - reach, self.difference + reach
        if self.draws is None:
            return low, high
        tail = int((len(self.draws) + 1) * level / 2)
        return min(low, float(self.draws[tail])), max(high, float(self.draws[-1 - tail]))


def paired(
    first: Floats, other: Floats, *, whole: bool, percentile: bool, seed: int = 0
) -> Estimate:
    """The mean of `other - first`, whose entries belong together (the same seed).

    `whole`: the figure counts things, so that equal differences may be equal by rounding alone;
    `percentile`: it is one, or a maximum, and is bootstrapped as well, from `seed`.
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
    """What `other - first` is for one more pair, where each pair is one way things may be.

    Unlike that of a mean, the error of a single pair does not shrink with the number of pairs.
    """
    estimate = paired(first, other, whole=whole, percentile=False)
    number = len(first)
    return estimate._replace(error=estimate.error * (number + 1) ** 0.5)


def _bootstrapped(changes: Floats, seed: int) -> Floats:
    """Ascending means of samples drawn with replacement from the pairs."""
    from scipy.stats import bootstrap

    drawn: Any = bootstrap(
        (changes,),
        np.mean,
        n_resamples=DRAWS,
        method="percentile",
        rng=np.random.default_rng(seed),
        vectorized=True,
    )
    return np.sort(drawn.bootstrap_distribution)

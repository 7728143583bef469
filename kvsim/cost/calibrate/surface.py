"""A smooth surface through kernel times over two counts, with honest errors.

```
log(us) = log(roofline of the kernel) + mean + sum of weights x closeness to each measured point
```

Kernel ridge regression (Gaussian process regression; Rasmussen and Williams, 2006, chapters 2 and
5). Two points are close if both counts are alike (Matern 5/2 over their logarithms), and also if
their work is alike, because kernels switch their launch shape at an amount of work. The error at a
point, or a group of points, that the fit has not seen follows from the same matrix without fitting
again (ibid., equations 5.10 to 5.12).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


class Law(NamedTuple):
    """Prior knowledge of a kernel; both functions take the two counts as arrays."""

    us: Callable[[Any, Any], Any]
    """The roofline in microseconds."""
    work: Callable[[Any, Any], Any]
    """The amount of work, in any unit."""


class Scales(NamedTuple):
    """How fast times change, in doublings of each count and of the work."""

    first: float
    second: float
    work: float
    work_share: float
    """Weight of similar work against similar counts."""
    noise: float
    """Variance of a measurement, relative to that of the surface."""


class Error(NamedTuple):
    """Errors of a fit on measured times outside it, in percent of these times."""

    points: int
    median_percent: float
    p95_percent: float
    max_percent: float
    bias_percent: float


class Surface:
    """A surface fitted to times `us[i]` at `(x[i], y[i])`, all above 0."""

    def __init__(self, x: ArrayLike, y: ArrayLike, us: ArrayLike, law: Law, scales: Scales) -> None:
        self._x, self._y = np.asarray(x, float), np.asarray(y, float)
        self._us, self._law, self._scales = np.asarray(us, float), law, scales
        residual = np.log(self._us / law.us(self._x, self._y))
        self._mean = float(residual.mean())
        closeness = self._closeness(self._x, self._y)
        closeness[np.diag_indices_from(closeness)] += scales.noise
        self._inverse = np.linalg.inv(closeness)
        self._weights = self._inverse @ (residual - self._mean)

    def at(self, x: ArrayLike, y: ArrayLike) -> Floats:
        """Microseconds at points `(x[i], y[i])`; far from all measured points, the roofline."""
        x, y = np.asarray(x, float), np.asarray(y, float)
        log = self._mean + self._closeness(x, y) @ self._weights
        return np.asarray(self._law.us(x, y) * np.exp(log), float)

    def unseen(self, groups: ArrayLike | None = None) -> Floats:
        """Microseconds at each measured point, by the fit without this point and its group.

        `groups[i]` names the group of point i; None: each point is a group.
        """
        if groups is None:
            return np.asarray(self._us * np.exp(-self._weights / np.diag(self._inverse)), float)
        names = np.asarray(groups)
        miss = np.empty_like(self._us)
        for name in np.unique(names):
            own = np.flatnonzero(names == name)
            block = self._inverse[np.ix_(own, own)]
            miss[own] = np.linalg.solve(block, self._weights[own])
        return np.asarray(self._us * np.exp(-miss), float)

    def error(self, groups: ArrayLike | None = None) -> Error:
        """The error of `unseen`."""
        return error(self.unseen(groups), self._us)

    def _closeness(self, x: Floats, y: Floats) -> Floats:
        """The closeness of each point to each measured point."""
        scales, work = self._scales, self._law.work
        distance = np.sqrt(
            _steps(x, self._x, scales.first) ** 2 + _steps(y, self._y, scales.second) ** 2
        )
        distance *= np.sqrt(5)
        alike = (1 + distance + distance**2 / 3) * np.exp(-distance)
        unequal = _steps(work(x, y), work(self._x, self._y), scales.work)
        return np.asarray(alike + scales.work_share * np.exp(-(unequal**2) / 2), float)


def error(fitted: Floats, measured: Floats) -> Error:
    """Errors in percent of `measured`; bias: the median of fitted over measured, minus 1."""
    signed = (fitted / measured - 1) * 100
    far = np.abs(signed)
    figures = (np.median(far), np.percentile(far, 95), far.max(), np.median(signed))
    return Error(len(far), *(round(float(each), 2) for each in figures))


def _steps(x: Any, own: Any, scale: float) -> Floats:
    """Doublings between each of `x` and each of `own`, in units of `scale`."""
    return np.asarray(np.subtract.outer(np.log2(x), np.log2(own)) / scale, float)

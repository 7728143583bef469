"""A smooth surface through kernel times over two counts, with honest errors.

```
log(us) = log(roofline of the kernel) + mean + sum of weights x closeness to each measured point
```

Kernel ridge regression (Gaussian process regression; Rasmussen and Williams, 2006, chapters 2 and
5). Two points are close if both counts are alike (Matern 5/2 over their logarithms), and also if
their work is alike, because kernels switch their launch shape at an amount of work. The error at a
point, or a group of points, that the fit has not seen follows from the same matrix without fitting
again (ibid., equations 5.10 to 5.12).

`Smooth` is such a regression on the logarithms of times on a complete grid of any number of counts.
Closeness is a product with one factor per axis, so the matrix of a complete grid is a Kronecker
product, and its eigenvectors are those of the axes: thousands of points take milliseconds (Saatci,
Scalable Inference for Structured Gaussian Process Models, 2011, chapter 5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvsim.cost.calibrate.compare import Point, reader

Floats = NDArray[np.float64]

CHANGES = "surfaces fitted to the rows and evaluated at other counts; no row is reproduced"
"""What a profile says of the tables that it was made from."""


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

    def error(self, groups: ArrayLike | None = None) -> dict[str, float]:
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


def error(fitted: Floats, measured: Floats) -> dict[str, float]:
    """Errors in percent of `measured`; bias: the median of fitted over measured, minus 1."""
    signed = (fitted / measured - 1) * 100
    far = np.abs(signed)
    figures = {
        "median_percent": np.median(far),
        "p95_percent": np.percentile(far, 95),
        "max_percent": far.max(),
        "bias_percent": np.median(signed),
    }
    return {"points": len(far), **{key: round(float(each), 2) for key, each in figures.items()}}


def _steps(x: Any, own: Any, scale: float) -> Floats:
    """Doublings between each of `x` and each of `own`, in units of `scale`."""
    return np.asarray(np.subtract.outer(np.log2(x), np.log2(own)) / scale, float)


TOKENS = [1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512]
TOKENS += [640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 6144, 8192]
SEQS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]
CONTEXTS = [2, 4, 8, *[base << i for i in range(13) for base in (16, 24)][:-1]]
CHUNKS = [16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192]
BEFORE = [0, 256, 1024, 4096, 16384, 65536]

MIXED = {
    "q": [16, 48, 192, 512, 1024, 2048],
    "ctx": [0, 1024, 4096, 16384],
    "n": [1, 3, 6, 12, 32, 64, 128],
    "kv": [16, 192, 768, 1536, 3072, 6144, 16384],
}
"""Far fewer per axis, because four axes multiply; these lost least on an RTX PRO 6000."""


SMOOTH_SCALE, SMOOTH_NOISE = 4.0, 1e-4
"""How far a time tells about others, in doublings of a count, and the variance of a measurement
relative to that of the surface: the best of a few, by the error on single rows left out of the
attention of an RTX PRO 6000."""
OFFSET = 16.0
"""Added to the counts of an axis that begins at 0, such as the context of a chunk."""


class Smooth:
    """The surface through `us[i][j]...` at `(axes[0][i], axes[1][j], ...)`; all times above 0."""

    def __init__(self, axes: Sequence[Sequence[float]], us: ArrayLike) -> None:
        self._offsets = [OFFSET if min(axis) == 0 else 0.0 for axis in axes]
        self._places = self._located(axes)
        logs = np.log(np.asarray(us, float))
        self._mean = float(logs.mean())
        spectra = [np.linalg.eigh(_closeness(place, place)) for place in self._places]
        strength = np.ones(())
        for eigenvalues, _ in spectra:
            strength = np.multiply.outer(strength, eigenvalues)
        turned = _along_axes([vectors.T for _, vectors in spectra], logs - self._mean)
        self._weights = _along_axes(
            [vectors for _, vectors in spectra], turned / (strength + SMOOTH_NOISE)
        )

    def at(self, axes: Sequence[Sequence[float]]) -> Floats:
        """Microseconds on the grid of other counts, with one dimension per axis."""
        near = map(_closeness, self._located(axes), self._places)
        return np.asarray(np.exp(_along_axes(near, self._weights) + self._mean), float)

    def _located(self, axes: Sequence[Sequence[float]]) -> list[Floats]:
        pairs = zip(axes, self._offsets, strict=True)
        return [np.log2(np.asarray(axis, float) + offset) for axis, offset in pairs]


def _closeness(places: Floats, own: Floats) -> Floats:
    distance = np.abs(np.subtract.outer(places, own)) / SMOOTH_SCALE * np.sqrt(5)
    return np.asarray((1 + distance + distance**2 / 3) * np.exp(-distance))


def _along_axes(matrices: Iterable[Floats], values: Floats) -> Floats:
    """`values`, with matrix k applied along axis k."""
    for axis, matrix in enumerate(matrices):
        values = np.moveaxis(np.tensordot(matrix, values, (1, axis)), 0, axis)
    return values


def table_error(table: Any, rows: Mapping[Point, float]) -> dict[str, float]:
    """Errors in percent of the table, interpolated as in a run, at the points of `rows`.

    `rows`: point → microseconds. Points outside the table are left out; with no other, `points` is
    all there is.
    """
    at = reader(table)
    pairs = [(found, us) for point, us in rows.items() if (found := at(point)) is not None]
    if not pairs:
        return {"points": 0}
    fitted, measured = np.array(pairs).T
    return error(fitted, measured)

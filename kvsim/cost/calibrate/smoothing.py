"""A smooth surface through times on a complete grid of two, three or more counts, or along a line.

Kernel ridge regression, as in `kvsim.cost.calibrate.surface`, on the logarithms of times. Closeness
is a product with one factor per axis (Matern 5/2 over logarithms of the counts), so the matrix of a
complete grid is a Kronecker product, and its eigenvectors are those of the axes: thousands of
points take milliseconds (Saatci, Scalable Inference for Structured Gaussian Process Models, 2011,
chapter 5).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from kvsim.cost.calibrate.surface import Floats

SCALE, NOISE = 4.0, 1e-4
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
            [vectors for _, vectors in spectra], turned / (strength + NOISE)
        )

    def at(self, axes: Sequence[Sequence[float]]) -> Floats:
        """Microseconds on the grid of other counts, with one dimension per axis."""
        near = map(_closeness, self._located(axes), self._places)
        return np.asarray(np.exp(_along_axes(near, self._weights) + self._mean), float)

    def _located(self, axes: Sequence[Sequence[float]]) -> list[Floats]:
        pairs = zip(axes, self._offsets, strict=True)
        return [np.log2(np.asarray(axis, float) + offset) for axis, offset in pairs]


def _closeness(places: Floats, own: Floats) -> Floats:
    distance = np.abs(np.subtract.outer(places, own)) / SCALE * np.sqrt(5)
    return np.asarray((1 + distance + distance**2 / 3) * np.exp(-distance))


def _along_axes(matrices: Iterable[Floats], values: Floats) -> Floats:
    """`values`, with matrix k applied along axis k."""
    for axis, matrix in enumerate(matrices):
        values = np.moveaxis(np.tensordot(matrix, values, (1, axis)), 0, axis)
    return values

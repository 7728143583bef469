"""Straight lines between points over one count, and grids as such lines over one of their counts.

The rules are those of `kvsim.cost.interpolation`: below the first point the first value holds;
above the last one the last slope continues, but never downwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from librt.vecs import vec
from mypy_extensions import i64

from kvsim.core.vectors import floats, numbers
from kvsim.cost.profile import Grid


class Line:
    """The line through `(xs[i], ys[i])`; it was measured from `first` to `last`.

    By default that range is the range of the points. The caller notes look-ups outside of it.
    """

    first: float
    last: float
    _xs: vec[float]
    _ys: vec[float]

    def __init__(
        self,
        xs: Sequence[float],
        ys: Sequence[float],
        measured: tuple[float, float] | None = None,
    ) -> None:
        self.first, self.last = (xs[0], xs[-1]) if measured is None else measured
        self._xs, self._ys = floats(xs), floats(ys)

    def plus(self, other: Callable[[float], float], breaks: Iterable[float]) -> Line:
        """The line through the sums with `other`, at the points of both: it bends at `breaks`."""
        xs = sorted({*self._xs, *map(float, breaks)})
        return Line(xs, [self.at(x) + other(x) for x in xs], (self.first, self.last))

    def at(self, x: float) -> float:
        """The value at `x`."""
        xs, ys = self._xs, self._ys
        i = cell_from(xs, 1.0, x)
        return _through(x, xs[i - 1], ys[i - 1], xs[i], ys[i])


class Lines:
    """A grid of times as lines over its contexts, one for every count `x`."""

    inside: bool
    """Whether the last look-up was within what was measured."""
    _xs: vec[float]
    _contexts: vec[float]
    _us: vec[float]
    """The times of all `x` at the first context, then at the next one."""
    _ends: vec[i64]
    """Number of contexts at which each `x` was measured."""

    def __init__(self, grid: Grid) -> None:
        self.inside = True
        self._xs, self._contexts = floats(grid.x), floats(grid.ctx)
        self._us = floats([us for column in grid.columns for us in column])
        self._ends = numbers([len(row) for row in grid.us])

    def at(
        self,
        x: float,
        context: float,
        scale: float = 1.0,
        fixed: float = 0.0,
        factor: float = 1.0,
        unit: float = 1.0,
    ) -> float:
        """The value at `context` of the line of `x`, through `(context x scale, (fixed + factor x
        time) x unit)`."""
        contexts, ends = self._contexts, self._ends
        i, j = cell_to(self._xs, x), cell_from(contexts, scale, context)
        end = ends[i - 1] if x <= self._xs[i - 1] else min(ends[i - 1], ends[i])
        self.inside = (
            self._xs[0] <= x <= self._xs[i]
            and contexts[0] * scale <= context <= contexts[end - 1] * scale
        )
        near = (fixed + factor * self._across(j - 1, i, x)) * unit
        far = (fixed + factor * self._across(j, i, x)) * unit
        return _through(context, contexts[j - 1] * scale, near, contexts[j] * scale, far)

    def _across(self, j: i64, i: i64, x: float) -> float:
        """The time at a context, as `Interpolation.along` finds it."""
        xs, us = self._xs, self._us
        at: i64 = j * len(xs) + i
        low, high = us[at - 1], us[at]
        beyond = x - xs[i - 1]
        if beyond <= 0:
            return low
        value = low + (high - low) * beyond / (xs[i] - xs[i - 1])
        return max(value, high) if x > xs[i] else value


def cell_from(xs: vec[float], scale: float, x: float) -> i64:
    """The upper end of the cell of `x`, of those between points `xs[i]` x `scale`; a point belongs
    to the cell that begins there. What is outside belongs to the first or the last one."""
    low: i64 = 1
    high: i64 = len(xs) - 1
    while low < high:
        middle: i64 = (low + high) >> 1
        if xs[middle] * scale <= x:
            low = middle + 1
        else:
            high = middle
    return low


def cell_to(xs: vec[float], x: float) -> i64:
    """The same, but a point belongs to the cell that ends there."""
    low: i64 = 1
    high: i64 = len(xs) - 1
    while low < high:
        middle: i64 = (low + high) >> 1
        if xs[middle] < x:
            low = middle + 1
        else:
            high = middle
    return low


def _through(x: float, xa: float, ya: float, xb: float, yb: float) -> float:
    """The line through two points, `x` being in their cell, or outside all of them."""
    if x < xa:
        return ya
    slope = (yb - ya) / (xb - xa)
    if x < xb:
        return ya + slope * (x - xa)
    return yb + max(slope, 0.0) * (x - xb)

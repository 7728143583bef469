"""Straight lines between points over one count, and grids as such lines over one of their counts.

The rules are those of `kvsim.cost.profile`: below the first point the first value holds;
above the last one the last slope continues, but never downwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from librt.vecs import vec
from mypy_extensions import i64

from kvsim.core.vectors import floats, numbers
from kvsim.cost.profile import Grid, MixedGrid


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


def rounded(x: float) -> i64:
    """`round(x)` of what fits into 64 bits, without Python's integers of any size."""
    whole: i64 = i64(x)
    rest = x - float(whole)
    odd: bool = whole & 1 != 0
    if rest > 0.5 or (odd and rest == 0.5):
        return whole + 1
    if rest < -0.5 or (odd and rest == -0.5):
        return whole - 1
    return whole


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


class Fused:
    """Looks up a `MixedGrid`; `outside` says whether the last look-up left it.

    The value is linear in each of the four raw counts. Below the first point of an axis its first
    value holds; above the last one the last slope continues.
    """

    outside: bool
    _q: vec[float]
    _ctx: vec[float]
    _n: vec[float]
    _kv: vec[float]
    _us: vec[float]
    """The times in the order of the grid."""

    def __init__(self, grid: MixedGrid) -> None:
        self._q, self._ctx = floats(grid.q), floats(grid.ctx)
        self._n, self._kv = floats(grid.n), floats(grid.kv)
        self._us = floats([us for a in grid.us for b in a for c in b for us in c])
        self.outside = False

    def us(self, chunks: Sequence[tuple[float, float]], n: float, mean: float) -> float:
        """Microseconds of `chunks`, (tokens, tokens of context), and `n` decodes of `mean` length.

        The grid was measured with one chunk. A launch has as many blocks for each sequence as its
        longest chunk needs, and blocks without work take time, too. So decodes are looked up beside
        the longest chunk, and count once. Each further chunk adds its time beyond the smallest
        chunk, both beside the fewest and shortest decodes.

        Source: FlashAttention-2, `run_flash_splitkv_fwd` (`num_m_block` comes from the greatest
        number of queries), github.com/Dao-AILab/flash-attention,
        `csrc/flash_attn/src/flash_fwd_launch_template.h`.
        """
        self.outside = False
        fewest, shortest = self._n[0], self._kv[0]
        total, smallest = 0.0, 0.0
        for q, ctx in sorted(chunks, reverse=True):
            us = self._at(q, ctx, n, mean)
            if us > smallest:
                total += us - smallest
            # For those after the longest chunk.
            n, mean, smallest = fewest, shortest, self._us[0]
        return total

    def _at(self, q: float, ctx: float, n: float, mean: float) -> float:
        i, j = cell_to(self._q, q), cell_to(self._ctx, ctx)
        k, m = cell_to(self._n, n), cell_to(self._kv, mean)
        share, ctx_share = self._share(self._kv, m, mean), self._share(self._ctx, j, ctx)
        n_share, q_share = self._share(self._n, k, n), self._share(self._q, i, q)
        contexts: i64 = len(self._ctx)
        row: i64 = (i - 1) * contexts + j
        next_row: i64 = row + contexts
        low = self._beside(row - 1, k, n_share, m, share)
        low += (self._beside(row, k, n_share, m, share) - low) * ctx_share
        high = self._beside(next_row - 1, k, n_share, m, share)
        high += (self._beside(next_row, k, n_share, m, share) - high) * ctx_share
        return low + (high - low) * q_share

    def _beside(self, chunk: i64, k: i64, n_share: float, m: i64, share: float) -> float:
        """The time of a chunk and its context, by their place in the table."""
        us, lengths = self._us, len(self._kv)
        at: i64 = (chunk * len(self._n) + k) * lengths + m
        fewer: i64 = at - lengths
        near = us[fewer - 1] + (us[at - 1] - us[fewer - 1]) * n_share
        far = us[fewer] + (us[at] - us[fewer]) * n_share
        return near + (far - near) * share

    def _share(self, xs: vec[float], i: i64, x: float) -> float:
        """The position of `x` in its cell: 0 to 1, or beyond."""
        low, high = xs[i - 1], xs[i]
        if x < low:
            self.outside = True
            return 0.0
        if x > high:
            self.outside = True
        return (x - low) / (high - low)

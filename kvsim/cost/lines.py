"""Straight lines between points over one count, for many look-ups.

The rules are those of `kvsim.cost.interpolation`: below the first point the first value holds;
above the last one the last slope continues, but never downwards.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from operator import sub, truediv
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MANY = 32
"""Positions from which on numpy's overhead pays."""


class Line:
    """The line through `(xs[i], ys[i])`; it was measured from `first` to `last`.

    By default that range is the range of the points. The caller notes look-ups outside of it.
    """

    __slots__ = ("_cells", "_columns", "_starts", "first", "last")

    def __init__(
        self,
        xs: Sequence[float],
        ys: Sequence[float],
        measured: tuple[float, float] | None = None,
    ) -> None:
        self.first, self.last = (xs[0], xs[-1]) if measured is None else measured
        slopes: list[float] = [*map(truediv, map(sub, ys[1:], ys), map(sub, xs[1:], xs))]
        slopes.append(max(slopes[-1], 0.0))
        self._starts = list(xs)
        self._cells = [(xs[0], ys[0], 0.0), *zip(xs, ys, slopes, strict=True)]
        """(start, value there, slope) before the first point and from each point on."""
        self._columns: NDArray[np.float64] | None = None
        """The same as columns, for many positions at once."""

    def plus(self, other: Callable[[float], float], breaks: Iterable[float]) -> Line:
        """The line through the sums with `other`, at the points of both: it bends at `breaks`."""
        xs = sorted({*self._starts, *map(float, breaks)})
        return Line(xs, [self.at(x) + other(x) for x in xs], (self.first, self.last))

    def at(self, x: float) -> float:
        """The value at `x`."""
        start, y, slope = self._cells[bisect_right(self._starts, x)]
        return y + slope * (x - start)

    def many(self, xs: NDArray[Any]) -> NDArray[np.float64]:
        """The values at many positions."""
        import numpy as np

        if len(xs) < _MANY:
            return np.array([self.at(x) for x in xs.tolist()])
        if self._columns is None:
            self._columns = np.array(self._cells).T
        starts, ys, slopes = self._columns
        i = np.searchsorted(self._starts, xs, side="right")
        values: NDArray[np.float64] = ys[i] + slopes[i] * (xs - starts[i])
        return values

    def rounded(self, xs: range) -> list[int]:
        """`round(at(x))` for each of ascending `xs`, bit for bit, with one look-up per cell."""
        starts, cells = self._starts, self._cells
        values: list[int] = []
        done, count = 0, len(xs)
        while done < count:
            i = bisect_right(starts, xs[done])
            end = count if i == len(starts) else bisect_left(xs, starts[i], done)
            start, y, slope = cells[i]
            values += [round(y + slope * (x - start)) for x in xs[done:end]]
            done = end
        return values

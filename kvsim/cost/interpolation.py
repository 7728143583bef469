"""Lines between measured points, on raw axes, in one to four dimensions.

Below the first point the first value holds; past the last the last slope continues, but never
downwards. Both are noted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from kvsim.cost.profile import MixedGrid


class Interpolation:
    """Looks values up; `outside` is set, and never reset, by a look-up that leaves its table."""

    def __init__(self) -> None:
        self.outside = False

    def along(self, xs: Sequence[float], us: Sequence[float], x: float) -> float:
        """The line through the points `(xs[i], us[i])` at `x`; `us` may end before `xs`."""
        last = len(us) - 1
        if x <= xs[0]:
            if x < xs[0]:
                self.outside = True
            return us[0]
        i = bisect_left(xs, x, 1, last)
        value = us[i - 1] + (us[i] - us[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])
        if x > xs[last]:
            self.outside = True
            return max(value, us[last])
        return value

    def between(
        self,
        xs: Sequence[float],
        ys: Sequence[float],
        rows: Sequence[Sequence[float]],
        x: float,
        y: float,
    ) -> float:
        """The grid `rows[i][j]` at `(xs[i], ys[j])` in `(x, y)`: along `y` in two rows, then `x`.

        Rows may end before `ys`.
        """
        last = len(xs) - 1
        if x <= xs[0]:
            if x < xs[0]:
                self.outside = True
            return self.along(ys, rows[0], y)
        i = bisect_left(xs, x, 1, last)
        low, high = self.along(ys, rows[i - 1], y), self.along(ys, rows[i], y)
        value = low + (high - low) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])
        if x > xs[last]:
            self.outside = True
            return max(value, high)
        return value

    def mixed(
        self, grid: MixedGrid, chunks: Sequence[tuple[int, int]], n: float, kv: float
    ) -> list[float]:
        """A grid of four dimensions at `(q, ctx, n, kv)` for each `(q, ctx)` of `chunks`."""
        k, decode_share = self._cell(grid.n, n)
        m, kv_share = self._cell(grid.kv, kv)
        found = []
        for q, ctx in chunks:
            i, q_share = self._cell(grid.q, q)
            j, ctx_share = self._cell(grid.ctx, ctx)
            ends = []
            for row in (grid.us[i - 1], grid.us[i]):
                low = _blend(row[j - 1], k, m, decode_share, kv_share)
                high = _blend(row[j], k, m, decode_share, kv_share)
                ends.append(low + (high - low) * ctx_share)
            found.append(max(ends[0] + (ends[1] - ends[0]) * q_share, 0.0))
        return found

    def _cell(self, xs: Sequence[float], x: float) -> tuple[int, float]:
        """The upper end of the cell of `x`, and how far in it `x` lies: 0 to 1, more past it."""
        if x <= xs[0]:
            if x < xs[0]:
                self.outside = True
            return 1, 0.0
        last = len(xs) - 1
        if x > xs[last]:
            self.outside = True
        i = bisect_left(xs, x, 1, last)
        return i, (x - xs[i - 1]) / (xs[i] - xs[i - 1])


def _blend(rows: Sequence[Sequence[float]], i: int, j: int, s: float, t: float) -> float:
    """The bilinear value in the cell below `(i, j)`."""
    first, second = rows[i - 1], rows[i]
    low = first[j - 1] + (first[j] - first[j - 1]) * t
    high = second[j - 1] + (second[j] - second[j - 1]) * t
    return low + (high - low) * s

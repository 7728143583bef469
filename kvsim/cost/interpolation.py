"""Linear interpolation between measured points, on raw axes, in one and two dimensions.

Below the first point the first value holds. Above the last one the last slope continues, but never
downwards. Both cases are noted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Interpolation:
    """Looks values up; a look-up outside its table sets `outside`, and no look-up resets it."""

    def __init__(self) -> None:
        self.outside = False

    def along(self, xs: Sequence[float], us: Sequence[float], x: float) -> float:
        """The line through the points `(xs[i], us[i])` at `x`; `us` may end before `xs`."""
        if x <= xs[0]:
            if x < xs[0]:
                self.outside = True
            return us[0]
        i = bisect_left(xs, x, 1, len(us) - 1)
        value = us[i - 1] + (us[i] - us[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])
        if x > xs[i]:
            self.outside = True
            return max(value, us[i])
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

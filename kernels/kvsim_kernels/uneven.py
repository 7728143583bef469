"""What uneven decode batches take longer than even ones of the same mean length. No torch here.

A sequence that is left alone on the device is read at the pace of its own thread blocks, `alone_ns`
per token; `k` sequences on a device that is full take `k x share_ns` per token. A table cost model
prices it in the same way (`kvsim.cost.tail`). Both rates are measured: `share_ns` is the slope of
the largest even batches; each batch of one long sequence among short ones gives an `alone_ns`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from kvsim_kernels.grid import Shape, lengths
from kvsim_kernels.rows import Row
from kvsim_kernels.tables import Table, between, robust_fit


def longer_us(sequences: ArrayLike, alone_ns: float, share_ns: float) -> float:
    """Microseconds that a launch over sequences of these lengths takes longer than an even one."""
    falling = np.sort(np.asarray(sequences, float))[::-1]
    idle_ns = np.maximum(0.0, alone_ns - np.arange(1, len(falling) + 1) * share_ns)
    ends = np.append(falling[1:], 0.0)
    return float((falling - ends) @ idle_ns - falling.mean() * idle_ns[-1]) / 1000


@dataclass(frozen=True)
class Law:
    """A decode kernel alone on batches of any lengths: its grid, and the two rates."""

    table: Table
    alone_ns: float
    share_ns: float
    longest: int
    """Longest sequence of any shape."""

    @classmethod
    def measured(cls, table: Table, rows: Sequence[Row], longest: int) -> "Law":
        """The law of a grid and of rows of one long sequence each.

        A kernel that reads one sequence as fast as many has no tail: both rates are then the same.
        """
        full = table["us"][-1]
        slope_us = robust_fit([[1.0, ctx] for ctx in table["ctx"][: len(full)]], full)[1]
        share_ns = max(float(slope_us), 0.0) / table["n"][-1] * 1000
        even = cls(table, share_ns, share_ns, longest)
        ahead_ns = [
            1000
            * (row["us"] - even.even_us(row["shape"]))
            / (row["shape"]["long"] - row["shape"]["ctx"])
            for row in rows
        ]
        return cls(table, share_ns + max(_median(ahead_ns), 0.0), share_ns, longest)

    def even_us(self, shape: Shape) -> float:
        """An even batch of as many tokens."""
        mean = float(lengths(shape, self.longest).mean())
        return between(self.table["n"], self.table["ctx"], self.table["us"], shape["n"], mean)

    def us(self, shape: Shape) -> float:
        """A batch with its own lengths."""
        found = lengths(shape, self.longest)
        return self.even_us(shape) + longer_us(found, self.alone_ns, self.share_ns)


def _median(values: Sequence[float]) -> float:
    return float(np.median(values)) if values else 0.0

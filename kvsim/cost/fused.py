"""Attention in one launch that serves prompt chunks and decodes together."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from kvsim.cost.profile import MixedGrid

MOST_KEPT = 512
"""Most numbers of decodes whose slices are kept."""


class Fused:
    """Looks up a `MixedGrid`; `outside` says whether the last look-up left it.

    The value is linear in each of the four raw counts. Below the first point of an axis its first
    value holds; above the last one the last slope continues.
    """

    def __init__(self, grid: MixedGrid) -> None:
        self._grid = grid
        self._n, self._kv = (grid.n[0], grid.n[-1]), grid.kv
        self._slices: dict[float, list[list[list[float]]]] = {}
        """By number of decodes: times by chunk, its context and mean length."""
        self._q_cells: dict[float, tuple[int, float]] = {}
        """By tokens of a chunk, and by its context, within the table."""
        self._ctx_cells: dict[float, tuple[int, float]] = {}
        self.outside = False

    def us(self, chunks: Sequence[tuple[float, float]], n: int, mean: float) -> float:
        """Microseconds of `chunks`, (tokens, tokens of context), and `n` decodes of `mean` length.

        The grid was measured with one chunk. Each further chunk adds its time beyond the smallest
        chunk, so that the launch and the decodes count once.
        """
        us = self._slices.get(n) or self._slice(n)
        self.outside = not self._n[0] <= n <= self._n[1]
        m, share = self._cell(self._kv, mean)
        before, total = m - 1, 0.0
        for q, ctx in chunks:
            i, q_share = self._q_cells.get(q) or self._kept(self._q_cells, self._grid.q, q)
            j, ctx_share = self._ctx_cells.get(ctx) or self._kept(
                self._ctx_cells, self._grid.ctx, ctx
            )
            row, next_row = us[i - 1], us[i]
            near, next_near = row[j - 1], next_row[j - 1]
            low = near[before] + (near[m] - near[before]) * share
            high = next_near[before] + (next_near[m] - next_near[before]) * share
            if ctx_share:
                far, next_far = row[j], next_row[j]
                low += (far[before] + (far[m] - far[before]) * share - low) * ctx_share
                high += (
                    next_far[before] + (next_far[m] - next_far[before]) * share - high
                ) * ctx_share
            low += (high - low) * q_share
            if low > 0:
                total += low
        if len(chunks) > 1:
            near = us[0][0]
            smallest = near[before] + (near[m] - near[before]) * share
            total -= (len(chunks) - 1) * max(smallest, 0.0)
        return total

    def _kept(
        self, cells: dict[float, tuple[int, float]], axis: Sequence[float], x: float
    ) -> tuple[int, float]:
        cell = self._cell(axis, x)
        if axis[0] <= x <= axis[-1]:
            cells[x] = cell
        return cell

    def _slice(self, n: int) -> list[list[list[float]]]:
        if len(self._slices) >= MOST_KEPT:
            self._slices.clear()
        k, share = self._cell(self._grid.n, n)
        made = self._slices[n] = [
            [
                [low + (high - low) * share for low, high in zip(ns[k - 1], ns[k], strict=True)]
                for ns in rows
            ]
            for rows in self._grid.us
        ]
        return made

    def _cell(self, xs: Sequence[float], x: float) -> tuple[int, float]:
        """The upper end of the cell of `x`, and the position of `x` in it: 0 to 1, or beyond."""
        i = bisect_left(xs, x, 1, len(xs) - 1)
        low, high = xs[i - 1], xs[i]
        if x < low:
            self.outside = True
            return i, 0.0
        if x > high:
            self.outside = True
        return i, (x - low) / (high - low)

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
        self._smallest = [(grid.q[0], grid.ctx[0])]
        self._slices: dict[int, list[list[list[float]]]] = {}
        """By number of decodes: times by chunk, its context and mean length."""
        self._chunk_cells: dict[float, tuple[int, float]] = {}
        """By tokens of a chunk, within the table."""
        self.outside = False

    def us(self, chunks: Sequence[tuple[float, float]], n: int, mean: float) -> float:
        """Microseconds of `chunks`, (tokens, tokens of context), and `n` decodes of `mean` length.

        The grid was measured with one chunk. Each further chunk adds its time beyond the smallest
        chunk, so that the launch and the decodes count once.
        """
        self.outside = False
        us = self._sum(chunks, n, mean)
        if len(chunks) > 1:
            outside = self.outside
            us -= (len(chunks) - 1) * self._sum(self._smallest, n, mean)
            self.outside = outside
        return us

    def _sum(self, chunks: Sequence[tuple[float, float]], n: int, mean: float) -> float:
        grid = self._grid
        us = self._slices.get(n)
        if us is None:
            if len(self._slices) >= MOST_KEPT:
                self._slices.clear()
            us = self._slices[n] = self._slice(n)
        if not grid.n[0] <= n <= grid.n[-1]:
            self.outside = True
        m, share = self._cell(grid.kv, mean)
        before, total = m - 1, 0.0
        for q, ctx in chunks:
            i, q_share = self._chunk_cells.get(q) or self._chunk_cell(q)
            j, ctx_share = self._cell(grid.ctx, ctx)
            row, next_row = us[i - 1], us[i]
            near, far, next_near, next_far = row[j - 1], row[j], next_row[j - 1], next_row[j]
            low = near[before] + (near[m] - near[before]) * share
            low += (far[before] + (far[m] - far[before]) * share - low) * ctx_share
            high = next_near[before] + (next_near[m] - next_near[before]) * share
            high += (next_far[before] + (next_far[m] - next_far[before]) * share - high) * ctx_share
            low += (high - low) * q_share
            if low > 0:
                total += low
        return total

    def _chunk_cell(self, q: float) -> tuple[int, float]:
        cell, axis = self._cell(self._grid.q, q), self._grid.q
        if axis[0] <= q <= axis[-1]:
            self._chunk_cells[q] = cell
        return cell

    def _slice(self, n: int) -> list[list[list[float]]]:
        k, share = self._cell(self._grid.n, n)
        return [
            [
                [low + (high - low) * share for low, high in zip(ns[k - 1], ns[k], strict=True)]
                for ns in rows
            ]
            for rows in self._grid.us
        ]

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

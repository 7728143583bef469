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
        self._fewest = self._slice(grid.n[0])
        self.outside = False

    def us(self, chunks: Sequence[tuple[float, float]], n: int, mean: float) -> float:
        """Microseconds of `chunks`, (tokens, tokens of context), and `n` decodes of `mean` length.

        The grid was measured with one chunk. A launch has as many blocks for each sequence as its
        longest chunk needs, and blocks without work take time, too. So decodes are looked up beside
        the longest chunk, and count once. Each further chunk adds its time beyond the smallest
        chunk, both beside the fewest and shortest decodes.

        Source: FlashAttention-2, `run_flash_splitkv_fwd` (`num_m_block` comes from the greatest
        number of queries), github.com/Dao-AILab/flash-attention,
        `csrc/flash_attn/src/flash_fwd_launch_template.h`.
        """
        us = self._slices.get(n) or self._slice(n)
        self.outside = not self._n[0] <= n <= self._n[1]
        m, share = self._cell(self._kv, mean)
        before, total, smallest = m - 1, 0.0, 0.0
        for q, ctx in sorted(chunks, reverse=True):
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
            if low > smallest:
                total += low - smallest
            # For those after the longest chunk.
            us, m, before, share = self._fewest, 1, 0, 0.0
            smallest = us[0][0][0]
        return total

    def _kept(
        self, cells: dict[float, tuple[int, float]], axis: Sequence[float], x: float
    ) -> tuple[int, float]:
        cell = self._cell(axis, x)
        if axis[0] <= x <= axis[-1]:
            cells[x] = cell
        return cell

    def _slice(self, n: float) -> list[list[list[float]]]:
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

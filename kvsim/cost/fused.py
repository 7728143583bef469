"""Attention in one launch that serves prompt chunks and decodes together."""

from __future__ import annotations

from collections.abc import Sequence

from librt.vecs import vec
from mypy_extensions import i64

from kvsim.core.vectors import floats
from kvsim.cost.lines import cell_to
from kvsim.cost.profile import MixedGrid


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

"""Surfaces of the kernels in AIConfigurator's tables: attention by heads, matrix products by shape.

The scales of every surface were chosen on the tables of the H100, by their error on rows outside
the fit (single rows; for matrix products, whole shapes and whole octaves of tokens). So the errors
on other GPUs are independent of that choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvsim.cost.calibrate.rows import numbers
from kvsim.cost.calibrate.surface import Error, Floats, Law, Scales, Surface, error
from kvsim.cost.layer import Peaks, product_us
from kvsim.errors import ConfigError
from kvsim.machine.models import Shard

DECODE = Scales(first=4, second=8, work=0.6, work_share=0.1, noise=0.003)
PREFILL = Scales(first=6, second=6, work=3, work_share=0.1, noise=1e-4)
GEMM = Scales(first=4, second=8, work=2, work_share=0.1, noise=0.01)

DECODE_FLOOR_US, PREFILL_FLOOR_US = 10.0, 11.0
MOST_SEQS, MOST_PREFILL_SEQS, MOST_TOKENS = 256, 8, 8192
LEAST_CHUNK, LEAST_WIDTH = 16, 2048
"""Rows beyond these limits are left out: no run comes near them, and they would distort the fit."""


class Attention(NamedTuple):
    """One attention kernel at the heads of a model."""

    surface: Surface
    ends: list[tuple[float, float]]
    """(sequences, longest measured length), in ascending order."""

    @classmethod
    def decode(cls, path: Path, shard: Shard, peaks: Peaks) -> Attention:
        """Decode attention, by sequences and their length."""
        points = [p for p in _attention_rows(path, shard, "ctx") if p[0] <= MOST_SEQS]
        kv_bytes = 4 * shard.kv_heads * shard.model.head_dim
        reading = kv_bytes / (0.85 * peaks.bandwidth) * 1e6
        law = Law(
            us=lambda n, ctx: (DECODE_FLOOR_US**3 + (n * ctx * reading) ** 3) ** (1 / 3),
            work=lambda n, ctx: n * ctx,
        )
        return cls._fitted(points, law, DECODE)

    @classmethod
    def prefill(cls, path: Path, shard: Shard, peaks: Peaks) -> Attention:
        """Prompt attention, by sequences and their tokens, causal, without context."""
        points = [
            p
            for p in _attention_rows(path, shard, "q_tokens")
            if p[0] <= MOST_PREFILL_SEQS and p[1] >= LEAST_CHUNK
        ]
        pair_us = 4 * shard.heads * shard.model.head_dim / (0.65 * peaks.flop_s) * 1e6
        law = Law(
            us=lambda n, q: np.hypot(PREFILL_FLOOR_US, n * q * (q + 1) / 2 * pair_us),
            work=lambda n, q: n * q * q,
        )
        return cls._fitted(points, law, PREFILL)

    @classmethod
    def _fitted(cls, points: list[tuple[float, ...]], law: Law, scales: Scales) -> Attention:
        n, length, us = zip(*points, strict=True)
        ends = {seqs: max(p[1] for p in points if p[0] == seqs) for seqs in sorted(set(n))}
        return cls(Surface(n, length, us, law, scales), list(ends.items()))

    def longest(self, seqs: int) -> float:
        """Longest length that was measured for at least `seqs` sequences."""
        fitting = [length for n, length in self.ends if n >= seqs]
        return fitting[0] if fitting else self.ends[-1][1]


class Gemm:
    """Matrix products of one GPU, by tokens and one side of the weight; the other side is fixed."""

    def __init__(self, path: Path, peaks: Peaks) -> None:
        self._path, self._peaks = path, peaks
        self._rows = np.array(
            [row for _, row in numbers(path, ("m", "n", "k", "us")) if row[0] <= MOST_TOKENS]
        ).reshape(-1, 4)
        self._slices: dict[tuple[str, int], _Slice] = {}

    def us(self, tokens: Floats, n: int, k: int) -> Floats:
        """Microseconds of the product of `tokens[i]` rows and a weight of n x k.

        Beyond the measured sizes, the time grows like the roofline from the nearest one.
        """
        piece, free = self._slice(n, k)
        near = min(max(free, float(piece.sides.min())), float(piece.sides.max()))
        growth = piece.roofline_us(tokens, free) / piece.roofline_us(tokens, near)
        return np.asarray(piece.surface.at(tokens, np.full_like(tokens, near)) * growth, float)

    def error(self, shapes: Iterable[tuple[int, int]]) -> Error:
        """Error over all shapes in the slices for `shapes`, each left out of its fit."""
        pieces = {id(piece): piece for piece, _ in (self._slice(n, k) for n, k in shapes)}
        unseen = np.concatenate([each.unseen for each in pieces.values()])
        return error(unseen, np.concatenate([each.measured for each in pieces.values()]))

    def nearest_measured(self, n: int, k: int) -> tuple[Floats, Floats]:
        """The measured shape that is most like n x k: (times without it in the fit, its times)."""
        piece, free = self._slice(n, k)
        sides = np.unique(piece.sides)
        own = piece.sides == sides[np.abs(np.log(sides / free)).argmin()]
        return piece.unseen[own], piece.measured[own]

    def _slice(self, n: int, k: int) -> tuple[_Slice, float]:
        """The slice for a shape, and the side of the shape that varies in it."""
        for column, name, fixed, free in ((2, "k", k, n), (1, "n", n, k)):
            key = (name, fixed)
            if key not in self._slices:
                rows = self._rows[self._rows[:, column] == fixed]
                rows = rows[rows[:, 3 - column] >= LEAST_WIDTH]
                if len(np.unique(rows[:, 3 - column])) < 3:
                    continue
                self._slices[key] = _Slice(rows[:, [0, 3 - column, 3]], fixed, self._peaks)
            return self._slices[key], float(free)
        raise ConfigError(
            f"{self._path}: neither n {n} nor k {k} was measured at 3 sizes of the other or more;"
            " this model's matrix products cannot be priced"
        )


class _Slice:
    """Rows (m, free side, us) with one fixed side, fitted."""

    def __init__(self, rows: Floats, fixed: float, peaks: Peaks) -> None:
        tokens, self.sides, self.measured = rows.T
        self._fixed, self._peaks = fixed, peaks
        law = Law(us=self.roofline_us, work=lambda m, side: m * side)
        self.surface = Surface(tokens, self.sides, self.measured, law, GEMM)
        self.unseen = self.surface.unseen(self.sides)

    def roofline_us(self, m: Any, side: Any) -> Floats:
        """Microseconds of a matrix product by the roofline (`kvsim.cost.layer`)."""
        return np.asarray(product_us(m, side, self._fixed, self._peaks))


def _attention_rows(path: Path, shard: Shard, length: str) -> list[tuple[float, ...]]:
    """(sequences, length, us) at the heads of a shard, keys and values in bf16."""
    columns = ("q_heads", "kv_heads", "head_dim", "n_seqs", length, "us")
    heads = [shard.heads, shard.kv_heads, shard.model.head_dim]
    found = [
        tuple(row[4:])
        for _, row in numbers(path, columns, label="kv_dtype")
        if row[0] == "bf16" and row[1:4] == heads
    ]
    if len(found) < 10:
        raise ConfigError(
            f"{path}: {len(found)} rows of kv_dtype bf16 with {heads[0]} query and {heads[1]} KV"
            f" heads of {heads[2]}; this model and degree of parallelism were not measured"
        )
    return found

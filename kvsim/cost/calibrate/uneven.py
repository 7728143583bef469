"""Derives what uneven decode batches take longer from tables of even ones, and judges it.

Both rates of `kvsim.cost.tail` are slopes of attention tables over lengths: that of a single decode
beside the smallest chunk, which no kernel splits, and that of the largest decode batch.
Rows of uneven batches are not used for them. They say how well the term meets them, and whether it
is priced by default.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from pathlib import Path
from statistics import linear_regression, median
from typing import Any, NamedTuple

import numpy as np

from kvsim.cost.calibrate.compare import reader
from kvsim.cost.calibrate.rows import numbers
from kvsim.cost.calibrate.surface import error
from kvsim.cost.profile import DecodeGrid, MixedGrid, Tail
from kvsim.cost.tail import Uneven

SPLIT_SHARE, SPLITTING_BLOCKS, TILE = 0.8, 2, 64
"""FlashAttention-2: KV is not split from this share of so many thread blocks per multiprocessor
on; queries of a thread block (sources: `kvsim.cost.tail`)."""
LENGTHS = (512, 8192)
"""Lengths between which slopes are taken, where a table has them: shorter ones take little but a
launch."""
COLUMNS = ("n", "nb", "pc", "kp", "kvs", "kv_big", "kv_mean", "t_mean_us", "t_skew_us")


class Batch(NamedTuple):
    """A measured uneven batch: `longer` of `sequences` are `long` tokens long, the others `short`,
    beside a chunk of `new` tokens after `context`. Counts are whole numbers."""

    sequences: int
    longer: int
    new: int
    context: int
    short: int
    long: int
    us: float


class Judged(NamedTuple):
    """A term, and how it meets measured uneven batches."""

    tail: Tail
    errors: dict[str, Any]
    """Errors with the term and, below `even`, without it; empty: there are no such rows."""


def derived(decode: DecodeGrid, mixed: MixedGrid, kv_heads: int, multiprocessors: int) -> Tail:
    """The term of a GPU with so many multiprocessors and KV heads."""
    alone = _slope(mixed.kv, [row[0] for row in _by_length(mixed)])
    share = _slope(decode.ctx, decode.us[-1]) / decode.x[-1]
    items = SPLIT_SHARE * SPLITTING_BLOCKS * multiprocessors
    return Tail(
        alone_ns=round(alone, 3),
        share_ns=round(share, 3),
        unsplit_seqs=ceil(items / kv_heads),
        tile=TILE,
        used=False,
    )


def judged(tail: Tail, decode: DecodeGrid, mixed: MixedGrid, path: Path, iterations: int) -> Judged:
    """`tail` with the verdict of the rows of `path`, of launches that do not split."""
    if not path.exists():
        return Judged(tail, {})
    uneven = Uneven(tail)
    rows: list[tuple[bool, float, float, float]] = []
    for batch, even_us in _measured(decode, mixed, path, iterations):
        if batch.new or batch.sequences >= tail.unsplit_seqs:
            further_us = _further_us(uneven, batch)
            rows.append((batch.new > 0, even_us, even_us + further_us, batch.us))
    if not rows:
        return Judged(tail, {})
    prompts, even, priced, real = map(np.array, zip(*rows, strict=True))
    parts = {"decodes": ~prompts.astype(bool), "with prompts": prompts.astype(bool)}
    errors: dict[str, Any] = {**error(priced, real), "even": error(even, real)}
    for name, here in parts.items():
        if here.any():
            errors[name] = error(priced[here], real[here])
            errors[f"{name}, even"] = error(even[here], real[here])
    better = all(errors[key] < errors["even"][key] for key in ("median_percent", "p95_percent"))
    return Judged(Tail(tail.alone_ns, tail.share_ns, tail.unsplit_seqs, tail.tile, better), errors)


def _measured(
    decode: DecodeGrid, mixed: MixedGrid, path: Path, iterations: int
) -> Iterator[tuple[Batch, float]]:
    """Uneven batches within the tables, and the time of even ones with the same mean.

    The profiler of vLLM 0.19 wrote sums over its iterations: the times that it gives for even
    batches, over those of the tables, tell whether a file has them.
    """
    decodes, mixes = reader(decode), reader(mixed)
    found: list[tuple[Batch, float]] = []
    ratios: list[float] = []
    for _, (n, longer, new, context, short, long, mean, mean_us, us) in numbers(path, COLUMNS):
        n, longer, new, context, short, long = map(int, (n, longer, new, context, short, long))
        even_us = mixes((new, context, n, mean)) if new else decodes((n, mean))
        if even_us:
            found.append((Batch(n, longer, new, context, short, long, us), even_us))
            ratios.append(mean_us / even_us)
    unit = iterations if ratios and median(ratios) > iterations**0.5 else 1
    for batch, even_us in found:
        yield batch._replace(us=batch.us / unit), even_us


def _further_us(uneven: Uneven, batch: Batch) -> float:
    n, longer, new, context, short, long, _ = batch
    lengths = ([long] * longer + [short] * (n - longer))[: uneven.longest]
    total = long * longer + short * (n - longer)
    if new:
        return uneven.mixed_us([(new, context)], n, total, lengths)
    return uneven.decode_us(n, total, lengths)


def _by_length(mixed: MixedGrid) -> list[list[float]]:
    """Times of the smallest chunk without context: by length, then by number of decodes."""
    return [list(column) for column in zip(*mixed.us[0][0], strict=True)]


def _slope(lengths: Sequence[float], us: Sequence[float]) -> float:
    """Nanoseconds per token within `LENGTHS`, or over all of a shorter table."""
    points = [(x, y) for x, y in zip(lengths, us, strict=False) if LENGTHS[0] <= x <= LENGTHS[1]]
    if len(points) < 2:
        points = list(zip(lengths, us, strict=False))
    return max(linear_regression(*zip(*points, strict=True)).slope, 0.0) * 1000

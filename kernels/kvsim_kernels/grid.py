"""What a calibration measures: kernels over grids, rows held out, whole steps. No torch here.

Raw counts are spaced by at most a factor of 2, on a GPU mostly 1.5: on public decode tables, lines
between points a factor of 2 apart miss by 0.5 % in the median, a factor of 4 apart by 2 %.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Shape = dict[str, Any]
Ints = NDArray[np.int64]

MOST_CHUNKS = 8
"""Chunks of a measured step beside its decoding sequences."""

LEAST_CHUNK = 8
"""Tokens of the smallest chunk of a measured step; grids begin at half of it."""


@dataclass(frozen=True)
class Limits:
    """The largest steps that are measured, and what the device offers.

    `tile`: queries per tile of the prefill kernel. `capture_sizes`: decoding sequences that a
    graph serves; none where there are no graphs. `decode_kernels`: of v1 and v2.
    """

    cuda: bool
    max_tokens: int
    max_seqs: int
    max_seq_len: int
    num_blocks: int
    block_size: int
    tile: int = 1
    capture_sizes: tuple[int, ...] = ()
    decode_kernels: tuple[str, ...] = ("v2",)
    experts: tuple[int, int] | None = None
    """Experts of a layer, and how many of them each token has."""
    gpus: int = 1
    """GPUs, or processes on a CPU, between which all-reduces are measured."""
    token_bytes: int = 0
    """Bytes of the hidden state of one token, which all-reduces sum."""

    def holds(self, lengths: Sequence[int] | np.ndarray) -> bool:
        """Whether the pool holds sequences of these lengths at once."""
        return int(np.sum(-(-np.asarray(lengths) // self.block_size))) <= self.num_blocks


@dataclass(frozen=True)
class Sample:
    """One measurement to be made.

    `method`: alone (cold caches), warm (one after another, as steps follow each other), insitu (a
    forward pass with less one without), whole (a step with its host work). `split`: fit, held_out,
    repeat (a second time, for the noise), start and end (anchors, for the drift). `round`: which
    pass over the whole plan.
    """

    kernel: str
    method: str
    split: str
    shape: Shape
    round: int = 0

    def row(self) -> dict[str, Any]:
        """The keys of its row that say what is measured."""
        return dict(vars(self))


def plan(limits: Limits, rounds: int = 1, seed: int = 0) -> list[Sample]:
    """Every sample but the anchors, `rounds` times.

    Each round is shuffled: drift must not look like a shape.
    """
    drawn = _all(limits, np.random.default_rng(seed))
    # What is drawn twice is measured once.
    samples = list({str(sample.row()): sample for sample in drawn}.values())
    rng = np.random.default_rng(seed + 1)
    return [
        replace(samples[i], round=number)
        for number in range(rounds)
        for i in rng.permutation(len(samples))
    ]


def anchors(samples: Sequence[Sample], split: str) -> list[Sample]:
    """A dozen of the samples in as many rounds, to be measured at the `start` and the `end`."""
    grid = sorted(
        (s for s in samples if s.split == "fit" and s.method in ("alone", "warm")),
        key=lambda s: (s.round, s.kernel, sorted(s.shape.items(), key=str)),
    )
    first = [sample for sample in grid if sample.round == 0]
    picked = first[:: max(1, len(first) // 12)]
    rounds = 1 + max((sample.round for sample in grid), default=0)
    return [replace(s, split=split, round=number) for number in range(rounds) for s in picked]


def ladder(low: int, high: int, fine: bool) -> list[int]:
    """Counts from `low` to `high`, each twice the one before; `fine`: with those between."""
    points, base = {high}, low
    while base < high:
        points |= {base, base * 3 // 2} if fine else {base}
        base *= 2
    return sorted(point for point in points if point <= high)


def lengths(shape: Shape, longest: int) -> Ints:
    """Lengths of the decoding sequences of a shape: all `ctx`, or scattered about it by `seed`; or
    `longer` of them `long`, and `ctx` the others.

    Scattered lengths are log-normal with a standard deviation of about 0.6 of their mean, and
    their mean is `ctx` exactly.
    """
    n, ctx = shape["n"], shape["ctx"]
    if "seed" not in shape or n < 2:
        even: Ints = np.full(n, ctx, dtype=np.int64)
        if "long" in shape:
            even[: shape["longer"]] = shape["long"]
        return even
    rng = np.random.default_rng([shape["seed"], n, ctx])
    draws = np.exp(rng.normal(0.0, 0.55, n))
    found: Ints = np.clip(np.rint(draws * ctx / draws.mean()), 1, longest).astype(np.int64)
    missing = n * ctx - int(found.sum())
    while missing:
        sign = 1 if missing > 0 else -1
        movable = np.flatnonzero((found + sign >= 1) & (found + sign <= longest))[: abs(missing)]
        found[movable] += sign
        missing -= sign * len(movable)
    return found


def _all(limits: Limits, rng: np.random.Generator) -> Iterator[Sample]:
    for version in limits.decode_kernels:
        yield from _decode(limits, f"decode_{version}", rng)
    yield from _prefill(limits, rng)
    yield from _dense(limits, rng)
    yield from _experts(limits)
    yield from _moves(limits)
    yield from _all_reduces(limits)
    yield from (Sample("ceiling", "alone", "fit", shape) for shape in _ceilings(limits))
    for index in range(80 if limits.cuda else 64):
        yield Sample("step", "whole", _half(index), _step(limits, rng, index))
    if limits.cuda:
        floor = {"n": 0, "ctx": 0, "chunks": [[16, 0]]}
        yield from (Sample("launch_floor", "whole", split, floor) for split in ("fit", "repeat"))
        for n, ctx in ((32, 4096), (64, 2048), (128, 1024)):
            if n <= limits.max_seqs and ctx <= limits.max_seq_len and limits.holds([ctx] * n):
                yield Sample("decode_gather", "alone", "fit", {"n": n, "ctx": ctx})


def _decode(limits: Limits, kernel: str, rng: np.random.Generator) -> Iterator[Sample]:
    sizes, every = ladder(1, limits.max_seqs, limits.cuda), 4 if limits.cuda else 2
    contexts = ladder(16, limits.max_seq_len, limits.cuda)
    grid = _lines(
        {"n": n, "ctx": ctx} for n in sizes for ctx in contexts if limits.holds([ctx] * n)
    )
    yield from (Sample(kernel, "alone", "fit", shape) for shape in grid)
    yield from (
        Sample(kernel, "alone", "repeat", shape) for shape in grid[:: max(1, len(grid) // 6)]
    )
    middle = [
        shape
        for shape in grid
        if shape["n"] in sizes[::every] + sizes[-1:] and shape["ctx"] in contexts[1::every]
    ]
    yield from (Sample(kernel, "insitu", "fit", shape) for shape in middle)
    for index in range(60 if limits.cuda else 32):
        shape = _random_decode(limits, rng)
        yield Sample(kernel, "alone", _half(index), shape | {"seed": index})
        if index % 2:
            yield Sample(kernel, "alone", "held_out", _random_decode(limits, rng))
    yield from _uneven(limits, kernel)


def _uneven(limits: Limits, kernel: str) -> Iterator[Sample]:
    """Few long sequences among short ones: one in the largest batches; held out, up to four of any
    lengths in a batch of any size."""
    most, rng = limits.max_seq_len, np.random.default_rng(limits.max_seqs)
    lengthy = [length for length in ladder(16, most, limits.cuda) if length >= most / 8]
    for n in (limits.max_seqs, -(-limits.max_seqs // 2)):
        for long in lengthy:
            for ctx in {long // 16, long // 4}:
                shape = {"n": n, "ctx": max(ctx, 1), "longer": 1, "long": long}
                if n > 1 and limits.holds(lengths(shape, most)):
                    yield Sample(kernel, "alone", "fit", shape)
    for _ in range(30 if limits.cuda else 16):
        long = _log_uniform(rng, 64, most)
        n = _log_uniform(rng, 2, limits.max_seqs)
        shape = {
            "n": n, "ctx": _log_uniform(rng, 8, long // 2),
            "longer": int(rng.integers(1, min(4, n - 1) + 1)), "long": long,
        }  # fmt: skip
        if limits.holds(lengths(shape, most)):
            yield Sample(kernel, "alone", "held_out", shape)


def _prefill(limits: Limits, rng: np.random.Generator) -> Iterator[Sample]:
    least = max(LEAST_CHUNK // 2, limits.tile)
    most = min(limits.max_tokens, limits.max_seq_len)
    queries = sorted({q // limits.tile * limits.tile for q in ladder(least, most, limits.cuda)})
    longest = limits.max_seq_len - least
    before = [0, *ladder(min(max(64, limits.max_seq_len // 64), longest), longest, limits.cuda)]
    grid = _lines(
        {"q": q, "ctx": ctx} for q in queries for ctx in before if q + ctx <= limits.max_seq_len
    )
    yield from (Sample("prefill", "alone", "fit", shape) for shape in grid)
    yield from (
        Sample("prefill", "alone", "repeat", shape) for shape in grid[:: max(1, len(grid) // 5)]
    )
    every = 3 if limits.cuda else 2
    middle = [
        shape
        for shape in grid
        if shape["q"] in queries[1::every] and shape["ctx"] in before[::every]
    ]
    yield from (Sample("prefill", "insitu", "fit", shape) for shape in middle)
    for _ in range(40 if limits.cuda else 20):
        q = _log_uniform(rng, LEAST_CHUNK, most // 2)
        shape = {"q": q, "ctx": int(rng.integers(0, limits.max_seq_len - q))}
        yield Sample("prefill", "alone", "held_out", shape)


def _lines(shapes: Iterable[Shape]) -> list[Shape]:
    """The shapes whose first count comes with two contexts or more: one point makes no line."""
    lines: dict[int, list[Shape]] = {}
    for shape in shapes:
        lines.setdefault(next(iter(shape.values())), []).append(shape)
    return [shape for line in lines.values() if len(line) > 1 for shape in line]


def _dense(limits: Limits, rng: np.random.Generator) -> Iterator[Sample]:
    """Every capture size, then a ladder; GEMM libraries change their tiles on the way."""
    sizes = {*limits.capture_sizes, *ladder(1, limits.max_tokens, True)}
    if limits.cuda:
        for low, spacing in ((256, 16), (512, 32), (1024, 64), (2048, 256), (4096, 512)):
            sizes |= set(range(low, min(2 * low, limits.max_tokens) + 1, spacing))
    yield from (Sample("dense", "warm", "fit", {"tokens": t}) for t in sorted(sizes))
    repeated = sorted(sizes)[:: max(1, len(sizes) // 6)]
    yield from (Sample("dense", "warm", "repeat", {"tokens": t}) for t in repeated)
    low = max((size for size in limits.capture_sizes), default=1)
    for t in sorted({_log_uniform(rng, low, limits.max_tokens) for _ in range(12)} - sizes):
        yield Sample("dense", "warm", "held_out", {"tokens": t})
    rows = sorted({*limits.capture_sizes, *ladder(1, limits.max_seqs, True)})
    yield from (Sample("head", "alone", "fit", {"samples": s}) for s in rows)
    for s in sorted({_log_uniform(rng, 2, limits.max_seqs) for _ in range(6)} - set(rows)):
        yield Sample("head", "alone", "held_out", {"samples": s})


def _experts(limits: Limits) -> Iterator[Sample]:
    """Layers with experts, by tokens and by how many experts these go to."""
    if limits.experts is None:
        return
    (number, per_token), rng = limits.experts, np.random.default_rng(limits.experts)
    sizes = [t for t in ladder(1, limits.max_tokens, limits.cuda) if t * per_token > 1]
    actives = ladder(1, number, limits.cuda)
    for tokens in sizes:
        for active in actives:
            if active <= tokens * per_token:
                shape = {"tokens": tokens, "active": active}
                yield Sample("experts", "alone", "fit", shape)
    for _ in range(20 if limits.cuda else 8):
        tokens = _log_uniform(rng, sizes[0], limits.max_tokens)
        active = _log_uniform(rng, 1, min(number, tokens * per_token))
        yield Sample("experts", "alone", "held_out", {"tokens": tokens, "active": active})


def _all_reduces(limits: Limits) -> Iterator[Sample]:
    """Messages from one token to the largest step, those between them held out."""
    if limits.gpus == 1:
        return
    for index, tokens in enumerate(ladder(1, limits.max_tokens, True)):
        shape = {"gpus": limits.gpus, "bytes": tokens * limits.token_bytes}
        yield Sample("all_reduce", "whole", _half(index), shape)


def _moves(limits: Limits) -> Iterator[Sample]:
    for blocks in (1, 4, 16, 64):
        if 2 * blocks <= limits.num_blocks:
            yield Sample("copy", "alone", "fit", {"blocks": blocks})
    for layout in ("layer", "cross"):
        for direction in ("d2h", "h2d", "both"):
            for blocks in (1, 2, 4, 8, 16, 32):
                shape = {"layout": layout, "direction": direction, "blocks": blocks}
                yield Sample("swap", "whole", "fit", shape)


def _ceilings(limits: Limits) -> list[Shape]:
    """What the device can do at best, measured beside the kernels."""
    mib, size = (512, 8192) if limits.cuda else (32, 512)
    moves = ("copy", "h2d", "d2h", "both") if limits.cuda else ("copy",)
    shapes: list[Shape] = [{"what": what, "bytes": mib << 20} for what in moves]
    return [*shapes, {"what": "gemm", "m": size, "n": size, "k": size}]


def _step(limits: Limits, rng: np.random.Generator, index: int) -> Shape:
    """A random step: two in four decode only, one mixes, one only prefills."""
    # `_half` goes by the lowest bit of the index, so both halves get every kind.
    kind = index // 2 % 4
    n = 0 if kind == 3 else _log_uniform(rng, 1, min(limits.max_seqs, limits.num_blocks // 8))
    room = (limits.max_tokens if kind == 3 else min(limits.max_tokens, 2048)) - n
    count = min(int(rng.integers(1, 4)), max(room, 0) // LEAST_CHUNK) if kind > 1 else 0
    # Chunks take half of the pool at most, four blocks and more are left to each other sequence.
    longest = min(limits.max_seq_len, limits.num_blocks * limits.block_size // 2 // max(count, 1))
    chunks: list[list[int]] = []
    for _ in range(count):
        q = _log_uniform(rng, LEAST_CHUNK, min(room // count, longest // 2))
        before = int(rng.integers(0, longest - q)) if rng.random() < 0.5 else 0
        chunks.append([q, before])
    free = limits.num_blocks - sum(-(-(q + ctx) // limits.block_size) for q, ctx in chunks)
    return {"n": n, "ctx": _context(limits, rng, n, free), "seed": index, "chunks": chunks}


def _random_decode(limits: Limits, rng: np.random.Generator) -> Shape:
    """A batch anywhere in the grid that the pool still holds when its lengths scatter."""
    n = _log_uniform(rng, 1, min(limits.max_seqs, limits.num_blocks // 4))
    return {"n": n, "ctx": _context(limits, rng, n, limits.num_blocks)}


def _context(limits: Limits, rng: np.random.Generator, n: int, free_blocks: int) -> int:
    """A mean length for `n` sequences; two blocks of each are spared, as lengths scatter."""
    room = free_blocks * limits.block_size // max(n, 1) - 2 * limits.block_size
    return _log_uniform(rng, 16, min(room, limits.max_seq_len // 2))


def _half(index: int) -> str:
    return "held_out" if index % 2 else "fit"


def _log_uniform(rng: np.random.Generator, low: int, high: int) -> int:
    return round(float(np.exp(rng.uniform(np.log(low), np.log(max(low, high))))))

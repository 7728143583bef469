"""Rows of a device that follows simple laws, for the plan of a real sweep; no torch."""

from dataclasses import replace
from typing import Any

from kvsim_kernels.geometry import Experts
from kvsim_kernels.grid import Limits, Sample, anchors, lengths, plan
from kvsim_kernels.rows import Row
from kvsim_kernels.uneven import longer_us

CPU = Limits(False, 256, 24, 1024, 24 * 1024 // 16, 16)
CUDA = Limits(
    True, 2048, 64, 4096, 9000, 16, tile=128,
    capture_sizes=(1, 2, 4, *range(8, 65, 8)), decode_kernels=("v1", "v2"),
)  # fmt: skip
EXPERTS = Experts(8, 2, 96)
SEVERAL = replace(CPU, experts=(8, 2), gpus=2, token_bytes=2048)
"""A mixture of experts, on a machine with two GPUs."""
ALONE_NS, SHARE_NS = 50.0, 10.0
LARGE = 40_000
"""Bytes of an all-reduce from which its figures are others."""
LAYERS = 4
STEP = (150.0, 1.1, 3.0)
INSITU = {"prefill": (5.0, 1.2), "decode_v1": (2.0, 1.1), "decode_v2": (1.0, 0.9)}


def header(limits: Limits) -> dict[str, Any]:
    """As a calibration writes it."""
    return {
        "schema": "kvsim.rows/1",
        "created": "2026-01-01",
        "git": "abc",
        "device": {"name": "law"},
        "software": {"torch": "none"},
        "model": {
            "name": "small", "layers": LAYERS, "hidden": 512, "heads": 8, "kv_heads": 2,
            "head_dim": 64, "ffn": 1536, "vocab": 4096, "dtype": "float32",
            "kv_dtype": "float32", "tp": 1,
        } | ({"experts": vars(EXPERTS)} if limits.experts else {}),
        "engine": {
            "block_size": limits.block_size, "graph": limits.cuda, "tile": limits.tile,
            "capture_sizes": list(limits.capture_sizes), "decode_kernel": "decode_v2",
            "max_model_len": limits.max_seq_len,
        },
    }  # fmt: skip


def padded(count: int, sizes: tuple[int, ...]) -> int:
    """What a graph pads a count to."""
    return min((size for size in sizes if size >= count), default=count)


def law(sample: Sample, limits: Limits) -> float:
    """Microseconds: linear in every raw count, so that tables are exact between their points."""
    shape, kernel = sample.shape, sample.kernel
    base, slope = INSITU[kernel] if sample.method == "insitu" else (0.0, 1.0)
    if kernel.startswith("decode_v"):
        found = lengths(shape, limits.max_seq_len)
        longer = longer_us(found, ALONE_NS, SHARE_NS)
        return base + slope * (4 + 0.5 * len(found) + 0.01 * float(found.sum()) + longer)
    if kernel == "decode_gather":
        return 5 * law(Sample("decode_v2", "alone", "fit", shape), limits)
    if kernel == "prefill":
        q = -(-shape["q"] // limits.tile) * limits.tile
        return base + slope * (6 + 0.2 * q + 0.001 * q * shape["ctx"])
    if kernel == "dense":
        return 300 + 20 * padded(shape["tokens"], limits.capture_sizes)
    if kernel == "head":
        return 40 + 3 * padded(shape["samples"], limits.capture_sizes)
    if kernel == "experts":
        return 20 + 0.5 * shape["tokens"] + 3 * shape["active"]
    if kernel == "all_reduce":
        return all_reduce(shape["bytes"])
    if kernel == "step":
        return whole(shape, limits)
    if kernel == "copy":
        return 0.5 * shape["blocks"]
    if kernel == "swap":
        return 8 + {"cross": 2, "layer": 20}[shape["layout"]] * shape["blocks"]
    return 100.0


def whole(shape: dict[str, Any], limits: Limits) -> float:
    """A step: the kernels as they are in situ, and the host."""
    n, chunks = shape["n"], shape["chunks"]
    tokens, samples = n + sum(q for q, _ in chunks), n + len(chunks)
    sizes = limits.capture_sizes
    us = 340 + 20 * padded(tokens, sizes) + 3 * padded(samples, sizes)
    parts = [Sample("prefill", "insitu", "", {"q": q, "ctx": ctx}) for q, ctx in chunks]
    if n:
        parts.append(Sample("decode_v2", "insitu", "", {key: shape[key] for key in KEYS}))
    if limits.experts:
        parts.append(
            Sample("experts", "", "", {"tokens": tokens, "active": EXPERTS.active(tokens)})
        )
    us += LAYERS * sum(law(part, limits) for part in parts)
    return STEP[0] + STEP[1] * us + STEP[2] * samples


KEYS = ("n", "ctx", "seed")
"""What tells the decoding sequences of a step."""


def all_reduce(moved_bytes: int) -> float:
    """20 us and 10 GB/s between two GPUs; 60 us and 20 GB/s for large messages."""
    return 60 + moved_bytes / 20e3 if moved_bytes >= LARGE else 20 + moved_bytes / 10e3


def measured(limits: Limits, rounds: int = 1) -> list[Row]:
    """The rows of a complete sweep, anchors included."""
    samples = plan(limits, rounds)
    rows = [row_of(sample, limits) for sample in samples]
    for split in ("start", "end"):
        rows += [row_of(s, limits) | {"session": 0} for s in anchors(samples, split)]
    return rows


def row_of(sample: Sample, limits: Limits) -> Row:
    """A row without noise."""
    return sample.row() | {"us": round(law(sample, limits), 3), "iqr_us": 0.0, "reps": 5}

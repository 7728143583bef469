"""Profiles from the kernel tables of AIConfigurator (github.com/ai-dynamo/aiconfigurator).

```
DIR/decode.csv      q_heads, kv_heads, head_dim, kv_dtype, n_seqs, ctx -> us, one layer
DIR/prefill.csv     q_heads, kv_heads, head_dim, kv_dtype, n_seqs, q_tokens -> us, one layer
DIR/gemm.csv        m, n, k -> us, y[m,n] = x[m,k] W[n,k]^T
DIR/allreduce.csv   num_gpus, mode, bytes -> us; only for tensor parallelism
```

They are that project's Parquet tables, bf16, as CSV in microseconds. A surface is fitted to each
kernel (`kvsim.cost.calibrate.surface`) and evaluated at counts of our own, so a profile holds none
of the measured rows. Its errors are those of points that the fit has not seen.

Not in the tables, and therefore estimated: norms, rotary embedding and activation (their traffic at
the memory's bandwidth and a least time each), the context of a prompt chunk (its arithmetic or
its traffic), the sampler, and the host (`step_overhead_us` of the hardware).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvsim.cost.calibrate.counts import BEFORE, CHUNKS, CONTEXTS, SEQS, TOKENS
from kvsim.cost.calibrate.kernels import Attention, Gemm
from kvsim.cost.calibrate.rows import numbers
from kvsim.cost.calibrate.surface import Error, Floats, error
from kvsim.cost.interpolation import Interpolation
from kvsim.cost.layer import SAMPLER_US, Peaks, products, small_kernels_us
from kvsim.cost.profile import (
    DecodeGrid,
    DenseCurve,
    Fit,
    HeadCurve,
    PrefillGrid,
    Profile,
    ProfiledEngine,
    ProfiledModel,
    refuse_special,
)
from kvsim.errors import ConfigError
from kvsim.machine.hardware import Hardware, load_hardware
from kvsim.machine.models import Shard, load_model

BLOCK_SIZE = 64
"""Tokens per block of the measured attention kernels."""


class Parts(NamedTuple):
    """The inputs to the fits of one GPU's kernels."""

    folder: Path
    shard: Shard
    tp: int
    peaks: Peaks


def import_profile(
    folder: Path,
    model_name: str,
    hardware_name: str,
    tp: int = 1,
    created: str = "",
    note: str = "",
) -> Profile:
    """The profile of a model on the GPU whose tables `folder` holds.

    `hardware_name` gives peaks and the host's time. `created` and `note` say when and with what the
    tables were measured, which the tables do not say. Raises `ConfigError` that names file, line
    and column, also if the tables have no row for the model's heads.
    """
    model, hardware = load_model(model_name), load_hardware(hardware_name)
    refuse_special(model)
    dtype = model.dtype("auto")
    if dtype != "bfloat16":
        raise ConfigError(
            f"{folder}: the tables were measured in bfloat16, {model.name} is {dtype};"
            " give another --model"
        )
    peaks = Peaks(hardware.flop_s(dtype), hardware.memory_bandwidth_gb_s * 1e9)
    parts = Parts(folder, model.shard(tp), tp, peaks)
    decode = Attention.decode(folder / "decode.csv", parts.shard, peaks)
    prefill = Attention.prefill(folder / "prefill.csv", parts.shard, peaks)
    gemm = Gemm(folder / "gemm.csv", peaks)
    return Profile(
        version="kvsim.profile/1",
        source="public-table",
        created=created,
        device={"name": hardware.name},
        software={"source": _SOURCE, "note": note, "changes": _CHANGES},
        model=ProfiledModel.of(model, "bfloat16", "bfloat16", tp),
        engine=ProfiledEngine(block_size=BLOCK_SIZE),
        fit=Fit(
            dense=_dense(parts, gemm),
            head=_head(parts, gemm),
            prefill=_prefill_grid(parts, prefill),
            decode_v2=_decode_grid(decode),
            step=(hardware.step_overhead_us, 1.0, 0.0),
        ),
        error=_errors(parts, decode, prefill, gemm, hardware),
    )


_SOURCE = (
    "kernel tables of github.com/ai-dynamo/aiconfigurator, Apache-2.0,"
    " copyright NVIDIA Corporation & Affiliates"
)
_CHANGES = "surfaces fitted to the rows and evaluated at other counts; no row is reproduced"


def _dense(parts: Parts, gemm: Gemm) -> DenseCurve:
    model, tokens = parts.shard.model, np.array(TOKENS, float)
    layer = sum(gemm.us(tokens, n, k) for n, k in products(parts.shard).values())
    layer = layer + small_kernels_us(parts.shard, tokens, parts.peaks)
    layer = layer + _all_reduce_us(parts, tokens)
    return DenseCurve([float(t) for t in TOKENS], _rounded(layer * model.num_hidden_layers))


def _all_reduce_us(parts: Parts, tokens: Floats) -> Floats:
    """Microseconds of two all-reduces of the hidden states, interpolated over measured sizes."""
    if parts.tp == 1:
        return np.zeros_like(tokens)
    path = parts.folder / "allreduce.csv"
    rows = sorted(
        (size, us)
        for _, (mode, gpus, size, us) in numbers(path, ("num_gpus", "bytes", "us"), label="mode")
        if mode == "graph" and gpus == parts.tp
    )
    if len(rows) < 2:
        raise ConfigError(
            f"{path}: no rows of mode graph for {parts.tp} GPUs;"
            " give another --tensor-parallel-size"
        )
    sizes, times = [size for size, _ in rows], [us for _, us in rows]
    look, width = Interpolation(), 2 * parts.shard.model.hidden_size
    return np.array([2 * look.along(sizes, times, t * width) for t in tokens])


def _head(parts: Parts, gemm: Gemm) -> HeadCurve:
    samples = [t for t in TOKENS if t <= 1024]
    hidden, words = parts.shard.model.hidden_size, parts.shard.vocab_size
    us = gemm.us(np.array(samples, float), words, hidden) + SAMPLER_US
    return HeadCurve([float(s) for s in samples], _rounded(us))


def _decode_grid(decode: Attention) -> DecodeGrid:
    """Decode attention; each row ends at the longest measured length for as many sequences."""
    rows = []
    for n in SEQS:
        contexts = np.array([c for c in CONTEXTS if c <= decode.longest(n)], float)
        rows.append(_rounded(decode.surface.at(np.full_like(contexts, n), contexts)))
    return DecodeGrid([float(n) for n in SEQS], [float(c) for c in CONTEXTS], rows)


def _prefill_grid(parts: Parts, prefill: Attention) -> PrefillGrid:
    """Prompt attention, measured without context; a context adds its arithmetic or traffic."""
    shard, q = parts.shard, np.array(CHUNKS, float)
    alone = prefill.surface.at(np.ones_like(q), q)
    flops = 4 * shard.heads * shard.model.head_dim * q * q / 2
    rate = float((flops / alone).max())
    row_bytes = 4 * shard.kv_heads * shard.model.head_dim
    rows = []
    for chunk, us in zip(q, alone, strict=True):
        per_token = max(
            4 * shard.heads * shard.model.head_dim * chunk / rate,
            row_bytes / parts.peaks.bandwidth * 1e6,
        )
        rows.append(_rounded(us + per_token * np.array(BEFORE, float)))
    return PrefillGrid([float(c) for c in CHUNKS], [float(c) for c in BEFORE], rows)


def _errors(
    parts: Parts, decode: Attention, prefill: Attention, gemm: Gemm, hardware: Hardware
) -> dict[str, Any]:
    """Errors on rows outside the fits, and a list of what could not be judged."""
    shapes = list(products(parts.shard).values())
    layer = [gemm.nearest_measured(*shape) for shape in shapes]
    unseen = sum(fitted for fitted, _ in layer)
    measured = sum(us for _, us in layer)
    return {
        "how": "rows left out of the fit: attention one by one, matrix products a whole shape at"
        " a time; smoothing was set on the tables of the H100",
        "decode": _figures(decode.surface.error()),
        "prefill": _figures(prefill.surface.error()),
        "gemm": _figures(gemm.error(shapes)),
        "gemm_layer_sum": _figures(error(np.asarray(unseen), np.asarray(measured))),
        "not judged": "prompt context, small kernels, sampler, host"
        f" ({hardware.step_overhead_us:g} us a step), block sizes other than {BLOCK_SIZE}",
    }


def _figures(found: Error) -> dict[str, float]:
    return dict(found._asdict())


def _rounded(us: Floats) -> list[float]:
    return [round(float(each), 2) for each in us]

"""Profiles from the kernel tables of AIConfigurator (github.com/ai-dynamo/aiconfigurator).

```
DIR/decode.csv      q_heads, kv_heads, head_dim, kv_dtype, n_seqs, ctx -> us, one layer
DIR/prefill.csv     q_heads, kv_heads, head_dim, kv_dtype, n_seqs, q_tokens -> us, one layer
DIR/gemm.csv        m, n, k -> us, y[m,n] = x[m,k] W[n,k]^T
DIR/allreduce.csv   num_gpus, mode, bytes -> us; only for tensor parallelism
```
are that project's Parquet tables, bf16, as CSV in microseconds. Of models with experts or latent
attention, its Parquet files are read as they are, in milliseconds:
```
DIR/moe_perf.parquet                      routed experts of a layer, by tokens and their division
DIR/mla_context_module_perf.parquet       latent attention with its projections: prompts
DIR/mla_generation_module_perf.parquet    the same: decodes
```
They lie in `systems/data/GPU/moe/vllm/VERSION` and `mla/vllm/VERSION` of that project, and in its
package.

A surface is fitted to each kernel (`kvsim.cost.calibrate.surface`) and evaluated at counts of our
own, so a profile holds none of the measured rows. Its errors are those of points that the fit has
not seen.

Not in the tables, and therefore estimated: norms, rotary embedding and activation (their traffic at
the memory's bandwidth and a least time each), the context of a prompt chunk (its arithmetic or
its traffic), the sampler, and the host (`step_overhead_us` of the hardware); of models with
experts, the router and shared experts; matrix products in FP8 outside experts and latent attention.

The scales of every surface were chosen on the tables of the H100, by their error on rows outside
the fit (single rows; for matrix products, whole shapes and whole octaves of tokens). So the errors
on other GPUs are independent of that choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import UNSET, UnsetType

from kvsim.cost import layer
from kvsim.cost.calibrate.rows import numbers
from kvsim.cost.calibrate.surface import (
    BEFORE,
    CHANGES,
    CHUNKS,
    CONTEXTS,
    SEQS,
    TOKENS,
    Floats,
    Law,
    Scales,
    Surface,
    error,
)
from kvsim.cost.layer import SAMPLER_US, Peaks, product_us, products, small_kernels_us
from kvsim.cost.profile import (
    DecodeGrid,
    DenseCurve,
    ExpertGrid,
    Fit,
    HeadCurve,
    Interpolation,
    PrefillGrid,
    Profile,
    ProfiledEngine,
    ProfiledModel,
    refuse_special,
)
from kvsim.errors import ConfigError
from kvsim.machine.hardware import Hardware, load_hardware
from kvsim.machine.models import Shard, load_model

HELD = ("experts", "latent attention", "fp8 weights")
"""What these tables hold of a model beside a dense decoder in bfloat16 (`Model.special`)."""
ROUTING = "power_law_1.01"
"""How tokens chose their experts, of the ways that were measured: nearly as if by chance."""
EXPERTS = Scales(first=4, second=8, work=2, work_share=0.1, noise=0.003)
MOST_ROWS = 16384
LATENT_FLOOR_US = 40.0

# Floors and shares of the peaks in the laws below are guesses: a surface is fitted to what they
# miss, so they count only far from every measured point.
DECODE = Scales(first=4, second=8, work=0.6, work_share=0.1, noise=0.003)
PREFILL = Scales(first=6, second=6, work=3, work_share=0.1, noise=1e-4)
GEMM = Scales(first=4, second=8, work=2, work_share=0.1, noise=0.01)

DECODE_FLOOR_US, PREFILL_FLOOR_US = 10.0, 11.0
MOST_SEQS, MOST_PREFILL_SEQS, MOST_TOKENS = 256, 8, 8192
LEAST_CHUNK, LEAST_WIDTH = 16, 2048
"""Rows beyond these limits are left out: no run comes near them, and they would distort the fit."""
FEWEST_ROWS = 10
"""Rows of attention from which a surface is fitted."""


class Kernels(NamedTuple):
    """The kernels of one GPU, and the model that is priced."""

    folder: Path
    """Of their tables."""
    shard: Shard
    bf16: Peaks
    peaks: Peaks
    """Of matrix products of the layers' own weights."""
    dtype: str
    """Of these products, as the tables name it."""
    element_bytes: int

    @classmethod
    def of(cls, folder: Path, shard: Shard, bf16: Peaks, fp8_tflop_s: float | None) -> Kernels:
        """`fp8_tflop_s`: the peak of products in FP8; raises `ConfigError` where it is needed, but
        the GPU has none."""
        stored = shard.model.quantization
        if stored is None:
            return cls(folder, shard, bf16, bf16, "bfloat16", 2)
        if fp8_tflop_s is None:
            raise ConfigError(
                f"profile: {shard.model.name} has {stored.method} weights, and this GPU no products"
                " in FP8; use --cost-model roofline"
            )
        fp8 = Peaks(fp8_tflop_s * 1e12, bf16.bandwidth)
        return cls(folder, shard, bf16, fp8, "fp8" if stored.bits == 8 else "fp8_block", 1)

    @property
    def products(self) -> list[tuple[int, int]]:
        """Shapes of the matrix products of a layer that are in `gemm.csv`."""
        shapes, model = products(self.shard), self.shard.model
        if model.latent is not None:
            del shapes["qkv"], shapes["o"]
        if self.element_bytes == 1 or model.expert_layers == model.num_hidden_layers:
            del shapes["gate_up"], shapes["down"]
        return list(shapes.values())

    def mlp_us(self, columns: int, tokens: Floats) -> Floats:
        """Microseconds of a dense MLP by the roofline."""
        us = layer.mlp_us(self.shard, columns, tokens, self.peaks, self.element_bytes)
        return np.asarray(us, float)


def expert_grid(kernels: Kernels) -> tuple[ExpertGrid, dict[str, float]]:
    """Layers with experts on one GPU of the group, and the error on rows outside the fit.

    The router and shared experts are not in the table: they are a roofline.
    """
    shard, element = kernels.shard, kernels.element_bytes
    model, peaks = shard.model, kernels.peaks
    assert model.experts is not None
    hidden, whole = model.hidden_size, model.experts
    number, chosen = whole.num_experts, whole.num_experts_per_tok
    path = kernels.folder / "moe_perf.parquet"
    rows = _rows(
        path,
        ("num_tokens", "moe_tp_size", "latency"),
        moe_dtype=kernels.dtype,
        hidden_size=hidden,
        inter_size=whole.moe_intermediate_size,
        topk=chosen,
        num_experts=number,
        moe_ep_size=1,
        distribution=ROUTING,
    )
    rows = rows[rows[:, 0] <= MOST_ROWS]
    if shard.tensor_parallel_size not in rows[:, 1]:
        raise ConfigError(
            f"{path}: no rows of {model.name}'s experts in {kernels.dtype} over"
            f" {shard.tensor_parallel_size} GPUs; this model and degree were not measured"
        )

    def us(tokens: Any, columns: Any) -> Any:
        active = number * (1 - (1 - chosen / number) ** tokens)
        # Gate, up and down projections.
        weights, multiplied = 3 * columns * hidden, tokens * chosen
        moved = element * (active * weights + multiplied * (2 * hidden + 4 * columns))
        return layer.kernel_us(2 * multiplied * weights, moved, peaks) + 20

    law = Law(us=us, work=lambda tokens, columns: tokens * columns)
    columns = whole.moe_intermediate_size / rows[:, 1]
    surface = Surface(rows[:, 0], columns, 1e3 * rows[:, 2], law, EXPERTS)
    tokens = np.array(TOKENS, float)
    times = surface.at(tokens, np.full_like(tokens, shard.expert_columns))
    times = times + layer.product_us(tokens, number, hidden, peaks)
    if whole.shared_expert_intermediate_size:
        shared = whole.shared_expert_intermediate_size // shard.tensor_parallel_size
        times = times + kernels.mlp_us(shared, tokens)
    # How many experts are read is in the measured times, so `active` changes nothing.
    both = [[round(float(time), 2)] * 2 for time in times]
    grid = ExpertGrid(
        [float(t) for t in TOKENS],
        [1.0, float(number)],
        both,
        tp=shard.tensor_parallel_size,
        routing="public table, tokens choose experts by a power law (1.01)",
    )
    return grid, surface.error()


class Attention(NamedTuple):
    """What was measured of the attention of one layer, on one GPU of the group."""

    decodes: Floats
    """Rows of (sequences, length, us); `prompts` has (sequences, tokens, us) without context."""
    prompts: Floats
    decode_us: Callable[[Any, Any], Any]
    """The roofline of a decode launch, by sequences and length; `prompt_us` of a prompt."""
    prompt_us: Callable[[Any, Any], Any]
    pair_flops: float
    """Of a prompt, per pair of tokens."""
    unpacked_flops: float = 0.0
    """Per token of context before a prompt chunk: its keys and values from the latent."""


def attention_of_heads(kernels: Kernels) -> Attention:
    """Attention over keys and values of heads. Raises `ConfigError` if the tables have too few rows
    of them."""
    shard, bf16 = kernels.shard, kernels.bf16
    # A key and a value of 2 bytes each; two products, each a multiplication and an addition.
    reading_us = 4 * shard.kv_heads * shard.model.head_dim / (0.85 * bf16.bandwidth) * 1e6
    pair_flops = 4 * shard.heads * shard.model.head_dim
    pair_us = pair_flops / (0.65 * bf16.flop_s) * 1e6
    return Attention(
        _rows_of_heads(kernels.folder / "decode.csv", shard, "ctx"),
        _rows_of_heads(kernels.folder / "prefill.csv", shard, "q_tokens"),
        lambda n, ctx: (DECODE_FLOOR_US**3 + (n * ctx * reading_us) ** 3) ** (1 / 3),
        lambda n, q: np.hypot(PREFILL_FLOOR_US, n * q * (q + 1) / 2 * pair_us),
        pair_flops,
    )


def _rows_of_heads(path: Path, shard: Shard, length: str) -> Floats:
    """(sequences, length, us) at the heads of a shard, keys and values in bf16."""
    columns = ("q_heads", "kv_heads", "head_dim", "n_seqs", length, "us")
    heads = [shard.heads, shard.kv_heads, shard.model.head_dim]
    found = [
        row[4:]
        for _, row in numbers(path, columns, label="kv_dtype")
        if row[0] == "bf16" and row[1:4] == heads
    ]
    if len(found) < FEWEST_ROWS:
        raise ConfigError(
            f"{path}: {len(found)} rows of kv_dtype bf16 with {heads[0]} query and {heads[1]} KV"
            f" heads of {heads[2]}; this model and degree of parallelism were not measured"
        )
    return np.array(found)


def latent_attention(kernels: Kernels) -> Attention:
    """Latent attention with its projections. Raises `ConfigError` if the tables are of another
    one."""
    shard, bf16 = kernels.shard, kernels.bf16
    latent, hidden, heads = shard.model.latent, shard.model.hidden_size, shard.heads
    assert latent is not None
    wide = latent.qk_nope_head_dim + latent.qk_rope_head_dim
    kept = latent.kv_lora_rank + latent.qk_rope_head_dim
    shapes = [
        ((latent.q_lora_rank or 0) + kept, hidden),
        (hidden, heads * latent.v_head_dim),
        (heads * wide, latent.q_lora_rank or hidden),
    ]
    flops = 2 * heads * (kept + latent.kv_lora_rank)
    token_us = max(flops / bf16.flop_s, 2 * kept / bf16.bandwidth) / 0.6 * 1e6
    pair_flops = 2 * heads * (wide + latent.v_head_dim)
    pair_us = pair_flops / (0.65 * bf16.flop_s) * 1e6

    def projected(tokens: Any, attended_us: Any) -> Any:
        peaks, element = kernels.peaks, kernels.element_bytes
        us = sum(layer.product_us(tokens, n, k, peaks, element) for n, k in shapes)
        return us + np.hypot(LATENT_FLOOR_US, attended_us)

    decodes = _rows_of_latent(kernels, "mla_generation_module_perf.parquet", "step")
    # A decode attends to its own token besides the `step` before it.
    decodes[:, 1] += 1
    return Attention(
        decodes,
        _rows_of_latent(kernels, "mla_context_module_perf.parquet", "isl"),
        lambda n, ctx: projected(n, n * ctx * token_us),
        lambda n, q: projected(n * q, n * q * (q + 1) / 2 * pair_us),
        pair_flops,
        2 * latent.kv_lora_rank * heads * (latent.qk_nope_head_dim + latent.v_head_dim),
    )


def _rows_of_latent(kernels: Kernels, name: str, length: str) -> Floats:
    """(sequences, length, us) at the heads of a GPU."""
    path, model, heads = kernels.folder / name, kernels.shard.model, kernels.shard.heads
    where = {"num_heads": heads, "gemm_type": kernels.dtype, "kv_cache_dtype": "bfloat16"}
    found = [np.empty((0, 3))]
    # The tables name the model that was measured; others with the same latent attention may use it.
    for measured in sorted(set(map(str, _table(path, ("model",))["model"].to_pylist()))):
        other = load_model(measured)
        if (other.latent, other.hidden_size) == (model.latent, model.hidden_size):
            columns = ("batch_size", length, "latency")
            found.append(_rows(path, columns, model=measured, **where) * (1, 1, 1e3))
    rows = np.concatenate(found)
    if len(rows) < FEWEST_ROWS:
        raise ConfigError(
            f"{path}: {len(rows)} rows of {model.name}'s latent attention with {heads}"
            f" heads in {kernels.dtype}; this model and degree were not measured"
        )
    return rows


def _rows(path: Path, columns: Sequence[str], **where: object) -> Floats:
    """The columns of the rows that have these values, sorted, the least last value of equals."""
    table = _table(path, (*columns, *where))
    kept = np.ones(table.num_rows, bool)
    for name, value in where.items():
        kept &= np.array([each == value for each in table[name].to_pylist()], bool)
    values = np.array([table[name].to_pylist() for name in columns], float).T[kept]
    if not (np.isfinite(values).all() and (values >= 0).all() and (values[:, -1] > 0).all()):
        raise ConfigError(f"{path}: {', '.join(columns)}: expected numbers above 0")
    values = values[np.lexsort(values.T[::-1])]
    _, first = np.unique(values[:, :-1], axis=0, return_index=True)
    return np.asarray(values[first], float)


def _table(path: Path, columns: Sequence[str]) -> Any:
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.read_table(path, columns=list(columns))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path}: not such a table: {' '.join(str(error).split())}") from None


def _surface(rows: Floats, law: Law, scales: Scales) -> Surface:
    x, y, us = rows.T
    return Surface(x, y, us, law, scales)


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

    def error(self, shapes: Iterable[tuple[int, int]]) -> dict[str, float]:
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


BLOCK_SIZE = 64
"""Tokens per block of the measured attention kernels."""


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
    and column, also if the tables have no row for the model's heads or experts.
    """
    model, hardware = load_model(model_name), load_hardware(hardware_name)
    refuse_special(model, HELD)
    dtype = model.dtype("auto")
    if dtype != "bfloat16":
        raise ConfigError(
            f"{folder}: the tables were measured in bfloat16, {model.name} is {dtype};"
            " give another --model"
        )
    bandwidth, shard = hardware.memory_bandwidth_gb_s * 1e9, model.shard(tp)
    peaks = Peaks(hardware.flop_s(dtype), bandwidth)
    kernels = Kernels.of(folder, shard, peaks, hardware.tflop_s.get("fp8"))
    found = (attention_of_heads if model.latent is None else latent_attention)(kernels)
    decodes = found.decodes[found.decodes[:, 0] <= MOST_SEQS]
    few, long = found.prompts[:, 0] <= MOST_PREFILL_SEQS, found.prompts[:, 1] >= LEAST_CHUNK
    decode_law = Law(us=found.decode_us, work=lambda n, ctx: n * ctx)
    prompt_law = Law(us=found.prompt_us, work=lambda n, q: n * q * q)
    decode = _surface(decodes, decode_law, DECODE)
    prefill = _surface(found.prompts[few & long], prompt_law, PREFILL)
    gemm = Gemm(folder / "gemm.csv", peaks)
    errors = _errors(kernels, decode, prefill, gemm, hardware)
    experts: ExpertGrid | UnsetType = UNSET
    if model.experts is not None:
        experts, errors["experts"] = expert_grid(kernels)
    return Profile(
        version="kvsim.profile/1",
        source="public-table",
        created=created,
        device={"name": hardware.name},
        software={"source": _SOURCE, "note": note, "changes": CHANGES},
        model=ProfiledModel.of(model, "bfloat16", "bfloat16", tp),
        engine=ProfiledEngine(block_size=BLOCK_SIZE),
        fit=Fit(
            dense=_dense(kernels, gemm),
            head=_head(kernels, gemm),
            prefill=_prefill_grid(kernels, prefill, found),
            decode_v2=_decode_grid(decode, decodes),
            step=(hardware.step_overhead_us, 1.0, 0.0),
            experts=experts,
        ),
        error=errors,
    )


_SOURCE = (
    "kernel tables of github.com/ai-dynamo/aiconfigurator, Apache-2.0,"
    " copyright NVIDIA Corporation & Affiliates"
)


def _dense(kernels: Kernels, gemm: Gemm) -> DenseCurve:
    """All layers without attention and experts; MLPs of the layers that have one."""
    model, tokens = kernels.shard.model, np.array(TOKENS, float)
    layer = sum((gemm.us(tokens, n, k) for n, k in kernels.products), np.zeros_like(tokens))
    layer = layer + small_kernels_us(kernels.shard, tokens, kernels.bf16)
    layer = layer + _all_reduce_us(kernels, tokens)
    us = layer * model.num_hidden_layers
    if kernels.element_bytes == 1:
        mlp = kernels.mlp_us(kernels.shard.intermediate_size, tokens)
        us += mlp * (model.num_hidden_layers - model.expert_layers)
    return DenseCurve([float(t) for t in TOKENS], _rounded(us))


def _all_reduce_us(kernels: Kernels, tokens: Floats) -> Floats:
    """Microseconds of two all-reduces of the hidden states, interpolated over measured sizes."""
    if kernels.shard.tensor_parallel_size == 1:
        return np.zeros_like(tokens)
    path = kernels.folder / "allreduce.csv"
    rows = sorted(
        (size, us)
        for _, (mode, gpus, size, us) in numbers(path, ("num_gpus", "bytes", "us"), label="mode")
        if mode == "graph" and gpus == kernels.shard.tensor_parallel_size
    )
    if len(rows) < 2:
        raise ConfigError(
            f"{path}: no rows of mode graph for {kernels.shard.tensor_parallel_size} GPUs;"
            " give another --tensor-parallel-size"
        )
    sizes, times = [size for size, _ in rows], [us for _, us in rows]
    look, width = Interpolation(), 2 * kernels.shard.model.hidden_size
    return np.array([2 * look.along(sizes, times, t * width) for t in tokens])


def _head(kernels: Kernels, gemm: Gemm) -> HeadCurve:
    samples = [t for t in TOKENS if t <= 1024]
    hidden, words = kernels.shard.model.hidden_size, kernels.shard.vocab_size
    us = gemm.us(np.array(samples, float), words, hidden) + SAMPLER_US
    return HeadCurve([float(s) for s in samples], _rounded(us))


def _decode_grid(decode: Surface, measured: Floats) -> DecodeGrid:
    """Decode attention; each row ends at the longest measured length for as many sequences."""
    rows = []
    for n in SEQS:
        contexts = np.array([c for c in CONTEXTS if c <= longest(measured, n)], float)
        rows.append(_rounded(decode.at(np.full_like(contexts, n), contexts)))
    return DecodeGrid([float(n) for n in SEQS], [float(c) for c in CONTEXTS], rows)


def longest(measured: Floats, seqs: int) -> float:
    """The longest length that was measured for so many sequences, or for the next count."""
    counts = measured[:, 0]
    at_least = counts[counts >= seqs]
    count = at_least.min() if len(at_least) else counts.max()
    return float(measured[counts == count, 1].max())


def _prefill_grid(kernels: Kernels, prefill: Surface, attention: Attention) -> PrefillGrid:
    """Prompt attention, measured without context; a context adds its arithmetic or traffic."""
    shard, q = kernels.shard, np.array(CHUNKS, float)
    alone = prefill.at(np.ones_like(q), q)
    flops = attention.pair_flops * q * q / 2
    rate = float((flops / alone).max())
    row_bytes = 4 * shard.kv_heads * shard.model.head_dim
    rows = []
    for chunk, us in zip(q, alone, strict=True):
        per_token = max(
            (attention.pair_flops * chunk + attention.unpacked_flops) / rate,
            row_bytes / kernels.bf16.bandwidth * 1e6,
        )
        rows.append(_rounded(us + per_token * np.array(BEFORE, float)))
    return PrefillGrid([float(c) for c in CHUNKS], [float(c) for c in BEFORE], rows)


def _errors(
    kernels: Kernels, decode: Surface, prefill: Surface, gemm: Gemm, hardware: Hardware
) -> dict[str, Any]:
    """Errors on rows outside the fits, and a list of what could not be judged."""
    shapes = kernels.products
    head = (kernels.shard.vocab_size, kernels.shard.model.hidden_size)
    layer = [gemm.nearest_measured(*shape) for shape in shapes or [head]]
    unseen = sum(fitted for fitted, _ in layer)
    measured = sum(us for _, us in layer)
    return {
        "how": "rows left out of the fit: attention one by one, matrix products a whole shape at"
        " a time; smoothing was set on the tables of the H100",
        "decode": decode.error(),
        "prefill": prefill.error(),
        "gemm": gemm.error(shapes or [head]),
        "gemm_layer_sum": error(np.asarray(unseen), np.asarray(measured)),
        "not judged": "prompt context, small kernels, sampler, host"
        f" ({hardware.step_overhead_us:g} us a step), block sizes other than {BLOCK_SIZE}",
    }


def _rounded(us: Floats) -> list[float]:
    return [round(float(each), 2) for each in us]

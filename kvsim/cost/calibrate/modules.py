"""AIConfigurator's tables of experts and of latent attention, its Parquet files as they are.

```
DIR/moe_perf.parquet                      routed experts of a layer, by tokens and their division
DIR/mla_context_module_perf.parquet       latent attention with its projections: prompts
DIR/mla_generation_module_perf.parquet    the same: decodes
```

They lie in `systems/data/GPU/moe/vllm/VERSION` and `mla/vllm/VERSION` of that project, and in its
package. Latencies are milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvsim.cost import layer
from kvsim.cost.calibrate.surface import TOKENS, Floats, Law, Scales, Surface
from kvsim.cost.layer import Peaks
from kvsim.cost.profile import ExpertGrid
from kvsim.errors import ConfigError
from kvsim.machine.models import Shard, load_model

HELD = ("experts", "latent attention", "fp8 weights")
"""What these tables hold of a model beside a dense decoder in bfloat16 (`Model.special`)."""
ROUTING = "power_law_1.01"
"""How tokens chose their experts, of the ways that were measured: nearly as if by chance."""
EXPERTS = Scales(first=4, second=8, work=2, work_share=0.1, noise=0.003)
MOST_ROWS = 16384
LATENT_FLOOR_US = 40.0


class ProductKernels(NamedTuple):
    """How matrix products of a model run on one GPU."""

    shard: Shard
    peaks: Peaks
    dtype: str
    """As the tables name it."""
    element_bytes: int

    @classmethod
    def of(cls, shard: Shard, bf16: Peaks, fp8_tflop_s: float | None) -> ProductKernels:
        """`fp8_tflop_s`: the peak of products in FP8; raises `ConfigError` where it is needed, but
        the GPU has none."""
        stored = shard.model.quantization
        if stored is None:
            return cls(shard, bf16, "bfloat16", 2)
        if fp8_tflop_s is None:
            raise ConfigError(
                f"profile: {shard.model.name} has {stored.method} weights, and this GPU no products"
                " in FP8; use --cost-model roofline"
            )
        fp8 = Peaks(fp8_tflop_s * 1e12, bf16.bandwidth)
        return cls(shard, fp8, "fp8" if stored.bits == 8 else "fp8_block", 1)

    def mlp_us(self, columns: int, tokens: Floats) -> Floats:
        """Microseconds of a dense MLP by the roofline."""
        us = layer.mlp_us(self.shard, columns, tokens, self.peaks, self.element_bytes)
        return np.asarray(us, float)


def experts(folder: Path, kernels: ProductKernels) -> tuple[ExpertGrid, dict[str, float]]:
    """Layers with experts on one GPU of the group, and the error on rows outside the fit.

    The router and shared experts are not in the table: they are a roofline.
    """
    shard, element = kernels.shard, kernels.element_bytes
    model, peaks = shard.model, kernels.peaks
    assert model.experts is not None
    hidden, whole = model.hidden_size, model.experts
    number, chosen = whole.num_experts, whole.num_experts_per_tok
    path = folder / "moe_perf.parquet"
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
    both = [[round(float(time), 2)] * 2 for time in times]
    grid = ExpertGrid(
        [float(t) for t in TOKENS],
        [1.0, float(number)],
        both,
        tp=shard.tensor_parallel_size,
        routing="public table, tokens choose experts by a power law (1.01)",
    )
    return grid, surface.error()


class Latent:
    """Latent attention of one layer with its projections, on one GPU of the group.

    Raises `ConfigError` if the tables are of another latent attention.
    """

    def __init__(self, folder: Path, kernels: ProductKernels, attention: Peaks) -> None:
        model = kernels.shard.model
        assert model.latent is not None
        self._folder, self._kernels, self._peaks = folder, kernels, attention
        self._latent, self._heads = model.latent, kernels.shard.heads
        wide = self._latent.qk_nope_head_dim + self._latent.qk_rope_head_dim
        self.pair_flops = 2 * self._heads * (wide + self._latent.v_head_dim)
        """Of a prompt, per pair of tokens."""
        self.unpacked_flops = 2 * self._latent.kv_lora_rank * self._heads
        self.unpacked_flops *= self._latent.qk_nope_head_dim + self._latent.v_head_dim
        """Per token of context before a prompt chunk: its keys and values from the latent."""

    def decode(self) -> tuple[list[tuple[float, ...]], Law]:
        """(sequences, length, us), and the law of decodes."""
        read = self._latent.kv_lora_rank + self._latent.qk_rope_head_dim
        flops = 2 * self._heads * (read + self._latent.kv_lora_rank)
        token_us = max(flops / self._peaks.flop_s, 2 * read / self._peaks.bandwidth) / 0.6 * 1e6
        law = Law(
            us=lambda n, ctx: (
                self._projections_us(n) + np.hypot(LATENT_FLOOR_US, n * ctx * token_us)
            ),
            work=lambda n, ctx: n * ctx,
        )
        rows = self._points("mla_generation_module_perf.parquet", "step")
        return [(n, step + 1, us) for n, step, us in rows], law

    def prefill(self) -> tuple[list[tuple[float, ...]], Law]:
        """(sequences, tokens, us) without context, and the law of prompts."""
        pair_us = self.pair_flops / (0.65 * self._peaks.flop_s) * 1e6

        def us(n: Any, q: Any) -> Any:
            attended = np.hypot(LATENT_FLOOR_US, n * q * (q + 1) / 2 * pair_us)
            return self._projections_us(n * q) + attended

        law = Law(us=us, work=lambda n, q: n * q * q)
        return self._points("mla_context_module_perf.parquet", "isl"), law

    def _projections_us(self, tokens: Any) -> Any:
        latent, hidden = self._latent, self._kernels.shard.model.hidden_size
        wide = latent.qk_nope_head_dim + latent.qk_rope_head_dim
        down = (latent.q_lora_rank or 0) + latent.kv_lora_rank + latent.qk_rope_head_dim
        shapes = [(down, hidden), (hidden, self._heads * latent.v_head_dim)]
        shapes.append((self._heads * wide, latent.q_lora_rank or hidden))
        kernels = self._kernels
        return sum(
            layer.product_us(tokens, n, k, kernels.peaks, kernels.element_bytes) for n, k in shapes
        )

    def _points(self, name: str, length: str) -> list[tuple[float, ...]]:
        path, kernels = self._folder / name, self._kernels
        model = kernels.shard.model
        columns = ("batch_size", length, "latency")
        where = {"gemm_type": kernels.dtype, "kv_cache_dtype": "bfloat16"}
        found: list[tuple[float, ...]] = []
        for measured in _values(path, "model"):
            other = load_model(measured)
            if (other.latent, other.hidden_size) != (model.latent, model.hidden_size):
                continue
            rows = _rows(path, columns, model=measured, num_heads=self._heads, **where)
            found += [(n, count, 1e3 * ms) for n, count, ms in rows.tolist()]
        if len(found) < 10:
            raise ConfigError(
                f"{path}: {len(found)} rows of {model.name}'s latent attention with {self._heads}"
                f" heads in {kernels.dtype}; this model and degree were not measured"
            )
        return found


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


def _values(path: Path, column: str) -> list[str]:
    return sorted(set(map(str, _table(path, (column,))[column].to_pylist())))


def _table(path: Path, columns: Sequence[str]) -> Any:
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.read_table(path, columns=list(columns))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path}: not such a table: {' '.join(str(error).split())}") from None

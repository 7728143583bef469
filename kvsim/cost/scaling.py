"""A profile carried over to another model, tensor parallelism, dtype or block size.

| part | rule |
|---|---|
| decode attention | that of as many work items (sequences x KV heads) of as many bytes each |
| prompt attention | that of a chunk with as many operations, tokens and context scaled alike |
| dense, logits | times the ratio of the two geometries' rooflines (`kvsim.cost.layer`) |
| experts | those of the same ones; of others, a roofline (`kvsim.cost.experts`) |
| all-reduce | two per layer, by the profile's figures for as many GPUs, or the hardware's |
| uneven batches | a thread block reads a token in proportion to its bytes, and so does the GPU |
| block size | taken to change nothing but the copying of blocks |

So efficiencies are the profile's own. A launch of fewer work items than any measured reads like one
sequence as much shorter: kernels split long sequences over the GPU.

Distance in percent, median / p95, from public H200 tables that the shipped profile of Llama-3-8B
(32 query and 8 KV heads of 128, bf16) was not made from; `tests/unit/cost/test_scaling.py` asserts
it:

| heads of one GPU | decode attention | prompt attention, no context |
|---|---|---|
| 16 and 4 (2 GPUs) | 2.2 / 9.4 | 3.8 / 8.1 |
| 8 and 2 (4 GPUs) | 3.2 / 11.1 | 10.3 / 20.8 |
| 4 and 1 (8 GPUs) | 5.4 / 20.1 | 9.1 / 20.4 |
| 40 and 8; 64 and 8 | 1.7 / 8.8; 1.7 / 9.1 | 4.8 / 9.3; 4.7 / 11.3 |
| 32 and 8 of 64 | 7.0 / 21.7 | 12.7 / 22.2 |
| 32 and 8, KV cache of fp8 | 19.4 / 28.6, too short | 15.9 / 19.6, too short |

Whole steps (1 to 256 decodes of 128 to 4,096 tokens, prompts of 256 to 8,192), median / greatest,
from profiles made of the tables for the geometry itself: Llama-3-8B on 2 GPUs 1.5 / 3.4, on 4
1.0 / 12.4; Llama-3-70B on 1 GPU 4.4 / 7.9, on 4 2.7 / 7.0; Qwen3-32B on 2 1.1 / 2.5.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from kvsim.cost import layer
from kvsim.cost.layer import Peaks
from kvsim.cost.profile import (
    SIZES,
    DecodeGrid,
    DenseCurve,
    Fit,
    HeadCurve,
    Interpolation,
    MixedGrid,
    PrefillGrid,
    Profile,
    ProfiledModel,
    Tail,
)
from kvsim.machine.hardware import AllReduce, Hardware
from kvsim.machine.memory import kv_dtype
from kvsim.machine.models import DTYPE_BYTES, Experts, Model, Shard
from kvsim.settings.config import RunConfig
from kvsim.settings.versions import DEFAULT_BLOCK_SIZE

GEOMETRY = {**SIZES, "experts": "experts", "special": "special"}
"""Name of a property of a model → its name in a profile; `_SETTINGS` does so for settings."""
_SETTINGS = {"dtype": "dtype", "kv_cache_dtype": "kv_dtype", "tensor_parallel_size": "tp"}


def wanted(model: Model, config: RunConfig) -> ProfiledModel:
    """The geometry and settings of a profile that would fit a run exactly."""
    dtype = model.dtype(config.dtype)
    return ProfiledModel.of(model, dtype, kv_dtype(model, config), config.tensor_parallel_size)


def differences(
    profile: Profile, model: Model, config: RunConfig
) -> dict[str, tuple[str | int, str | int]]:
    """Setting → (the profile's, the run's) where they differ, under the names of run settings.

    Only a measured profile is tied to a block size; its `others` have further sizes.
    """
    made, run = profile.model, wanted(model, config)
    found = {
        name: (_shown(getattr(made, key)), _shown(getattr(run, key)))
        for name, key in (GEOMETRY | _SETTINGS).items()
        if getattr(made, key) != getattr(run, key)
    }
    block_size = config.block_size or DEFAULT_BLOCK_SIZE
    if profile.source == "measured" and profile.fit_at(block_size) is None:
        found["block_size"] = (profile.engine.block_size, block_size)
    return found


def _shown(value: str | int | Experts | UnsetType) -> str | int:
    if value is UNSET:
        return "none"
    if not isinstance(value, Experts):
        return value
    columns = value.moe_intermediate_size
    return f"{value.num_experts_per_tok} of {value.num_experts}, {columns} columns"


def scaled(profile: Profile, model: Model, config: RunConfig, hardware: Hardware) -> Profile:
    """`profile` scaled to `model` under `config`; its source becomes `scaled`.

    `hardware` gives peaks and all-reduces; it should be the GPU that was measured. Raises
    `ConfigError` for a degree of parallelism that the model does not allow, and for dtypes without
    a peak in the hardware.
    """
    block_size = config.block_size or DEFAULT_BLOCK_SIZE
    run = wanted(model, config)
    step = _Change(_Side.of(profile.model, hardware), _Side.of(run, hardware), hardware)
    fit = profile.fit_at(block_size) or profile.fit
    blocks = block_size / profile.engine.block_size
    all_reduce, terms = step.all_reduce(fit.all_reduce), profile.terms
    if all_reduce is not fit.all_reduce:
        terms = terms | {"all-reduce": f"figures of {hardware.name}"}
    return replace(
        profile,
        source="scaled",
        terms=terms,
        model=run,
        engine=replace(profile.engine, block_size=block_size),
        rows=[],
        others={},
        fit=Fit(
            dense=step.dense(fit.dense, isinstance(fit.all_reduce, AllReduce)),
            head=step.head(fit.head),
            prefill=step.prefill(fit.prefill),
            decode_v1=step.decode(fit.decode_v1),
            decode_v2=step.decode(fit.decode_v2),
            mixed=step.mixed(fit.mixed),
            step=fit.step,
            prompt_step_us=fit.prompt_step_us,
            all_reduce=all_reduce,
            tail=step.tail(fit.tail),
            l2_mib=fit.l2_mib,
            experts=fit.experts if step.same_experts else UNSET,
            # Launches grow with the layers; a block with layers, KV heads, bytes of a row, and
            # tokens.
            launch_floor_us=fit.launch_floor_us * step.layers,
            copied_block_us=fit.copied_block_us * step.layers * step.work * step.bytes * blocks,
        ),
    )


class _Side(NamedTuple):
    """One GPU's share of a geometry, with the peaks for its dtype."""

    shard: Shard
    tp: int
    peaks: Peaks
    element_bytes: int
    row_bytes: int
    """Bytes of the key of one token and head."""

    @classmethod
    def of(cls, made: ProfiledModel, hardware: Hardware) -> _Side:
        model = Model(
            name=made.name,
            **{name: getattr(made, key) for name, key in SIZES.items()},
            # A model must have one; no time depends on it.
            max_position_embeddings=1,
            experts=made.experts or None,
            source="profile",
        )
        peaks = Peaks(hardware.flop_s(made.dtype), hardware.memory_bandwidth_gb_s * 1e9)
        row_bytes = made.head_dim * DTYPE_BYTES[made.kv_dtype]
        return cls(model.shard(made.tp), made.tp, peaks, DTYPE_BYTES[made.dtype], row_bytes)

    def layers_us(self, tokens: float) -> float:
        """Microseconds of all layers by the roofline, without attention, experts, all-reduces."""
        return float(layer.layers_us(self.shard, tokens, self.peaks, self.element_bytes))

    @property
    def expert(self) -> tuple[Experts | None, int, int]:
        """What the time of a layer with experts, whole and on one GPU, depends on."""
        model = self.shard.model
        return model.experts, model.hidden_size, self.element_bytes

    def head_us(self, samples: float) -> float:
        return float(layer.head_us(self.shard, samples, self.peaks, self.element_bytes))


class _Change:
    """The change from one geometry to another."""

    def __init__(self, old: _Side, new: _Side, hardware: Hardware) -> None:
        self._old, self._new, self._hardware = old, new, hardware
        self.same_experts = old.expert == new.expert
        self.layers = new.shard.model.num_hidden_layers / old.shard.model.num_hidden_layers
        self.work = new.shard.kv_heads / old.shard.kv_heads
        """Work items per sequence, new over old; `bytes` is the ratio of bytes per work item and
        token."""
        self.bytes = new.row_bytes / old.row_bytes
        flops = new.shard.heads * new.shard.model.head_dim
        self._side = (flops / (old.shard.heads * old.shard.model.head_dim)) ** 0.5
        """A new chunk of q tokens has as many operations as an old one of q times this."""

    def dense(self, curve: DenseCurve, alone: bool) -> DenseCurve:
        """`alone`: all-reduces are not in it."""
        us = []
        for tokens, measured_us in zip(curve.x, curve.us, strict=True):
            ratio = self._new.layers_us(tokens) / self._old.layers_us(tokens)
            if alone:
                us.append(measured_us * ratio)
                continue
            # The curve holds the all-reduces of the old group: those of the new one take their
            # place.
            alone_us = max(measured_us - self._all_reduces_us(self._old, tokens), 0.0)
            us.append(alone_us * ratio + self._all_reduces_us(self._new, tokens))
        return DenseCurve(curve.x, us)

    def all_reduce(self, figures: AllReduce | UnsetType) -> AllReduce | UnsetType:
        """The profile's own figures hold between as many GPUs only."""
        if not isinstance(figures, AllReduce):
            return figures
        # On one GPU, nothing is reduced.
        holds = self._new.tp in (1, figures.gpus or self._old.tp)
        return figures if holds else self._hardware.all_reduce

    def tail(self, tail: Tail | UnsetType) -> Tail | UnsetType:
        if not isinstance(tail, Tail):
            return UNSET
        return replace(
            tail,
            alone_ns=tail.alone_ns * self.bytes,
            share_ns=tail.share_ns * self.bytes * self.work,
            unsplit_seqs=max(1, ceil(tail.unsplit_seqs / self.work)),
        )

    def head(self, curve: HeadCurve) -> HeadCurve:
        pairs = zip(curve.x, curve.us, strict=True)
        return HeadCurve(
            curve.x, [us * self._new.head_us(x) / self._old.head_us(x) for x, us in pairs]
        )

    def prefill(self, grid: PrefillGrid) -> PrefillGrid:
        side = self._side
        return PrefillGrid(_over(grid.x, side), _over(grid.ctx, side), grid.us, grid.tile)

    def decode(self, grid: DecodeGrid | UnsetType) -> DecodeGrid | UnsetType:
        if not isinstance(grid, DecodeGrid):
            return UNSET
        # So many sequences of the new geometry have as many work items as the smallest measured
        # launch.
        look, first = Interpolation(), grid.x[0] / self.work
        fewer = [float(n) for n in (1, 2, 4, 8, 16, 32) if n < first]
        rows = [
            [look.along(grid.ctx, grid.us[0], ctx * n / first) for ctx in grid.ctx] for n in fewer
        ]
        return DecodeGrid(
            [*fewer, *_over(grid.x, self.work)], _over(grid.ctx, self.bytes), [*rows, *grid.us]
        )

    def mixed(self, grid: MixedGrid | UnsetType) -> MixedGrid | UnsetType:
        if not isinstance(grid, MixedGrid):
            return UNSET
        return MixedGrid(
            _over(grid.q, self._side),
            _over(grid.ctx, self._side),
            _over(grid.n, self.work),
            _over(grid.kv, self.bytes),
            grid.us,
        )

    def _all_reduces_us(self, side: _Side, tokens: float) -> float:
        model = side.shard.model
        moved = tokens * model.hidden_size * side.element_bytes
        return 2 * model.num_hidden_layers * self._hardware.all_reduce.us(moved, side.tp)


def _over(axis: list[float], ratio: float) -> list[float]:
    return [x / ratio for x in axis]

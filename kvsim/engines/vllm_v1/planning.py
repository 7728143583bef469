"""The KV cache groups of a model, from its geometry and the settings of a run."""

from __future__ import annotations

from collections import Counter

from kvsim.engines.vllm_v1.groups import Chunked, Full, Group, Layout, Mamba, Sliding
from kvsim.machine.hardware import Hardware
from kvsim.machine.memory import CacheGroup, block_sizes, tables_of
from kvsim.machine.models import Model
from kvsim.machine.packed import Packed
from kvsim.settings.config import RunConfig
from kvsim.settings.versions import release

SAVE_STATES = ("h100", "h20", "h800", "gh200", "b200", "b300", "gb", "rtx-50", "rtx-pro-6000")
"""GPUs, by the beginning of their names, on which vLLM's kernels for the delta rule save states
inside a chunk: Hopper, and Blackwell with CUDA 13 (vLLM 0.33.0,
model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py, `_resolve_gdn_prefill_backend`)."""


def saves_states(model: Model, config: RunConfig, hardware: Hardware) -> bool:
    """Whether a chunk can save a state on its way, so that it need not end there.

    Sources: `get_kv_cache_spec` of vLLM 0.24.0 to 0.33.0, models/kimi_k3/nvidia/kda.py (from 0.29),
    model_executor/layers/mamba/mamba_mixer2.py (from 0.32, on any GPU) and qwen_gdn_linear_attn.py
    (from 0.33).
    """
    linear, version = model.linear, release(config.vllm_version)
    if linear is None or not config.enable_prefix_caching:
        return False
    if linear.kind == "mamba2":
        return version >= (0, 32)
    kimi_k3 = linear.kind == "kimi_delta" and linear.full_rank_gate and version >= (0, 29)
    qwen = linear.kind == "gated_delta_net" and version >= (0, 33)
    return (kimi_k3 or qwen) and hardware.name.startswith(SAVE_STATES)


def _export_tokens(kind: str, block_size: int) -> int:
    """The tokens of which a saved state is a multiple behind the start of a chunk: vLLM 0.33.0,
    mamba_mixer2.py, kda_checkpoint.py and, below mamba/, abstract.py,
    `get_mamba_prefill_checkpoint_grid`."""
    return {"mamba2": 1, "kimi_delta": 16}.get(kind, block_size)


def groups_of_model(model: Model, config: RunConfig, hardware: Hardware) -> tuple[Group, ...]:
    """Returns the rules of each group; none if one table of full attention serves all layers."""
    tables = tables_of(model, config)
    if tables and tables[0].packed is not None:
        return tuple(_packed(each.packed) for each in tables if each.packed)
    sizes = block_sizes(model, config) if tables else {}
    return tuple(_rules(each, model, config, hardware, sizes[each.kind]) for each in tables)


def _packed(group: Packed) -> Group:
    if group.window is None:
        return Full(block_size=group.block_size)
    return Sliding(block_size=group.block_size, window=group.window)


def _rules(
    group: CacheGroup, model: Model, config: RunConfig, hardware: Hardware, size: int
) -> Group:
    longest = config.max_model_len
    assert isinstance(longest, int)
    if group.kind == "sliding_attention":
        return Sliding(block_size=size, window=model.sliding_window or longest)
    if group.kind == "chunked_attention":
        return Chunked(block_size=size, chunk=model.attention_chunk_size or longest)
    if group.kind == "linear_attention":
        assert model.linear is not None
        return Mamba(
            block_size=size if config.enable_prefix_caching else longest,
            checkpoint=saves_states(model, config, hardware),
            checkpoint_alignment=_export_tokens(model.linear.kind, size),
        )
    return Full(block_size=size)


def notes_on_groups(groups: tuple[Group, ...], config: RunConfig) -> tuple[str, ...]:
    """What a reader of a result should know of the groups, one line each."""
    if len(groups) == 1 and isinstance(groups[0], Full):
        return ()
    kinds = Counter(group.words for group in groups)
    listed = ", ".join(f"{number} of {words}" for words, number in kinds.items())
    sizes = sorted({int(group.block_size) for group in groups if group.holds_tokens})
    found = [
        f"{len(groups)} KV cache groups share the pool: {listed}; a block holds"
        f" {'/'.join(map(str, sizes))} tokens of one group"
    ]
    sparse = any(isinstance(group, Sliding | Mamba) for group in groups)
    if config.enable_prefix_caching and sparse and not config.prefix_cache_retention_interval:
        found.append(
            "prefix_cache_retention_interval 0: windows and states stay in the prefix cache at the"
            " ends of prompts only, so a later turn hits at most the prompt before it, and a shared"
            " beginning counts from its third request on; none keeps everything"
        )
    return tuple(found)


def reserved_steps(version: str | None, in_flight: int) -> int:
    """Of how many steps a pool reserves the tokens in windows and chunks: since vLLM 0.26, of all
    that are in flight, before, of one (v1/kv_cache_interface.py, `max_in_flight_tokens`)."""
    return in_flight if release(version) >= (0, 26) else 1


def peak_blocks(groups: tuple[Group, ...], layout: Layout) -> int:
    """Returns the blocks that one sequence of `max_model_len` tokens holds at most.

    Source: vLLM 0.33.0, v1/core/kv_cache_planning.py, `_max_memory_usage_bytes_from_groups`.
    """
    return sum(group.peak_blocks(layout) for group in groups)

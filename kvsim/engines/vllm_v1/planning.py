"""The KV cache groups of a model, from its geometry and the settings of a run."""

from __future__ import annotations

from collections import Counter

from kvsim.engines.vllm_v1.groups import Chunked, Full, Group, Layout, Mamba, Sliding
from kvsim.machine.hardware import Hardware
from kvsim.machine.memory import CacheGroup, tables_of
from kvsim.machine.models import Model
from kvsim.settings.config import RunConfig

SAVE_STATES = ("h20", "h100", "h200", "gh200", "b200", "gb200", "rtx-5090", "rtx-pro-6000")
"""GPUs, by the beginning of their names, on which vLLM's kernel for linear attention saves states
inside a chunk: Hopper, and Blackwell with CUDA 13 (vLLM 0.33.0,
model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py, `_resolve_gdn_prefill_backend`)."""


def saves_states(config: RunConfig, hardware: Hardware) -> bool:
    """Whether a chunk can save a state on its way, so that it need not end there."""
    return bool(config.enable_prefix_caching) and hardware.name.startswith(SAVE_STATES)


def groups_of_model(model: Model, config: RunConfig, hardware: Hardware) -> tuple[Group, ...]:
    """Returns the rules of each group; none if one table of full attention serves all layers."""
    return tuple(_rules(group, model, config, hardware) for group in tables_of(model, config))


def _rules(group: CacheGroup, model: Model, config: RunConfig, hardware: Hardware) -> Group:
    size, longest = config.block_size, config.max_model_len
    assert size is not None and isinstance(longest, int)
    if group.kind == "sliding_attention":
        return Sliding(block_size=size, window=model.sliding_window or longest)
    if group.kind == "chunked_attention":
        return Chunked(block_size=size, chunk=model.attention_chunk_size or longest)
    if group.kind == "linear_attention":
        return Mamba(
            block_size=size if config.enable_prefix_caching else longest,
            checkpoint=saves_states(config, hardware),
            checkpoint_alignment=size,
        )
    return Full(block_size=size)


def notes_on_groups(groups: tuple[Group, ...], config: RunConfig) -> tuple[str, ...]:
    """What a reader of a result should know of the groups, one line each."""
    if len(groups) == 1 and isinstance(groups[0], Full):
        return ()
    kinds = Counter(group.words for group in groups)
    listed = ", ".join(f"{number} of {words}" for words, number in kinds.items())
    found = [
        f"{len(groups)} KV cache groups share the pool: {listed}; a block holds"
        f" {config.block_size} tokens of one group"
    ]
    sparse = any(isinstance(group, Sliding | Mamba) for group in groups)
    if config.enable_prefix_caching and sparse and not config.prefix_cache_retention_interval:
        found.append(
            "prefix_cache_retention_interval 0: windows and states stay in the prefix cache at the"
            " ends of prompts only, so a later turn hits at most the prompt before it, and a shared"
            " beginning counts from its third request on; none keeps everything"
        )
    return tuple(found)


def peak_blocks(groups: tuple[Group, ...], layout: Layout) -> int:
    """Returns the blocks that one sequence of `max_model_len` tokens holds at most.

    Source: vLLM 0.33.0, v1/core/kv_cache_planning.py, `_max_memory_usage_bytes_from_groups`.
    """
    return sum(group.peak_blocks(layout) for group in groups)

"""How vLLM V1 groups layers that share a pool of KV blocks.

All groups have equally many layers, so that a block holds as many bytes in each of them:

```
  gemma-3-27b   52 sliding + 10 full   ->  6 groups of 9 or 8 sliding layers, 1 of 10 full ones
  gpt-oss-20b   12 sliding + 12 full   ->  1 and 1
```

Source: vLLM 0.33.0, `v1/core/kv_cache_planning.py`, `_get_kv_cache_groups_uniform_page_size`.
"""

from __future__ import annotations

from itertools import chain
from math import ceil, lcm
from typing import NamedTuple

from kvsim.machine.models.geometry import Model, Shard
from kvsim.machine.models.parts import LayerType

KERNEL_BLOCK_TOKENS = 16
"""Least block size of attention kernels (vLLM 0.33.0, v1/attention/backends/flash_attn.py)."""

STATE_EXPORT_TOKENS = 64
"""Blocks are a multiple of this where a kernel saves states inside a chunk (vLLM 0.33.0,
v1/attention/backends/gdn_attn.py, `FLASHINFER_GDN_CHECKPOINT_ALIGNMENT`)."""


class CacheGroup(NamedTuple):
    """Layers of one kind that share a block table."""

    kind: LayerType
    layers: tuple[int, ...]


def cache_groups(model: Model, hybrid: bool = True) -> tuple[CacheGroup, ...]:
    """Returns the groups of all layers of a model, in order of their first layers.

    Without `hybrid`, layers with windows or chunks keep all tokens beside layers that do
    (`--disable-hybrid-kv-cache-manager`).
    """
    kinds: dict[LayerType, list[int]] = {}
    for index in range(model.keeping_layers):
        kinds.setdefault(model.layer_type(index), []).append(index)
    kinds.pop("none", None)
    if not hybrid and "full_attention" in kinds:
        states = kinds.pop("linear_attention", [])
        kinds = {"full_attention": sorted(chain.from_iterable(kinds.values()))}
        if states:
            kinds["linear_attention"] = states
    numbers = [len(layers) for layers in kinds.values()]
    size = max(numbers) if max(numbers) < 1.5 * min(numbers) else min(numbers)
    return tuple(
        CacheGroup(kind, tuple(layers[place :: -(-len(layers) // size)]))
        for kind, layers in kinds.items()
        for place in range(-(-len(layers) // size))
    )


def is_plain(groups: tuple[CacheGroup, ...]) -> bool:
    """Whether one table of all tokens serves all layers."""
    return [group.kind for group in groups] == ["full_attention"]


def block_layers(groups: tuple[CacheGroup, ...], layers: range) -> int:
    """Returns how many of these layers, e.g. of a pipeline stage, have a part of every block."""
    return max(sum(layer in layers for layer in group.layers) for group in groups)


def state_block_size(shard: Shard, block_size: int, element_bytes: int, exports: bool) -> int:
    """Returns the block size in tokens at which a block of attention is as large as a state.

    `exports` says whether a kernel saves states inside a chunk. Without states, it is `block_size`.
    Source: vLLM 0.33.0, platforms/interface.py, `_align_hybrid_block_size`.
    """
    kept = {group.kind: group for group in shard.kv_groups}
    if "linear_attention" not in kept:
        return block_size
    state_bytes = kept.pop("linear_attention").state_bytes
    token_bytes = max(group.token_bytes(element_bytes) for group in kept.values())
    unit = max(KERNEL_BLOCK_TOKENS, block_size)
    linear = shard.model.linear
    if exports and linear is not None and linear.kind == "gated_delta_net":
        unit = lcm(unit, STATE_EXPORT_TOKENS)
    return unit * ceil(state_bytes / (unit * token_bytes))

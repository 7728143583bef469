"""What nano-vllm takes from GPU memory when it starts."""

from __future__ import annotations

from kvsim.errors import ConfigError
from kvsim.machine.hardware import GIB
from kvsim.machine.memory import Stage, Taken, peak_bytes
from kvsim.machine.models import Shard
from kvsim.settings.config import RunConfig
from kvsim.settings.versions import MASKING_BYTES

NANO_SAMPLING_BYTES = MASKING_BYTES
"""Bytes per logit of nano-vllm's sampler: logits, their float32 copy, probabilities, noise."""


class NanoMemory:
    """As vLLM, but everything in use is charged, the context too, and no blocks are for swapping
    (nano-vllm, engine/model_runner.py, `allocate_kv_cache`). With 0 blocks, it asserts."""

    is_vllm = False

    def taken(self, stage: Stage) -> Taken:
        shard, hardware, config, tokens, seqs = stage[:5]
        overhead = (hardware.library_gib + hardware.context_gib) * GIB
        return Taken(overhead, _activation_bytes(shard, config, tokens, seqs))


def _activation_bytes(shard: Shard, config: RunConfig, tokens: int, seqs: int) -> int:
    """nano-vllm's warm-up: as many prompts of the longest length as `tokens` and `seqs` allow.

    Source: nano-vllm, engine/model_runner.py, `warmup_model`. Raises `ConfigError` for more GPUs
    than key/value heads, which nano-vllm does not replicate.
    """
    model, longest = shard.model, config.max_model_len
    if model.num_key_value_heads % config.tensor_parallel_size:
        raise ConfigError(
            f"memory_formula: nano-vllm cannot share {model.num_key_value_heads} key/value heads"
            f" among tensor_parallel_size {config.tensor_parallel_size} GPUs; use fewer GPUs, or"
            " the vllm formula, which replicates heads"
        )
    length = min(longest if isinstance(longest, int) else model.max_position_embeddings, tokens)
    prompts = min(tokens // length, seqs)
    return peak_bytes(shard, config, prompts * length, prompts * NANO_SAMPLING_BYTES)

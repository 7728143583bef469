"""What vLLM and nano-vllm take from GPU memory when they start."""

from __future__ import annotations

from kvsim.errors import ConfigError
from kvsim.machine.hardware import GIB
from kvsim.machine.memory import MIB, Stage, Taken, peak_bytes
from kvsim.machine.models import Shard
from kvsim.settings.config import RunConfig
from kvsim.settings.versions import MASKING_BYTES, startup

CUDAGRAPH_POOL_BYTES = int(0.1 * GIB)
"""Memory that the CUDA graphs share, and `CUDAGRAPH_BYTES` for each of them.

Fitted to `Estimated CUDA graph memory` in start-up logs of models of 0.6 to 27 B: 0.52 to 0.55 GiB
for 86 graphs (github.com/LMCache/LMCache/issues/3430), 0.48 for 70, 0.40 for 54, 0.13 for 5
(github.com/noonghunna/club-3090/issues/104). An RTX 5090 had 0.63 GiB for 86.
"""

CUDAGRAPH_BYTES = int(5.4 * MIB)


class VllmMemory:
    """(total x utilization - the terms) // block.

    The CUDA context was there before the engine started to measure, and is not charged (vLLM 0.6.3,
    vllm/worker/worker.py, `determine_num_available_blocks`; 0.33.0, v1/worker/gpu_worker.py,
    `determine_available_memory`). With 0 blocks, vLLM goes on and refuses to serve.
    """

    is_vllm = True

    def taken(self, stage: Stage) -> Taken:
        shard, hardware, config, tokens, seqs = stage[:5]
        charged = startup(config.vllm_version)
        logit = charged.least_sampling_bytes if stage.least else charged.sampling_bytes
        graphs = 0
        if charged.charges_cudagraphs and not config.enforce_eager:
            graphs = CUDAGRAPH_POOL_BYTES + CUDAGRAPH_BYTES * cudagraphs(tokens, seqs)
        sampled = min(seqs, tokens) * logit if stage.last else 0
        sampler = seqs * shard.model.vocab_size * charged.sampler_bytes if stage.last else 0
        activations = peak_bytes(shard, config, tokens, sampled)
        return Taken(hardware.library_gib * GIB, activations, sampler, graphs)


def cudagraphs(max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """CUDA graphs that vLLM captures: pieces of the model at each size, and whole decode steps.

    Sizes are 1, 2, 4, multiples of 8 below 256 and of 16 from there to twice `max_num_seqs`, at
    most 512. Decode steps are captured up to `max_num_seqs`. Source: vLLM 0.33.0,
    vllm/config/vllm.py, `_set_cudagraph_sizes`; GPUs of compute capability 10 go on to 1,024.
    """
    most = min(2 * max_num_seqs, max_num_batched_tokens)
    return sum((size <= most) + (size <= min(max_num_seqs, most)) for size in _SIZES)


_SIZES: tuple[int, ...] = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))


def captured_tokens(max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """The largest batch for which vLLM captures a CUDA graph."""
    most = min(2 * max_num_seqs, max_num_batched_tokens)
    return max([size for size in _SIZES if size <= most])


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

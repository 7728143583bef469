"""How many KV blocks fit: bytes of a block, and the memory budget of two engines.

```
total x gpu_memory_utilization - weights - activations - overhead = bytes for blocks
```
Weights follow from the geometry. An engine measures activations and overhead with a dummy forward
pass when it starts. Here both are estimates, and they are called so wherever they are shown.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvsim.config import RunConfig
from kvsim.defaults import DEFAULT_BLOCK_SIZE
from kvsim.errors import ConfigError
from kvsim.hardware import GIB, Hardware
from kvsim.models import DTYPE_BYTES, Model

VLLM_SAMPLING_BYTES = 39
"""Bytes per logit at the peak of vLLM's dummy sampling (float32 copy, sort, probabilities).

Fitted to published start-up logs of 256 sequences: 1.26 GiB for Llama-3-8B at 8,192 tokens
(vLLM 0.6, github.com/vllm-project/vllm/pull/10511), 1.42 GiB for Qwen2.5-7B at 4,096 (0.7).
"""

NANO_SAMPLING_BYTES = 14
"""Bytes per logit of nano-vllm's sampler: logits, their float32 copy, probabilities, noise."""


def kv_dtype(model: Model, config: RunConfig) -> str:
    """Type of the stored keys and values."""
    return model.dtype(config.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype)


def token_bytes(model: Model, config: RunConfig) -> int:
    """Bytes of the KV of one token on one GPU, if every layer keeps it (`Shard.token_bytes`)."""
    return model.shard(config.tensor_parallel_size).token_bytes(kv_dtype(model, config))


def block_bytes(model: Model, config: RunConfig) -> int:
    """Bytes of one KV block on one GPU of the tensor-parallel group."""
    return (config.block_size or DEFAULT_BLOCK_SIZE) * token_bytes(model, config)


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory of one GPU, term by term; all GPUs of a tensor-parallel group are alike."""

    formula: str
    """The engine whose formula it is: `vllm` or `nano-vllm`."""
    memory_bytes: int
    gpu_memory_utilization: float
    weight_bytes: int
    activation_bytes: int
    """Estimate of the peak of the engine's dummy forward pass, above the weights."""
    overhead_bytes: int
    """Estimate of other memory that the engine counts as used: neither weights nor activations."""
    kv_bytes: int
    """What remains for blocks; negative if the terms exceed the limit."""
    block_bytes: int
    num_gpu_blocks_in_budget: int
    """Blocks by the formula; at least 0."""
    num_gpu_blocks: int
    """Blocks of the run: those of the budget, or `num_gpu_blocks_override`."""
    num_cpu_blocks: int
    """Blocks for swapping: of `swap_space`, or `num_cpu_blocks_override`."""
    num_gpu_blocks_overridden: bool
    num_cpu_blocks_overridden: bool

    def describe(self) -> dict[str, Any]:
        """All terms, for the provenance of a result."""
        return asdict(self)

    def __str__(self) -> str:
        def gib(count: int) -> str:
            return f"{count / GIB:.2f} GiB"

        return (
            f"{gib(self.memory_bytes)} x gpu_memory_utilization {self.gpu_memory_utilization:g}"
            f" - weights {gib(self.weight_bytes)} - activations {gib(self.activation_bytes)}"
            f" (estimate) - overhead {gib(self.overhead_bytes)} (estimate)"
            f" = {gib(self.kv_bytes)} for blocks of {self.block_bytes:,} bytes"
        )


def budget(
    model: Model,
    hardware: Hardware,
    config: RunConfig,
    max_num_batched_tokens: int,
    max_num_seqs: int,
) -> Budget:
    """Blocks that fit on each GPU, by `config.memory_formula`.

    `vllm`: (total x utilization - weights - activations - libraries) // block; the CUDA context
    was there before the engine started to measure and is not charged (vLLM 0.6.3,
    vllm/worker/worker.py, `determine_num_available_blocks`; V1 has the same terms).
    `nano-vllm`: the same, but everything in use is charged, the context too, and no blocks for
    swapping (nano-vllm, engine/model_runner.py, `allocate_kv_cache`).

    Raises `ConfigError` with all terms if not one block fits and nothing is overridden: vLLM would
    go on with 0 blocks and refuse to serve, nano-vllm asserts.
    """
    block = block_bytes(model, config)
    if config.memory_formula == "nano-vllm":
        activations = _nano_activation_bytes(model, config, max_num_batched_tokens, max_num_seqs)
        overhead = int((hardware.library_gib + hardware.context_gib) * GIB)
        swap = 0
    else:
        activations = _vllm_activation_bytes(model, config, max_num_batched_tokens, max_num_seqs)
        overhead = int(hardware.library_gib * GIB)
        swap = int(config.swap_space * GIB // block)
    weights = model.weight_bytes(config.dtype, config.tensor_parallel_size)
    limit = hardware.memory_bytes * config.gpu_memory_utilization
    left = int(limit - weights - activations - overhead)
    fitting = max(left // block, 0)
    gpu, cpu = config.num_gpu_blocks_override, config.num_cpu_blocks_override
    result = Budget(
        formula=config.memory_formula,
        memory_bytes=hardware.memory_bytes,
        gpu_memory_utilization=config.gpu_memory_utilization,
        weight_bytes=weights,
        activation_bytes=activations,
        overhead_bytes=overhead,
        kv_bytes=left,
        block_bytes=block,
        num_gpu_blocks_in_budget=fitting,
        num_gpu_blocks=fitting if gpu is None else gpu,
        num_cpu_blocks=swap if cpu is None else cpu,
        num_gpu_blocks_overridden=gpu is not None,
        num_cpu_blocks_overridden=cpu is not None,
    )
    if result.num_gpu_blocks == 0:
        raise ConfigError(
            f"{model.name} on {hardware.name}: no KV block fits: {result}; raise"
            " gpu_memory_utilization or tensor_parallel_size, lower max_num_batched_tokens or"
            " max_num_seqs, or set num_gpu_blocks_override"
        )
    return result


def _vllm_activation_bytes(model: Model, config: RunConfig, tokens: int, seqs: int) -> int:
    """vLLM's dummy batch: `tokens` prompt tokens of `seqs` sequences, each of which samples.

    The full vocabulary is gathered on every GPU.
    """
    return _peak_bytes(model, config, tokens, min(seqs, tokens) * VLLM_SAMPLING_BYTES)


def _nano_activation_bytes(model: Model, config: RunConfig, tokens: int, seqs: int) -> int:
    """nano-vllm's warm-up: as many prompts of the longest length as `tokens` and `seqs` allow.

    Source: nano-vllm, engine/model_runner.py, `warmup_model`. Raises `ConfigError` for more GPUs
    than key/value heads, which nano-vllm does not replicate.
    """
    if model.num_key_value_heads % config.tensor_parallel_size:
        raise ConfigError(
            f"memory_formula: nano-vllm cannot share {model.num_key_value_heads} key/value heads"
            f" among tensor_parallel_size {config.tensor_parallel_size} GPUs; use fewer GPUs, or"
            " the vllm formula, which replicates heads"
        )
    length = min(config.max_model_len or model.max_position_embeddings, tokens)
    prompts = min(tokens // length, seqs)
    return _peak_bytes(model, config, prompts * length, prompts * NANO_SAMPLING_BYTES)


def _peak_bytes(model: Model, config: RunConfig, tokens: int, bytes_per_word: int) -> int:
    """Estimated peak above the weights: the larger of the widest layer stage and of sampling.

    A layer holds the residual and its normalised copy of every token, and either gate, up and
    their product, or queries, keys, values and the attention output. Sampling holds the hidden
    states and `bytes_per_word` for every word of the vocabulary.
    """
    shard = model.shard(config.tensor_parallel_size)
    attention = shard.qkv_size + shard.heads * model.head_dim
    widest = 2 * model.hidden_size + max(3 * shard.intermediate_size, attention)
    element = DTYPE_BYTES[model.dtype(config.dtype)]
    forward = tokens * widest * element
    sampling = tokens * model.hidden_size * element + bytes_per_word * model.vocab_size
    return max(forward, sampling)

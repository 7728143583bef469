"""How many KV blocks fit: bytes of a block, and the memory budget of three engines.

```
total x gpu_memory_utilization - weights - activations - sampler - libraries - communication
    - CUDA graphs = bytes for blocks
```
Weights follow from the geometry. An engine measures the other terms with a dummy forward pass when
it starts. Here they are estimates, and they are called so wherever they are shown. They stand for a
start with a filled compile cache: vLLM's first start on a machine also charges what compiling
takes, often 0.5 to 2 GiB (github.com/vllm-project/vllm/issues/54122 and 54383).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import asdict

from kvsim.config import RunConfig
from kvsim.defaults import DEFAULT_BLOCK_SIZE
from kvsim.engines.versions import MASKING_BYTES, gpu_memory_utilization, startup
from kvsim.errors import ConfigError
from kvsim.hardware import GIB, Hardware
from kvsim.models import DTYPE_BYTES, Model, Shard

MIB = 2**20

NANO_SAMPLING_BYTES = MASKING_BYTES
"""Bytes per logit of nano-vllm's sampler: logits, their float32 copy, probabilities, noise."""

NVLINK_BUFFER_BYTES = int(1.8 * GIB)
"""Buffers of NCCL and of the custom all-reduce on each of several GPUs that NVLink connects.

What start-up logs counted beyond one GPU's libraries: 1.4 GiB (2 x H200, vLLM 0.11), 1.6 (B300),
1.8 (2 x H100, github.com/vllm-project/vllm/pull/10511), 1.9 (8 x A100-40, 0.7), 2.4 (16 x H20,
github.com/vllm-project/vllm/issues/13074); the middle one is taken.
"""

PCIE_BUFFER_BYTES = int(0.1 * GIB)
"""Buffers of NCCL where PCIe connects the GPUs: 0.09 GiB with 2 x RTX 4090
(github.com/vllm-project/vllm/issues/13061), 0.04 with 16 x RTX 3090 (pull/14447)."""

CUDAGRAPH_POOL_BYTES = int(0.1 * GIB)
"""Memory that the CUDA graphs share, and `CUDAGRAPH_BYTES` for each of them.

Fitted to `Estimated CUDA graph memory` in start-up logs of models of 0.6 to 27 B: 0.52 to 0.55 GiB
for 86 graphs (github.com/LMCache/LMCache/issues/3430), 0.48 for 70, 0.40 for 54, 0.13 for 5
(github.com/noonghunna/club-3090/issues/104). An RTX 5090 had 0.63 GiB for 86.
"""

CUDAGRAPH_BYTES = int(5.4 * MIB)


def kv_dtype(model: Model, config: RunConfig) -> str:
    """Type of the stored keys and values; all 8-bit formats are `fp8`."""
    if config.kv_cache_dtype.startswith("fp8"):
        return "fp8"
    return model.dtype(config.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype)


def token_bytes(model: Model, config: RunConfig) -> int:
    """Bytes of the KV of one token on one GPU, if every layer keeps it (`Shard.token_bytes`)."""
    return model.shard(config.tensor_parallel_size).token_bytes(kv_dtype(model, config))


def block_bytes(model: Model, config: RunConfig) -> int:
    """Bytes of one KV block on one GPU of the tensor-parallel group."""
    return (config.block_size or DEFAULT_BLOCK_SIZE) * token_bytes(model, config)


class Budget(Struct, frozen=True):
    """Memory of one GPU, term by term.

    All GPUs of a tensor-parallel group are alike. Of pipeline stages, it is the one with room for
    the fewest blocks, which is how many every stage gets.
    """

    formula: str
    """The engine whose formula it is: `vllm`, `sglang` or `nano-vllm`."""
    vllm_version: str | None
    """The release whose start-up is meant; none: not vLLM."""
    memory_bytes: int
    gpu_memory_utilization: float
    num_hidden_layers: int
    """Layers on this GPU: all, or those of its pipeline stage."""
    weight_bytes: int
    """Weights in GPU memory."""
    cpu_offload_bytes: int
    """Weights in CPU memory instead."""
    activation_bytes: int
    """Estimate of the peak of the engine's dummy forward pass, above the weights."""
    sampler_bytes: int
    """Estimate of what the sampler holds for good."""
    overhead_bytes: int
    """Estimate of other memory that the engine counts as used: neither weights nor activations."""
    communication_bytes: int
    """Estimate of the buffers with which several GPUs exchange data; 0 for one GPU."""
    cudagraph_bytes: int
    """Estimate of the CUDA graphs; 0 where the version does not charge them, and if eager."""
    kv_bytes: int
    """What remains for blocks, or `kv_cache_memory_bytes`; negative if the terms exceed the
    limit."""
    kv_bytes_given: bool
    """Whether `kv_cache_memory_bytes` is used in place of the other terms."""
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

        blocks = f"{gib(self.kv_bytes)} for blocks of {self.block_bytes:,} bytes"
        if self.kv_bytes_given:
            return f"kv_cache_memory_bytes: {blocks}"
        optional = {
            "sampler": self.sampler_bytes,
            "communication": self.communication_bytes,
            "CUDA graphs": self.cudagraph_bytes,
        }
        further = (f" - {name} {gib(term)} (estimate)" for name, term in optional.items() if term)
        return (
            f"{gib(self.memory_bytes)} x gpu_memory_utilization {self.gpu_memory_utilization:g}"
            f" - weights {gib(self.weight_bytes)} - activations {gib(self.activation_bytes)}"
            f" (estimate) - overhead {gib(self.overhead_bytes)} (estimate){''.join(further)}"
            f" = {blocks}"
        )


class _Terms(NamedTuple):
    """What is in use on one GPU apart from KV blocks; names as in `Budget`."""

    weight_bytes: int
    cpu_offload_bytes: int
    activation_bytes: int
    sampler_bytes: int
    overhead_bytes: int
    communication_bytes: int
    cudagraph_bytes: int

    @property
    def used_bytes(self) -> int:
        return sum(self) - self.cpu_offload_bytes


def budget(
    model: Model,
    hardware: Hardware,
    config: RunConfig,
    max_num_batched_tokens: int,
    max_num_seqs: int,
) -> Budget:
    """Blocks that fit on each GPU, by `config.memory_formula` and `config.vllm_version`.

    `vllm`: (total x utilization - the other terms) // block; the CUDA context was there before the
    engine started to measure and is not charged (vLLM 0.6.3, vllm/worker/worker.py,
    `determine_num_available_blocks`; 0.33.0, v1/worker/gpu_worker.py,
    `determine_available_memory`).
    `sglang`: (total - context) x utilization - weights (SGLang 0.5.23,
    mem_cache/kv_cache_configurator.py, `_profile_available_bytes`).
    `nano-vllm`: as vLLM, but everything in use is charged, the context too, and no blocks for
    swapping (nano-vllm, engine/model_runner.py, `allocate_kv_cache`).

    Raises `ConfigError` with all terms if not one block fits and nothing is overridden: vLLM would
    go on with 0 blocks and refuse to serve, nano-vllm asserts.
    """
    shard = model.shard(config.tensor_parallel_size, expert_parallel_size(config))
    stages = [
        _stage_budget(shard, hardware, config, max_num_batched_tokens, max_num_seqs, layers)
        for layers in model.stages(config.pipeline_parallel_size)
    ]
    result = min(stages, key=lambda stage: stage.kv_bytes // stage.block_bytes)
    if result.num_gpu_blocks == 0:
        raise ConfigError(
            f"{model.name} on {hardware.name}: no KV block fits: {result}; raise"
            " gpu_memory_utilization or tensor_parallel_size, lower max_num_batched_tokens or"
            " max_num_seqs, or set num_gpu_blocks_override"
        )
    return result


def expert_parallel_size(config: RunConfig) -> int:
    """GPUs among which the experts of a layer are divided as wholes.

    Replicas share them (vLLM 0.33.0, model_executor/layers/fused_moe/config.py,
    `FusedMoEParallelConfig.make`). With replicas but without expert parallelism, columns are
    divided among as many GPUs, which takes the same memory.
    """
    if config.enable_expert_parallel or config.data_parallel_size > 1:
        return config.tensor_parallel_size * config.data_parallel_size
    return 1


def _stage_budget(
    shard: Shard,
    hardware: Hardware,
    config: RunConfig,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    layers: range,
) -> Budget:
    """The budget of a GPU of the pipeline stage with these layers."""
    vllm = config.memory_formula in (None, "vllm")
    terms = _terms(shard, hardware, config, max_num_batched_tokens, max_num_seqs, layers)
    utilization = config.gpu_memory_utilization
    if utilization is None:
        utilization = gpu_memory_utilization(config.vllm_version)
    left = int(hardware.memory_bytes * utilization - terms.used_bytes)
    given = config.kv_cache_memory_bytes
    left = left if given is None else given
    token = shard.token_bytes(kv_dtype(shard.model, config), layers)
    block = (config.block_size or DEFAULT_BLOCK_SIZE) * token
    fitting = max(left // block, 0)
    swap = 0 if not vllm else int(config.swap_space * GIB // block)
    gpu, cpu = config.num_gpu_blocks_override, config.num_cpu_blocks_override
    return Budget(
        formula=config.memory_formula or "vllm",
        vllm_version=config.vllm_version if vllm else None,
        memory_bytes=hardware.memory_bytes,
        gpu_memory_utilization=utilization,
        num_hidden_layers=len(layers),
        **terms._asdict(),
        kv_bytes=left,
        kv_bytes_given=given is not None,
        block_bytes=block,
        num_gpu_blocks_in_budget=fitting,
        num_gpu_blocks=fitting if gpu is None else gpu,
        num_cpu_blocks=swap if cpu is None else cpu,
        num_gpu_blocks_overridden=gpu is not None,
        num_cpu_blocks_overridden=cpu is not None,
    )


def _terms(
    shard: Shard, hardware: Hardware, config: RunConfig, tokens: int, seqs: int, layers: range
) -> _Terms:
    """What is in use on a GPU of the pipeline stage with these layers."""
    model, weights = shard.model, shard.weight_bytes(config.dtype, layers)
    last = layers.stop == model.num_hidden_layers
    offloaded = min(weights, int(config.cpu_offload_gb * GIB))
    overhead, sampler, graphs = hardware.library_gib * GIB, 0, 0
    if config.memory_formula == "sglang":
        # Activations and graphs are what `mem_fraction_static` leaves; of what was in use when the
        # engine began to measure, the same share is charged.
        activations, graphs = 0, 0
        overhead = hardware.context_gib * GIB * (config.gpu_memory_utilization or 1.0)
    elif config.memory_formula == "nano-vllm":
        activations = _nano_activation_bytes(shard, config, tokens, seqs)
        overhead += hardware.context_gib * GIB
    else:
        charged = startup(config.vllm_version)
        sampled = min(seqs, tokens) * charged.sampling_bytes if last else 0
        activations = _peak_bytes(shard, config, tokens, sampled)
        sampler = seqs * model.vocab_size * charged.sampler_bytes if last else 0
        if charged.charges_cudagraphs and not config.enforce_eager:
            graphs = CUDAGRAPH_POOL_BYTES + CUDAGRAPH_BYTES * cudagraphs(tokens, seqs)
    gpus = config.tensor_parallel_size * config.pipeline_parallel_size
    buffers = NVLINK_BUFFER_BYTES if hardware.nvlink else PCIE_BUFFER_BYTES
    return _Terms(
        weight_bytes=weights - offloaded,
        cpu_offload_bytes=offloaded,
        activation_bytes=activations,
        sampler_bytes=sampler,
        overhead_bytes=int(overhead),
        communication_bytes=buffers if gpus > 1 else 0,
        cudagraph_bytes=graphs,
    )


def cudagraphs(max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """CUDA graphs that vLLM captures: pieces of the model at each size, and whole decode steps.

    Sizes are 1, 2, 4, multiples of 8 below 256 and of 16 from there to twice `max_num_seqs`, at
    most 512. Decode steps are captured up to `max_num_seqs`. Source: vLLM 0.33.0,
    vllm/config/vllm.py, `_set_cudagraph_sizes`; GPUs of compute capability 10 go on to 1,024.
    """
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
    most = min(2 * max_num_seqs, max_num_batched_tokens)
    return sum((size <= most) + (size <= min(max_num_seqs, most)) for size in sizes)


def _nano_activation_bytes(shard: Shard, config: RunConfig, tokens: int, seqs: int) -> int:
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
    return _peak_bytes(shard, config, prompts * length, prompts * NANO_SAMPLING_BYTES)


def _peak_bytes(shard: Shard, config: RunConfig, tokens: int, bytes_per_word: int) -> int:
    """Estimated peak above the weights: the larger of the widest layer stage and of sampling.

    A layer holds the residual and its normalised copy of every token, and either gate, up and
    their product, or queries, keys, values and the attention output. A token has these of each
    expert that it passes through. Sampling holds the hidden states and `bytes_per_word` for every
    word of the whole vocabulary, which every GPU gathers.
    """
    model = shard.model
    attention = shard.qkv_size + shard.heads * model.head_dim
    mlp = 3 * shard.intermediate_size
    if model.experts is not None:
        routed = model.experts.num_experts_per_tok * model.experts.moe_intermediate_size
        mlp = 3 * routed // shard.tensor_parallel_size
    element = DTYPE_BYTES[model.dtype(config.dtype)]
    forward = tokens * (2 * model.hidden_size + max(mlp, attention)) * element
    sampling = tokens * model.hidden_size * element + bytes_per_word * model.vocab_size
    return max(forward, sampling)

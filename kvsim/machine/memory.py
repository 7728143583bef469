"""How many KV blocks fit: bytes of a block, and the memory budget of a GPU.

```
total x gpu_memory_utilization - weights - activations - sampler - libraries - communication
    - CUDA graphs = bytes for blocks
```
Weights follow from the geometry. An engine measures the other terms with a dummy forward pass when
it starts. Here they are estimates, and they are called so wherever they are shown. They stand for a
start with a filled compile cache: vLLM's first start on a machine also charges what compiling
takes, often 0.5 to 2 GiB (github.com/vllm-project/vllm/issues/54122 and 54383).

vLLM V1 groups layers that share a pool of blocks. All groups have equally many layers, so that a
block holds as many bytes in each of them:

```
  gemma-3-27b   52 sliding + 10 full   ->  6 groups of 9 or 8 sliding layers, 1 of 10 full ones
  gpt-oss-20b   12 sliding + 12 full   ->  1 and 1
```
Source: vLLM 0.33.0, `v1/core/kv_cache_planning.py`, `_get_kv_cache_groups_uniform_page_size`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from math import ceil, lcm
from typing import Any, NamedTuple, Protocol

from msgspec import Struct
from msgspec.structs import asdict, replace

from kvsim.errors import ConfigError
from kvsim.machine.hardware import GIB, Hardware
from kvsim.machine.models import DTYPE_BYTES, Model, Shard, load_model
from kvsim.machine.models.parts import LayerType
from kvsim.machine.packed import Packed, packed_bytes, packed_groups
from kvsim.settings.config import RunConfig
from kvsim.settings.versions import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_LORA_RANK,
    gpu_memory_utilization,
    release,
)

MIB = 2**20

NVLINK_BUFFER_BYTES = int(1.8 * GIB)
"""Buffers of NCCL and of the custom all-reduce on each of several GPUs that NVLink connects.

What start-up logs counted beyond one GPU's libraries: 1.4 GiB (2 x H200, vLLM 0.11), 1.6 (B300),
1.8 (2 x H100, github.com/vllm-project/vllm/pull/10511), 1.9 (8 x A100-40, 0.7), 2.4 (16 x H20,
github.com/vllm-project/vllm/issues/13074); the middle one is taken.
"""

LEAST_NVLINK_BUFFER_BYTES = int(0.44 * GIB)
"""The least of them that a start-up log had: 4 x H100, vLLM of July 2026
(github.com/vllm-project/vllm/pull/48601, 0.6 GiB with the libraries)."""

PCIE_BUFFER_BYTES = int(0.1 * GIB)
"""Buffers of NCCL where PCIe connects the GPUs: 0.09 GiB with 2 x RTX 4090
(github.com/vllm-project/vllm/issues/13061), 0.04 with 16 x RTX 3090 (pull/14447)."""


def pool_setting(config: RunConfig) -> str:
    """The setting that decides how many KV blocks there are."""
    for key in ("num_gpu_blocks_override", "kv_cache_memory_bytes"):
        if getattr(config, key) is not None:
            return key
    return "gpu_memory_utilization"


def kv_dtype(model: Model, config: RunConfig) -> str:
    """Type of the stored keys and values; all 8-bit formats are `fp8`."""
    if config.kv_cache_dtype.startswith("fp8"):
        return "fp8"
    return model.dtype(config.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype)


def token_bytes(model: Model, config: RunConfig) -> int:
    """Bytes of the KV of one token on one GPU, if every layer keeps it (`Shard.token_bytes`)."""
    return model.shard(config.tensor_parallel_size).token_bytes(kv_dtype(model, config))


def tables_of(model: Model, config: RunConfig) -> tuple[CacheGroup, ...]:
    """The groups of layers that have block tables of their own; none if one table serves all."""
    disabled = config.disable_hybrid_kv_cache_manager
    if disabled is None:  # An engine or a release without such tables.
        return ()
    if model.compressed is not None and not disabled:
        return tuple(
            CacheGroup("sliding_attention" if each.window else "full_attention", (), each)
            for each in packed_groups(model, range(model.num_hidden_layers), _has_layer(config))
        )
    groups = cache_groups(model, not disabled, _has_layer(config))
    return () if is_plain(groups) else groups


def block_bytes(model: Model, config: RunConfig) -> int:
    """Bytes of one KV block on one GPU of the tensor-parallel group."""
    shard = model.shard(config.tensor_parallel_size)
    return _block_bytes(shard, config, range(model.num_hidden_layers))


def drafted_tokens(config: RunConfig) -> int:
    """Tokens that the drafter of the settings proposes in a step; 0 without one."""
    tokens = config.speculative_config.get("num_speculative_tokens")
    return tokens if type(tokens) is int else 0


def _has_layer(config: RunConfig) -> bool:
    """Whether the drafter of the settings is one layer behind those of the target."""
    return drafting_method(config.speculative_config) in _STATES_IN


def drafter(shard: Shard, config: RunConfig) -> Drafter:
    """What the drafter of the settings takes on a GPU; nothing without one."""
    if not config.speculative_config:
        return Drafter()
    dtype = kv_dtype(shard.model, config)
    return drafter_of(shard, config.speculative_config, config.dtype, dtype)


def _block_bytes(shard: Shard, config: RunConfig, layers: range) -> int:
    """Bytes of one KV block in these layers, and in those of a drafter behind the last of them;
    those of a draft model count where one table serves all."""
    dtype, size = kv_dtype(shard.model, config), config.block_size or DEFAULT_BLOCK_SIZE
    groups, last = tables_of(shard.model, config), shard.model.num_hidden_layers
    if not groups:
        return size * (shard.token_bytes(dtype, layers) + drafter(shard, config).token_bytes)
    if groups[0].packed is not None:
        drafts = layers.stop == last and _has_layer(config)
        packed = packed_groups(shard.model, layers, drafts)
        return packed_bytes(packed, release(config.vllm_version))
    # Groups with states keep nothing of a token: blocks are as large as the others need.
    token = max(group.token_bytes(DTYPE_BYTES[dtype]) for group in shard.kv_groups)
    stage = range(layers.start, last + 1) if layers.stop == last else layers
    return int(size * token * block_layers(groups, stage))


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
    drafter_bytes: int
    """Weights of the drafter; an estimate unless it is a model of its own."""
    adapter_bytes: int
    """Slots for adapters."""
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
    least: bool
    """Whether activations and communication are the least that starts were seen to charge, as the
    usual ones leave too few blocks."""

    def remarks(self) -> tuple[str, ...]:
        """What a reader should know of the terms, one line each."""
        if not self.least:
            return ()
        return (
            "memory: by the usual estimate the engine would not start; by the least that servers"
            " were seen to take (small buffers between GPUs; up to vLLM 0.11.0 the sampler of"
            " FlashInfer, as in its image) it does, and the run counts with that; --startup-log or"
            " --num-gpu-blocks-override gives the real blocks",
        )

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
            "drafter": self.drafter_bytes,
            "adapters": self.adapter_bytes,
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


class Stage(NamedTuple):
    """A GPU when its engine starts."""

    shard: Shard
    hardware: Hardware
    config: RunConfig
    max_num_batched_tokens: int
    max_num_seqs: int
    layers: range
    """The layers of its pipeline stage."""
    least: bool
    """Whether to charge the least that starts were seen to charge."""

    @property
    def last(self) -> bool:
        """Whether it samples."""
        return self.layers.stop == self.shard.model.num_hidden_layers


class Taken(NamedTuple):
    """What a start takes from a GPU beside weights and the buffers between GPUs; names as in
    `Budget`."""

    overhead_bytes: float
    activation_bytes: int = 0
    sampler_bytes: int = 0
    cudagraph_bytes: int = 0


class Formula(Protocol):
    """How an engine counts its KV blocks: (memory x utilization - what is taken) // block."""

    is_vllm: bool
    """Whether it has a release, and `swap_space` gives it blocks in CPU memory."""

    def taken(self, stage: Stage) -> Taken:
        """Returns what is in use on a GPU, or kept for the model. Raises `ConfigError` for settings
        with which the engine does not start."""
        ...


def budget(
    model: Model,
    hardware: Hardware,
    config: RunConfig,
    formula: Formula,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    holds: Callable[[Budget], bool] = lambda found: found.num_gpu_blocks > 0,
) -> Budget:
    """Blocks that fit on each GPU, by the formula of an engine.

    `holds`: whether an engine starts with a budget; by default, if there is a block at all. Where
    it does with the least that starts were seen to charge, but not with the usual estimate, the
    least counts. Raises `ConfigError` with all terms if not one block fits and nothing is
    overridden: vLLM would go on with 0 blocks and refuse to serve, nano-vllm asserts.
    """
    shard = model.shard(config.tensor_parallel_size, expert_parallel_size(config))
    limits = max_num_batched_tokens, max_num_seqs

    def counted(least: bool) -> Budget:
        stages = (
            _stage_budget(formula, Stage(shard, hardware, config, *limits, layers, least))
            for layers in model.stages(config.pipeline_parallel_size)
        )
        return min(stages, key=lambda stage: stage.kv_bytes // stage.block_bytes)

    result = counted(least=False)
    if not holds(result) and holds(least := counted(least=True)):
        result = least
    if result.num_gpu_blocks == 0:
        less = "" if result.kv_bytes_given else "lower max_num_batched_tokens or max_num_seqs, "
        raise ConfigError(
            f"{model.name} on {hardware.name}: no KV block fits: {result}; raise"
            f" {pool_setting(config)} or tensor_parallel_size, {less}or set num_gpu_blocks_override"
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


def _terms(formula: Formula, stage: Stage) -> dict[str, int]:
    """What is in use on a GPU when its blocks are counted; names as in `Budget`."""
    shard, config, layers = stage.shard, stage.config, stage.layers
    taken, weights = formula.taken(stage), shard.weight_bytes(config.dtype, layers)
    offloaded = min(weights, int(config.cpu_offload_gb * GIB))
    slots = (config.max_loras or 1) if config.enable_lora else 0
    rank = config.max_lora_rank or DEFAULT_LORA_RANK
    nvlink = LEAST_NVLINK_BUFFER_BYTES if stage.least else NVLINK_BUFFER_BYTES
    buffers = nvlink if stage.hardware.nvlink else PCIE_BUFFER_BYTES
    gpus = config.tensor_parallel_size * config.pipeline_parallel_size
    return {
        "weight_bytes": weights - offloaded,
        "drafter_bytes": drafter(shard, config).weight_bytes,
        "adapter_bytes": adapter_bytes(shard, config.dtype, layers, slots, rank) if slots else 0,
        **taken._asdict(),
        "overhead_bytes": int(taken.overhead_bytes),
        "communication_bytes": buffers if gpus > 1 else 0,
    }


def _stage_budget(formula: Formula, stage: Stage) -> Budget:
    """The budget of a GPU of a pipeline stage."""
    shard, hardware, config, layers = stage.shard, stage.hardware, stage.config, stage.layers
    terms = _terms(formula, stage)
    utilization = config.gpu_memory_utilization
    if utilization is None:
        utilization = gpu_memory_utilization(config.vllm_version)
    left = int(hardware.memory_bytes * utilization - sum(terms.values()))
    given = config.kv_cache_memory_bytes
    left = left if given is None else given
    block = _block_bytes(shard, config, layers)
    if not block:
        raise ConfigError(
            f"pipeline_parallel_size: of the layers of {shard.model.name}, a stage has only some"
            f" that keep no keys and values with vLLM {config.vllm_version}; use fewer stages"
        )
    fitting = max(left // block, 0)
    swap = int(config.swap_space * GIB // block) if formula.is_vllm else 0
    gpu, cpu = config.num_gpu_blocks_override, config.num_cpu_blocks_override
    return Budget(
        formula=config.memory_formula or "vllm",
        vllm_version=config.vllm_version if formula.is_vllm else None,
        memory_bytes=hardware.memory_bytes,
        gpu_memory_utilization=utilization,
        num_hidden_layers=len(layers),
        **terms,
        cpu_offload_bytes=shard.weight_bytes(config.dtype, layers) - terms["weight_bytes"],
        kv_bytes=left,
        kv_bytes_given=given is not None,
        block_bytes=block,
        num_gpu_blocks_in_budget=fitting,
        num_gpu_blocks=fitting if gpu is None else gpu,
        num_cpu_blocks=swap if cpu is None else cpu,
        num_gpu_blocks_overridden=gpu is not None,
        num_cpu_blocks_overridden=cpu is not None,
        least=stage.least,
    )


def peak_bytes(shard: Shard, config: RunConfig, tokens: int, bytes_per_word: int) -> int:
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


KERNEL_BLOCK_TOKENS = 16
"""Least block size of attention kernels (vLLM 0.33.0, v1/attention/backends/flash_attn.py)."""

STATE_EXPORT_TOKENS = 64
"""Blocks are a multiple of this where a kernel saves states inside a chunk (vLLM 0.33.0,
v1/attention/backends/gdn_attn.py, `FLASHINFER_GDN_CHECKPOINT_ALIGNMENT`)."""


class CacheGroup(NamedTuple):
    """Layers of one kind that share a block table."""

    kind: LayerType
    layers: tuple[int, ...]
    packed: Packed | None = None
    """Of compressed attention: what a block holds of them."""


def cache_groups(model: Model, hybrid: bool = True, drafts: bool = False) -> tuple[CacheGroup, ...]:
    """Returns the groups of all layers of a model, in order of their first layers.

    Without `hybrid`, layers with windows or chunks keep all tokens beside layers that do
    (`--disable-hybrid-kv-cache-manager`). With `drafts`, a drafter's layer stands behind the last
    one, with full attention, beside others that have it.
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
    if drafts and "full_attention" in kinds:
        kinds["full_attention"].append(model.num_hidden_layers)
    numbers = [len(layers) for layers in kinds.values()]
    # Kinds with nearly as many layers become one group each, the smaller ones padded; otherwise the
    # larger ones are cut into groups of the smallest.
    size = max(numbers) if max(numbers) < 1.5 * min(numbers) else min(numbers)
    return tuple(
        # Every n-th layer, so that each stage of a pipeline has layers of every group.
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


def block_sizes(model: Model, config: RunConfig) -> dict[str, int]:
    """The tokens of a block, by kind of layers: those that keep fewer bytes of a token have so many
    more in a block that all blocks are alike, where that comes out even.

    Source: vLLM 0.33.0, v1/core/kv_cache_planning.py, `unify_kv_cache_spec_page_size`.
    """
    size, element = config.block_size or DEFAULT_BLOCK_SIZE, DTYPE_BYTES[kv_dtype(model, config)]
    groups = model.shard(config.tensor_parallel_size).kv_groups
    kept = {group.kind: group.token_bytes(element) for group in groups}
    most = max(kept.values())
    sizes: dict[str, int] = dict.fromkeys((group.kind for group in cache_groups(model)), size)
    for kind in ("full_attention", "sliding_attention", "chunked_attention"):
        if kind in sizes and kind in kept and most % kept[kind] == 0:
            sizes[kind] = int(size * most // kept[kind])
    return sizes


def state_block_size(model: Model, config: RunConfig, exports: bool) -> int:
    """Returns the block size in tokens at which a block of attention is as large as a state.

    `exports` says whether a kernel saves states inside a chunk. Without states, it is that of the
    settings. Sources: vLLM 0.33.0, platforms/interface.py, `_align_hybrid_block_size`; before 0.32,
    blocks of latent vectors were multiples of 64 tokens (0.11.2 to 0.19.0,
    model_executor/models/config.py).
    """
    block_size = config.block_size or DEFAULT_BLOCK_SIZE
    kept = {group.kind: group for group in model.shard(config.tensor_parallel_size).kv_groups}
    if "linear_attention" not in kept:
        return block_size
    states = kept.pop("linear_attention")
    state_bytes = states.state_bytes + drafted_tokens(config) * states.draft_bytes
    element = DTYPE_BYTES[kv_dtype(model, config)]
    token_bytes = max(group.token_bytes(element) for group in kept.values())
    unit = max(KERNEL_BLOCK_TOKENS, block_size)
    if model.latent is not None:
        unit = max(unit, 128 if release(config.vllm_version) >= (0, 32) else 64)
    if exports and model.linear is not None and model.linear.kind == "gated_delta_net":
        unit = lcm(unit, STATE_EXPORT_TOKENS)
    return unit * ceil(state_bytes / (unit * token_bytes))


DRAFT_VOCABULARY = 32_000
"""Words of the output projection of EAGLE-3 drafters: `draft_vocab_size` of yuhuili's checkpoints
on Hugging Face."""

_STATES_IN = {"eagle": 2, "eagle3": 3, "mtp": 2}
"""Method whose drafter is one layer like those of the target → hidden states that go into the
projection before it."""


class Drafter(NamedTuple):
    """What a drafter takes on each GPU of the target."""

    weight_bytes: int = 0
    token_bytes: int = 0
    """Of the KV cache, for one token."""


def drafting_method(given: Mapping[str, Any]) -> str | None:
    """The method of a `speculative_config`, or what vLLM takes for a drafter of this name; None if
    it names neither. `qwen3_next_mtp` and the like are `mtp` (vLLM 0.33.0, config/speculative.py,
    `MTPModelTypes`)."""
    name, method = given.get("model"), given.get("method")
    if method is None and isinstance(name, str):
        lowered = name.strip("[]").lower()
        known = ("ngram", "eagle3", "eagle")
        return next((each for each in known if each in lowered), "draft_model")
    if not isinstance(method, str):
        return None
    return "mtp" if method.endswith("_mtp") and ":" not in method else method


def drafter_of(shard: Shard, given: Mapping[str, Any], dtype: str, kv_dtype: str) -> Drafter:
    """The drafter of a `speculative_config` beside a model.

    A draft model has its weights and layers, divided as those of the target. EAGLE, EAGLE-3 and MTP
    are taken to be one layer like those of the target (`num_hidden_layers` 1), and a projection of
    two or three hidden states; EAGLE-3 has queries, keys and values of twice the width, and an
    output projection of its own. Embeddings, and otherwise the output projection, are shared. All
    their layers get KV in the target's blocks. N-grams take nothing; of other methods nothing is
    known. Sources: vLLM 0.33.0, model_executor/models, `llama_eagle.py`, `llama_eagle3.py`,
    `deepseek_mtp.py`; v1/worker/gpu/spec_decode/eagle/utils.py, `_should_share`;
    v1/core/kv_cache_planning.py, `get_kv_cache_groups`.
    """
    name, method = given.get("model"), drafting_method(given)
    if method == "draft_model" and isinstance(name, str):
        whole = load_model(name).shard(shard.tensor_parallel_size)
        return Drafter(whole.weight_bytes(dtype), whole.token_bytes(kv_dtype))
    if method is None or method not in _STATES_IN:
        return Drafter()
    model = shard.model
    last = range(model.num_hidden_layers - 1, model.num_hidden_layers)
    if method != "mtp":  # These are not part of the target's checkpoint.
        shard = replace(shard, model=replace(model, quantization=None))
    hidden = model.hidden_size
    further = _STATES_IN[method] * hidden * hidden
    if method == "eagle3":
        words = ceil(min(model.vocab_size, DRAFT_VOCABULARY) / shard.tensor_parallel_size)
        further += hidden * (shard.qkv_size + words)
    weights = shard.layer_bytes(dtype, last) + further * DTYPE_BYTES[model.dtype(dtype)]
    return Drafter(ceil(weights), shard.token_bytes(kv_dtype, last))


def adapter_bytes(shard: Shard, dtype: str, layers: range, slots: int, rank: int) -> int:
    """Bytes of the slots for adapters in these layers: as many as may be in one step, of the
    highest rank, for every matrix product, whatever the adapters change.

    A product of `columns` inputs has `rank` x `columns` numbers, and `rank` for each output; those
    of a fused product have inputs of their own. The side that tensor parallelism divides in the
    model is divided. Attention with latent vectors or states is not counted, nor are embeddings
    (only few models take adapters there). Source: vLLM 0.33.0, lora/layers, `create_lora_weights`
    of `base_linear.py`, `column_parallel_linear.py` and `fused_moe.py`; lora/utils.py,
    `get_supported_lora_modules`.
    """
    model, hidden = shard.model, shard.model.hidden_size
    queries, fused = shard.heads * model.head_dim, 2 if model.gated_mlp else 1

    def mlp(columns: int) -> int:
        return fused * (hidden + columns) + columns + hidden

    numbers = 0
    for index in layers:
        if model.latent is None and model.layer_type(index) != "linear_attention":
            numbers += 3 * hidden + shard.qkv_size + queries + hidden
        columns = model.mlp_columns(index)
        if model.experts is None or columns is not None:
            numbers += mlp(-(-(columns or 0) // shard.tensor_parallel_size)) if columns else 0
            continue
        numbers += hidden + model.experts.num_experts
        numbers += shard.experts_held * mlp(shard.expert_columns)
        if shared := model.experts.shared_expert_intermediate_size:
            numbers += mlp(shared // shard.tensor_parallel_size)
    return slots * rank * numbers * DTYPE_BYTES[model.dtype(dtype)]

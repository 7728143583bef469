"""What a run assumes: values of settings that were not given, and what it leaves out.

Each value says where it comes from:

```
kvsim        model and GPU where none is named
the model    dtype, max_model_len
the engine   limits of a step, block size, share of memory, prefix cache, ...: by its version and,
             for vLLM V1, by the GPU (`kvsim.settings.versions`)
```
They are in the summary and the report of a run, and `kvsim run` prints them.

What the settings ask for and a run does not simulate is said in notes. A run is one replica:
`tensor_parallel_size` x `pipeline_parallel_size` GPUs with one scheduler. `kvsim run`, `check` and
`profile fit-run` simulate all replicas of `data_parallel_size` (`kvsim.fleet`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from kvsim.engines import Engine
from kvsim.engines.vllm_v1.planning import saves_states
from kvsim.machine.hardware import Hardware, load_hardware
from kvsim.machine.memory import cache_groups, is_plain, state_block_size, tables_of
from kvsim.machine.models import Model, model_of
from kvsim.machine.packed import PACKED_TOKENS
from kvsim.settings.config import RunConfig
from kvsim.settings.library import signature
from kvsim.settings.versions import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_LORA_RANK,
    Default,
    gpu_memory_utilization,
    has_cache_groups,
    reads_cache_scheme,
    release,
    retention_interval,
    server_defaults,
)

SCHEDULER_SETTINGS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "preemption_mode",
    "scheduling_policy",
    "victim",
    "watermark",
    "scheduler_reserve_full_isl",
    "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive",
    "max_num_active_seqs",
    "max_num_scheduled_tokens",
    "prefill_schedule_interval",
)
"""Settings that only some engines have."""


class Settings(NamedTuple):
    """The settings of a run, complete, and what they name."""

    config: RunConfig
    model: Model
    hardware: Hardware
    assumed: dict[str, Default]
    """The settings that were not given, and their defaults."""
    fits: bool
    """Whether `max_model_len` is the most that fits, up to that of the model: where it is `auto`,
    or where nothing is said of the model, so that a first run starts on any GPU."""


def complete(config: RunConfig, engine: Engine) -> Settings:
    """`config` with a value for whatever the engine, the model or kvsim choose.

    A scheduler's own defaults are listed, but not filled in: its constructor applies them.
    A `max_model_len` of `auto` becomes the model's own; the memory budget then limits it. Raises
    `ConfigError` for names that do not exist, and for a release whose defaults are not known.
    """
    model = model_of(config)
    hardware = load_hardware(config.hardware_name)
    # Before a length is filled in.
    fits = config.max_model_len == "auto" or (config.model, config.max_model_len) == (None, None)
    defaults = {
        "model": Default(config.model_name, "kvsim's default"),
        "hardware": Default(config.hardware_name, "kvsim's default"),
        "max_model_len": Default(model.max_position_embeddings, model.name),
        **_limits(config, engine, model, hardware),
        **_engine_defaults(config, engine, model, hardware),
    }
    defaults |= _tables_defaults(config, engine, model)
    if config.max_model_len == "auto":
        config = msgspec.structs.replace(config, max_model_len=model.max_position_embeddings)
    defaults = {key: each for key, each in defaults.items() if getattr(config, key) is None}
    defaults |= _stored_cache(config, engine, model)
    config = msgspec.structs.replace(config, **{key: d.value for key, d in defaults.items()})
    config, stored = _sparse_cache(config, engine, model, hardware)
    model = model_of(config)
    # Needs the block size and the type of the cache.
    config, raised = _whole_states(config, model, hardware)
    defaults |= stored | raised
    if config.dtype == "auto":
        defaults["dtype"] = Default(model.dtype("auto"), model.name)
    defaults |= _own_defaults(config, engine)
    return Settings(config, model, hardware, defaults, fits)


def _limits(
    config: RunConfig, engine: Engine, model: Model, hardware: Hardware
) -> dict[str, Default]:
    """The limits of a step that `vllm serve` chooses by its version and the GPU."""
    version, longest = config.vllm_version or engine.vllm_version, config.max_model_len
    if not engine.serves or version is None:
        return {}
    limits = server_defaults(
        version,
        hardware.device_name,
        hardware.memory_bytes,
        longest if isinstance(longest, int) else model.max_position_embeddings,
        config.enable_chunked_prefill is not False,
    )
    if config.max_num_batched_tokens is not None:
        # A step has room for a token of every sequence (`engine/arg_utils.py`).
        seqs = limits["max_num_seqs"]
        few = min(seqs.value, config.max_num_batched_tokens)
        limits["max_num_seqs"] = seqs._replace(value=few)
    if engine.asynchronous is None or ":" in config.engine:
        # A class of an outsider's is what it is, whatever the release does.
        del limits["async_scheduling"]
    return limits


def _engine_defaults(
    config: RunConfig, engine: Engine, model: Model, hardware: Hardware
) -> dict[str, Default]:
    """What the engine chooses otherwise, by its version, the GPU and the model."""
    version, caching = config.vllm_version or engine.vllm_version, engine.enable_prefix_caching
    # A class of an outsider's for an engine with groups is one for both.
    if config.block_manager is not None and not (engine.groups and ":" in config.block_manager):
        caching = config.block_manager == engine.prefix_manager
    found: dict[str, Any] = {
        "gpu_memory_utilization": gpu_memory_utilization(version),
        "block_size": engine.block_size,
        "enable_prefix_caching": caching,
        "memory_formula": engine.memory_formula,
    }
    if config.enable_lora:
        found |= {"max_loras": 1, "max_lora_rank": DEFAULT_LORA_RANK}
    if engine.server_defaults is not None:
        found |= engine.server_defaults(config, hardware, model)
    if version is not None:
        found["vllm_version"] = version
    rules = _source(config, engine)
    return {key: Default(value, rules) for key, value in found.items()}


def _tables_defaults(config: RunConfig, engine: Engine, model: Model) -> dict[str, Default]:
    """Whether layers that keep less than all tokens have block tables of their own."""
    version, rules = config.vllm_version or engine.vllm_version, _source(config, engine)
    if not (engine.groups and has_cache_groups(version)):
        return {}
    if model.compressed is None and is_plain(cache_groups(model)):
        return {}
    whole = {"block_size": Default(PACKED_TOKENS, rules)} if model.compressed is not None else {}
    return {
        **whole,
        "disable_hybrid_kv_cache_manager": Default(False, rules),
        "prefix_cache_retention_interval": Default(retention_interval(version), rules),
    }


def _stored_cache(config: RunConfig, engine: Engine, model: Model) -> dict[str, Default]:
    """The type of KV cache for which the checkpoint has scales, unless the settings name one."""
    reads = engine.groups and reads_cache_scheme(config.vllm_version or engine.vllm_version)
    stored = model.quantization.kv_cache_dtype if model.quantization else None
    if stored is None or not reads or config.kv_cache_dtype != "auto":
        return {}
    return {"kv_cache_dtype": Default(stored, f"the checkpoint of {model.name}")}


def _sparse_cache(
    config: RunConfig, engine: Engine, model: Model, hardware: Hardware
) -> tuple[RunConfig, dict[str, Default]]:
    """The settings with the type in which vLLM's kernels keep latent vectors of which an indexer
    chooses some (DeepSeek-V3.2, GLM-5)."""
    chosen = engine.groups and model.latent and model.indexer
    if not chosen or config.kv_cache_dtype == "fp8_ds_mla" or not _scales_vectors(config, hardware):
        return config, {}
    found = Default("fp8_ds_mla", f"vLLM {config.vllm_version}: sparse attention of {model.name}")
    replaced = msgspec.structs.replace(config, kv_cache_dtype=found.value)
    return replaced, {"kv_cache_dtype": found}


def _scales_vectors(config: RunConfig, hardware: Hardware) -> bool:
    """Whether they are in 8 bits with scales: FP8 is, but since 0.18 on Blackwell's data-centre
    GPUs; its others know nothing else.

    Source: vLLM 0.33.0, model_executor/layers/attention/mla_attention.py and platforms/cuda.py;
    0.11.2 to 0.17.1, model_executor/models/config.py, `DeepseekV32ForCausalLM`.
    """
    fp8 = config.kv_cache_dtype.startswith("fp8")
    if hardware.name.startswith(("b200", "b300", "gb200", "gb300")):
        return fp8 and release(config.vllm_version) < (0, 18)
    alone = hardware.name.startswith(("gb10", "rtx-50", "rtx-pro"))
    return fp8 or (alone and config.kv_cache_dtype == "auto")


def _whole_states(
    config: RunConfig, model: Model, hardware: Hardware
) -> tuple[RunConfig, dict[str, Default]]:
    """The settings with blocks that hold a state of linear attention."""
    if not tables_of(model, config) or model.compressed is not None:
        return config, {}
    size = state_block_size(model, config, saves_states(model, config, hardware))
    if size == (config.block_size or DEFAULT_BLOCK_SIZE):
        return config, {}
    source = f"vLLM {config.vllm_version}: a block holds a state of {model.name}"
    return msgspec.structs.replace(config, block_size=size), {"block_size": Default(size, source)}


def _source(config: RunConfig, engine: Engine) -> str:
    """The engine in words, with the release whose defaults it takes."""
    return f"vLLM {config.vllm_version or engine.vllm_version}" if engine.serves else engine.about


def _own_defaults(config: RunConfig, engine: Engine) -> dict[str, Default]:
    """Defaults that the constructor of the engine's scheduler states."""
    parameters, rules = signature(engine.scheduler).parameters, _source(config, engine)
    stated = {key: parameters[key].default for key in SCHEDULER_SETTINGS if key in parameters}
    return {
        key: Default(value, rules)
        for key, value in stated.items()
        if getattr(config, key) is None and value not in (None, inspect.Parameter.empty)
    }


GPUS_OF_A_MACHINE = 8


def left_out(config: RunConfig, model: Model, stages: int = 1) -> tuple[str, ...]:
    """What the settings ask for and a run does not simulate, one line each.

    `stages`: how many stages of a pipeline work on different steps at once.
    """
    longest, own = config.max_model_len, model.max_position_embeddings
    lines = {
        f"max_model_len: {model.name} is {own:,} tokens long; vLLM and SGLang refuse more, unless"
        " the rope is scaled (--hf-overrides) or VLLM_ALLOW_LONG_MAX_MODEL_LEN or"
        " SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN is 1": (
            isinstance(longest, int) and longest > own
        ),
        "enable_expert_parallel: the experts of each GPU are taken to have as many tokens; uneven"
        " loads are not simulated": config.enable_expert_parallel,
        f"cpu_offload_gb {config.cpu_offload_gb:g}: GPU memory is saved, but reading these weights"
        " over the host link in every step is not simulated": config.cpu_offload_gb > 0,
        "max_loras: there are no adapters without --enable-lora, so it limits nothing": (
            config.max_loras is not None and not config.enable_lora
        ),
        "cuda_graph_max_bs: only SGLang's memory depends on it, so it changes nothing": (
            config.cuda_graph_max_bs is not None and config.engine != "sglang"
        ),
        "cost.front_end: it takes time before the engine only; what answers cost there"
        " (detokenizer, streams) is not simulated": "front_end" in config.cost,
        "enforce_eager: no memory goes to CUDA graphs, but step times are those with graphs": (
            config.enforce_eager
        ),
    }
    return (*_of_pipeline(config, stages), *(line for line, applies in lines.items() if applies))


def _of_pipeline(config: RunConfig, stages: int) -> list[str]:
    if config.pipeline_parallel_size == 1:
        return []
    key = f"pipeline_parallel_size {config.pipeline_parallel_size}"
    if stages == 1:
        return [
            f"{key}: each step passes all stages before the next begins; overlapping steps and"
            " their bubbles are not simulated"
        ]
    lines = [
        f"{key}: times of stages are ESTIMATED: layers share the price of a step, the last stage"
        " computes the logits, and activations are sent at the speed of the all-reduce or of"
        " cost.stage_link"
    ]
    gpus = config.tensor_parallel_size * stages
    if gpus > GPUS_OF_A_MACHINE and "stage_link" not in config.cost:
        lines.append(
            f"{key}: {gpus} GPUs are taken to be in one machine; for several, give latency_us and"
            " bandwidth_gb_s of their network in cost.stage_link"
        )
    return lines


def one_of_several(config: RunConfig) -> tuple[str, ...]:
    """What is not simulated where one of several replicas is, one line each."""
    if config.data_parallel_size == 1:
        return ()
    return (
        f"data_parallel_size {config.data_parallel_size}: one replica is simulated, and it serves"
        " the whole trace; `kvsim run` simulates all of them. Where replicas share experts, the"
        " others are taken to have as many tokens in each step",
    )


def unheeded_wishes(
    adapters: Iterable[str | None], config: RunConfig, goes_on: bool
) -> tuple[str, ...]:
    """What requests of a trace ask for and a run does not simulate, one line each. `adapters`: of
    the requests. `goes_on`: the engine goes on with those that their clients give up."""
    lines = []
    if not config.enable_lora and any(adapters):
        lines.append(
            "lora: requests name adapters, but all are served by the model itself (they share no"
            " prefixes across adapters); --enable-lora of vllm-v1 serves them by their adapters"
        )
    if goes_on:
        lines.append(
            f"abort_after_s: clients give requests up, but {config.engine} goes on with them here;"
            " vllm-v1 ends them"
        )
    return tuple(lines)

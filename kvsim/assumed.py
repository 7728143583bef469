"""Fills in the settings that nobody gave, and says who chose each of them.

```
kvsim        model and GPU of a first run
the model    dtype, max_model_len
the engine   limits of a step, block size, share of memory, prefix cache, ...: by its version and,
             for vLLM V1, by the GPU (`kvsim.engines.versions`)
```
What a run assumed is in its summary and its report, and `kvsim run` prints it.
"""

from __future__ import annotations

import inspect
from typing import NamedTuple

import msgspec

from kvsim.config import RunConfig
from kvsim.engines import Engine
from kvsim.engines.versions import Default, parse_version, server_defaults
from kvsim.errors import ConfigError
from kvsim.hardware import Hardware, load_hardware
from kvsim.model import Model, load_model

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
)
"""Settings that only some engines have."""


class Settings(NamedTuple):
    """The settings of a run, complete, and what they name."""

    config: RunConfig
    model: Model
    hardware: Hardware
    assumed: dict[str, Default]
    """What nobody gave, by setting."""


def complete(config: RunConfig, engine: Engine) -> Settings:
    """`config` with a value for whatever the engine, the model or kvsim choose.

    A scheduler's own defaults are listed, but not filled in: its constructor applies them.
    Raises `ConfigError` for names that do not exist, and for a version where none is simulated.
    """
    model = load_model(config.model_name)
    hardware = load_hardware(config.hardware_name)
    defaults = {
        "model": Default(config.model_name, "kvsim's first run"),
        "hardware": Default(config.hardware_name, "kvsim's first run"),
        "max_model_len": Default(model.max_position_embeddings, model.name),
        **_engine_defaults(config, engine, model, hardware),
    }
    defaults = {key: each for key, each in defaults.items() if getattr(config, key) is None}
    config = msgspec.structs.replace(config, **{key: d.value for key, d in defaults.items()})
    if config.dtype == "auto":
        defaults["dtype"] = Default(model.dtype("auto"), model.name)
    rules = _source(config, engine)
    for key, value in _own_defaults(engine).items():
        if getattr(config, key) is None:
            defaults[key] = Default(value, rules)
    return Settings(config, model, hardware, defaults)


def _engine_defaults(
    config: RunConfig, engine: Engine, model: Model, hardware: Hardware
) -> dict[str, Default]:
    """What the engine chooses by its version and the GPU."""
    by_engine = {
        "block_size": engine.block_size,
        "enable_prefix_caching": engine.enable_prefix_caching,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "memory_formula": engine.memory_formula,
    }
    if config.block_manager is not None:
        by_engine["enable_prefix_caching"] = config.block_manager == engine.prefix_manager
    rules = _source(config, engine)
    found = {key: Default(value, rules) for key, value in by_engine.items()}
    if not engine.versioned:
        if config.vllm_version is not None:
            raise ConfigError(
                f"vllm_version: {config.engine} is one version; leave it out, or use"
                " --engine vllm-v1"
            )
        return found
    of_gpu = server_defaults(
        parse_version(config.vllm_version or engine.versioned),
        hardware.device_name,
        hardware.memory_bytes,
        config.max_model_len or model.max_position_embeddings,
        config.enable_chunked_prefill is not False,
    )
    found = of_gpu | found | {"gpu_memory_utilization": of_gpu["gpu_memory_utilization"]}
    found["vllm_version"] = Default(engine.versioned, rules)
    if config.max_num_batched_tokens is not None:
        # A step has room for a token of every sequence (`engine/arg_utils.py`).
        most = found["max_num_seqs"]
        found["max_num_seqs"] = most._replace(value=min(most.value, config.max_num_batched_tokens))
    if engine.asynchronous is None or ":" in config.engine:
        del found["async_scheduling"]
    return found


def _source(config: RunConfig, engine: Engine) -> str:
    """The engine in words, with the release whose defaults it takes."""
    return f"vLLM {config.vllm_version or engine.versioned}" if engine.versioned else engine.about


def _own_defaults(engine: Engine) -> dict[str, object]:
    """Defaults that the constructor of the engine's scheduler states."""
    parameters = inspect.signature(engine.scheduler).parameters
    stated = {key: parameters[key].default for key in SCHEDULER_SETTINGS if key in parameters}
    return {
        key: value
        for key, value in stated.items()
        if value is not None and value is not inspect.Parameter.empty
    }

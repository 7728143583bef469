"""What is tried on each engine, one setting at a time.

Only arguments that the release has: those of vLLM are in `engine/arg_utils.py` of the first release
that was read with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from kvsim.errors import ConfigError
from kvsim.machine.memory import pool_setting
from kvsim.run.assembly import Parts, assemble
from kvsim.settings.config import RunConfig
from kvsim.settings.versions import Release, release


class Trial(NamedTuple):
    """A setting, and the values to try."""

    key: str
    values: tuple[Any, ...]
    why: str
    """What it trades."""
    since: Release = ()
    """The first release that was read with this setting."""
    caveat: str = ""
    """What a simulation cannot see. Such a change is shown, but never recommended with others."""


class Change(NamedTuple):
    """One setting of the base changed."""

    key: str
    value: Any
    trial: Trial
    config: RunConfig


class Untried(NamedTuple):
    """A change with which the engine does not start, or that means nothing."""

    key: str
    value: Any
    reason: str


_STEPS = (
    Trial(
        "max_num_batched_tokens",
        (512, 1024, 2048, 4096, 8192, 16384),
        "small chunks keep decodes quick, large ones finish prompts sooner",
    ),
    Trial(
        "max_num_seqs",
        (16, 32, 64, 128, 256, 512, 1024),
        "fewer requests at once decode faster, more wait less",
    ),
)
_MEMORY = Trial("gpu_memory_utilization", (0.95,), "more blocks, less room for peaks of memory")
_SHARING = Trial("enable_prefix_caching", (True, False), "saves prefills where prompts share text")
_SMALL_KV = Trial(
    "kv_cache_dtype",
    ("fp8",),
    "twice as many blocks in the same bytes",
    caveat="it changes what the model computes, so test its answers first",
)

TRIALS: dict[str, tuple[Trial, ...]] = {
    "vllm-v1": (
        *_STEPS,
        _MEMORY,
        Trial("block_size", (16, 32, 64, 128), "small blocks waste less and share more"),
        _SHARING,
        _SMALL_KV,
        Trial(
            "watermark",
            (0.0, 0.01, 0.05),
            "blocks kept free at admission prevent preemptions",
            (0, 24),
        ),
        Trial(
            "long_prefill_token_threshold",
            (0, 512, 2048),
            "a cap on a prompt's chunk leaves room for others in a step",
            (0, 8),
        ),
        Trial(
            "scheduler_reserve_full_isl",
            (True, False),
            "admitting only what fits whole prevents preemptions",
            (0, 19),
        ),
        Trial(
            "async_scheduling",
            (True, False),
            "composing a step while the one before runs hides the scheduler's time",
            (0, 10, 2),
        ),
    ),
    "vllm-0.6.3": (
        *_STEPS,
        _MEMORY,
        Trial("block_size", (8, 16, 32), "small blocks waste less and share more"),
        _SHARING,
        _SMALL_KV,
        Trial("enable_chunked_prefill", (True, False), "prompts share steps with decodes"),
        Trial("preemption_mode", ("recompute", "swap"), "what a preemption costs"),
    ),
    "vllm-0.3.3": (*_STEPS, _MEMORY, Trial("block_size", (8, 16, 32), "small blocks waste less")),
    "sglang": (
        *_STEPS,
        _MEMORY,
        Trial("block_size", (1, 16, 64), "large pages are quicker to read, and share less"),
        _SHARING,
        _SMALL_KV,
        Trial("async_scheduling", (True, False), "overlap hides the scheduler's time"),
    ),
    "nano-vllm": (*_STEPS, _MEMORY),
    "nano-vllm-2025-08": (*_STEPS, _MEMORY),
}
"""What is tried, by engine; on one of the user's own, what most engines have."""


class Changes(NamedTuple):
    """What there is to try on a base."""

    tried: list[Change]
    untried: list[Untried]


def changes_of(base: RunConfig) -> Changes:
    """The changes to try on these settings, and those that are not possible.

    Raises `ConfigError` where the engine does not start with the base itself.
    """
    parts = assemble(base)
    found = Changes([], [])
    for trial in TRIALS.get(base.engine, (*_STEPS, _MEMORY, _SHARING)):
        for value in _values(trial, parts):
            try:
                config = changed(base, {trial.key: value})
            except ConfigError as error:
                found.untried.append(Untried(trial.key, value, str(error)))
            else:
                found.tried.append(Change(trial.key, value, trial, config))
    return found


def changed(base: RunConfig, settings: dict[str, Any]) -> RunConfig:
    """The base with these settings, and its block count in the same bytes of memory.

    Raises `ConfigError` where the engine does not start with them.
    """
    decides = pool_setting(base)
    if "gpu_memory_utilization" in settings and decides != "gpu_memory_utilization":
        raise ConfigError(f"gpu_memory_utilization: {decides} decides instead")
    config = msgspec.structs.replace(base, **settings)
    memory = assemble(config).memory
    if base.num_gpu_blocks_override is None:
        return config
    pool_bytes = base.num_gpu_blocks_override * assemble(base).memory.block_bytes
    blocks = max(1, pool_bytes // memory.block_bytes)
    config = msgspec.structs.replace(config, num_gpu_blocks_override=blocks)
    assemble(config)
    return config


def _values(trial: Trial, parts: Parts) -> Iterator[Any]:
    """The values that are not in force already, of a setting that the release has."""
    version = release(parts.config.vllm_version)
    if version and version < trial.since:
        return
    now = getattr(parts.config, trial.key)
    if now is None and trial.key in parts.assumed:
        now = parts.assumed[trial.key].value
    higher = trial.key == "gpu_memory_utilization"
    for value in trial.values:
        if value != now and not (higher and value < now):
            yield value

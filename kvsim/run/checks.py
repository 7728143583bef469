"""Refuses what an engine refuses when it starts, each with one line and a remedy."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from kvsim.core.blocks import BlockManager
from kvsim.core.scheduler import Scheduler
from kvsim.engines import BLOCK_MANAGERS, ENGINES, Engine
from kvsim.engines.vllm_v1.groups import Group, Layout, Mamba, Sliding
from kvsim.engines.vllm_v1.planning import peak_blocks
from kvsim.errors import ConfigError
from kvsim.machine.hardware import GIB
from kvsim.machine.memory import Budget, drafted_tokens, pool_setting
from kvsim.machine.models import Model
from kvsim.machine.packed import PACKED_TOKENS
from kvsim.run.assumed import SCHEDULER_SETTINGS
from kvsim.settings.config import RunConfig
from kvsim.settings.library import look_up, takes
from kvsim.settings.limits import BLOCK_TOKENS, check_size
from kvsim.settings.versions import release

VLLM_SETTINGS = (
    "vllm_version",
    "kv_cache_memory_bytes",
    "cpu_offload_gb",
    "pipeline_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
)
"""Settings that only vLLM has."""

_SINCE = {
    "long_prefill_token_threshold_adaptive": (0, 31),
    "max_num_active_seqs": (0, 31),
    "prefill_schedule_interval": (0, 33),
}
"""Setting → the first release of vLLM V1 that heeds it."""


def check_engine(config: RunConfig, engine: Engine) -> None:
    """Refuse settings that the engine does not have."""
    _check_arguments(config, engine)
    for key in sorted({each.switch for each in ENGINES.values()} - {""}):
        if getattr(config, key) is not None and (engine.switch != key or ":" in config.engine):
            owners = " and ".join(name for name, each in ENGINES.items() if each.switch == key)
            raise ConfigError(f"{key}: only for {owners}; leave it out with {config.engine}")
    if config.n > 1 and not engine.samples:
        raise ConfigError(f"n: {config.engine} runs with one sample per request here; use --n 1")


def _check_arguments(config: RunConfig, engine: Engine) -> None:
    """Refuse settings that the constructor of the scheduler does not take."""
    own = {config.engine: engine.scheduler} if config.engine in ENGINES else {}
    kind = look_up("engine", own, config.engine)
    for key in SCHEDULER_SETTINGS:
        if getattr(config, key) is None or takes(f"engine: {config.engine}", kind, key):
            continue
        what = "has no such setting; leave it out"
        if takes(config.engine, engine.scheduler, key):
            what = f"does not name it in its constructor; name {key} or **settings there, or leave"
            what += " it out"
        raise ConfigError(f"{key}: {config.engine} {what}")


def check_vllm(config: RunConfig, engine: Engine) -> None:
    """Refuse settings of vLLM with an engine that is not vLLM."""
    if engine.vllm_version is None:
        for key in VLLM_SETTINGS:
            if getattr(config, key) != getattr(RunConfig(), key):
                raise ConfigError(f"{key}: only for vLLM; leave it out with {config.engine}")
    version = config.vllm_version
    for key, since in _SINCE.items():
        if getattr(config, key) is not None and version and release(version) < since:
            first = ".".join(map(str, since))
            raise ConfigError(
                f"{key}: vLLM heeds it from {first} on, not in {version}; leave it out"
            )


def check_cache(config: RunConfig, engine: Engine) -> None:
    """Refuse a prefix cache where the engine has none, and the lack of one where it must share."""
    if config.block_manager is None:
        if config.enable_prefix_caching and not engine.prefix_manager:
            raise ConfigError(
                f"enable_prefix_caching: {config.engine} has no prefix cache; leave it out"
            )
        if not config.enable_prefix_caching and not engine.block_manager:
            raise ConfigError(
                f"enable_prefix_caching: {config.engine} always has a prefix cache; leave it out"
            )


TABLE_SETTINGS = (
    "disable_hybrid_kv_cache_manager",
    "prefix_cache_retention_interval",
    "mamba_cache_mode",
    "mamba_ssm_cache_dtype",
)
"""Settings of engines in which groups of layers have block tables of their own."""


def check_tables(config: RunConfig, engine: Engine) -> None:
    """Refuse enormous blocks, and settings of KV cache groups where there are none."""
    check_size("block_size", config.block_size or 1, BLOCK_TOKENS)
    for key in TABLE_SETTINGS:
        if getattr(config, key) is not None and not engine.groups:
            owners = " and ".join(name for name, each in ENGINES.items() if each.groups)
            raise ConfigError(f"{key}: a setting of {owners}; {config.engine} has it not")


def check_states(config: RunConfig, model: Model) -> None:
    """Refuse what vLLM would not obey with a model that has layers with states, or compresses."""
    if config.kv_cache_dtype == "fp8_ds_mla" and not model.indexer:
        raise ConfigError(
            f"kv_cache_dtype: fp8_ds_mla is for latent vectors of which an indexer chooses some,"
            f" and {model.name} has none; use --kv-cache-dtype fp8"
        )
    packed = model.compressed is not None and config.disable_hybrid_kv_cache_manager is False
    if packed and config.block_size != PACKED_TOKENS:
        raise ConfigError(
            f"block_size: the kernels of {model.name} take blocks of {PACKED_TOKENS} tokens alone;"
            f" use --block-size {PACKED_TOKENS}"
        )
    if "linear_attention" not in model.layer_types:
        return
    if config.disable_hybrid_kv_cache_manager:
        raise ConfigError(
            f"disable_hybrid_kv_cache_manager: {model.name} has layers with states, which need"
            " block tables of their own; leave it out"
        )
    mode, caching = config.mamba_cache_mode, bool(config.enable_prefix_caching)
    if mode is not None and caching != (mode == "align"):
        raise ConfigError(
            f"mamba_cache_mode: vLLM takes {'align' if caching else 'none'} with prefix caching"
            f" {'on' if caching else 'off'}, whatever is set; leave it out, or use"
            f" --{'no-' * caching}enable-prefix-caching"
        )


def check_retention(config: RunConfig, groups: tuple[Group, ...]) -> None:
    """Refuse what vLLM refuses (0.33.0, v1/core/kv_cache_coordinator.py,
    `_validate_prefix_cache_retention_interval`)."""
    interval = config.prefix_cache_retention_interval
    if not isinstance(interval, int) or interval == 0:
        return
    sparse = any(isinstance(group, Sliding | Mamba) for group in groups)
    if not sparse:
        raise ConfigError(
            "prefix_cache_retention_interval: no layer of this model has a sliding window or a"
            " state, so it has no effect; leave it out"
        )
    if interval % (config.block_size or 1):
        raise ConfigError(
            f"prefix_cache_retention_interval: {interval} is no multiple of the block size"
            f" ({config.block_size} tokens); use one"
        )


def adapters(config: RunConfig, engine: Engine) -> int | None:
    """The most adapters of a step; None: none serve. Raises `ConfigError` where the engine has
    none."""
    if not config.enable_lora:
        return None
    check_features("enable_lora", config, engine, "serves no adapters here")
    return config.max_loras


def check_features(key: str, config: RunConfig, engine: Engine, lacks: str) -> None:
    """Refuse a feature of vLLM V1 with another engine. `lacks` says in words what that lacks."""
    if not engine.groups:
        raise ConfigError(f"{key}: {config.engine} {lacks}; leave it out")


def check_sharing(config: RunConfig, manager: str, engine: Engine) -> None:
    """Refuse rules of sharing where nothing is shared."""
    if manager in BLOCK_MANAGERS and manager != engine.prefix_manager:
        for key in ("eviction", "publish_at", "hits_save", "full_hit"):
            if key in config.block_manager_args:
                raise ConfigError(
                    f"block_manager_args.{key}: {manager} has no prefix cache; leave it out, or use"
                    " an engine with --enable-prefix-caching"
                )


class Room(NamedTuple):
    """The pool, and what a long sequence takes of it."""

    memory: Budget
    groups: tuple[Group, ...]
    """The KV cache groups of the model; none if one table serves all layers."""
    max_in_flight_tokens: int
    """Most tokens that are scheduled and not settled."""

    def longest(self, config: RunConfig, most: int) -> int:
        """Returns the longest sequence that fits, of at most `most` tokens."""
        assert config.block_size is not None
        blocks = self.memory.num_gpu_blocks
        if not self.groups:
            return min(most, blocks * config.block_size)

        def need(tokens: int) -> int:
            size, flying = config.block_size or 1, self.max_in_flight_tokens
            layout = Layout(size, size, tokens, flying, num_spec_tokens=drafted_tokens(config))
            return peak_blocks(self.groups, layout)

        # More tokens never need fewer blocks.
        return bisect_right(range(1, most + 1), blocks, key=need)


def check_pool(config: RunConfig, room: Room, engine: Engine) -> None:
    """Refuse a pool that cannot hold `max_model_len` tokens.

    Source: vLLM 0.6.3, worker/worker.py:491; 0.33.0, v1/core/kv_cache_planning.py,
    `_check_enough_kv_cache_memory`.
    """
    assert isinstance(config.max_model_len, int)
    memory, longest = room.memory, room.longest(config, config.max_model_len)
    if config.max_model_len > longest and not engine.caps_sequences:
        shorter = f"use --max-model-len {longest} or less (auto takes the most that fits), or "
        given = memory.num_gpu_blocks_overridden or memory.kv_bytes_given
        beside = "" if given else f" beside weights of {memory.weight_bytes / GIB:.4g} GiB"
        raise ConfigError(
            f"max_model_len: {config.max_model_len} tokens do not fit into the KV cache of"
            f" {longest} tokens ({memory.num_gpu_blocks} blocks of {config.block_size}){beside};"
            f" {shorter if longest else ''}raise --{pool_setting(config).replace('_', '-')}"
        )


def check_manager(config: RunConfig, blocks: BlockManager, manager: str) -> None:
    """Refuse what a block manager cannot do."""
    if config.enable_prefix_caching and not blocks.needs_keys:
        raise ConfigError(
            f"block_manager: {manager} does not share blocks; leave out --enable-prefix-caching"
        )
    may_swap = config.scheduling_policy == "priority" and config.n > 1
    if not blocks.swaps and (may_swap or config.preemption_mode in ("swap", "auto")):
        raise ConfigError(f"block_manager: {manager} cannot swap; use --preemption-mode recompute")


def check_scheduler(config: RunConfig, scheduler: Scheduler, blocks: BlockManager) -> None:
    """Refuse samples where steps overlap, and token budgets that the engine refuses, at start-up or
    at its first chunk."""
    if config.n > 1 and (scheduler.lingers or scheduler.in_flight > 1):
        raise ConfigError(f"n: {config.engine} is asynchronous, and serves one sample; use --n 1")
    tokens = scheduler.max_num_batched_tokens
    assert config.block_size is not None and isinstance(config.max_model_len, int)
    if not scheduler.chunked and tokens < config.max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens: {tokens} is below max_model_len ({config.max_model_len});"
            " raise it, lower --max-model-len, or use --enable-chunked-prefill"
        )
    whole = blocks.needs_keys and scheduler.whole_blocks
    if config.enable_chunked_prefill and whole and tokens % config.block_size:
        raise ConfigError(
            f"max_num_batched_tokens: {tokens} is not a multiple of block_size"
            f" ({config.block_size}), as chunked prefill with prefix caching needs; choose one"
        )

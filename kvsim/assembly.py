"""Turns settings into the objects of one run: engine, block manager, cost model, link, budget."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import msgspec

from kvsim.config import RunConfig
from kvsim.cost import Cost, make_cost
from kvsim.cost.prices import make_prices
from kvsim.engine.future import Future
from kvsim.engine.scheduler import Scheduler
from kvsim.engine.tables import COUNTED, Tables
from kvsim.engines import BLOCK_MANAGERS, ENGINES, Engine
from kvsim.errors import ConfigError
from kvsim.fast.counted import without_names
from kvsim.hardware import load_hardware
from kvsim.library import construct, look_up
from kvsim.link import LinkTimes, make_link
from kvsim.memory import Budget, block_bytes, budget
from kvsim.model import load_model
from kvsim.rules import ready
from kvsim.rules.victims import make_victim

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


class Parts(NamedTuple):
    """The objects of one run that depend on its settings alone."""

    config: RunConfig
    """The settings, with the engine's own where none were given."""
    block_manager: str
    scheduler: Scheduler
    blocks: Tables
    cost: Cost
    link: LinkTimes
    memory: Budget
    future: Future
    """What oracles among them see."""


def assemble(config: RunConfig, named: bool = True) -> Parts:
    """Scheduler, block manager, cost model, link and memory budget of a configuration.

    `named`: whether physical block ids are asked for, also where they can decide nothing.

    Raises `ConfigError` for whatever cannot be, and for what the engine would refuse at start-up.
    """
    model = load_model(config.model)
    hardware = load_hardware(config.hardware)
    engine = _engine(config.engine)
    config = _with_defaults(config, engine, model.max_position_embeddings)
    _check_engine(config, engine)
    # The memory budget needs the engine's token budget, the engine needs the number of blocks.
    prices = make_prices(config, model, hardware)
    future = Future()
    draft = _scheduler(config, engine, {"num_gpu_blocks": 1, "prices": prices, "future": future})
    memory = budget(model, hardware, config, draft.max_num_batched_tokens, draft.max_num_seqs)
    pools = {"num_gpu_blocks": memory.num_gpu_blocks, "num_cpu_blocks": memory.num_cpu_blocks}
    _check_pool(config, memory)
    manager = _manager(config, engine)
    _check_sharing(config, manager)
    given = {**_given(config), **pools, "future": future}
    managers = BLOCK_MANAGERS
    if not named and config.n == 1:
        managers = {name: without_names(kind, config) for name, kind in managers.items()}
    args = ready(config.block_manager_args, **given)
    blocks = construct("block_manager", managers, manager, args, **given)
    caching = {"prices": prices, "enable_prefix_caching": blocks.needs_keys}
    scheduler = _scheduler(config, engine, {**pools, **caching, "future": future})
    _check_manager(config, blocks, manager)
    if config.n > 1 and (scheduler.lingers or scheduler.in_flight > 1):
        raise ConfigError(f"n: {config.engine} is asynchronous, and serves one sample; use --n 1")
    _check_chunks(config, scheduler, blocks)
    return Parts(
        config,
        manager,
        scheduler,
        blocks,
        make_cost(config, model, hardware),
        make_link(model, hardware, config, block_bytes(model, config)),
        memory,
        future,
    )


def _engine(name: str) -> Engine:
    """The entry of the table; of an outsider's scheduler, that of the class it inherits from.

    One from scratch goes with the managers of vLLM 0.6.3.
    """
    if name in ENGINES:
        return ENGINES[name]
    kind = look_up("engine", ENGINES, name)
    if not (isinstance(kind, type) and issubclass(kind, Scheduler)):
        raise ConfigError(
            f"engine: {name} is no scheduler; make it a subclass of one of kvsim.engines, or of"
            " kvsim.engine.scheduler.Scheduler"
        )
    for base in kind.__mro__:
        for entry in ENGINES.values():
            if base in (entry.scheduler, entry.asynchronous):
                return entry
    return ENGINES["vllm-0.6.3"]


def _with_defaults(config: RunConfig, engine: Engine, longest: int) -> RunConfig:
    """The settings that the whole run needs, filled in as the engine does."""
    own = {
        "block_size": engine.block_size,
        "enable_prefix_caching": engine.enable_prefix_caching,
        "max_model_len": longest,
    }
    if config.block_manager is not None:
        own["enable_prefix_caching"] = config.block_manager == engine.prefix_manager
    missing = {key: value for key, value in own.items() if getattr(config, key) is None}
    return msgspec.structs.replace(config, **missing)


def _given(config: RunConfig) -> dict[str, Any]:
    """The settings that have a value, as arguments for constructors."""
    values = {key: getattr(config, key) for key in RunConfig.__struct_fields__}
    return {key: value for key, value in values.items() if value is not None}


def _scheduler(config: RunConfig, engine: Engine, further: dict[str, Any]) -> Scheduler:
    table = {name: entry.scheduler for name, entry in ENGINES.items()}
    if config.engine in table and engine.asynchronous is not None and _asynchronous(config):
        table[config.engine] = engine.asynchronous
    assert config.max_model_len is not None
    victim = make_victim(
        config.victim,
        seed=config.seed,
        max_model_len=config.max_model_len,
        future=further["future"],
    )
    given = {**_given(config), **further, "victim": victim}
    args = ready(config.scheduler_args, **given)
    scheduler: Scheduler = construct("engine", table, config.engine, args, **given)
    return scheduler


def _asynchronous(config: RunConfig) -> bool:
    """Whether the engine works asynchronously, as it does where nothing speaks against it."""
    return (
        config.n == 1
        and config.async_scheduling is not False
        and (not config.disable_async_output_proc)
    )


def _manager(config: RunConfig, engine: Engine) -> str:
    """The name of the block manager."""
    if config.block_manager is None:
        return engine.prefix_manager if config.enable_prefix_caching else engine.block_manager
    fitting = {engine.block_manager, engine.prefix_manager, *engine.others} - {""}
    if config.block_manager in BLOCK_MANAGERS and config.block_manager not in fitting:
        raise ConfigError(
            f"block_manager: {config.block_manager} does not go with {config.engine}, which takes"
            f" {', '.join(sorted(fitting))}"
        )
    return config.block_manager


def _check_engine(config: RunConfig, engine: Engine) -> None:
    """Refuse settings that the engine does not have."""
    constructor = inspect.signature(engine.scheduler).parameters
    for key in SCHEDULER_SETTINGS:
        if getattr(config, key) is not None and key not in constructor and ":" not in config.engine:
            raise ConfigError(f"{key}: {config.engine} has no such setting; leave it out")
    for key, name in (("async_scheduling", "vllm-v1"), ("disable_async_output_proc", "vllm-0.6.3")):
        if getattr(config, key) is not None and config.engine != name:
            raise ConfigError(f"{key}: a setting of {name}; {config.engine} has it not")
    if config.n > 1 and not engine.samples:
        raise ConfigError(f"n: {config.engine} has no parallel samples here; use --n 1")
    if config.block_manager is None:
        if config.enable_prefix_caching and not engine.prefix_manager:
            raise ConfigError(f"enable_prefix_caching: {config.engine} has no prefix cache")
        if not config.enable_prefix_caching and not engine.block_manager:
            raise ConfigError(f"enable_prefix_caching: {config.engine} cannot do without")


def _check_sharing(config: RunConfig, manager: str) -> None:
    """Refuse rules of sharing where nothing is shared."""
    if manager in BLOCK_MANAGERS and not BLOCK_MANAGERS[manager].needs_keys:
        for key in ("eviction", "publish_at", "hits_save", "full_hit"):
            if key in config.block_manager_args:
                raise ConfigError(
                    f"block_manager_args.{key}: {manager} has no prefix cache; leave it out, or use"
                    " an engine with --enable-prefix-caching"
                )


def _check_pool(config: RunConfig, memory: Budget) -> None:
    """Refuse a `max_model_len` that the pool cannot hold (vLLM 0.6.3 `worker/worker.py:491`)."""
    assert config.block_size is not None and config.max_model_len is not None
    room = memory.num_gpu_blocks * config.block_size
    if config.max_model_len > room:
        raise ConfigError(
            f"max_model_len: {config.max_model_len} tokens do not fit into the KV cache of {room}"
            f" tokens ({memory.num_gpu_blocks} blocks of {config.block_size}); lower"
            " --max-model-len or raise --gpu-memory-utilization"
        )


def _check_manager(config: RunConfig, blocks: Tables, manager: str) -> None:
    """Refuse what a block manager cannot do."""
    if config.enable_prefix_caching and not blocks.needs_keys:
        raise ConfigError(
            f"block_manager: {manager} shares nothing; leave out --enable-prefix-caching"
        )
    may_swap = config.scheduling_policy == "priority" and config.n > 1
    if not blocks.swaps and (may_swap or config.preemption_mode in ("swap", "auto")):
        raise ConfigError(f"block_manager: {manager} cannot swap; use --preemption-mode recompute")
    if config.n > 1 and blocks.lockstep == COUNTED:
        raise ConfigError(f"block_manager: {manager} cannot share blocks of samples; use --n 1")


def _check_chunks(config: RunConfig, scheduler: Scheduler, blocks: Tables) -> None:
    """Refuse token budgets that the engine refuses, at start-up or at its first chunk."""
    tokens = scheduler.max_num_batched_tokens
    assert config.block_size is not None and config.max_model_len is not None
    if not scheduler.chunked and tokens < config.max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens: {tokens} is below max_model_len ({config.max_model_len});"
            " raise it, lower --max-model-len, or use --enable-chunked-prefill"
        )
    whole = blocks.needs_keys and scheduler.whole_blocks
    if config.enable_chunked_prefill and whole and tokens % config.block_size:
        raise ConfigError(
            f"max_num_batched_tokens: {tokens} is no multiple of block_size"
            f" ({config.block_size}), as chunked prefill with prefix caching demands"
        )

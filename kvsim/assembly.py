"""Turns settings into the objects of one run: engine, block manager, cost model, link, budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvsim.blocks import BLOCK_MANAGERS, Tables
from kvsim.config import RunConfig, nearest
from kvsim.cost import Cost, make_cost
from kvsim.engines import ENGINES, Engine, Scheduler
from kvsim.errors import ConfigError
from kvsim.hardware import load_hardware
from kvsim.library import construct
from kvsim.link import LinkTimes, make_link
from kvsim.memory import Budget, block_bytes, budget
from kvsim.model import load_model


class Parts(NamedTuple):
    """The objects of one run that depend on its settings alone."""

    engine: str
    block_manager: str
    scheduler: Scheduler
    blocks: Tables
    cost: Cost
    link: LinkTimes
    memory: Budget


def assemble(config: RunConfig) -> Parts:
    """Scheduler, block manager, cost model, link and memory budget of a configuration."""
    model = load_model(config.model)
    hardware = load_hardware(config.hardware)
    max_model_len = config.max_model_len or model.max_position_embeddings
    engine = _engine(config.engine)
    knobs = {
        **{key: getattr(config, key) for key in RunConfig.__struct_fields__},
        "max_model_len": max_model_len,
    }
    # The memory budget needs the engine's token budget, the engine needs the number of blocks.
    draft = _scheduler(config, engine, {**knobs, "num_gpu_blocks": 1})
    memory = budget(model, hardware, config, draft.max_num_batched_tokens, draft.max_num_seqs)
    _check_pool(config, memory, max_model_len)
    knobs["num_gpu_blocks"] = memory.num_gpu_blocks
    knobs["num_cpu_blocks"] = memory.num_cpu_blocks
    manager = config.block_manager
    if manager is None:
        manager = engine.prefix_manager if config.enable_prefix_caching else engine.block_manager
    blocks = construct("block_manager", BLOCK_MANAGERS, manager, config.block_manager_args, **knobs)
    knobs["enable_prefix_caching"] = blocks.needs_keys
    scheduler = _scheduler(config, engine, knobs)
    _check_manager(config, blocks, manager)
    _check_chunks(config, scheduler, blocks)
    return Parts(
        config.engine,
        manager,
        scheduler,
        blocks,
        make_cost(config, model, hardware),
        make_link(model, hardware, config, block_bytes(model, config)),
        memory,
    )


def _engine(name: str) -> Engine:
    """The entry of the table; an outsider's scheduler goes with the managers of vLLM 0.6.3."""
    if name in ENGINES or ":" not in name:
        if name not in ENGINES:
            raise ConfigError(
                f"engine: no {name!r};{nearest(name, ENGINES)} there are {', '.join(ENGINES)},"
                " or package.module:Class"
            )
        return ENGINES[name]
    return ENGINES["vllm-0.6.3"]


def _scheduler(config: RunConfig, engine: Engine, knobs: Mapping[str, Any]) -> Scheduler:
    table = {name: entry.scheduler for name, entry in ENGINES.items()}
    scheduler: Scheduler = construct("engine", table, config.engine, config.scheduler_args, **knobs)
    return scheduler


def _check_pool(config: RunConfig, memory: Budget, max_model_len: int) -> None:
    """Refuse a `max_model_len` that the pool cannot hold (vLLM 0.6.3 `worker/worker.py:491`)."""
    room = memory.num_gpu_blocks * config.block_size
    if max_model_len > room:
        raise ConfigError(
            f"max_model_len: {max_model_len} tokens do not fit into the KV cache of {room} tokens"
            f" ({memory.num_gpu_blocks} blocks of {config.block_size}); lower --max-model-len or"
            " raise --gpu-memory-utilization"
        )


def _check_manager(config: RunConfig, blocks: Tables, manager: str) -> None:
    """Refuse what a block manager cannot do."""
    if config.enable_prefix_caching and not blocks.needs_keys:
        raise ConfigError(
            f"block_manager: {manager} shares nothing; leave out --enable-prefix-caching"
        )
    may_swap = config.scheduling_policy == "priority" and config.n > 1
    if not blocks.grows and (may_swap or config.preemption_mode == "swap"):
        raise ConfigError(f"block_manager: {manager} cannot swap; use --preemption-mode recompute")


def _check_chunks(config: RunConfig, scheduler: Scheduler, blocks: Tables) -> None:
    """Refuse chunk sizes at which vLLM 0.6.3 dies with its first chunk."""
    tokens = scheduler.max_num_batched_tokens
    whole = blocks.needs_keys and getattr(scheduler, "whole_blocks", False)
    if config.enable_chunked_prefill and whole and tokens % config.block_size:
        raise ConfigError(
            f"max_num_batched_tokens: {tokens} is no multiple of block_size"
            f" ({config.block_size}), as chunked prefill with prefix caching demands"
        )

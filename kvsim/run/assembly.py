"""Turns settings into the objects of one run: engine, block manager, cost model, link, budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from kvsim.core.blocks import BlockManager
from kvsim.core.scheduler import Scheduler
from kvsim.cost import Cost, make_cost, make_prices
from kvsim.cost.estimates import StagedCost
from kvsim.engines import BLOCK_MANAGERS, ENGINES, Engine, memory_formula
from kvsim.engines.vllm_v1.groups import Full, Group
from kvsim.engines.vllm_v1.manager import KVCacheManager, full_attention
from kvsim.engines.vllm_v1.planning import groups_of_model, notes_on_groups, reserved_steps
from kvsim.engines.vllm_v1.releases import LATEST, Release, notes_on, release_of
from kvsim.errors import ConfigError
from kvsim.machine.hardware import (
    FrontEndTimes,
    Hardware,
    LinkTimes,
    make_front_end_times,
    make_link,
)
from kvsim.machine.memory import Budget, block_bytes, budget, tables_of
from kvsim.machine.models import Model
from kvsim.policies import ready
from kvsim.policies.future import Future
from kvsim.policies.victims import make_victim
from kvsim.run.assumed import Settings, complete, left_out
from kvsim.run.checks import (
    Room,
    adapters,
    check_cache,
    check_engine,
    check_features,
    check_manager,
    check_pool,
    check_retention,
    check_scheduler,
    check_sharing,
    check_states,
    check_tables,
    check_vllm,
)
from kvsim.run.offload import offloads
from kvsim.run.speculation import Speculative, speculates, speculation_of
from kvsim.settings.config import RunConfig, to_table
from kvsim.settings.library import construct, look_up
from kvsim.settings.versions import DEFAULT_BLOCK_SIZE, Default
from kvsim.settings.versions import release as version_of

if TYPE_CHECKING:
    from kvsim.run.connectors import Offload, Side


class Parts(NamedTuple):
    """The objects of one run that depend on its settings alone."""

    config: RunConfig
    """The settings, with the engine's own where none were given."""
    model: Model
    hardware: Hardware
    block_manager: str
    scheduler: Scheduler
    blocks: Any
    """The block manager (`kvsim.core.blocks.BlockManager`), with its pools."""
    cost: Cost
    link: LinkTimes
    front_end: FrontEndTimes | None
    """What requests pass before the engine; None: nothing is known of it, and it takes no time."""
    memory: Budget
    future: Future
    """What oracles among the policies see."""
    assumed: dict[str, Default]
    """Settings that were not given."""
    notes: tuple[str, ...]
    """What a reader of the result should know of the model, and what is not simulated."""
    offload: Offload | Side | None
    """Where KV goes beyond the GPU: the tier in CPU memory, or another engine; None without."""
    speculation: Speculative | None
    """Speculative decoding; None without it."""


def assemble(config: RunConfig, *, switched: tuple[str, ...] = ()) -> Parts:
    """Scheduler, block manager, cost model, link and memory budget of a configuration.

    `switched`: rules of the release of vLLM V1 that are to decide otherwise.
    Raises `ConfigError` for whatever cannot be, and for what the engine would refuse at start-up.
    """
    engine = _engine(config.engine)
    check_vllm(config, engine)
    check_engine(config, engine)
    settings = complete(config, engine)
    config, model, hardware, assumed, _ = settings
    check_cache(config, engine)
    check_tables(config, engine)
    check_states(config, model)
    prices, future = make_prices(config, model, hardware), Future()
    decides = release_of(version_of(config.vllm_version), switched) if engine.groups else LATEST
    draft = _draft(config, engine, decides, {"prices": prices, "future": future})
    if config.max_num_batched_tokens is None:
        assumed["max_num_batched_tokens"] = Default(draft.max_num_batched_tokens, engine.about)
    groups = groups_of_model(model, config, hardware)
    check_retention(config, groups)
    stages = stages_at_work(config, engine, model)
    room = _room(settings, engine, draft, groups)
    config, memory = _fitted(settings, engine, room), room.memory
    pools = {"num_gpu_blocks": memory.num_gpu_blocks, "num_cpu_blocks": memory.num_cpu_blocks}
    tiered, drafts = offloads(config, engine, groups), speculates(config, engine)
    max_loras = adapters(config, engine)
    manager = _manager(config, engine)
    check_sharing(config, manager, engine)
    given = {**_given(config), **pools, "future": future}
    if engine.groups:
        given["max_num_batched_tokens"] = draft.max_num_batched_tokens
        given["in_flight"] = draft.in_flight
        # A tier goes by what blocks hold, even where the GPU's cache is off.
        given |= {"release": decides, "keyed": config.enable_prefix_caching or tiered}
        given |= _given_groups(config, model, hardware)
    cost = make_cost(config, model, hardware)
    if stages > 1:
        cost = StagedCost(cost, model, hardware, config)
    speculation = offload = None
    if drafts:
        speculation = speculation_of(config, model, hardware, cost, tiered)
        given, cost = given | speculation.blocks(), speculation.priced(cost)
    args = ready(config.block_manager_args, **given)
    blocks: BlockManager = construct("block_manager", BLOCK_MANAGERS, manager, args, **given)
    caching = {"prices": prices, "enable_prefix_caching": blocks.needs_keys}
    further: dict[str, Any] = {**pools, **caching, "future": future}
    if tiered:  # Few runs have one.
        from kvsim.run.connectors import offload_of

        offload = offload_of(config, model, hardware, blocks, draft)
    if engine.groups:
        further |= {"blocks": blocks, "max_loras": max_loras}
        for part in (offload, speculation):
            further |= part.parts() if part else {}
    scheduler = _scheduler(config, engine, further)
    check_manager(config, blocks, manager)
    check_scheduler(config, scheduler, blocks)
    notes = _notes_on_tables(model, config, blocks, offload, speculation)
    return Parts(
        *(config, model, hardware, manager, scheduler, blocks, cost),
        make_link(model, hardware, config, block_bytes(model, config)),
        make_front_end_times(config),
        *(memory, future, assumed),
        (*notes, *memory.remarks(), *left_out(config, model, stages)),
        *(offload, speculation),
    )


def _draft(
    config: RunConfig, engine: Engine, release: Release, further: dict[str, Any]
) -> Scheduler:
    """A scheduler that is only asked for its limits: the memory budget needs its token budget, and
    the scheduler that runs needs the number of blocks."""
    if not engine.groups:
        return _scheduler(config, engine, {"num_gpu_blocks": 1, **further})
    assert isinstance(config.max_model_len, int)
    blocks = full_attention(
        config.block_size or DEFAULT_BLOCK_SIZE,
        2,
        enable_prefix_caching=False,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=1,
        release=release,
    )
    return _scheduler(config, engine, {"blocks": blocks, **further})


def _engine(name: str) -> Engine:
    """The entry of the table; of an outsider's scheduler, that of the class it inherits from."""
    if name in ENGINES:
        return ENGINES[name]
    kind = look_up("engine", ENGINES, name)
    if not (isinstance(kind, type) and issubclass(kind, Scheduler)):
        manages = isinstance(kind, type) and issubclass(kind, BlockManager)
        what = "a block manager, for --block-manager" if manages else "not a scheduler"
        raise ConfigError(f"engine: {name} is {what}; make it a subclass of one of kvsim.engines")
    # The nearest of its bases decides.
    for base in kind.__mro__:
        for entry in ENGINES.values():
            if base in (entry.scheduler, entry.asynchronous):
                return entry
    raise ConfigError(f"engine: {name} has no engine behind it; make it a subclass of VllmV1")


def _room(settings: Settings, engine: Engine, draft: Scheduler, groups: tuple[Group, ...]) -> Room:
    """The pool by the formula of the settings. `draft` has the limits of a step, and the number of
    steps that are not settled."""
    config, model, hardware, _, fits = settings
    if config.enable_prefix_caching:
        groups = tuple(group.with_prefix_cache() for group in groups)
    tokens, seqs = draft.max_num_batched_tokens, draft.max_num_seqs
    flying = tokens * reserved_steps(config.vllm_version, draft.in_flight)
    # Then the engine starts with any pool.
    longest = 1 if fits or engine.caps_sequences else config.max_model_len
    assert isinstance(longest, int)

    def holds(memory: Budget) -> bool:
        return Room(memory, groups, flying).longest(config, longest) == longest

    formula = memory_formula(config.memory_formula)
    memory = budget(model, hardware, config, formula, tokens, seqs, holds)
    return Room(memory, groups, flying)


def _given(config: RunConfig) -> dict[str, Any]:
    """The settings that have a value, as arguments for constructors."""
    values = {key: getattr(config, key) for key in RunConfig.__struct_fields__}
    return {key: value for key, value in values.items() if value is not None}


def _scheduler(config: RunConfig, engine: Engine, further: dict[str, Any]) -> Scheduler:
    table = {}
    if config.engine in ENGINES:
        # Engines work asynchronously where nothing speaks against it.
        synchronous = config.async_scheduling is False or config.disable_async_output_proc
        ahead = None if synchronous or config.n > 1 else engine.asynchronous
        table[config.engine] = ahead or engine.scheduler
    assert isinstance(config.max_model_len, int)
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


def _given_groups(config: RunConfig, model: Model, hardware: Hardware) -> dict[str, Any]:
    """What the block manager of KV cache groups is given beside settings."""
    # The length that fits may be below that of which the first groups knew.
    groups = groups_of_model(model, config, hardware)
    interval = config.prefix_cache_retention_interval
    return {
        "groups": groups or (Full(block_size=config.block_size or DEFAULT_BLOCK_SIZE),),
        "prefix_cache_retention_interval": None if interval == "none" else interval or 0,
    }


def _notes_on_tables(
    model: Model,
    config: RunConfig,
    blocks: BlockManager,
    offload: Offload | Side | None,
    speculation: Speculative | None,
) -> tuple[str, ...]:
    """What a reader should know of the block tables, of their tier in CPU memory, and of drafts."""
    if not isinstance(blocks, KVCacheManager):
        return model.notes
    features = {
        "connectors": offload,
        "drafts": speculation,
        "adapters": config.enable_lora,
        "pipelines": config.pipeline_parallel_size > 1,
        "groups of layers": tables_of(model, config),
    }
    found = [name for name, there in features.items() if there]
    said = notes_on(blocks.release, to_table(config), found)
    if not found:
        return (*model.notes, *said)
    further = (offload.notes() if offload else ()) + (speculation.notes if speculation else ())
    return (*model.remarks, *notes_on_groups(tuple(blocks.groups), config), *said, *further)


def _fitted(settings: Settings, engine: Engine, room: Room) -> RunConfig:
    """The settings with a `max_model_len` that fits; `assumed` says so where it was not given.

    Source: vLLM 0.33.0, v1/core/kv_cache_planning.py, `_auto_fit_max_model_len`. Memory was counted
    with the model's limit, as there. Raises `ConfigError` where one that was given does not fit.
    """
    config, _, _, assumed, fits = settings
    if not fits:
        check_pool(config, room, engine)
        return config
    assert isinstance(config.max_model_len, int)
    config = replace(config, max_model_len=room.longest(config, config.max_model_len))
    if "max_model_len" in assumed and config.max_model_len != assumed["max_model_len"].value:
        assumed["max_model_len"] = Default(config.max_model_len, "the most that fits")
    return config


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
    if config.block_manager not in BLOCK_MANAGERS:
        _check_kind(config, engine)
    return config.block_manager


def _check_kind(config: RunConfig, engine: Engine) -> None:
    """Refuse a class of an outsider's that is no block manager, or one of another engine."""
    assert config.block_manager is not None
    kind = look_up("block_manager", BLOCK_MANAGERS, config.block_manager)
    wanted: Any = BLOCK_MANAGERS[engine.block_manager or engine.prefix_manager]
    if isinstance(kind, type) and issubclass(kind, wanted):
        return
    what = "is not a block manager"
    if isinstance(kind, type) and issubclass(kind, Scheduler):
        what = "is a scheduler, for --engine"
    elif isinstance(kind, type) and issubclass(kind, BlockManager):
        what = f"is one of another engine than {config.engine}"
    raise ConfigError(
        f"block_manager: {config.block_manager} {what}; give a subclass of"
        f" {wanted.__module__}.{wanted.__name__}"
    )


KEY = "pipeline_parallel_size"


def stages_at_work(config: RunConfig, engine: Engine, model: Model) -> int:
    """How many stages work on different steps at once; 1 without a pipeline.

    Other engines than vLLM V1 pass each step through all stages before the next begins, and say so
    (`kvsim.run.assumed`). Raises `ConfigError` for what is not simulated together with a
    pipeline.
    """
    stages = config.pipeline_parallel_size
    if stages == 1 or not engine.groups:
        return 1
    check_features(KEY, config, engine, "has no pipeline")
    others = {
        "speculative_config": config.speculative_config,
        "kv_offloading_size": config.kv_offloading_size,
        "kv_transfer_config": config.kv_transfer_config,
        "data_parallel_size": config.data_parallel_size > 1 and model.experts is not None,
    }
    for key, given in others.items():
        if given:
            raise ConfigError(
                f"{key}: not simulated together with a pipeline; leave it out, or use"
                " --pipeline-parallel-size 1"
            )
    return stages

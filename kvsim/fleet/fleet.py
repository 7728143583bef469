"""Runs a trace through several replicas behind a router.

They may be the data-parallel ranks of one engine, or one of several fleets that are compared on the
same requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from kvsim.core.collector import collector_paused
from kvsim.errors import ConfigError
from kvsim.fleet.dispatch import News, looks
from kvsim.fleet.figures import find_bounds, summarise_fleet
from kvsim.fleet.folder import FleetRun, fleet_run
from kvsim.fleet.proxy import Split, split_roles
from kvsim.fleet.replicas import (
    Load,
    Replicas,
    Sent,
    clients_wait,
    heeds_replicas,
    routed,
    serve_apart,
)
from kvsim.fleet.result import FleetResult
from kvsim.fleet.routers import make_router
from kvsim.fleet.routers.router import Router
from kvsim.fleet.settings import RANKS_ROUTER, load_settings
from kvsim.machine.hardware import FRONT_END
from kvsim.run.assembly import Parts, assemble
from kvsim.run.attempt import show_future
from kvsim.run.blame import blaming
from kvsim.run.replica.time import Clock
from kvsim.run.result import Result
from kvsim.run.simulation import Settings, assembled, opened, read_config, simulate
from kvsim.settings.config import RunConfig, to_table
from kvsim.workload.clients import Clients, release_times
from kvsim.workload.trace import Trace

PartsOf = Callable[[RunConfig], Parts]
"""Turns settings into the objects of a run, as `kvsim.run.assembly.assemble` does."""


@collector_paused()
def simulate_fleet(
    trace: Trace | str | Path | None,
    configs: Sequence[Settings],
    router: str = "round-robin",
    router_args: Mapping[str, Any] | None = None,
    *,
    explain: bool = False,
    jobs: int | None = 1,
    progress: Callable[[int], None] | None = None,
    command: str = "",
    parts_of: PartsOf = assemble,
) -> FleetResult:
    """Replays a trace through replicas, each with settings of its own, behind a router.

    `configs` are the settings of each replica, in any form that `simulate` takes. All of them say
    the same of how clients send; each has a `seed` of its own for rules that draw, and arrivals are
    drawn from that of the first one. `router` is a name of `kvsim.fleet.routers.ROUTERS` or a
    `package.module:Class`, `router_args` are arguments of its constructor. `explain`: note what
    each decision chose from, which asks every replica's cache about every request. `parts_of` is
    that of `kvsim.run.simulation.simulate`.

    Where nothing in a replica changes what any of them is sent, they run apart, in at most `jobs`
    processes with equal results, unless decisions are explained; None: one per core, if there are
    many requests.

    Replicas with a `kv_role` in their `kv_transfer_config` split prefill and decode
    (`kvsim.fleet.proxy`). Each side has a router of its own, of this name; the decisions noted are
    those about prompts.

    Replicas with a `data_parallel_size` of their number are the ranks of one engine, which step
    together if the model has experts. A replica whose engine stops with an error gets no more
    requests; the others go on. Raises what `simulate` does.
    """
    known = _read_all(configs)
    first, args = known[0], dict(router_args or {})
    trace = opened(trace, first)
    rows = trace.rows[: first.num_prompts]
    load = Load(trace, rows, release_times(rows, first), first.n, first.ignore_eos)
    everyone = range(len(known))
    coupled = first.data_parallel_size > 1 or clients_wait(rows, first)
    with blaming(*known, router=router):
        size = assembled(first, rows).blocks.block_size

        def new_router(numbers: Sequence[int]) -> Router:
            names = [f"replica-{number}" for number in numbers]
            return make_router(router, args, names, seed=first.seed, block_size=size)

        if roles := split_roles(known, rows):
            parts = [assembled(config, rows, parts_of) for config in known]
            split = Split(load, parts, roles, new_router, progress)
            return split.played(router, args, command, explain)
        chooser = new_router(everyone)
        # Apart, each replica assembles parts of its own.
        if not (explain or coupled or heeds_replicas(chooser)) and parts_of is assemble:
            chosen = routed(load, chooser)
            if apart := serve_apart(load, known, chosen, command, jobs, progress):
                indexes = [np.flatnonzero(np.array(chosen) == number) for number in everyone]
                return FleetResult(router, args, apart, indexes, list(chosen))
            # The first one has decided already, and one that draws has drawn.
            chooser = new_router(everyone)
        fleet = _together(load, known, chooser, router, progress, parts_of)
        return fleet.played(router, args, command, explain)


def _read_all(configs: Sequence[Settings]) -> list[RunConfig]:
    """Returns the settings of the replicas. Raises `ConfigError`, also where they do not agree on
    how requests are sent."""
    known = [read_config(config) for config in configs]
    if not known:
        raise ConfigError("replicas: give at least one")
    if any(config.on_engine_error == "reject" for config in known):
        raise ConfigError(
            "on_engine_error: reject is for one engine; a replica that stops gets no more requests"
        )
    if any(FRONT_END in config.cost for config in known):
        raise ConfigError("cost.front_end: only before one engine; leave it out with several")
    for key in sorted(load_settings() - {"seed"}):
        for number, config in enumerate(known):
            if getattr(config, key) != getattr(known[0], key):
                raise ConfigError(
                    f"replica {number}: {key} says how requests are sent to all replicas; give each"
                    " of them the same"
                )
    return known


def _together(
    load: Load,
    configs: Sequence[RunConfig],
    router: Router,
    name: str,
    progress: Callable[[int], None] | None,
    parts_of: PartsOf,
) -> Replicas:
    """Returns the replicas in one event loop. `name`: the router's. Raises `ConfigError`."""
    parts = [assembled(config, load.rows, parts_of) for config in configs]
    sizes = {each.blocks.block_size for each in parts}
    if router.heeds_events and len(sizes) > 1:
        raise ConfigError(
            f"block_size: {name} goes by KV events, so blocks of all replicas need one size, and"
            f" here are {', '.join(map(str, sorted(sizes)))}"
        )
    keyed = any(each.blocks.needs_keys for each in parts)
    env, requests = Clock(), load.requests(keyed)
    clients = Clients(requests, load.rows, load.release_ns, parts[0].config)
    for each in parts:
        show_future(each.future, load.trace, requests, clients)
    everyone: list[News] = []
    env.process(looks(env, everyone, clients))
    fleet = Replicas(env, load, Sent(requests, clients), parts, router, progress)
    everyone.append(fleet.dispatch.news)
    return fleet


EngineResult = Result | FleetResult
"""What one engine did."""


def simulate_engine(
    trace: Trace, config: RunConfig, *, command: str = "", parts_of: PartsOf = assemble
) -> EngineResult:
    """Replays a trace through an engine. If it has several ranks, they are behind vLLM's balancer,
    and step together if the model has experts. Raises `ConfigError`."""
    ranks = config.data_parallel_size
    if ranks == 1:
        return simulate(trace, config, command=command, parts_of=parts_of)
    return simulate_fleet(trace, [config] * ranks, RANKS_ROUTER, command=command, parts_of=parts_of)


def figures_of(result: EngineResult) -> Mapping[str, Any]:
    """The figures of all ranks together, with their provenance under `meta`."""
    return result.summary if isinstance(result, Result) else summarise_fleet(result)


class Contender(RunConfig, frozen=True, kw_only=True):
    """Replicas behind a router; the settings are those of the first replica, which say how clients
    send."""

    each: tuple[RunConfig, ...]
    """The settings of every replica."""
    router: str
    router_args: Mapping[str, Any]


def contender(configs: Sequence[RunConfig], router: str, args: Mapping[str, Any]) -> Contender:
    """Returns these replicas behind this router."""
    first = to_table(configs[0])
    return Contender(**first, each=tuple(configs), router=router, router_args=dict(args))


def simulate_contender(
    trace: Trace,
    fleet: Contender,
    *,
    progress: Callable[[int], None] | None = None,
    command: str = "",
) -> FleetRun:
    """Replays a trace through a fleet. Seeds of replicas differ from its own as they were given."""
    later = fleet.seed - fleet.each[0].seed
    result = simulate_fleet(
        trace,
        [replace(config, seed=config.seed + later) for config in fleet.each],
        fleet.router,
        fleet.router_args,
        explain=True,
        progress=progress,
        command=command,
    )
    return fleet_run(result, summarise_fleet(result, find_bounds(trace, result)))

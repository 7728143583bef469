"""A fleet as one of several configurations that are compared on the same requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from kvsim.fleet.figures import summarise_fleet
from kvsim.fleet.fleet import simulate_fleet
from kvsim.fleet.folder import FleetRun, fleet_run
from kvsim.fleet.routing import find_bounds
from kvsim.settings.config import RunConfig, to_table
from kvsim.workload.trace import Trace


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

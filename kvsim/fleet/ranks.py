"""Runs a trace through one engine with all its data-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvsim.fleet.figures import summarise_fleet
from kvsim.fleet.fleet import PartsOf, simulate_fleet
from kvsim.fleet.result import FleetResult
from kvsim.fleet.settings import RANKS_ROUTER
from kvsim.run.assembly import assemble
from kvsim.run.result import Result
from kvsim.run.simulation import simulate
from kvsim.settings.config import RunConfig
from kvsim.workload.trace import Trace

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

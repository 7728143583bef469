"""Runs one point, and condenses its result into a record of plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvsim.errors import ConfigError, PolicyError
from kvsim.fleet.figures import summarise_fleet
from kvsim.fleet.fleet import simulate_fleet
from kvsim.fleet.settings import FleetConfig
from kvsim.results.plain import flat, plain
from kvsim.run.simulation import simulate
from kvsim.search.sweep.records import Record
from kvsim.settings.config import RunConfig, to_table
from kvsim.version import __version__
from kvsim.workload.trace import Trace

REFUSED = "refused"
"""Outcome of a point whose settings the engine refuses at start-up."""

ENGINE_FACTS = (
    "num_gpu_blocks",
    "num_cpu_blocks",
    "block_size",
    "max_num_batched_tokens",
    "watermark_blocks",
    "kv_cache_bytes",
)
"""Figures that the engine derives from the settings, kept with every result: those of one replica,
and the bytes of all."""


_NO_FIGURES = ("meta", "rejected_by_reason", "replicas", "time_ledger_requests")
"""Parts of a summary whose keys depend on the run."""


class Task(NamedTuple):
    """A run to do, and the key of its result."""

    key: str
    config: RunConfig
    ledger: bool = False
    """Whether its figures have those of the ledger, if it has one engine."""


def run_point(task: Task, trace: Trace, jobs: int | None = 1) -> Record:
    """The record of a run: its outcome and its figures, without anything specific to this machine.

    `jobs`: processes that may share the replicas of a fleet, as for `simulate_fleet`.
    `outcome.kind` is `finished`, `refused`, `deadlock`, or the kind of an `EngineStopped`. Raises
    `PolicyError`: a policy that fails is not refused by the engine.
    """
    record: Record = {"key": task.key, "kvsim_version": __version__}
    record["config"] = plain(to_table(task.config))
    try:
        summary, metas = _ran(trace, task, jobs)
    except PolicyError:
        raise
    except ConfigError as error:
        return record | {"outcome": {"kind": REFUSED, "explanation": str(error)}, "figures": {}}
    meta = next((m for m in metas if m["outcome"]["kind"] != "finished"), metas[0])
    facts = {**meta, "kv_cache_bytes": sum(map(_kv_cache_bytes, metas))}
    return record | {
        "outcome": meta["outcome"],
        "engine": {key: facts[key] for key in ENGINE_FACTS},
        "time_source": {"kind": meta["cost"]["kind"], "source": meta["cost"]["source"]},
        "figures": figures_of(summary),
    }


def _ran(
    trace: Trace, task: Task, jobs: int | None
) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
    """The summary of a run or of a fleet, and the provenance of each engine in it."""
    config = task.config
    if not isinstance(config, FleetConfig):
        result = simulate(trace, config)
        return result.summary if task.ledger else result.figures, [result.meta]
    replicas = [config] * config.replicas
    fleet = simulate_fleet(trace, replicas, config.router, config.router_args, jobs=jobs)
    return summarise_fleet(fleet), [each.meta for each in fleet.replicas]


def figures_of(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """The figures of a summary; those of inner tables have dotted keys."""
    return flat({key: value for key, value in summary.items() if key not in _NO_FIGURES})


def _kv_cache_bytes(meta: Mapping[str, Any]) -> int:
    """Bytes of the KV blocks of all GPUs of the replica."""
    config = meta["config"]
    gpus: int = config["tensor_parallel_size"] * config["pipeline_parallel_size"]
    return int(meta["num_gpu_blocks"] * meta["memory"]["block_bytes"] * gpus)

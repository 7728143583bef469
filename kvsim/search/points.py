"""Runs one point, and condenses its result into a record of plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from kvsim.errors import ConfigError, PolicyError
from kvsim.fleet import FleetConfig, simulate_fleet, summarise_fleet
from kvsim.results.metrics import METRICS
from kvsim.results.plain import flat, plain
from kvsim.run.simulation import simulate
from kvsim.settings.config import RunConfig, to_table
from kvsim.settings.parsing import is_flat
from kvsim.version import __version__
from kvsim.workload.trace import Trace

Record = dict[str, Any]
"""The result of one run: `key`, `kvsim_version`, `config`, `outcome`, `engine`, `time_source`,
`figures`."""

Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Figure = Annotated[int, Meta(ge=-(1 << 53), le=1 << 53)] | float | None

_ALWAYS = {metric.key for metric in METRICS if metric.always} | {"failed"}
"""Figures of every run that was not refused."""
_WHOLE = {metric.key for metric in METRICS if metric.whole} | {"failed"}


class Versioned(Struct):
    """The version of kvsim that wrote a file."""

    kvsim_version: str


class _Point(Struct, forbid_unknown_fields=True):
    settings: dict[str, Any]
    seed: Count
    key: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]


class _Trace(Struct):
    name: str
    format: str
    sha256: str
    requests: Count


class Manifest(Versioned):
    """What `sweep.json` holds."""

    trace: _Trace
    base: dict[str, Any]
    points: Annotated[list[_Point], Meta(min_length=1)]
    slo: str | None
    ledger: bool = False


class _Outcome(Struct):
    kind: str
    explanation: str = ""


class _Engine(Struct):
    num_gpu_blocks: Count
    num_cpu_blocks: Count
    block_size: Count
    max_num_batched_tokens: Count
    watermark_blocks: Count
    kv_cache_bytes: Count


class _TimeSource(Struct):
    kind: str
    source: str


class _Result(Versioned):
    key: str
    config: dict[str, Any]
    outcome: _Outcome
    figures: dict[str, Figure]
    engine: _Engine | None = None
    time_source: _TimeSource | None = None


def checked_record(record: Any, key: str) -> Record:
    """The record, if it is the whole result of the run with this key. Raises `ValueError`."""
    result = msgspec.convert(record, _Result)
    figures = result.figures
    if result.key != key or not is_flat(record):
        raise ValueError("of another run, or nested too deeply")
    if (result.engine is None) != (result.time_source is None):
        raise ValueError("a part is missing")
    if result.engine is not None and not figures.keys() >= _ALWAYS:
        raise ValueError("figures are missing")
    if any(type(figures.get(name)) is float for name in _WHOLE):
        raise ValueError("a count is not whole")
    return dict(record)


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

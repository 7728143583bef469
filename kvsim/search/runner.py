"""Runs many configurations: in this process, in local processes, or on a Ray cluster.

`run_missing` keeps a record of each run in a store; `run_all` gives whatever is made of each
result. With every backend, a record is in the store as soon as its run ends, and a key is claimed
while it runs. So a sweep may be killed at any moment, and several sweeps may share a folder.
"""

from __future__ import annotations

import pickle
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from kvsim.errors import ConfigError, PolicyError
from kvsim.fleet import FleetConfig, simulate_fleet, summarise_fleet
from kvsim.results.plain import flat, plain
from kvsim.run.simulation import simulate
from kvsim.run.workers import in_processes, unpickled
from kvsim.search.store import ENGINE_FACTS, Record, Store
from kvsim.settings.config import RunConfig, to_table
from kvsim.version import __version__
from kvsim.workload.keys import keyed
from kvsim.workload.trace import Trace
from kvsim.writing import temporary_folder

REFUSED = "refused"
"""Outcome of a point whose settings the engine refuses at start-up."""

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


T = TypeVar("T")

Done = Callable[[int], None]
Backend = Callable[[Store, Trace, Sequence[Task], int | None, Done], None]
"""Fills the store. The number is the most processes at once, None for one per core. `Done` is
called with the number of runs that have just ended."""

_PATIENCE_S = 0.2
_REACHED_WITHIN_S = 5
_AHEAD = 2
"""Tasks in flight for each core of a cluster, so that none waits for the driver."""


def run_all(
    run: Callable[..., T], tasks: Iterable[tuple[Any, ...]], number: int, *, ordered: bool = True
) -> Iterator[T]:
    """What `run(*task)` returns, for each task, in `number` processes; with 1, in this one.

    In the order of the tasks, or as they end.
    """
    if number <= 1:
        return (run(*task) for task in tasks)
    return in_processes(run, tasks, number, ordered=ordered)


def processes(jobs: int | None, tasks: Sequence[Any]) -> int:
    """How many processes to use for these tasks; `jobs`: the most, None for one per core."""
    from joblib import cpu_count

    return min(jobs or cpu_count(), len(tasks))


def run_missing(
    store: Store,
    trace: Trace,
    configs: Mapping[str, RunConfig],
    *,
    ledger: bool = False,
    backend: Backend | None = None,
    jobs: int | None = None,
    done: Done = lambda number: None,
) -> int:
    """Run every key (`address`) that is not in the store, once; returns the number of runs."""
    store.make()
    missing = [(key, config) for key, config in configs.items() if store.load(key) is None]
    tasks = [Task(key, config, ledger) for key, config in missing]
    done(len(configs) - len(tasks))
    if tasks:
        (backend or run_local)(store, trace, tasks, jobs, done)
    return len(tasks)


def run_local(
    store: Store, trace: Trace, tasks: Sequence[Task], jobs: int | None, done: Done
) -> None:
    """Run in processes of this machine, each of which stores its own results.

    They write in one temporary folder, so nothing is left of a process that ends while it writes.
    """
    number, trace = processes(jobs, tasks), keyed(trace)
    if number <= 1:
        for task in tasks:
            store.fetch(task.key, partial(run_point, task, trace, jobs))
            done(1)
        return
    with temporary_folder(store.folder, store.folder) as folder:
        path = folder / "trace"
        path.write_bytes(pickle.dumps(trace))
        each = ((store.writing_in(folder), task, str(path)) for task in tasks)
        for _ in run_all(_fetch_from, each, number, ordered=False):
            done(1)


def run_on_ray(
    address: str | None,
    store: Store,
    trace: Trace,
    tasks: Sequence[Task],
    jobs: int | None,
    done: Done,
) -> None:
    """Run on a Ray cluster whose nodes have kvsim installed; this process stores the results.

    `address`: the address of the cluster's head; None starts Ray on this machine, with `jobs`
    cores. Raises `ConfigError` if Ray is not installed or not reachable.
    """
    ray = _started_ray(address, jobs)
    try:
        remote = ray.remote(num_cpus=1, max_retries=3)(_run_remotely)
        shared = ray.put(keyed(trace))
        waiting, running = deque(tasks), dict[Any, Task]()
        most = _AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
        while waiting or running:
            for _ in range(min(most - len(running), len(waiting))):
                task = waiting.popleft()
                # Another sweep runs it: its turn comes again behind the others.
                if not store.claim(task.key, wait=False):
                    waiting.append(task)
                # That sweep has finished it meanwhile.
                elif store.load(task.key) is not None:
                    store.release(task.key)
                    done(1)
                else:
                    running[remote.remote(task, [shared], trace.sha256)] = task
            if not running:
                time.sleep(_PATIENCE_S)
                continue
            ended, _ = ray.wait(list(running), timeout=_PATIENCE_S)
            for reference in ended:
                try:
                    store.save(ray.get(reference))
                except ray.exceptions.RayTaskError as error:  # whose text is a traceback
                    raise error.cause from None
                store.release(running.pop(reference).key)
                done(1)
    finally:
        ray.shutdown()


def _started_ray(address: str | None, jobs: int | None) -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError("--backend ray: Ray is not installed; pip install 'kvsim[ray]'") from None
    options: dict[str, Any] = {"logging_level": "error", "log_to_driver": False}
    if address is None:
        options |= {"num_cpus": jobs, "include_dashboard": False}
    else:
        _check_reachable(address)
    try:
        ray.init(address=address or "local", **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        line = str(error).strip().splitlines()[0]
        raise ConfigError(f"--ray-address {address}: no Ray cluster there: {line}") from None
    return ray


def _check_reachable(address: str) -> None:
    """Open a connection first, because Ray would retry for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return
    try:
        socket.create_connection((host, int(port)), _REACHED_WITHIN_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"--ray-address {address}: no connection ({error}); give HOST:PORT of the"
            " cluster's head, or leave it out to start Ray here"
        ) from None


def _fetch_from(store: Store, task: Task, path: str) -> None:
    store.fetch(task.key, partial(run_point, task, unpickled(path)))


_held: dict[str, Trace] = {}
"""Traces that this worker of Ray has fetched, by digest."""


def _run_remotely(task: Task, shared: list[Any], sha256: str) -> Record:
    """Run a task; `shared` lists a reference to the trace, which Ray does not fetch by itself."""
    import ray

    if sha256 not in _held:
        _held[sha256] = ray.get(shared[0])
    return run_point(task, _held[sha256])

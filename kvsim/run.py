"""One run: trace → requests → replica → result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import simpy

from kvsim.archive import Archive
from kvsim.assembly import Parts, assemble
from kvsim.batch.batch import Batch
from kvsim.batch.stretch import Stretches
from kvsim.collector import collector_paused
from kvsim.config import RunConfig, load_config, make_config
from kvsim.errors import EngineStopped
from kvsim.events import Link
from kvsim.ledger.account import account_prompts, account_times
from kvsim.recorder import Recorder
from kvsim.replica import Replica, Watcher
from kvsim.request import Request
from kvsim.result import Outcome, Result, provenance
from kvsim.workload import open_trace
from kvsim.workload.arrivals import release_times
from kvsim.workload.clients import Clients
from kvsim.workload.requests import Requests
from kvsim.workload.spec import trace_of
from kvsim.workload.trace import Trace

if TYPE_CHECKING:
    import numpy as np

    from kvsim.result import Books

Progress = Callable[[int], None]


@collector_paused()
def simulate(
    trace: Trace | str | Path | None,
    config: RunConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    progress: Progress | None = None,
    watcher: Watcher | None = None,
    command: str = "",
    parts_of: Callable[[RunConfig, bool], Parts] = assemble,
) -> Result:
    """Replay a trace under a configuration.

    `trace`: a path, an opened trace, or None for the `workload` of the settings. `config`: settings
    as a table, a path of a TOML file, or None for the defaults. `progress` is called with the
    number of requests that have just ended, `watcher` with every step.
    `parts_of` turns the settings into the objects of a run, for those who exchange one of them.

    With `on_engine_error = "reject"`, a run that ends in an engine error starts again with the
    request at fault refused at arrival, as often as it takes: what the engine decides is never
    patched in the middle.

    Raises `TraceError` and `ConfigError`; what goes wrong inside the simulated engine is an
    outcome in `Result.meta["outcome"]`, not an exception.
    """
    if not isinstance(config, RunConfig):
        if config is None or isinstance(config, Mapping):
            config = make_config(config or {})
        else:
            config = load_config(str(config))
    if trace is None:
        trace = trace_of(config)
    elif not isinstance(trace, Trace):
        trace = open_trace(str(trace))
    rows = trace.rows[: config.num_prompts]
    errors: list[Outcome] = []
    dull = config.exact_twin or watcher is not None
    while True:
        parts = parts_of(config, dull)
        requests = Requests(trace, rows, n=config.n, keyed=parts.blocks.needs_keys)
        archive = Archive(rows)
        clients = Clients(requests, rows, release_times(rows, config), config)
        batch = Batch(parts.blocks) if dull else Stretches(parts.blocks)
        recorder = Recorder(parts.blocks.block_size)
        refused = {error.request: error.kind for error in errors}
        # A watcher and the accounts of prompts look at requests that are over.
        kept = watcher is not None or parts.blocks.needs_keys
        over = None if kept else _shelve(requests, archive)
        outcome = _play(parts, batch, clients, recorder, refused, progress, watcher, over)
        if config.on_engine_error == "stop" or outcome.request in ("", *refused):
            break
        errors.append(outcome)
    log = batch.transitions.columns()
    keep_books = _record(parts, requests, archive, outcome, recorder, log)
    meta = provenance(trace, len(rows), parts, outcome, errors, command)
    meta["fast_path"] = batch.shortcuts()
    return Result(config, meta, keep_books, batch.token_gaps_ns, log)


def _play(
    parts: Parts,
    batch: Batch,
    clients: Clients,
    recorder: Recorder,
    refused: Mapping[str, str],
    progress: Progress | None,
    watcher: Watcher | None,
    over: Callable[[Request], None] | None,
) -> Outcome:
    """Run the event loop until nothing more can happen."""
    env = simpy.Environment()
    Replica(
        env,
        parts.scheduler,
        batch,
        parts.cost,
        Link(env, parts.link),
        clients,
        recorder,
        refused=refused,
        progress=progress,
        watcher=watcher,
        over=over,
    )
    try:
        env.run()
    except EngineStopped as stop:
        batch.dissolve()
        return Outcome(
            stop.kind,
            int(env.now),
            len(recorder),
            stop.request_id,
            stop.explanation,
            stop.remedy,
            stop.rule,
        )
    batch.audit()
    if len(batch):
        return _deadlock(batch, int(env.now), len(recorder))
    return Outcome("finished", int(env.now), len(recorder))


def _shelve(requests: Requests, archive: Archive) -> Callable[[Request], None]:
    """What is done with a request that is over: what it came to is smaller than it is."""

    def shelve(request: Request) -> None:
        archive.add(request)
        requests.let_go(request)

    return shelve


def _record(
    parts: Parts,
    requests: Requests,
    archive: Archive,
    outcome: Outcome,
    recorder: Recorder,
    log: dict[str, np.ndarray],
) -> Callable[[], Books]:
    """What works out the columns of steps and requests, and where time and tokens went."""
    blocks = parts.blocks
    for index in archive.missing():
        request = requests[index]
        if request.finish_ns < 0 and not request.reason:
            # It did not end by itself.
            request.reason = "not-served" if outcome.kind == "finished" else outcome.kind
        archive.add(request)
    if not blocks.needs_keys:
        requests.let_all_go()
    columns = archive.columns()
    in_flight = getattr(parts.scheduler, "in_flight", 1)

    def keep_books() -> Books:
        steps, times = account_times(parts.cost, recorder.columns(), columns, log, in_flight)
        if not blocks.needs_keys:
            return steps, columns | times
        withheld = blocks.full_hit.withheld
        prompts = account_prompts(requests, log, blocks.block_size, withheld)
        requests.let_all_go()
        return steps, columns | times | prompts

    return keep_books


def _deadlock(batch: Batch, now_ns: int, step: int) -> Outcome:
    """Nothing can be scheduled, and nobody will arrive: say who is in the way."""
    queue = "swapped" if batch.swapped else "waiting"
    head = (batch.swapped or batch.waiting or batch.running)[0]
    return Outcome(
        "deadlock",
        now_ns,
        step,
        head.id,
        f"request {head.id}, at the head of the {queue} queue, can never be scheduled, and nothing"
        f" is running that could free blocks; {len(batch)} requests wait behind it for ever",
        "give the engine more blocks (--num-gpu-blocks-override), a smaller --watermark, or a"
        " larger --max-num-batched-tokens",
    )

"""One run: trace → requests → replica → result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import simpy

from kvsim.assembly import Parts, assemble
from kvsim.config import RunConfig, load_config, make_config
from kvsim.errors import EngineStopped
from kvsim.recorder import Recorder
from kvsim.replica import Link, Replica, Watcher
from kvsim.request import Request
from kvsim.result import Outcome, Result, provenance, request_columns
from kvsim.schedule.batch import Batch
from kvsim.workload import open_trace
from kvsim.workload.arrivals import release_times
from kvsim.workload.clients import Clients
from kvsim.workload.keys import streams
from kvsim.workload.trace import Row, Trace

Progress = Callable[[int], None]


def simulate(
    trace: Trace | str | Path,
    config: RunConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    progress: Progress | None = None,
    watcher: Watcher | None = None,
    command: str = "",
) -> Result:
    """Replay a trace under a configuration.

    `trace`: a path or an opened trace. `config`: settings as a table, a path of a TOML file, or
    None for the defaults. `progress` is called with the number of requests that have just ended,
    `watcher` with every step.

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
    if not isinstance(trace, Trace):
        trace = open_trace(str(trace))
    rows = trace.rows[: config.num_prompts]
    errors: list[Outcome] = []
    while True:
        parts = assemble(config)
        requests = make_requests(trace, rows, config, parts)
        clients = Clients(requests, rows, release_times(rows, config), config)
        batch = Batch(parts.blocks)
        recorder = Recorder()
        refused = {error.request: error.kind for error in errors}
        outcome = _play(parts, batch, clients, recorder, refused, progress, watcher)
        if config.on_engine_error == "stop" or outcome.request in ("", *refused):
            break
        errors.append(outcome)
    _account(requests, outcome)
    return Result(
        config,
        provenance(trace, len(rows), parts, outcome, errors, command),
        recorder.columns(),
        request_columns(requests),
        batch.token_gaps_ns,
    )


def make_requests(trace: Trace, rows: list[Row], config: RunConfig, parts: Parts) -> list[Request]:
    """Fresh requests for the rows of a trace, with block identities if anything looks at them."""
    identities: list[Any] = [None] * len(rows)
    if parts.blocks.needs_keys:
        identities = streams(trace)
    return [
        Request(
            row.index,
            row.id,
            row.input_length,
            row.output_length,
            identities[row.index],
            n=config.n,
            priority=row.priority,
            session=row.session,
        )
        for row in rows
    ]


def _play(
    parts: Parts,
    batch: Batch,
    clients: Clients,
    recorder: Recorder,
    refused: Mapping[str, str],
    progress: Progress | None,
    watcher: Watcher | None,
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
    )
    try:
        env.run()
    except EngineStopped as stop:
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


def _account(requests: list[Request], outcome: Outcome) -> None:
    """Every request that did not end by itself gets a reason."""
    for request in requests:
        if request.finish_ns < 0 and not request.reason:
            request.reason = "not-served" if outcome.kind == "finished" else outcome.kind

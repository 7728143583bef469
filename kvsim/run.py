"""One run: trace → requests → replica → result."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import simpy

from kvsim.archive import Archive
from kvsim.assembly import Parts, assemble
from kvsim.collector import collector_paused
from kvsim.config import RunConfig, load_config, make_config
from kvsim.cost import declares_sums
from kvsim.engine.batch import Batch, Endings
from kvsim.engine.loop import Loop, Watcher
from kvsim.engine.request import Request, Stream
from kvsim.errors import ConfigError, EngineStopped
from kvsim.fast.shortcuts import Shortcuts
from kvsim.ledger.account import account_prompts, account_times
from kvsim.limits import check_run
from kvsim.records.recorder import Recorder
from kvsim.replica.events import Link
from kvsim.replica.host import SimulatedTime
from kvsim.result import Outcome, Result, provenance
from kvsim.workload import open_trace
from kvsim.workload.arrivals import release_times
from kvsim.workload.clients import Clients
from kvsim.workload.keys import streams
from kvsim.workload.requests import Requests
from kvsim.workload.trace import Row, TokenContent, Trace

if TYPE_CHECKING:
    from kvsim.result import Books

Progress = Callable[[int], None]

_LONGEST_NS = 1 << 63
"""Sums of the times of all requests stay below this, as 64-bit integers."""
_TOO_LONG = (
    "the run lasts too long for its result (292 years, all requests together); check the times of"
    " --cost-model, of cost.link and of the trace"
)


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
        from kvsim.workload.spec import trace_of

        trace = trace_of(config)
    elif not isinstance(trace, Trace):
        trace = open_trace(str(trace))
    rows = trace.rows[: config.num_prompts]
    errors: list[Outcome] = []
    asked = "exact_twin" if config.exact_twin else "" if watcher is None else "a watcher looks on"
    while True:
        parts = parts_of(config, bool(asked))
        if parts.blocks.prefixes_only and _tokens_known(rows):
            parts = parts_of(config, True)

        check_run(len(rows), _least_steps(rows, parts))
        refused = {error.request: error.kind for error in errors}
        run = _Run(trace, rows, parts, refused, asked, watcher, progress)
        outcome = run.play()
        if config.on_engine_error == "stop" or outcome.request in ("", *refused):
            break
        errors.append(outcome)
    keep_books = run.record(outcome)
    meta = provenance(trace, len(rows), parts, outcome, errors, command)
    meta["fast_path"] = run.shortcuts.describe(outcome.step)
    return Result(config, meta, keep_books, run.batch.token_gaps_ns, run.log)


class _Run:
    """One attempt: the objects that change while it lasts."""

    def __init__(
        self,
        trace: Trace,
        rows: Sequence[Row],
        parts: Parts,
        refused: Mapping[str, str],
        asked: str,
        watcher: Watcher | None,
        progress: Progress | None,
    ) -> None:
        """`refused`: request id → why it is turned away; `asked`: why there are no short cuts."""
        self.parts = parts
        self._trace = trace
        self._streams: Sequence[Stream] = ()
        self.requests = Requests(
            trace,
            rows,
            n=parts.config.n,
            keyed=parts.blocks.needs_keys,
            ignore_eos=parts.config.ignore_eos,
        )
        self.archive = Archive(rows)
        self.recorder = Recorder(parts.blocks.block_size)
        lengths = array("q", [row.output_length for row in rows])
        endings = Endings(lengths.__getitem__, parts.scheduler.longest_sequence)
        self.batch = batch = Batch(parts.blocks, endings)
        self.shortcuts = Shortcuts(batch, parts.scheduler, parts.cost, endings, asked)
        self._env = simpy.Environment()
        clients = Clients(self.requests, rows, release_times(rows, parts.config), parts.config)
        parts.future.fill(
            len(rows),
            lengths.__getitem__,
            self._prompt_keys,
            self.requests.admitted,
            clients.expected_ns,
        )
        full_plans = not declares_sums(parts.cost)
        link = Link(self._env, parts.link)
        host = SimulatedTime(self._env, parts.cost, link, clients, full_plans)
        loop = Loop(
            host,
            parts.scheduler,
            batch,
            record=self.recorder.packed,
            refused=refused,
            watcher=watcher,
            progress=progress,
            # A watcher looks at requests that are over.
            over=self._shelve if watcher is None else None,
            repetition=self.shortcuts.repetition(
                self.recorder, lambda now_ns: self._arrive(now_ns), host.upcoming, clients.listen
            ),
        )
        self._host, self._loop = host, loop
        self._env.process(loop.run())

    def play(self) -> Outcome:
        """Run the event loop until nothing more can happen."""
        env, batch = self._env, self.batch
        try:
            env.run()
        except EngineStopped as stop:
            batch.dissolve()
            return Outcome(
                stop.kind,
                int(env.now),
                len(self.recorder),
                stop.request_id,
                stop.explanation,
                stop.remedy,
                stop.rule,
            )
        except (OverflowError, struct.error):  # of the columns of steps, which hold 64 bits
            raise ConfigError(_TOO_LONG) from None
        batch.audit()
        if len(batch):
            return _deadlock(batch, int(env.now), len(self.recorder))
        return Outcome("finished", int(env.now), len(self.recorder))

    def record(self, outcome: Outcome) -> Callable[[], Books]:
        """What works out the columns of steps and requests, and where time and tokens went."""
        parts, requests, archive, recorder = self.parts, self.requests, self.archive, self.recorder
        blocks = parts.blocks
        for index in archive.missing():
            request = requests[index]
            if request.finish_ns < 0 and not request.reason:
                # It did not end by itself.
                request.reason = "not-served" if outcome.kind == "finished" else outcome.kind
            archive.add(request)
        prompts = requests.streams
        requests.let_all_go()
        columns = archive.columns()
        _check_sum(columns, outcome.time_ns)
        self.log = log = self.batch.transitions.columns()

        cost, in_flight = parts.cost, parts.scheduler.in_flight

        # It refers to no part that leads to the rows of the trace.
        def keep_books() -> Books:
            steps, times = account_times(cost, recorder.columns(), columns, log, in_flight)
            if not blocks.needs_keys:
                return steps, columns | times
            withheld, size = blocks.full_hit.withheld, blocks.block_size
            split = account_prompts(prompts, columns, log, size, withheld)
            return steps, columns | times | split

        return keep_books

    def _arrive(self, now_ns: int) -> float:
        """Takes in the requests sent until `now_ns`. Returns when the next one will be sent."""
        inbox = self._host.inbox
        inbox.collect(now_ns)
        self._loop.take_in(inbox.take())
        return inbox.next_ns

    def _prompt_keys(self, index: int, block_size: int) -> Sequence[int]:
        """Keys of the full blocks of a prompt, for oracles."""
        self._streams = self._streams or streams(self._trace)
        blocks = self._trace.rows[index].input_length // block_size
        return self._streams[index].keys(0, blocks, block_size)

    def _shelve(self, request: Request) -> None:
        """Keeps the results of a request that is over instead of the request, to save memory."""
        self.archive.add(request)
        self.requests.let_go(request)


def _tokens_known(rows: Sequence[Row]) -> bool:
    """Whether any request comes with real tokens."""
    return any(isinstance(row.content, TokenContent) for row in rows)


def _least_steps(rows: Sequence[Row], parts: Parts) -> int:
    """Steps that the outputs take, each step one token of as many sequences as may run."""
    outputs = [row.output_length for row in rows]
    full = sum(outputs) * parts.config.n // max(parts.scheduler.max_num_seqs, 1)
    return max([full, *outputs])


def _check_sum(requests: Mapping[str, Any], now_ns: int) -> None:
    """Refuse a result whose sums over requests would not fit into 64 bits."""
    released_ns, finish_ns = requests["released_ns"], requests["finish_ns"]
    ended = finish_ns >= 0
    spent_ns = (finish_ns - released_ns)[ended].sum(dtype=float)
    spent_ns += (float(now_ns) - released_ns[~ended]).sum(dtype=float)
    if max(spent_ns, now_ns) >= _LONGEST_NS:
        raise ConfigError(_TOO_LONG)


def _deadlock(batch: Batch, now_ns: int, step: int) -> Outcome:
    """Returns the outcome when nothing can be scheduled or arrive, naming the blocking request."""
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

"""One run: trace → requests → replica → result."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import simpy

from kvsim.assembly import Parts, assemble, ending_early
from kvsim.collector import collector_paused
from kvsim.config import RunConfig, load_config, make_config
from kvsim.engine.future import Future
from kvsim.engine.loop import Watcher
from kvsim.engine.request import Stream
from kvsim.errors import ConfigError, EngineStopped
from kvsim.limits import check_run
from kvsim.notes import one_of_several, unheeded_wishes
from kvsim.offload import role_of
from kvsim.replica.inbox import Inbox
from kvsim.result import Outcome, Result
from kvsim.serving import Serving
from kvsim.workload import open_trace
from kvsim.workload.arrivals import release_times
from kvsim.workload.clients import Clients
from kvsim.workload.keys import streams
from kvsim.workload.requests import Requests
from kvsim.workload.trace import Row, TokenContent, Trace

if TYPE_CHECKING:
    import numpy as np

Progress = Callable[[int], None]
Settings = RunConfig | Mapping[str, Any] | str | Path | None

_LONGEST_NS = 1 << 63
"""Sums of the times of all requests stay below this, as 64-bit integers."""
TOO_LONG = (
    "the run lasts too long for its result (292 years, all requests together); check the times of"
    " --cost-model, of cost.link and of the trace"
)


@collector_paused()
def simulate(
    trace: Trace | str | Path | None,
    config: Settings = None,
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
    config = read_config(config)
    if role_of(config):
        raise ConfigError(
            "kv_role: one engine is half of a prefill/decode split; give both sides, as in"
            " --prefill-replicas 1 --decode-replicas 1"
        )
    trace = opened(trace, config)
    rows = trace.rows[: config.num_prompts]
    errors: list[Outcome] = []
    asked = "exact_twin" if config.exact_twin else "" if watcher is None else "a watcher looks on"
    while True:
        parts = assembled(config, rows, bool(asked), parts_of)
        refused = {error.request: error.kind for error in errors}
        run = _Run(trace, rows, parts, refused, asked, watcher, progress)
        outcome = run.play()
        if config.on_engine_error == "stop" or outcome.request in ("", *refused):
            break
        errors.append(outcome)
    result = run.result(trace, outcome, errors, command)
    result.meta["notes"] += one_of_several(config)
    return result


def read_config(config: Settings) -> RunConfig:
    """The settings, from any form in which `simulate` takes them. Raises `ConfigError`."""
    if isinstance(config, RunConfig):
        return config
    if config is None or isinstance(config, Mapping):
        return make_config(config or {})
    return load_config(str(config))


def opened(trace: Trace | str | Path | None, config: RunConfig) -> Trace:
    """The trace, from any form in which `simulate` takes it. Raises `TraceError`."""
    if trace is None:
        from kvsim.workload.spec import trace_of

        return trace_of(config)
    return trace if isinstance(trace, Trace) else open_trace(str(trace))


def assembled(
    config: RunConfig,
    rows: Sequence[Row],
    named: bool,
    parts_of: Callable[[RunConfig, bool], Parts] = assemble,
) -> Parts:
    """The objects that settings stand for, to serve these rows; `named` as for `assemble`.

    Raises `ConfigError`, also for a run that would be too long.
    """
    given_up = any(row.abort_after_ns is not None for row in rows)
    if given_up:
        config = ending_early(config)
    parts = parts_of(config, named)
    if parts.blocks.prefixes_only and tokens_known(rows):
        parts = parts_of(config, True)
    unheeded = unheeded_wishes(rows, config, given_up and not parts.scheduler.ends_early)
    if unheeded:
        parts = parts._replace(notes=(*parts.notes, *unheeded))
    if parts.speculation is not None:
        parts.speculation.learn(rows)
    check_run(len(rows), _least_steps(rows, parts))
    return parts


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
        self._requests = Requests(
            rows,
            streams(trace) if parts.blocks.needs_keys else None,
            n=parts.config.n,
            ignore_eos=parts.config.ignore_eos,
        )
        lengths = array("q", [row.output_length for row in rows])
        self._env = simpy.Environment()
        clients = Clients(self._requests, rows, release_times(rows, parts.config), parts.config)
        show_future(parts.future, lengths, trace, self._requests, clients)
        self._serving = Serving(
            self._env,
            parts,
            rows,
            self._requests,
            Inbox(self._env, clients),
            lengths.__getitem__,
            refused=refused,
            asked=asked,
            watcher=watcher,
            progress=progress,
        )

    def play(self) -> Outcome:
        """Run the event loop until nothing more can happen."""
        env, serving = self._env, self._serving
        env.process(serving.run())
        try:
            env.run()
        except EngineStopped as stop:
            return serving.outcome(serving.now_ns, stop)
        except (OverflowError, struct.error):  # of the columns of steps, which hold 64 bits
            raise ConfigError(TOO_LONG) from None
        return serving.outcome(serving.now_ns)

    def result(self, trace: Trace, outcome: Outcome, errors: list[Outcome], command: str) -> Result:
        """What the engine did. `errors`: why earlier attempts ended."""
        archive = self._serving.archive
        made = self._serving.result(trace, outcome, archive.missing(), errors, command)
        self._requests.let_all_go()
        archive.let_rows_go()
        _check_sum(archive.column("released_ns"), archive.column("finish_ns"), outcome.time_ns)
        return made


def show_future(
    future: Future, lengths: Sequence[int], trace: Trace, requests: Requests, clients: Clients
) -> None:
    """Shows oracles the lengths of outputs, the keys of the full blocks of prompts, and when these
    come."""
    if not future.oracles:
        return  # It would keep the trace in memory when the run is over.
    known: list[Sequence[Stream]] = []

    def prompt_keys(index: int, block_size: int) -> Sequence[int]:
        if not known:
            known.append(streams(trace))
        blocks = trace.rows[index].input_length // block_size
        return known[0][index].keys(0, blocks, block_size)

    future.fill(
        len(requests), lengths.__getitem__, prompt_keys, requests.admitted, clients.expected_ns
    )


def tokens_known(rows: Sequence[Row]) -> bool:
    """Whether any request comes with real tokens."""
    return any(isinstance(row.content, TokenContent) for row in rows)


def _least_steps(rows: Sequence[Row], parts: Parts) -> int:
    """Steps that the outputs take, each step one token of as many sequences as may run, or with
    drafts as many tokens as can be accepted."""
    outputs = [row.output_length for row in rows]
    full = sum(outputs) * parts.config.n // max(parts.scheduler.max_num_seqs, 1)
    spec = parts.speculation
    return max([full, *outputs]) // (1 if spec is None else 1 + spec.proposer.num_spec_tokens)


def _check_sum(released_ns: np.ndarray, finish_ns: np.ndarray, now_ns: int) -> None:
    """Refuse a result whose sums over requests would not fit into 64 bits."""
    ended = finish_ns >= 0
    spent_ns = (finish_ns - released_ns)[ended].sum(dtype=float)
    spent_ns += (float(now_ns) - released_ns[~ended]).sum(dtype=float)
    if max(spent_ns, now_ns) >= _LONGEST_NS:
        raise ConfigError(TOO_LONG)

"""One attempt at a run: requests, clients and one engine, in simulated time."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence

import numpy as np
import simpy

from kvsim.core.host import NEVER_NS, Receiver
from kvsim.core.loop import Listeners
from kvsim.errors import ConfigError, EngineStopped
from kvsim.machine.hardware import FrontEndTimes
from kvsim.policies.future import Future
from kvsim.run.assembly import Parts
from kvsim.run.blame import raised_here
from kvsim.run.replica.inbox import Inbox, Mailbox, Senders
from kvsim.run.replica.time import Clock, Process
from kvsim.run.result import Outcome, Result
from kvsim.run.serving import Serving
from kvsim.workload.clients import Clients, Requests, release_times
from kvsim.workload.keys import streams
from kvsim.workload.streams import Stream
from kvsim.workload.trace import Row, Trace, column

_LONGEST_NS = 1 << 63
"""Sums of the times of all requests stay below this, as 64-bit integers."""
_TOO_LONG = (
    "the run lasts too long for its result (292 years, all requests together); check the times of"
    " --cost-model, of cost.link and of the trace"
)


class Attempt:
    """The objects that change while an attempt lasts."""

    def __init__(
        self,
        trace: Trace,
        rows: Sequence[Row],
        parts: Parts,
        refused: Mapping[str, str],
        listeners: Listeners,
    ) -> None:
        """`refused`: request id → why it is turned away."""
        self._requests = Requests(
            rows,
            streams(trace) if parts.blocks.needs_keys else None,
            n=parts.config.n,
            ignore_eos=parts.config.ignore_eos,
        )
        self._env = Clock()
        release_ns = array("q", release_times(rows, parts.config))
        clients = Clients(self._requests, rows, release_ns, parts.config)
        show_future(parts.future, trace, self._requests, clients)
        self._serving = Serving(
            self._env,
            parts,
            self._requests,
            received(self._env, clients, parts.front_end),
            listeners=listeners,
            refused=refused,
        )

    def play(self) -> Outcome:
        """Run the event loop until nothing more can happen."""
        serving = self._serving
        self._env.process(serving.run())
        try:
            play(self._env)
        except EngineStopped as stop:
            return serving.outcome(serving.now_ns, stop)
        return serving.outcome(serving.now_ns)

    def result(self, trace: Trace, outcome: Outcome, errors: list[Outcome], command: str) -> Result:
        """What the engine did. `errors`: why earlier attempts ended."""
        archive = self._serving.archive
        made = self._serving.result(trace, outcome, archive.missing(), errors, command)
        # The result needs neither requests nor rows: their memory may be freed.
        self._requests.let_all_go()
        archive.let_rows_go()
        _check_sum(archive.column("released_ns"), archive.column("finish_ns"), outcome.time_ns)
        return made


def play(env: simpy.Environment) -> None:
    """Run the event loop until nothing more can happen."""
    try:
        env.run()
    except (OverflowError, struct.error) as error:  # of the columns of steps, which hold 64 bits
        if not raised_here(error.__cause__ or error):
            raise
        raise ConfigError(_TOO_LONG) from None


def show_future(future: Future, trace: Trace, requests: Requests, clients: Clients) -> None:
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

    lengths = column(trace.rows, "output_length")
    future.fill(
        len(requests), lengths.__getitem__, prompt_keys, requests.admitted, clients.expected_ns
    )


def _check_sum(released_ns: np.ndarray, finish_ns: np.ndarray, now_ns: int) -> None:
    """Refuse a result whose sums over requests would not fit into 64 bits."""
    ended = finish_ns >= 0
    # In floats, as a sum of integers would overflow unnoticed.
    spent_ns = (finish_ns - released_ns)[ended].sum(dtype=float)
    spent_ns += (float(now_ns) - released_ns[~ended]).sum(dtype=float)
    if max(spent_ns, now_ns) >= _LONGEST_NS:
        raise ConfigError(_TOO_LONG)


def received(env: Clock, clients: Senders, times: FrontEndTimes | None) -> Receiver:
    """Where the requests of these clients reach the engine: behind a front end, if it has times.

    ```
     clients ──► inbox ──► front end ──all that came, together──► mailbox ──► engine
                             └─ one at a time: HTTP, chat template, tokenizer
    ```
    vLLM's is one event loop. It begins with each request that has come, and goes on with none of
    them before it has begun with all. So requests that come while it is at work wait until it is
    done, are prepared one after another, and reach the engine at once. That is how a thousand
    requests of the same instant wait for each other (`docs/results/real-runs.md`).
    """
    inbox = Inbox(env, clients)
    if times is None:
        return inbox
    mailbox = Mailbox(env, env.peek, inbox.release)
    env.process(_prepare(env, inbox, times, mailbox))
    return mailbox


def _prepare(env: Clock, inbox: Inbox, times: FrontEndTimes, mailbox: Mailbox) -> Process:
    while True:
        inbox.collect(int(env.now))
        came = inbox.take()
        if not came:
            yield from inbox.wait(NEVER_NS)
            continue
        yield env.timeout(sum(times.request_ns(request.input_length) for request in came))
        for request in came:
            mailbox.put(request)

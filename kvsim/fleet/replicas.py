"""The replicas behind one router at work: in one event loop, or apart.

They can be simulated apart if nothing in them changes what any of them is sent. Then the router's
decisions come first, and each replica runs by itself, in any process and any order, with the same
results.
"""

from __future__ import annotations

import pickle
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import simpy

from kvsim.core.loop import Listeners
from kvsim.core.request import Request
from kvsim.engines.memory import captured_tokens
from kvsim.errors import ConfigError, EngineStopped
from kvsim.fleet.dispatch import Decisions, Dispatch
from kvsim.fleet.result import FleetResult
from kvsim.fleet.routers.router import Router, asked_of
from kvsim.run.assembly import Parts
from kvsim.run.attempt import play
from kvsim.run.blame import blaming
from kvsim.run.replica.inbox import Inbox, Senders
from kvsim.run.replica.time import Clock, Process, Ranks
from kvsim.run.result import Outcome, Result
from kvsim.run.serving import Serving
from kvsim.run.simulation import assembled
from kvsim.run.workers import in_processes, unpickled
from kvsim.settings.config import RunConfig
from kvsim.settings.library import overridden
from kvsim.workload.clients import NOTHING, Released, Requests, waits_for
from kvsim.workload.keys import streams
from kvsim.workload.streams import Streams
from kvsim.workload.trace import Row, Trace, bare


class Sent(NamedTuple):
    """What a router is sent."""

    requests: Requests
    clients: Senders


class Replicas:
    """The replicas behind one router: the objects that change while a run lasts."""

    def __init__(
        self,
        env: simpy.Environment,
        load: Load,
        sent: Sent,
        parts: Sequence[Parts],
        router: Router,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._env, self._requests, self._router = env, sent.requests, router
        self._trace = load.trace
        self.dispatch = Dispatch(env, sent.clients, router, len(load.rows), load.streams)
        self._stops: list[Outcome | None] = [None] * len(parts)
        self._ranks = _in_lock_step(env, parts, [each.wake for each in self.dispatch.mailboxes])
        news = self.dispatch.news
        for number, each in enumerate(parts):
            serving = Serving(
                env,
                each,
                sent.requests,
                self.dispatch.mailboxes[number],
                listeners=Listeners(
                    progress=progress,
                    step_over=news.subscribe(number, each) if router.heeds_events else None,
                ),
                ranks=self._ranks,
            )
            self.dispatch.servings.append(serving)
            env.process(self._serve(number, serving))

    def played(self, router: str, args: dict[str, Any], command: str, explain: bool) -> FleetResult:
        """Runs the event loop until nothing more can happen, and returns what came of it."""
        if explain:
            self.explain()
        play(self._env)
        servings, chosen = self.dispatch.servings, list(self.dispatch.chosen)
        made = self.results(command, max(serving.now_ns for serving in servings))
        indexes = [serving.indexes for serving in servings]
        return FleetResult(router, args, made, indexes, chosen, self.decisions())

    def explain(self) -> None:
        """Notes what each decision of the router chooses from."""
        blocks = [serving.batch.blocks for serving in self.dispatch.servings]
        requests = self._requests
        self.dispatch.decisions = Decisions(self._router, blocks, requests.streams, len(requests))

    def decisions(self) -> dict[str, np.ndarray] | None:
        """Columns of `kvsim.core.schema.ROUTING`, if they were asked for."""
        noted = self.dispatch.decisions
        return None if noted is None else noted.columns()

    def _serve(self, number: int, serving: Serving) -> Process:
        """Runs a replica. If its engine stops, the others go on without it."""
        try:
            yield from serving.run()
        except EngineStopped as stop:
            self._stops[number] = serving.outcome(serving.now_ns, stop)
            self.dispatch.lost(number)
            if self._ranks is not None:
                self._ranks.leave()

    def results(self, command: str, now_ns: int, unsent: int = 0) -> list[Result]:
        """Returns what each replica did until `now_ns`. Requests that were sent to nobody are
        listed with those of the replica `unsent`; -1: nowhere."""
        made = []
        where = np.array(self.dispatch.chosen)
        # They are in somebody's table, so that the tables of all replicas add up to the trace.
        where[where < 0] = unsent
        for number, serving in enumerate(self.dispatch.servings):
            own, over = np.flatnonzero(where == number), serving.archive.column("index")
            missing = np.setdiff1d(own, over, assume_unique=True).tolist()
            outcome = self._stops[number] or serving.outcome(now_ns)
            made.append(serving.result(self._trace, outcome, missing, [], command))
        self._requests.let_all_go()
        return made


def _in_lock_step(
    env: simpy.Environment, parts: Sequence[Parts], wakers: Sequence[Callable[[], None]]
) -> Ranks | None:
    """Returns the ranks of one engine if that is what the replicas are, and if their steps depend
    on each other: if the model has experts (vLLM 0.33.0, v1/engine/core.py, `run_engine_core`).

    Raises `ConfigError` if copies between GPU and CPU would make one of them late.
    """
    sizes = {each.config.data_parallel_size for each in parts}
    first = parts[0]
    if len(parts) == 1 or sizes != {len(parts)} or first.model.experts is None:
        return None
    if first.offload is not None or first.config.preemption_mode in ("swap", "auto"):
        raise ConfigError(
            "data_parallel_size: ranks that step together are simulated without copies between GPU"
            " and CPU; leave out kv_offloading_size, and preempt by recompute"
        )
    if (first.config.prefill_schedule_interval or 1) > 1:
        raise ConfigError(
            "prefill_schedule_interval: ranks that share experts count its steps together, which is"
            " not simulated; leave it out"
        )
    tokens, seqs = first.scheduler.max_num_batched_tokens, first.scheduler.max_num_seqs
    graphs = 0 if first.config.enforce_eager else captured_tokens(tokens, seqs)
    return Ranks(env, wakers, graphs)


_OWN = {
    *("__init__", "choose", "route", "sent", "worker_lost", "worker_added"),
    *("expected", "index_limit_tokens"),
}
"""What a router may override without heeding workers that stay alive."""
_WORTHWHILE = 10_000
"""Requests from which on further processes save more time than they take to start."""


@dataclass(frozen=True)
class Load:
    """What clients send, whatever becomes of it."""

    trace: Trace
    rows: Sequence[Row]
    release_ns: Sequence[int]
    """When each request is sent."""
    samples: int
    """Samples of each request."""
    ignore_eos: bool

    @cached_property
    def streams(self) -> Streams:
        """What each row of the trace says."""
        return streams(self.trace)

    def __getstate__(self) -> dict[str, Any]:
        # Another process makes its streams itself: they are as quickly made as sent.
        return {key: value for key, value in vars(self).items() if key != "streams"}

    def requests(self, keyed: bool, kv_transfer: str = "") -> Requests:
        """New requests; `keyed`: with block identities. `kv_transfer`: as in `Requests`."""
        known, samples = self.streams if keyed else None, self.samples
        return Requests(
            self.rows, known, n=samples, ignore_eos=self.ignore_eos, kv_transfer=kv_transfer
        )


class Share(NamedTuple):
    """What one replica serves."""

    config: RunConfig
    indexes: Sequence[int]
    """Its requests, in the order in which they are sent."""


def heeds_replicas(router: Router) -> bool:
    """Whether anything that happens in a living replica may change the router's decisions."""
    interval_ns = router.scrape_ns, router.tick_ns
    return (
        router.heeds_events or interval_ns != (None, None) or not overridden(router, Router) <= _OWN
    )


def clients_wait(rows: Sequence[Row], config: RunConfig) -> bool:
    """Whether any request is sent only after another one has ended."""
    return config.max_concurrency is not None or max(waits_for(rows, config), default=-1) >= 0


def routed(load: Load, router: Router) -> array[int]:
    """The replica of each request of a router that heeds none of them."""
    chosen, everyone = array("q", [-1]) * len(load.rows), list(range(len(router.workers)))
    row = bare(load.rows)
    # Stable: requests of the same instant are routed in the order of the trace.
    for index in sorted(range(len(load.rows)), key=load.release_ns.__getitem__):
        asked = asked_of(row(index), load.streams)
        chosen[index] = router.route(asked, everyone, load.release_ns[index]).worker
    return chosen


def serve_apart(
    load: Load,
    configs: Sequence[RunConfig],
    chosen: Sequence[int],
    command: str,
    jobs: int | None,
    progress: Callable[[int], None] | None,
) -> list[Result] | None:
    """What the replicas do with the requests chosen for them, in at most `jobs` processes.

    None if an engine stops, after which a router would send it nothing, or if an oracle has to be
    shown the requests of all.
    """
    indexes: list[list[int]] = [[] for _ in configs]
    for index in sorted(range(len(chosen)), key=load.release_ns.__getitem__):
        indexes[chosen[index]].append(index)
    shares = [Share(*each) for each in zip(configs, indexes, strict=True)]
    results = []
    if jobs is None and len(chosen) >= _WORTHWHILE:
        from joblib import cpu_count

        jobs = cpu_count()
    served = _all_served(load, shares, command, min(jobs or 1, len(shares)))
    for share, result in zip(shares, served, strict=True):
        if result is None:
            return None
        results.append(result)
        if progress is not None:
            progress(len(share.indexes))
    # All of them are there until the last one is done.
    end_s = max(result.meta["outcome"]["time_s"] for result in results)
    for result in results:
        result.meta["outcome"]["time_s"] = end_s
    return results


def _all_served(
    load: Load, shares: Sequence[Share], command: str, number: int
) -> Iterator[Result | None]:
    if number <= 1:
        yield from (_served(load, share, command) for share in shares)
        return
    with tempfile.TemporaryDirectory(prefix="kvsim-") as folder:
        path = Path(folder) / "load"
        path.write_bytes(pickle.dumps(load))
        tasks = ((str(path), share, command) for share in shares)
        yield from in_processes(_served_from, tasks, number)


def _served_from(path: str, share: Share, command: str) -> Result | None:
    with blaming(share.config):
        return _served(unpickled(path), share, command)


def _served(load: Load, share: Share, command: str) -> Result | None:
    """Runs one replica. None if its engine stops, or if it has an oracle."""
    config = share.config
    rows = [load.rows[index] for index in share.indexes]
    parts = assembled(config, rows)
    if parts.future.oracles:
        return None
    env = Clock()
    requests = load.requests(parts.blocks.needs_keys)
    inbox = Inbox(env, _Sender(requests, load.release_ns, share.indexes))
    serving = Serving(env, parts, requests, inbox)
    env.process(serving.run())
    try:
        play(env)
    except EngineStopped:
        return None
    outcome = serving.outcome(serving.now_ns)
    stored = set(serving.archive.column("index").tolist())
    missing = sorted(set(share.indexes) - stored)
    result = serving.result(load.trace, outcome, missing, [], command)
    requests.let_all_go()
    return result


class _Sender:
    """Sends one replica its requests, each at its time."""

    listen = False

    def __init__(
        self, requests: Requests, release_ns: Sequence[int], indexes: Sequence[int]
    ) -> None:
        self._requests, self._release_ns, self._indexes = requests, release_ns, indexes

    def start(self) -> Iterator[tuple[int, Request]]:
        """The requests as (time in ns, request), in order of time."""
        return ((self._release_ns[index], self._requests[index]) for index in self._indexes)

    def offer(self, request: Request, now_ns: int) -> bool:
        """Sends a request: nobody is held back."""
        request.released_ns = request.arrival_ns = now_ns
        return True

    def ended(self, request: Request, now_ns: int) -> Released:
        """No request depends on another one."""
        return NOTHING

"""The replicas behind one router at work in one event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import simpy

from kvsim.engines.memory import captured_tokens
from kvsim.errors import ConfigError, EngineStopped
from kvsim.fleet.apart import Load
from kvsim.fleet.dispatch import Decisions, Dispatch
from kvsim.fleet.result import FleetResult
from kvsim.fleet.routers.router import Router
from kvsim.run.assembly import Parts
from kvsim.run.attempt import play
from kvsim.run.replica.events import Process
from kvsim.run.replica.inbox import Senders
from kvsim.run.replica.lockstep import Ranks
from kvsim.run.result import Outcome, Result
from kvsim.run.serving import Serving
from kvsim.workload.clients import Requests


class Sent(NamedTuple):
    """What a router is sent."""

    requests: Requests
    clients: Senders
    lengths: Sequence[int]
    """How long each output becomes."""


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
        self.dispatch = Dispatch(env, sent.clients, router, load.rows, load.streams)
        self._stops: list[Outcome | None] = [None] * len(parts)
        self._ranks = _in_lock_step(env, parts, [each.wake for each in self.dispatch.mailboxes])
        news = self.dispatch.news
        for number, each in enumerate(parts):
            serving = Serving(
                env,
                each,
                load.rows,
                sent.requests,
                self.dispatch.mailboxes[number],
                sent.lengths.__getitem__,
                refused={},
                step_over=news.subscribe(number, each) if router.heeds_events else None,
                progress=progress,
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
        where[where < 0] = unsent
        for number, serving in enumerate(self.dispatch.servings):
            missing = [index for index in serving.archive.missing() if where[index] == number]
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

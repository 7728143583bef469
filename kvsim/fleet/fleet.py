"""Runs a trace through several replicas behind a router."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import simpy

from kvsim.assembly import Parts
from kvsim.collector import collector_paused
from kvsim.config import RunConfig
from kvsim.engines.vllm_memory import captured_tokens
from kvsim.errors import ConfigError, EngineStopped
from kvsim.fleet.apart import Load, clients_wait, heeds_replicas, routed, serve_apart
from kvsim.fleet.decisions import Decisions
from kvsim.fleet.dispatch import Dispatch
from kvsim.fleet.settings import load_settings
from kvsim.replica.events import Process
from kvsim.replica.lockstep import Ranks
from kvsim.result import Outcome, Result
from kvsim.routers import ROUTERS, make_router
from kvsim.routers.router import Router
from kvsim.run import (
    TOO_LONG,
    Settings,
    assembled,
    opened,
    read_config,
    show_future,
    tokens_known,
)
from kvsim.serving import Serving
from kvsim.workload.arrivals import release_times
from kvsim.workload.clients import Clients
from kvsim.workload.trace import Trace


@dataclass
class FleetResult:
    """What several replicas did with one trace."""

    router: str
    router_args: dict[str, Any]
    replicas: list[Result]
    """A result for each replica, with the requests that it was sent."""
    indexes: list[np.ndarray]
    """The requests of each replica, as places in the trace."""
    chosen: Sequence[int]
    """The replica of each request, in the order of the trace; -1: it was sent to none."""
    decisions: Mapping[str, np.ndarray] | None = None
    """Columns of `kvsim.schema.ROUTING`, if they were asked for."""

    @cached_property
    def requests(self) -> dict[str, Any]:
        """The requests of all replicas in the order of the trace, with the column `replica`."""
        return together([each.requests for each in self.replicas], self.indexes, self.chosen)


def together(
    each: Sequence[Mapping[str, Any]], indexes: Sequence[np.ndarray], chosen: Sequence[int]
) -> dict[str, Any]:
    """Returns the requests of all replicas in the order of the trace, with the column `replica`.

    `indexes`: the requests of each replica, as places in the trace; `chosen`: the replica of each.
    A column that not all have, because some have no prefix cache, is left out.
    """
    places = np.concatenate(indexes)
    order = np.argsort(places, kind="stable")
    joined: dict[str, Any] = {}
    for name in each[0]:
        if not all(name in columns for columns in each):
            continue
        values = [columns[name] for columns in each]
        if isinstance(values[0], np.ndarray):
            joined[name] = np.concatenate(values)[order]
        else:
            flat = [value for column in values for value in column]
            joined[name] = [flat[place] for place in order]
    return {**joined, "index": places[order], "replica": np.array(chosen)[places[order]]}


@collector_paused()
def simulate_fleet(
    trace: Trace | str | Path | None,
    configs: Sequence[Settings],
    router: str = "round-robin",
    router_args: Mapping[str, Any] | None = None,
    *,
    explain: bool = False,
    jobs: int | None = 1,
    progress: Callable[[int], None] | None = None,
    command: str = "",
) -> FleetResult:
    """Replays a trace through replicas, each with settings of its own, behind a router.

    `configs` are the settings of each replica, in any form that `simulate` takes. All of them say
    the same of how clients send; each has a `seed` of its own for rules that draw, and arrivals are
    drawn from that of the first one. `router` is a name of `kvsim.routers.ROUTERS` or a
    `package.module:Class`, `router_args` are arguments of its constructor. `explain`: note what
    each decision chose from, which asks every replica's cache about every request.

    Where nothing in a replica changes what any of them is sent, they run apart, in at most `jobs`
    processes with equal results, unless decisions are explained; None: one per core, if there are
    many requests.

    Replicas with a `data_parallel_size` of their number are the ranks of one engine, which step
    together if the model has experts. A replica whose engine stops with an error gets no more
    requests; the others go on. Raises `TraceError` and `ConfigError`.
    """
    known = _read_all(configs)
    first, args = known[0], dict(router_args or {})
    trace = opened(trace, first)
    rows = trace.rows[: first.num_prompts]
    load = Load(trace, rows, release_times(rows, first), first.n, first.ignore_eos)
    named = [f"replica-{number}" for number in range(len(known))]
    size = assembled(first, rows, named=False).blocks.block_size

    def new_router() -> Router:
        return make_router(router, args, named, seed=first.seed, block_size=size)

    chooser = new_router()
    coupled = first.data_parallel_size > 1 or heeds_replicas(chooser) or clients_wait(rows, first)
    if not (explain or coupled):
        chosen = routed(load, chooser)
        apart = serve_apart(load, known, chosen, command, jobs, progress)
        if apart is not None:
            where = np.array(chosen)
            indexes = [np.flatnonzero(where == number) for number in range(len(known))]
            return FleetResult(router, args, apart, indexes, list(chosen))
        chooser = new_router()
    fleet = _together(load, known, chooser, router, progress)
    if explain:
        fleet.explain(chooser)
    fleet.play()
    replicas, dispatch = fleet.results(trace, command), fleet.dispatch
    indexes = [serving.indexes for serving in dispatch.servings]
    decisions = None if dispatch.decisions is None else dispatch.decisions.columns()
    return FleetResult(router, args, replicas, indexes, list(dispatch.chosen), decisions)


def _read_all(configs: Sequence[Settings]) -> list[RunConfig]:
    """Returns the settings of the replicas. Raises `ConfigError`, also where they do not agree on
    how requests are sent."""
    known = [read_config(config) for config in configs]
    if not known:
        raise ConfigError("replicas: give at least one")
    if any(config.on_engine_error == "reject" for config in known):
        raise ConfigError(
            "on_engine_error: reject is for one engine; a replica that stops gets no more requests"
        )
    for key in sorted(load_settings() - {"seed"}):
        for number, config in enumerate(known):
            if getattr(config, key) != getattr(known[0], key):
                raise ConfigError(
                    f"replica {number}: {key} says how requests are sent to all replicas; give each"
                    " of them the same"
                )
    return known


def _together(
    load: Load,
    configs: Sequence[RunConfig],
    router: Router,
    name: str,
    progress: Callable[[int], None] | None,
) -> _Fleet:
    """Returns the replicas in one event loop. `name`: the router's. Raises `ConfigError`."""
    # What a cache without block ids reports leaves out blocks that no other request can hit.
    told = "an outsider's router hears of every block" if _tells_all(router) else ""
    asked = ["exact_twin" if config.exact_twin else told for config in configs]
    keyed = router.heeds_events and tokens_known(load.rows)
    parts = [
        assembled(config, load.rows, bool(why) or keyed)
        for config, why in zip(configs, asked, strict=True)
    ]
    sizes = {each.blocks.block_size for each in parts}
    if router.heeds_events and len(sizes) > 1:
        raise ConfigError(
            f"block_size: {name} goes by KV events, so blocks of all replicas need one size, and"
            f" here are {', '.join(map(str, sorted(sizes)))}"
        )
    return _Fleet(load, parts, asked, router, progress)


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
    tokens, seqs = first.scheduler.max_num_batched_tokens, first.scheduler.max_num_seqs
    graphs = 0 if first.config.enforce_eager else captured_tokens(tokens, seqs)
    return Ranks(env, wakers, graphs)


def _tells_all(router: Router) -> bool:
    """Whether a router is somebody's own, and hears of blocks."""
    return router.heeds_events and type(router) not in ROUTERS.values()


class _Fleet:
    """The objects that change while a run of several replicas lasts."""

    def __init__(
        self,
        load: Load,
        parts: Sequence[Parts],
        asked: Sequence[str],
        router: Router,
        progress: Callable[[int], None] | None,
    ) -> None:
        """`asked`: why a replica has no short cuts."""
        config, rows, trace = parts[0].config, load.rows, load.trace
        self._requests = requests = load.requests(any(each.blocks.needs_keys for each in parts))
        lengths = array("q", [row.output_length for row in rows])
        self._env = env = simpy.Environment()
        clients = Clients(requests, rows, load.release_ns, config)
        self.dispatch = Dispatch(env, clients, router, rows, load.streams)
        self._stops: list[Outcome | None] = [None] * len(parts)
        self._ranks = _in_lock_step(env, parts, [each.wake for each in self.dispatch.mailboxes])
        news = self.dispatch.news
        hears = router.heeds_events or router.scrape_ns is not None
        for number, each in enumerate(parts):
            show_future(each.future, lengths, trace, requests, clients)
            serving = Serving(
                env,
                each,
                rows,
                requests,
                self.dispatch.mailboxes[number],
                lengths.__getitem__,
                refused={},
                asked=asked[number] or ("ranks step together" if self._ranks else ""),
                stepwise="the router hears of each step" if hears else "",
                step_over=news.subscribe(number, each.blocks) if router.heeds_events else None,
                progress=progress,
                ranks=self._ranks,
            )
            self.dispatch.servings.append(serving)
            env.process(self._serve(number, serving))

    def explain(self, router: Router) -> None:
        """Notes what each decision of the router chooses from."""
        blocks = [serving.batch.blocks for serving in self.dispatch.servings]
        requests = self._requests
        self.dispatch.decisions = Decisions(router, blocks, requests.streams, len(requests))

    def _serve(self, number: int, serving: Serving) -> Process:
        """Runs a replica. If its engine stops, the others go on without it."""
        try:
            yield from serving.run()
        except EngineStopped as stop:
            self._stops[number] = serving.outcome(serving.now_ns, stop)
            self.dispatch.lost(number)
            if self._ranks is not None:
                self._ranks.leave()

    def play(self) -> None:
        """Runs the event loop until nothing more can happen."""
        try:
            self._env.run()
        except (OverflowError, struct.error):  # of the columns of steps, which hold 64 bits
            raise ConfigError(TOO_LONG) from None

    def results(self, trace: Trace, command: str) -> list[Result]:
        """Returns what each replica did."""
        servings = self.dispatch.servings
        made, now_ns = [], max(serving.now_ns for serving in servings)
        # A request that was sent to nobody is listed with those of the first replica.
        where = np.maximum(np.array(self.dispatch.chosen), 0)
        for number, serving in enumerate(servings):
            missing = [index for index in serving.archive.missing() if where[index] == number]
            outcome = self._stops[number] or serving.outcome(now_ns)
            made.append(serving.result(trace, outcome, missing, [], command))
        self._requests.let_all_go()
        return made

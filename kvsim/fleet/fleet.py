"""Runs a trace through several replicas behind a router."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import simpy

from kvsim.assembly import Parts, assemble
from kvsim.collector import collector_paused
from kvsim.config import RunConfig
from kvsim.engine.request import DECODE, PREFILL
from kvsim.engines.vllm_memory import captured_tokens
from kvsim.errors import ConfigError, EngineStopped
from kvsim.fleet.apart import Load, clients_wait, heeds_replicas, routed, serve_apart
from kvsim.fleet.decisions import Decisions
from kvsim.fleet.dispatch import Dispatch
from kvsim.fleet.handovers import Sides, Ways, sides_of, together
from kvsim.fleet.proxy import Back, Front, Proxy, check_sides, split_roles
from kvsim.fleet.settings import load_settings
from kvsim.records.tally import Tally
from kvsim.replica.events import Process
from kvsim.replica.inbox import Senders
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
from kvsim.workload.requests import Requests
from kvsim.workload.trace import Trace

PartsOf = Callable[[RunConfig, bool], Parts]
"""Turns settings into the objects of a run, as `kvsim.assembly.assemble` does."""


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
    """The replica of each request, in the order of the trace, or that of its prompt; -1: it was
    sent to none."""
    decisions: Mapping[str, np.ndarray] | None = None
    """Columns of `kvsim.schema.ROUTING`, if they were asked for."""
    ways: Ways | None = None
    """How requests went through a prefill/decode split; None without one."""

    @cached_property
    def requests(self) -> dict[str, Any]:
        """The requests of all replicas in the order of the trace, with the column `replica`."""
        if self._sides is not None:
            return self._sides.whole()
        return together([each.requests for each in self.replicas], self.indexes, self.chosen)

    @cached_property
    def handovers(self) -> dict[str, np.ndarray] | None:
        """Columns of `kvsim.schema.HANDOVERS`; None without a prefill/decode split."""
        if self.ways is None or self._sides is None:
            return None
        return self._sides.handovers(self.ways.handovers)

    @cached_property
    def token_gaps_ns(self) -> Tally:
        """Time between consecutive tokens of a sequence → how often it occurred."""
        gaps = Tally()
        for replica in self.replicas:
            for number, times in zip(*replica.token_gaps_ns.arrays(), strict=True):
                gaps.add(int(number), int(times))
        return gaps

    @cached_property
    def _sides(self) -> Sides | None:
        if self.ways is None:
            return None
        each = [one.requests for one in self.replicas]
        return sides_of(each, self.indexes, self.ways.roles, self.chosen, self.ways.decoders)


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
    parts_of: PartsOf = assemble,
) -> FleetResult:
    """Replays a trace through replicas, each with settings of its own, behind a router.

    `configs` are the settings of each replica, in any form that `simulate` takes. Those of the
    first one say how clients send, whatever the others say; each keeps its `seed` for rules that
    draw. `router` is a name of `kvsim.routers.ROUTERS` or a `package.module:Class`, `router_args`
    are arguments of its constructor. `explain`: note what each decision chose from, which asks
    every replica's cache about every request. `parts_of` is that of `kvsim.run.simulate`.

    Where nothing in a replica changes what any of them is sent, they run apart, in at most `jobs`
    processes with equal results, unless decisions are explained; None: one per core, if there are
    many requests.

    Replicas with a `kv_role` in their `kv_transfer_config` split prefill and decode
    (`kvsim.fleet.proxy`). Each side has a router of its own, of this name; the decisions noted are
    those about prompts.

    Replicas with a `data_parallel_size` of their number are the ranks of one engine, which step
    together if the model has experts. A replica whose engine stops with an error gets no more
    requests; the others go on. Raises `TraceError` and `ConfigError`.
    """
    known = _read_all(configs)
    first, args = known[0], dict(router_args or {})
    trace = opened(trace, first)
    rows = trace.rows[: first.num_prompts]
    load = Load(trace, rows, release_times(rows, first), first.n, first.ignore_eos)
    everyone = range(len(known))
    size = assembled(first, rows, named=False).blocks.block_size

    def new_router(numbers: Sequence[int]) -> Router:
        own = [f"replica-{number}" for number in numbers]
        return make_router(router, args, own, seed=first.seed, block_size=size)

    roles = split_roles(known, rows)
    if roles:
        parts = [assembled(config, rows, True, parts_of) for config in known]
        split = _Split(load, parts, roles, new_router, progress)
        return split.played(router, args, command, explain)
    chooser = new_router(everyone)
    coupled = first.data_parallel_size > 1 or heeds_replicas(chooser) or clients_wait(rows, first)
    if not (explain or coupled) and parts_of is assemble:
        chosen = routed(load, chooser)
        apart = serve_apart(load, known, chosen, command, jobs, progress)
        if apart is not None:
            where = np.array(chosen)
            indexes = [np.flatnonzero(where == number) for number in everyone]
            return FleetResult(router, args, apart, indexes, list(chosen))
        chooser = new_router(everyone)
    fleet = _together(load, known, chooser, router, progress, parts_of)
    return fleet.played(router, args, command, explain)


def _read_all(configs: Sequence[Settings]) -> list[RunConfig]:
    """Returns the settings of the replicas, all with the load of the first one: an engine is built
    for the number of samples that its requests have. Raises `ConfigError`."""
    known = [read_config(config) for config in configs]
    if not known:
        raise ConfigError("replicas: give at least one")
    if any(config.on_engine_error == "reject" for config in known):
        raise ConfigError(
            "on_engine_error: reject is for one engine; a replica that stops gets no more requests"
        )
    sent = {key: getattr(known[0], key) for key in load_settings() - {"seed"}}
    return [msgspec.structs.replace(config, **sent) for config in known]


def _together(
    load: Load,
    configs: Sequence[RunConfig],
    router: Router,
    name: str,
    progress: Callable[[int], None] | None,
    parts_of: PartsOf,
) -> _Fleet:
    """Returns the replicas in one event loop. `name`: the router's. Raises `ConfigError`."""
    # What a cache without block ids reports leaves out blocks that no other request can hit.
    told = "an outsider's router hears of every block" if _tells_all(router) else ""
    asked = ["exact_twin" if config.exact_twin else told for config in configs]
    keyed = router.heeds_events and tokens_known(load.rows)
    parts = [
        assembled(config, load.rows, bool(why) or keyed, parts_of)
        for config, why in zip(configs, asked, strict=True)
    ]
    sizes = {each.blocks.block_size for each in parts}
    if router.heeds_events and len(sizes) > 1:
        raise ConfigError(
            f"block_size: {name} goes by KV events, so blocks of all replicas need one size, and"
            f" here are {', '.join(map(str, sorted(sizes)))}"
        )
    keyed = any(each.blocks.needs_keys for each in parts)
    env, requests = simpy.Environment(), load.requests(keyed)
    clients = Clients(requests, load.rows, load.release_ns, parts[0].config)
    sent = _Sent(requests, clients, array("q", [row.output_length for row in load.rows]))
    for each in parts:
        show_future(each.future, sent.lengths, load.trace, requests, clients)
    return _Fleet(env, load, sent, parts, asked, router, progress)


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


class _Sent(NamedTuple):
    """What a router is sent."""

    requests: Requests
    clients: Senders
    lengths: Sequence[int]
    """How long each output becomes."""


class _Fleet:
    """The replicas behind one router: the objects that change while a run lasts."""

    def __init__(
        self,
        env: simpy.Environment,
        load: Load,
        sent: _Sent,
        parts: Sequence[Parts],
        asked: Sequence[str],
        router: Router,
        progress: Callable[[int], None] | None,
    ) -> None:
        """`asked`: why a replica has no short cuts."""
        self._env, self._requests, self._router = env, sent.requests, router
        self._trace = load.trace
        self.dispatch = Dispatch(env, sent.clients, router, load.rows, load.streams)
        self._stops: list[Outcome | None] = [None] * len(parts)
        self._ranks = _in_lock_step(env, parts, [each.wake for each in self.dispatch.mailboxes])
        news = self.dispatch.news
        hears = router.heeds_events or router.scrape_ns is not None
        for number, each in enumerate(parts):
            serving = Serving(
                env,
                each,
                load.rows,
                sent.requests,
                self.dispatch.mailboxes[number],
                sent.lengths.__getitem__,
                refused={},
                asked=asked[number] or ("ranks step together" if self._ranks else ""),
                stepwise="the router hears of each step" if hears else "",
                step_over=news.subscribe(number, each.blocks) if router.heeds_events else None,
                progress=progress,
                ranks=self._ranks,
            )
            self.dispatch.servings.append(serving)
            env.process(self._serve(number, serving))

    def played(self, router: str, args: dict[str, Any], command: str, explain: bool) -> FleetResult:
        """Runs the event loop until nothing more can happen, and returns what came of it."""
        if explain:
            self.explain()
        _play(self._env)
        dispatch, replicas = self.dispatch, self.results(command, int(self._env.now))
        indexes = [serving.indexes for serving in dispatch.servings]
        return FleetResult(router, args, replicas, indexes, list(dispatch.chosen), self.decisions())

    def explain(self) -> None:
        """Notes what each decision of the router chooses from."""
        blocks = [serving.batch.blocks for serving in self.dispatch.servings]
        requests = self._requests
        self.dispatch.decisions = Decisions(self._router, blocks, requests.streams, len(requests))

    def decisions(self) -> dict[str, np.ndarray] | None:
        """Columns of `kvsim.schema.ROUTING`, if they were asked for."""
        noted = self.dispatch.decisions
        return None if noted is None else noted.columns()

    def _serve(self, number: int, serving: Serving) -> Process:
        """Runs a replica. If its engine stops, the others go on without it."""
        try:
            yield from serving.run()
        except EngineStopped as stop:
            self._stops[number] = serving.outcome(int(self._env.now), stop)
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


class _Split:
    """Prefill replicas behind one router and decode replicas behind another."""

    def __init__(
        self,
        load: Load,
        parts: Sequence[Parts],
        roles: tuple[str, ...],
        router_of: Callable[[Sequence[int]], Router],
        progress: Callable[[int], None] | None,
    ) -> None:
        """`roles`: that of each replica. `router_of` makes a router for replicas, by number."""
        check_sides(parts)
        self._env = env = simpy.Environment()
        self._roles = roles
        lengths = array("q", [row.output_length for row in load.rows])
        prompts, outputs = load.requests(True, PREFILL), load.requests(True, DECODE)
        clients = Clients(prompts, load.rows, load.release_ns, parts[0].config)
        for number, each in enumerate(parts):
            requests = prompts if roles[number] == PREFILL else outputs
            show_future(each.future, lengths, load.trace, requests, clients)
        self._proxy = proxy = Proxy(clients, outputs)
        one_token = array("q", [1]) * len(lengths)

        def side(role: str, sent: _Sent, told: Callable[[int], None] | None) -> _Fleet:
            numbers = self._numbers(role)
            own = [parts[number] for number in numbers]
            asked = ["exact_twin" if each.config.exact_twin else "" for each in own]
            return _Fleet(env, load, sent, own, asked, router_of(numbers), told)

        self._prefill = side(PREFILL, _Sent(prompts, Front(proxy), one_token), None)
        self._decode = side(DECODE, _Sent(outputs, Back(proxy), lengths), progress)
        proxy.connect(env, self._prefill.dispatch, self._decode.dispatch)

    def _numbers(self, role: str) -> list[int]:
        """The replicas with a role."""
        return [number for number, each in enumerate(self._roles) if each == role]

    def played(self, router: str, args: dict[str, Any], command: str, explain: bool) -> FleetResult:
        """Runs the event loop until nothing more can happen, and returns what came of it."""
        prefill, decode = self._prefill, self._decode
        if explain:
            prefill.explain()
        _play(self._env)
        servings = [*prefill.dispatch.servings, *decode.dispatch.servings]
        # Timers of leases go on after the last engine has.
        now_ns = max(serving.now_ns for serving in servings)
        made = [*prefill.results(command, now_ns), *decode.results(command, now_ns, unsent=-1)]
        prompts, outputs = self._numbers(PREFILL), self._numbers(DECODE)
        order = np.argsort([*prompts, *outputs])
        decisions = prefill.decisions()
        if decisions is not None:
            for name in ("replica", "best_replica"):
                decisions[name] = _numbered(decisions[name], prompts)
        decoders = _numbered(np.array(decode.dispatch.chosen), outputs)
        return FleetResult(
            router,
            args,
            [made[place] for place in order],
            [servings[place].indexes for place in order],
            _numbered(np.array(prefill.dispatch.chosen), prompts).tolist(),
            decisions,
            Ways(self._roles, decoders.tolist(), self._proxy.handovers),
        )


def _numbered(places: np.ndarray, numbers: Sequence[int]) -> np.ndarray:
    """The numbers of replicas given by their places on one side; -1 stays."""
    return np.where(places < 0, -1, np.array(numbers)[places])


def _play(env: simpy.Environment) -> None:
    """Runs the event loop until nothing more can happen."""
    try:
        env.run()
    except (OverflowError, struct.error):  # of the columns of steps, which hold 64 bits
        raise ConfigError(TOO_LONG) from None

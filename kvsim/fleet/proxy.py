"""Sends each request to a prefill engine for one token, then to a decode engine for all of them.

```
 clients ──► router ──► prefill engine ── prompt computed ──► router ──► decode engine
    ▲                        └ keeps its blocks ─────── read over the network ──┤
    └──────────────────────────────────────────────────────────────────────────┘
```

The proxy of vLLM's own tests works like this (`toy_proxy_server.py` in its repository, folder
`tests/v1/kv_connector/nixl_integration`). The token of the prefill engine is thrown away, and the
client gets its first one from the decode engine. The proxy itself takes no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import simpy

from kvsim.core.request import DECODE, PREFILL, Request
from kvsim.engines.vllm_v1.scheduler import VllmV1
from kvsim.errors import ConfigError
from kvsim.fleet.dispatch import Dispatch, News, looks
from kvsim.fleet.replicas import Load, Replicas, Sent
from kvsim.fleet.result import FleetResult, Ways
from kvsim.fleet.routers.router import Router
from kvsim.run.assembly import Parts
from kvsim.run.attempt import play, show_future
from kvsim.run.connectors import Side
from kvsim.run.offload import ROLES, role_of
from kvsim.run.replica.rdma import Handover, Keeper, Puller
from kvsim.run.replica.time import Clock
from kvsim.run.serving import Serving
from kvsim.settings.config import RunConfig
from kvsim.workload.clients import NOTHING, Clients, Released, Requests
from kvsim.workload.trace import Row


class Proxy:
    """Who sends requests to prefill engines, and from there to decode engines (`Back`)."""

    listen = True
    prefill: Dispatch
    decode: Dispatch

    def __init__(self, clients: Clients, decodes: Requests) -> None:
        """`decodes`: the requests to decode engines, by their index."""
        self._clients, self._decodes = clients, decodes
        self.handovers: dict[int, Handover] = {}
        """What prefill engines computed, by the index of the request."""
        self._keepers: list[Keeper] = []
        self._pullers: list[Puller] = []

    def connect(self, env: simpy.Environment, prefill: Dispatch, decode: Dispatch) -> None:
        """Gives the engines behind both routers workers that move blocks between them."""
        self.prefill, self.decode = prefill, decode
        for serving, mailbox in zip(prefill.servings, prefill.mailboxes, strict=True):
            keeper = Keeper(env, _side(serving).lease, mailbox)
            self._keepers.append(keeper)
            _set_worker(serving, keeper)
        for serving, mailbox in zip(decode.servings, decode.mailboxes, strict=True):
            side = _side(serving)
            puller = Puller(env, side.times, side.lease, side.block_bytes, self.handovers, mailbox)
            self._pullers.append(puller)
            _set_worker(serving, puller)

    def start(self) -> Iterator[tuple[int, Request]]:
        """As `Clients.start`."""
        return self._clients.start()

    def offer(self, request: Request, now_ns: int) -> bool:
        """As `Clients.offer`."""
        return self._clients.offer(request, now_ns)

    def ended(self, request: Request, now_ns: int) -> Released:
        """A prompt was rejected, or computed: then a decode engine goes on."""
        if request.reason:
            return self._clients.ended(request, now_ns)
        index = request.index
        keeper = self._keepers[self.prefill.chosen[index]]
        # There before the decode engine is asked, whose worker looks it up.
        self.handovers[index] = handover = keeper.keep(request)
        self.decode.offer(self._decodes[index])
        decoder = self.decode.chosen[index]
        if decoder >= 0:
            self._pullers[decoder].expect(handover)
        return NOTHING

    def over(self, request: Request, now_ns: int) -> None:
        """A decode engine has ended a request."""
        self._pullers[self.decode.chosen[request.index]].forget(self.handovers[request.index])
        self.prefill.follow(self._clients.ended(request, now_ns))


class Back:
    """Who sends requests to decode engines: the proxy, when a prompt was computed."""

    listen = True

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    def start(self) -> Iterator[tuple[int, Request]]:
        """No request waits only for its time."""
        return iter(())

    def offer(self, request: Request, now_ns: int) -> bool:
        """Sends a request: nobody is held back."""
        request.released_ns = request.arrival_ns = now_ns
        return True

    def ended(self, request: Request, now_ns: int) -> Released:
        """The clients are told; what they send next goes to a prefill engine."""
        self._proxy.over(request, now_ns)
        return NOTHING


def split_roles(configs: Sequence[RunConfig], rows: Sequence[Row]) -> tuple[str, ...]:
    """Returns the role of each replica in a prefill/decode split; nothing without one.

    Raises `ConfigError` for a split that lacks a side, and for what cannot be split.
    """
    roles = tuple(map(role_of, configs))
    if not any(roles):
        return ()
    named = {role: key for key, role in ROLES.items()} | {"": "neither"}
    for role in (PREFILL, DECODE):
        if role not in roles:
            raise ConfigError(
                f"kv_role: no replica is {named[role]}; a prefill/decode split needs both sides, as"
                " in --prefill-replicas 1 --decode-replicas 1"
            )
    if "" in roles:
        raise ConfigError(
            f"kv_role: replica {roles.index('')} has none beside replicas that have one; give all"
            " of them kv_producer or kv_consumer"
        )
    for row in rows:
        if row.abort_after_ns is not None:
            raise ConfigError(
                f"abort_after_s: request {row.id}: clients that give up are not simulated in a"
                " prefill/decode split; leave abort_after_s out"
            )
    return roles


def check_sides(parts: Sequence[Parts]) -> None:
    """Raises `ConfigError` if the engines of a split do not keep the same KV in equal blocks."""
    for key, kinds in (
        ("model", [each.config.model_name for each in parts]),
        ("block_size", [each.blocks.block_size for each in parts]),
        ("kv_cache_dtype", [each.config.kv_cache_dtype for each in parts]),
    ):
        if len({*kinds}) > 1:
            raise ConfigError(
                f"{key}: engines of a prefill/decode split read each other's blocks, so they need"
                f" the same, and here are {', '.join(sorted(map(str, {*kinds})))}"
            )


def _side(serving: Serving) -> Side:
    side = serving.parts.offload
    assert isinstance(side, Side)
    return side


def _set_worker(serving: Serving, worker: Keeper | Puller) -> None:
    scheduler = serving.parts.scheduler
    assert isinstance(scheduler, VllmV1)
    scheduler.worker = worker


class Split:
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
        self._env = env = Clock()
        self._roles = roles
        prompts = load.requests(True, PREFILL)
        outputs = load.requests(True, DECODE)
        clients = Clients(prompts, load.rows, load.release_ns, parts[0].config)
        for number, each in enumerate(parts):
            requests = prompts if roles[number] == PREFILL else outputs
            show_future(each.future, load.trace, requests, clients)
        self._proxy = proxy = Proxy(clients, outputs)

        def side(role: str, sent: Sent, told: Callable[[int], None] | None) -> Replicas:
            numbers = self._numbers(role)
            own = [parts[number] for number in numbers]
            router = router_of(numbers)
            if router.heeds_events:
                raise ConfigError(
                    "router: it goes by KV events, and those of a prefill/decode split are not"
                    " simulated; choose another one; dynamo-kv does without if use_kv_events is"
                    " false"
                )
            return Replicas(env, load, sent, own, router, told)

        everyone: list[News] = []
        # Filled below, before the event loop begins.
        env.process(looks(env, everyone, clients))
        # Progress counts a request once, where it ends.
        self._prefill = side(PREFILL, Sent(prompts, proxy), None)
        self._decode = side(DECODE, Sent(outputs, Back(proxy)), progress)
        proxy.connect(env, self._prefill.dispatch, self._decode.dispatch)
        everyone += [self._prefill.dispatch.news, self._decode.dispatch.news]

    def _numbers(self, role: str) -> list[int]:
        """The replicas with a role."""
        return [number for number, each in enumerate(self._roles) if each == role]

    def played(self, router: str, args: dict[str, Any], command: str, explain: bool) -> FleetResult:
        """Runs the event loop until nothing more can happen, and returns what came of it."""
        prefill, decode = self._prefill, self._decode
        if explain:
            prefill.explain()
        play(self._env)
        servings = [*prefill.dispatch.servings, *decode.dispatch.servings]
        # Timers of leases go on after the last engine has.
        now_ns = max(serving.now_ns for serving in servings)
        # A request that was sent to nobody is listed once: with the prompts.
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

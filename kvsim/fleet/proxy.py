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

from collections.abc import Iterator, Sequence

import simpy

from kvsim.core.request import DECODE, PREFILL, Request
from kvsim.engines.vllm_v1.scheduler import VllmV1
from kvsim.errors import ConfigError
from kvsim.fleet.dispatch import Dispatch
from kvsim.run.assembly import Parts
from kvsim.run.features.connectors import Side
from kvsim.run.features.offload import ROLES, role_of
from kvsim.run.replica.rdma import Handover, Keeper, Puller
from kvsim.run.serving import Serving
from kvsim.settings.config import RunConfig
from kvsim.workload.clients import NOTHING, Clients, Released
from kvsim.workload.trace import Row


class Proxy:
    """Both sides of a prefill/decode split, and what is on its way between them."""

    prefill: Dispatch
    decode: Dispatch

    def __init__(self, clients: Clients, decodes: Sequence[Request]) -> None:
        """`decodes`: the requests to decode engines, by their index."""
        self.clients, self._decodes = clients, decodes
        self.handovers: dict[int, Handover] = {}
        """What prefill engines computed, by the index of the request."""
        self._keepers: list[Keeper] = []
        self._pullers: list[Puller] = []

    def connect(self, env: simpy.Environment, prefill: Dispatch, decode: Dispatch) -> None:
        """Gives the engines behind both routers workers that move blocks between them."""
        self.prefill, self.decode = prefill, decode
        for serving, mailbox in zip(prefill.servings, prefill.mailboxes, strict=True):
            side = _side(serving)
            keeper = Keeper(env, side.lease, mailbox)
            self._keepers.append(keeper)
            _set_worker(serving, keeper)
        for serving, mailbox in zip(decode.servings, decode.mailboxes, strict=True):
            side = _side(serving)
            self._pullers.append(
                puller := Puller(
                    env,
                    side.times,
                    side.lease,
                    side.block_bytes,
                    self.handovers,
                    mailbox,
                )
            )
            _set_worker(serving, puller)

    def hand_over(self, request: Request) -> None:
        """A prompt was computed: a decode engine goes on."""
        index = request.index
        keeper = self._keepers[self.prefill.chosen[index]]
        self.handovers[index] = handover = keeper.keep(request)
        self.decode.offer(self._decodes[index])
        decoder = self.decode.chosen[index]
        if decoder >= 0:
            self._pullers[decoder].expect(handover)

    def over(self, request: Request, now_ns: int) -> None:
        """A decode engine has ended a request."""
        self._pullers[self.decode.chosen[request.index]].forget(self.handovers[request.index])
        self.prefill.follow(self.clients.ended(request, now_ns))


class Front:
    """Who sends requests to prefill engines: the clients."""

    listen = True

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    def start(self) -> Iterator[tuple[int, Request]]:
        """As `Clients.start`."""
        return self._proxy.clients.start()

    def offer(self, request: Request, now_ns: int) -> bool:
        """As `Clients.offer`."""
        return self._proxy.clients.offer(request, now_ns)

    def ended(self, request: Request, now_ns: int) -> Released:
        """A prompt was computed, or rejected."""
        if request.reason:
            return self._proxy.clients.ended(request, now_ns)
        self._proxy.hand_over(request)
        return NOTHING


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

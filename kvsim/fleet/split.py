"""A prefill/decode split at work: replicas behind two routers, with a proxy between them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import simpy

from kvsim.core.request import DECODE, PREFILL
from kvsim.errors import ConfigError
from kvsim.fleet.apart import Load
from kvsim.fleet.handovers import Ways
from kvsim.fleet.news import News, looks
from kvsim.fleet.proxy import Back, Front, Proxy, check_sides
from kvsim.fleet.replicas import Replicas, Sent
from kvsim.fleet.result import FleetResult
from kvsim.fleet.routers.router import Router
from kvsim.run.assembly import Parts
from kvsim.run.attempt import play, show_future
from kvsim.workload.clients import Clients
from kvsim.workload.columns import column


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
        self._env = env = simpy.Environment()
        self._roles = roles
        lengths = array("q", column(load.rows, "output_length"))
        prompts = load.requests(True, PREFILL)
        outputs = load.requests(True, DECODE)
        clients = Clients(prompts, load.rows, load.release_ns, parts[0].config)
        for number, each in enumerate(parts):
            requests = prompts if roles[number] == PREFILL else outputs
            show_future(each.future, lengths, load.trace, requests, clients)
        self._proxy = proxy = Proxy(clients, outputs)
        one_token = array("q", [1]) * len(lengths)

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
        env.process(looks(env, everyone, clients))
        self._prefill = side(PREFILL, Sent(prompts, Front(proxy), one_token), None)
        self._decode = side(DECODE, Sent(outputs, Back(proxy), lengths), progress)
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

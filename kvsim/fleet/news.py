"""Brings a router its news of the replicas: cache events as they arrive, and measurements.

```
 step of a replica is over ──events of its cache──► delay ──► router
 every scrape_ns ───queues and caches measured────► delay ──► router
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf

import simpy

from kvsim.engine.cache_events import CacheEvents, Stored
from kvsim.engine.tables import Tables
from kvsim.errors import ConfigError
from kvsim.fleet.mailbox import Mailbox
from kvsim.replica.events import Process
from kvsim.routers.router import Router
from kvsim.serving import Serving


class News:
    """What a router is told of its replicas, and when."""

    def __init__(
        self,
        env: simpy.Environment,
        router: Router,
        mailboxes: Sequence[Mailbox],
        servings: Sequence[Serving],
    ) -> None:
        """`servings` may be filled later."""
        self._env, self._router, self._mailboxes = env, router, mailboxes
        self._servings = servings
        self._events = [CacheEvents() for _ in mailboxes]
        self._under_way: list[tuple[int, int, Callable[[], None]]] = []
        """A heap of what has been sent: when it arrives, its number, and what tells the router."""
        self._number = count()
        self.next_look_ns: float = inf
        """When the replicas are measured next, or the router looks after itself."""
        if router.scrape_ns is not None or router.tick_ns is not None:
            env.process(self._look())

    def subscribe(self, number: int, blocks: Tables) -> Callable[[], None]:
        """Lets the router hear of the cache of a replica. Returns what to call when one of its
        steps is over. Raises `ConfigError` if its engine publishes no events."""
        if not blocks.report(self._events[number]):
            raise ConfigError(
                f"router: it goes by KV events, and replica {number} publishes none; give it"
                " vllm-v1 or sglang with prefix caching, all layers in one group and no offloading,"
                " or choose another router; dynamo-kv does without if use_kv_events is false"
            )
        return partial(self.publish, number)

    def publish(self, number: int) -> None:
        """A step of a replica is over: its events are on their way. vLLM publishes those of a step
        as one batch when it handles the output (0.33.0 `v1/core/sched/scheduler.py`,
        `update_from_output`)."""
        events, router = self._events[number].take(), self._router
        if not events:
            return

        def tell() -> None:
            for event in events:
                if isinstance(event, Stored):
                    router.stored(number, event.parent, event.keys)
                else:
                    router.removed(number, event.keys)

        self._send(router.event_delay_ns, tell)

    def arrive(self, now_ns: int) -> None:
        """Tells the router what has arrived until now. It matters only when it decides."""
        while self._under_way and self._under_way[0][0] <= now_ns:
            _, _, tell = heappop(self._under_way)
            tell()

    def _look(self) -> Process:
        """Measures the replicas and lets the router look after itself, each at its interval, as
        long as anything else can happen."""
        router, env = self._router, self._env
        due = {
            act: every
            for act, every in ((self._measure, router.scrape_ns), (router.tick, router.tick_ns))
            if every is not None
        }
        times = dict(due)
        while True:
            self.next_look_ns = min(times.values())
            yield env.timeout(self.next_look_ns - env.now)
            if env.peek() == inf:
                return
            for act, every in due.items():
                if times[act] == env.now:
                    times[act] += every
                    act()

    def _measure(self) -> None:
        loads = []
        for serving, mailbox in zip(self._servings, self._mailboxes, strict=True):
            batch, gpu = serving.batch, serving.batch.blocks.gpu
            usage = 1 - gpu.free / gpu.size
            loads.append((len(batch.waiting) + len(mailbox), batch.num_running, usage))
        self._send(self._router.scrape_delay_ns, lambda: self._router.snapshot(loads))

    def _send(self, delay_ns: int, tell: Callable[[], None]) -> None:
        if delay_ns:
            heappush(self._under_way, (int(self._env.now) + delay_ns, next(self._number), tell))
        else:
            tell()

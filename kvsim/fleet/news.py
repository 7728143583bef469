"""Brings a router its news of the replicas: cache events as they arrive, and measurements.

```
 step of a replica is over ──events of its cache──► delay ──► router
 every scrape_ns ───queues and caches measured────► delay ──► router
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf

import simpy

from kvsim.core.blocks import CacheEvents, Stored
from kvsim.core.request import Request
from kvsim.errors import ConfigError
from kvsim.fleet.routers.router import Router
from kvsim.run.assembly import Parts
from kvsim.run.replica.events import Later, Process, woken
from kvsim.run.replica.inbox import arrival_order
from kvsim.run.serving import Serving
from kvsim.workload.clients import Clients

Ended = Callable[[Iterable[Request]], None]


class Mailbox:
    """Holds the requests that a router sent to a replica until the engine takes them in."""

    next_ns = inf
    """Nobody knows who gets the next request."""
    listens = True
    """The router hears of every request that ends, when it ends."""

    def __init__(
        self, env: simpy.Environment, upcoming_ns: Callable[[], float], ended: Ended
    ) -> None:
        """`upcoming_ns` returns the time before which nothing outside the replica matters to it;
        `ended` is told which requests ended."""
        self._env = env
        self._upcoming_ns = upcoming_ns
        self.release = ended
        self.pending: list[Request] = []
        """Requests that have arrived and were not taken."""
        self._wake: simpy.Event | None = None

    def __len__(self) -> int:
        return len(self.pending)

    @property
    def asleep(self) -> bool:
        """Whether the engine waits."""
        return self._wake is not None

    def put(self, request: Request) -> None:
        """A request arrives."""
        self.pending.append(request)
        self.wake()

    def wake(self) -> None:
        """Ends the wait."""
        if self._wake is not None:
            self._wake.succeed()
            self._wake = None

    def upcoming(self) -> tuple[float, float]:
        """Returns two times in nanoseconds, infinite for never: when the next request with a fixed
        send time comes, and when the next event outside the engine is due."""
        return self.next_ns, self._upcoming_ns()

    def collect(self, now_ns: int) -> None:
        """Requests are put here when they arrive."""

    def take(self) -> list[Request]:
        """Removes and returns the arrived requests, in order of (arrival, place in the trace)."""
        arrived, self.pending = self.pending, []
        arrived.sort(key=arrival_order)
        return arrived

    def wait(self, until_ns: float) -> Process:
        """Waits until a request arrives, or `wake` is called, at most until `until_ns`."""
        if not self.pending:
            self._wake = self._env.event()
            yield woken(self._wake, until_ns)
            self._wake = None
            yield Later(self._env, 0)


PATIENCE_LOOKS = 1_000_000
"""Looks in a row without a step, while a replica has requests, after which a run is refused."""


def looks(env: simpy.Environment, everyone: Sequence[News], clients: Clients) -> Process:
    """Lets all routers of a run look at their replicas, as long as a request is left and anything
    else can happen: in one process, as several would keep each other alive.

    `everyone` may be filled later. Raises `ConfigError` if time passes and nothing is computed.
    """
    steps, vain = 0, 0
    while clients.left and (next_ns := min(each.next_look_ns for each in everyone)) < inf:
        yield env.timeout(int(next_ns) - env.now)
        if env.peek() == inf:
            return
        for each in everyone:
            each.look(int(env.now))
        before, steps = steps, sum(each.steps for each in everyone)
        vain = vain + 1 if steps == before and not all(each.idle for each in everyone) else 0
        if vain == PATIENCE_LOOKS:
            raise ConfigError(
                f"router: it looked at its replicas {vain:,} times in a row while they computed"
                " nothing, although they have requests; give a longer interval"
            )


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
        acts = (self._measure, router.scrape_ns), (router.tick, router.tick_ns)
        self._intervals_ns = {act: every for act, every in acts if every is not None}
        self._due_ns = dict(self._intervals_ns)

    def subscribe(self, number: int, parts: Parts) -> Callable[[], None]:
        """Lets the router hear of the cache of a replica. Returns what to call when one of its
        steps is over. Raises `ConfigError` if its engine publishes no events."""
        if parts.offload is not None or not parts.blocks.report(self._events[number]):
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

    def look(self, now_ns: int) -> None:
        """Measures the replicas and lets the router look after itself, each when it is due."""
        for act, every in self._intervals_ns.items():
            if self._due_ns[act] == now_ns:
                self._due_ns[act] += every
                act()

    @property
    def next_look_ns(self) -> float:
        """When `look` is due next; infinite: never."""
        return min(self._due_ns.values(), default=inf)

    @property
    def idle(self) -> bool:
        """Whether no replica has a request."""
        return not any(self._mailboxes) and not any(len(each.batch) for each in self._servings)

    @property
    def steps(self) -> int:
        """Steps of all replicas so far."""
        return sum(each.rows.num_steps for each in self._servings)

    def _measure(self) -> None:
        loads = []
        for serving, mailbox in zip(self._servings, self._mailboxes, strict=True):
            batch, gpu = serving.batch, serving.parts.blocks.gpu
            usage = 1 - gpu.free / gpu.size
            loads.append((len(batch.waiting) + len(mailbox), batch.num_running, usage))
        self._send(self._router.scrape_delay_ns, lambda: self._router.snapshot(loads))

    def _send(self, delay_ns: int, tell: Callable[[], None]) -> None:
        if delay_ns:
            heappush(self._under_way, (int(self._env.now) + delay_ns, next(self._number), tell))
        else:
            tell()

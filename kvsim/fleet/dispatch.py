"""Sends each request to the replica that the router names, and brings the router its news.

```
 clients ──their time has come──► router ──► mailbox ──► engine
    ▲                               ▲                       │
    └──── ended requests ───────────┴───────────────────────┘

 step of a replica is over ──events of its cache──► delay ──► router
 every scrape_ns ───queues and caches measured────► delay ──► router
```

It may note what each decision chose from: what the caches really had of the prompt, what the router
took them to have, and why the best replica was not chosen.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count

import numpy as np
import simpy

from kvsim.core.blocks import BlockManager, CacheEvents, Stored
from kvsim.core.host import NEVER_NS
from kvsim.core.request import Request
from kvsim.core.schema import CAUSES, ROUTING
from kvsim.errors import ConfigError
from kvsim.fleet.routers.router import Asked, Choice, Router, asked_of
from kvsim.run.assembly import Parts
from kvsim.run.replica.inbox import Mailbox, Senders
from kvsim.run.replica.time import Process
from kvsim.run.serving import Serving
from kvsim.settings.library import overridden
from kvsim.workload.clients import Clients, Released
from kvsim.workload.streams import SpanStream, Streams, TokenStream


class Decisions:
    """Lets a router decide, and notes the columns of `kvsim.core.schema.ROUTING`.

    It sees the caches of the engines; the router does not. It changes no decision.
    """

    def __init__(
        self,
        router: Router,
        blocks: Sequence[BlockManager],
        prompts: Sequence[SpanStream | TokenStream] | None,
        requests: int,
    ) -> None:
        """`blocks`: the block manager of each replica; `prompts`: what they know prompts by."""
        self._router, self._blocks, self._prompts = router, blocks, prompts
        self._columns = {column.name: array("q", [-1]) * requests for column in ROUTING.columns}

    def route(
        self,
        request: Request,
        asked: Asked,
        alive: Sequence[int],
        now_ns: int,
        in_flight: Sequence[int],
    ) -> int:
        """Returns the replica that the router chooses. `in_flight`: requests of each replica."""
        cached = self._cached(request, alive)
        expected = self._router.expected(asked, alive, now_ns)
        chosen, choice = self._router.route(asked, alive, now_ns)
        best, cause = _judged(cached, expected, chosen, choice, self._router.index_limit_tokens)
        row = {
            "time_ns": now_ns,
            "replica": chosen,
            "cached_tokens": cached[chosen],
            "best_replica": best,
            "best_tokens": cached[best],
            "cause": CAUSES.index(cause),
            "eligible": len(alive),
            "eligible_tokens": sum(cached.values()),
            "candidates": len(choice.workers),
            "in_flight": in_flight[chosen],
            "least_in_flight": min(in_flight[replica] for replica in alive),
        }
        if expected is not None:
            row |= {"expected_tokens": expected[chosen], "best_expected_tokens": expected[best]}
        for name, value in row.items():
            self._columns[name][request.index] = value
        return chosen

    def columns(self) -> dict[str, np.ndarray]:
        """Returns one row per request of the trace."""
        columns = {name: np.array(values) for name, values in self._columns.items()}
        return columns | {"request": np.arange(len(columns["request"]))}

    def _cached(self, request: Request, alive: Sequence[int]) -> dict[int, int]:
        """Prompt tokens that each replica's cache has."""
        if self._prompts is None:
            return dict.fromkeys(alive, 0)
        prompt = self._prompts[request.index]
        cached = {}
        for replica in alive:
            # It keeps the numbers that one pool gave its contents.
            own = Request(request.index, request.id, request.input_length, prompt)
            cached[replica] = self._blocks[replica].cached_tokens(own)
        return cached


def _judged(
    cached: Mapping[int, int],
    expected: Mapping[int, int] | None,
    chosen: int,
    choice: Choice,
    limit: int | None,
) -> tuple[int, str]:
    """The best replica, and why it was not chosen: a name of `CAUSES`."""
    most = max(cached.values())
    if cached[chosen] == most:
        return chosen, ""
    best_ones = [replica for replica, tokens in cached.items() if tokens == most]
    if expected is None:
        return best_ones[0], "no_index"
    # Of equals, the one that the router thinks most of: no fault of its index, then.
    best = max(best_ones, key=expected.__getitem__)
    if limit is not None and min(expected[best], expected[chosen]) >= limit:
        return best, "index_cap"
    if expected[best] <= expected[chosen]:
        return best, "stale_index"
    return best, "tie" if best in choice.workers else "load"


class Dispatch:
    """Takes the requests of the clients to the replicas, in order of time."""

    def __init__(
        self,
        env: simpy.Environment,
        clients: Senders,
        router: Router,
        requests: int,
        streams: Streams,
    ) -> None:
        """`requests`: their number. `streams`: those of the trace, by the request's index."""
        self._env, self._clients, self._router = env, clients, router
        self._streams, replicas = streams, len(router.workers)
        self._alive = list(range(replicas))
        self.mailboxes = [
            Mailbox(env, self._upcoming_ns, partial(self._ended, number))
            for number in range(replicas)
        ]
        self.servings: list[Serving] = []
        """The replicas' engines, once they are made."""
        self.news = News(env, router, self.mailboxes, self.servings)
        self.chosen = array("q", [-1]) * requests
        """The replica of each request; -1: none."""
        self.decisions: Decisions | None = None
        """Notes what is decided, if anybody asks."""
        self._in_flight = [0] * replicas
        """Requests that each replica was sent and that are not over."""
        self._tells_tokens = "first_token" in overridden(router, Router)
        self._prefilling: dict[str, Request] = {}
        """Requests that the router believes to have no first token, if it cares."""
        self._next_arrival_ns = NEVER_NS
        env.process(self._send())

    def lost(self, replica: int) -> None:
        """A replica's engine has stopped: nobody is sent there any more."""
        self._alive.remove(replica)
        self._router.worker_lost(replica)

    def _send(self) -> Process:
        """Sends the requests that wait only for their time."""
        for time_ns, request in self._clients.start():
            self._next_arrival_ns = time_ns
            if time_ns > self._env.now:
                yield self._env.timeout(time_ns - self._env.now)
            self.offer(request)
        self._next_arrival_ns = NEVER_NS

    def _upcoming_ns(self) -> int:
        # A request that ends elsewhere may let a client send another one.
        if self._clients.listen:
            return int(self._env.peek())
        return min(self._next_arrival_ns, self.news.next_look_ns)

    def offer(self, request: Request) -> None:
        """Offers a request to its client's concurrency limit, which may hold it back."""
        if self._clients.offer(request, int(self._env.now)):
            self._route(request)

    def _route(self, request: Request) -> None:
        # All engines have stopped: it is sent to nobody.
        if not self._alive:
            return
        now_ns = int(self._env.now)
        self.news.arrive(now_ns)
        for id, other in list(self._prefilling.items()):
            # Heard late, but before it matters: a router goes by it only when it decides.
            if 0 <= other.first_token_ns < now_ns:
                self._router.first_token(id)
                del self._prefilling[id]
        asked = asked_of(request, self._streams)
        if self.decisions is None:
            worker = self._router.route(asked, self._alive, now_ns).worker
        else:
            worker = self.decisions.route(request, asked, self._alive, now_ns, self._in_flight)
        self._in_flight[worker] += 1
        if self._tells_tokens:
            self._prefilling[request.id] = request
        self.chosen[request.index] = worker
        self.mailboxes[worker].put(request)

    def _ended(self, replica: int, requests: Iterable[Request]) -> None:
        now_ns = int(self._env.now)
        # Before clients react to the end: `step_over` is called once they were told.
        self.news.publish(replica)
        for request in requests:
            self._prefilling.pop(request.id, None)
            self._router.ended(request.id)
            self._in_flight[self.chosen[request.index]] -= 1
            self.follow(self._clients.ended(request, now_ns))

    def follow(self, released: Released) -> None:
        """Sends the requests that a completion releases, now or after their think time."""
        now_ns = int(self._env.now)
        for other in released.sent:
            self._route(other)
        for time_ns, other in released.later:
            if time_ns > now_ns:
                self._env.process(self._send_later(other, time_ns - now_ns))
            else:  # The engine that is being told composes its next step at this instant.
                self.offer(other)

    def _send_later(self, request: Request, delay_ns: int) -> Process:
        yield self._env.timeout(delay_ns)
        self.offer(request)


PATIENCE_LOOKS = 1_000_000
"""Looks in a row without a step, while a replica has requests, after which a run is refused."""


def looks(env: simpy.Environment, everyone: Sequence[News], clients: Clients) -> Process:
    """Lets all routers of a run look at their replicas, as long as a request is left and anything
    else can happen: in one process, as several would keep each other alive.

    `everyone` may be filled later. Raises `ConfigError` if time passes and nothing is computed.
    """
    steps, vain = 0, 0
    while clients.left and (next_ns := min(each.next_look_ns for each in everyone)) < NEVER_NS:
        yield env.timeout(next_ns - env.now)
        # Nothing else can happen any more, and looking alone changes nothing.
        if env.peek() == NEVER_NS:
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
        # The first look comes one interval after the start.
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
    def next_look_ns(self) -> int:
        """When `look` is due next; `NEVER_NS`: never."""
        return min(self._due_ns.values(), default=NEVER_NS)

    @property
    def idle(self) -> bool:
        """Whether no replica has a request."""
        return not any(self._mailboxes) and not any(len(each.batch) for each in self._servings)

    @property
    def steps(self) -> int:
        """Steps of all replicas so far."""
        return sum(each.rows.num_rows for each in self._servings)

    def _measure(self) -> None:
        loads = []
        for serving, mailbox in zip(self._servings, self._mailboxes, strict=True):
            batch, gpu = serving.batch, serving.parts.blocks.gpu
            # Blocks with content that nobody holds count as free.
            usage = 1 - gpu.free / gpu.size
            loads.append((len(batch.waiting) + len(mailbox), batch.num_running, usage))
        self._send(self._router.scrape_delay_ns, lambda: self._router.snapshot(loads))

    def _send(self, delay_ns: int, tell: Callable[[], None]) -> None:
        if delay_ns:
            # What arrives together is told in the order in which it was sent.
            heappush(self._under_way, (int(self._env.now) + delay_ns, next(self._number), tell))
        else:
            tell()

"""Holds requests between the clients, which send them, and the engine, which takes them in.

```
 clients ──their time has come──┐
         ──a completion──────────┤► inbox ──► engine
         ──think time is over────┘    └─ wakes it where it sleeps
```

What clients send on their own is pulled when its time has passed, so that it costs no event;
only what depends on a completion is timed by the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import Protocol, cast

import simpy

from kvsim.core.request import Request
from kvsim.run.replica.events import Later, Process, woken
from kvsim.workload.clients import Released

_NOBODY: tuple[float, Request | None] = inf, None


class Senders(Protocol):
    """Who sends requests to an engine: `kvsim.workload.clients.Clients`, or some of them."""

    @property
    def listen(self) -> bool:
        """Whether they need to hear of ended requests, because sending depends on them."""

    def start(self) -> Iterator[tuple[int, Request]]:
        """Requests that wait only for their time, as (time in ns, request), in order of time."""

    def offer(self, request: Request, now_ns: int) -> bool:
        """Try to send a request now: True if it is sent, False if it is held back."""

    def ended(self, request: Request, now_ns: int) -> Released:
        """The requests that an ended one releases."""


class Inbox:
    """Requests that have arrived and that the engine has not taken in yet."""

    def __init__(self, env: simpy.Environment, clients: Senders) -> None:
        self._env = env
        self._clients = clients
        self.listens = clients.listen
        """Whether anybody needs to hear of ended requests."""
        self.pending: list[Request] = []
        """Requests that have arrived and were not taken."""
        self._wake: simpy.Event | None = None
        self._upcoming = iter(clients.start())
        """Requests that clients send at a fixed time, in order of time."""
        self._next: Request | None
        self.next_ns: float
        """When the next of these is sent."""
        self.next_ns, self._next = next(self._upcoming, _NOBODY)

    def __bool__(self) -> bool:
        return bool(self.pending)

    @property
    def _now_ns(self) -> int:
        return cast(int, self._env.now)

    def upcoming(self) -> tuple[float, float]:
        """Returns two times in nanoseconds, infinite for never: when the next request with a fixed
        send time comes, and when the next event outside the engine is due."""
        return self.next_ns, self._env.peek()

    def collect(self, now_ns: int) -> None:
        """Lets clients send all requests that are due until now, each at its time."""
        while self.next_ns <= now_ns:
            request = self._next
            assert request is not None
            if self._clients.offer(request, int(self.next_ns)):
                self.pending.append(request)
            self.next_ns, self._next = next(self._upcoming, _NOBODY)
        if self._wake is not None:
            self._rouse()

    def take(self) -> list[Request]:
        """Removes and returns the arrived requests, in order of (arrival, place in the trace)."""
        arrived, self.pending = self.pending, []
        if len(arrived) > 1:
            arrived.sort(key=arrival_order)
        return arrived

    def release(self, ended: Iterable[Request]) -> None:
        """Tells the clients of completions; they send more now or after their think time."""
        if not self.listens:
            return
        now_ns = self._now_ns
        for request in ended:
            sent, later = self._clients.ended(request, now_ns)
            self.pending += sent
            for time_ns, other in later:
                if time_ns <= now_ns:
                    self._offer(other)
                else:
                    timer = self._env.timeout(time_ns - now_ns, other)
                    timer.callbacks.append(lambda event: self._offer(event.value))
        self._rouse()

    def wait(self, until_ns: float) -> Process:
        """Waits until a request arrives, at most until `until_ns`."""
        if not self.pending:
            self._wake = self._env.event()
            self._set_alarm()
            yield woken(self._wake, until_ns)
            self._wake = None
            yield Later(self._env, 0)

    def _offer(self, request: Request) -> None:
        """Offers a request to its client's concurrency limit, which may hold it back."""
        self.collect(self._now_ns)
        if self._clients.offer(request, self._now_ns):
            self.pending.append(request)
            self._rouse()

    def _rouse(self) -> None:
        """Wakes the engine if it waits for a request that is here now."""
        if self._wake is not None and self.pending:
            self._wake.succeed()
            self._wake = None

    def _set_alarm(self) -> None:
        """Wakes the engine when the next request with a fixed send time is due, unless the
        concurrency limit holds it back."""
        if self._wake is not None and self._next is not None:
            timer = self._env.timeout(int(self.next_ns) - self._now_ns)
            timer.callbacks.append(self._ring)

    def _ring(self, event: simpy.Event) -> None:
        self.collect(self._now_ns)
        self._set_alarm()


Ended = Callable[[Iterable[Request]], None]


class Mailbox:
    """Holds the requests that somebody passes on to an engine until it takes them in."""

    next_ns = inf
    """Nobody knows when the next request comes."""
    listens = True
    """Whoever passes requests on hears of every one that ends, when it ends."""

    def __init__(
        self, env: simpy.Environment, upcoming_ns: Callable[[], float], ended: Ended
    ) -> None:
        """`upcoming_ns` returns the time before which nothing outside the engine matters to it;
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


def arrival_order(request: Request) -> tuple[int, int]:
    """Sorts requests by arrival and place in the trace."""
    return request.arrival_ns, request.index

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

from collections.abc import Callable, Iterator
from typing import Protocol

import simpy

from kvsim.core.host import NEVER_NS, Receiver
from kvsim.core.request import Request
from kvsim.run.replica.time import Later, Process, woken
from kvsim.workload.clients import Released

_NOBODY: tuple[int, Request | None] = NEVER_NS, None


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


class Waking(Receiver):
    """Wakes an engine that waits for requests."""

    def __init__(self, env: simpy.Environment, listens: bool) -> None:
        super().__init__(listens)
        self._env = env
        self._wake: simpy.Event | None = None

    def __len__(self) -> int:
        return len(self.pending)

    @property
    def asleep(self) -> bool:
        """Whether the engine waits."""
        return self._wake is not None

    def wake(self) -> None:
        """Ends the wait."""
        if self._wake is not None:
            self._wake.succeed()
            self._wake = None

    def wait(self, until_ns: int) -> Process:
        """Waits until a request arrives, or `wake` is called, at most until `until_ns`."""
        if not self.pending:
            self._wake = self._env.event()
            self._set_alarm()
            yield woken(self._wake, until_ns)
            self._wake = None
            # Behind everything else of this instant, so that all who arrive now are taken in
            # together.
            yield Later(self._env, 0)

    def _set_alarm(self) -> None:
        """Wakes the engine when the next request with a fixed send time is due."""


class Inbox(Waking):
    """Requests that have arrived and that the engine has not taken in yet."""

    def __init__(self, env: simpy.Environment, clients: Senders) -> None:
        super().__init__(env, clients.listen)
        self._clients = clients
        self._upcoming = iter(clients.start())
        """Requests that clients send at a fixed time, in order of time."""
        self._next: Request | None
        self.next_ns, self._next = next(self._upcoming, _NOBODY)

    def upcoming(self) -> tuple[int, int]:
        return self.next_ns, int(self._env.peek())

    def collect(self, now_ns: int) -> None:
        """Lets clients send all requests that are due until now, each at its time."""
        while self.next_ns <= now_ns:
            request = self._next
            assert request is not None
            if self._clients.offer(request, self.next_ns):
                self.pending.append(request)
            self.next_ns, self._next = next(self._upcoming, _NOBODY)
        if self.pending:
            self.wake()

    def release(self, ended: list[Request]) -> None:
        """Tells the clients of completions; they send more now or after their think time."""
        if not self.listens:
            return
        now_ns = int(self._env.now)
        for request in ended:
            sent, later = self._clients.ended(request, now_ns)
            self.pending += sent
            for time_ns, other in later:
                if time_ns <= now_ns:
                    self._offer(other)
                else:
                    timer = self._env.timeout(time_ns - now_ns, other)
                    timer.callbacks.append(lambda event: self._offer(event.value))
        if self.pending:
            self.wake()

    def _offer(self, request: Request) -> None:
        """Offers a request to its client's concurrency limit, which may hold it back."""
        self.collect(int(self._env.now))
        if self._clients.offer(request, int(self._env.now)):
            self.pending.append(request)
            self.wake()

    def _set_alarm(self) -> None:
        # The concurrency limit may hold the request back.
        if self._wake is not None and self._next is not None:
            timer = self._env.timeout(self.next_ns - int(self._env.now))
            timer.callbacks.append(self._ring)

    def _ring(self, event: simpy.Event) -> None:
        self.collect(int(self._env.now))
        self._set_alarm()


Ended = Callable[[list[Request]], None]


class Mailbox(Waking):
    """Holds the requests that somebody passes on to an engine until it takes them in. Nobody knows
    when the next one comes."""

    def __init__(
        self, env: simpy.Environment, upcoming_ns: Callable[[], int], ended: Ended
    ) -> None:
        """`upcoming_ns` returns the time before which nothing outside the engine matters to it;
        `ended` is told which requests ended, when they end."""
        super().__init__(env, listens=True)
        self._upcoming_ns, self._ended = upcoming_ns, ended

    def put(self, request: Request) -> None:
        """A request arrives."""
        self.pending.append(request)
        self.wake()

    def upcoming(self) -> tuple[int, int]:
        return self.next_ns, self._upcoming_ns()

    def release(self, ended: list[Request]) -> None:
        self._ended(ended)

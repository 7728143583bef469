"""Where the requests for one replica arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf

import simpy

from kvsim.core.request import Request
from kvsim.run.replica.events import Later, Process, woken
from kvsim.run.replica.inbox import arrival_order

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

"""The parts of the event loop that SimPy does not have: the engine's events and the host link."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from math import inf
from typing import Any, Protocol

import simpy
from simpy.events import EventPriority

from kvsim.machine.hardware import LinkTimes

Process = Generator[simpy.Event, Any, Any]

AFTER_ARRIVALS = EventPriority(2)
"""SimPy priority of the engine's events: after all other events of the same instant."""


class Clock(simpy.Environment):
    """Simulated time. Engines ask before each step what happens next."""

    def __init__(self) -> None:
        super().__init__()
        self.events = self._queue
        """What is due, as a heap of tuples that begin with their time."""

    def peek(self) -> float:
        """When the next event happens; infinite: never. SimPy's own raises and catches an error
        for an empty queue."""
        return self._queue[0][0] if self._queue else inf


class Later(simpy.Event):
    """An event of the engine, `delay_ns` from now."""

    def __init__(self, env: simpy.Environment, delay_ns: int) -> None:
        # As SimPy's own `Timeout` does it, without a call of `Event.__init__`.
        self.env = env
        self.callbacks = []
        self._ok = True
        self._value = None
        env.schedule(self, priority=AFTER_ARRIVALS, delay=delay_ns)


def woken(wake: simpy.Event, until_ns: float) -> simpy.Event:
    """Returns an event that happens with `wake`, or when it is `until_ns` without it."""
    env = wake.env
    return wake if until_ns == inf else wake | env.timeout(int(until_ns) - env.now)


class Link:
    """The host link. It makes one copy at a time, in the order of the requests for it."""

    def __init__(self, env: simpy.Environment, times: LinkTimes) -> None:
        self._env = env
        self._times = times
        self._lane = simpy.Resource(env, capacity=1)

    def later(self, delay_ns: int) -> Later:
        """An event of the engine, `delay_ns` from now."""
        return Later(self._env, delay_ns)

    def transfer(self, blocks: int) -> Process:
        """Copies blocks one way. Returns the wait for the link and the copying time, in
        nanoseconds."""
        asked = self._env.now
        with self._lane.request() as turn:
            yield turn
            started = self._env.now
            yield Later(self._env, self._times.transfer_ns(blocks))
        return started - asked, self._env.now - started


class Receiver(Protocol):
    """Where the requests for an engine arrive."""

    next_ns: float
    """When the next request with a fixed send time comes; infinite: never."""
    listens: bool
    """Whether something outside the engine depends on when a request ends."""

    def upcoming(self) -> tuple[float, float]:
        """Returns two times in nanoseconds, infinite for never: when the next request with a fixed
        send time comes, and when the next event outside the engine is due."""

    def collect(self, now_ns: int) -> None:
        """Lets requests arrive that are due until now."""

    def take(self) -> list[Any]:
        """Removes and returns the arrived requests, in order of (arrival, place in the trace)."""

    def release(self, ended: Iterable[Any]) -> None:
        """Tells whoever listens that these requests have ended."""

    def wait(self, until_ns: float) -> Process:
        """Waits until a request arrives, at most until `until_ns`."""

"""The parts of the event loop that SimPy does not have: the engine's events and the host link."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import simpy
from simpy.events import EventPriority

from kvsim.core.host import NEVER_NS
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

    def peek(self) -> int:
        """When the next event happens; `NEVER_NS`: none does. SimPy's own raises and catches an
        error for an empty queue."""
        return int(self._queue[0][0]) if self._queue else NEVER_NS


class Later(simpy.Event):
    """An event of the engine, `delay_ns` from now."""

    def __init__(self, env: simpy.Environment, delay_ns: int) -> None:
        # As SimPy's own `Timeout` does it, without a call of `Event.__init__`.
        self.env = env
        self.callbacks = []
        self._ok = True
        self._value = None
        env.schedule(self, priority=AFTER_ARRIVALS, delay=delay_ns)


def woken(wake: simpy.Event, until_ns: int) -> simpy.Event:
    """Returns an event that happens with `wake`, or when it is `until_ns` without it."""
    env = wake.env
    return wake if until_ns >= NEVER_NS else wake | env.timeout(until_ns - env.now)


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

"""Simulated time: the host of a loop in the event loop of SimPy.

Time is integer nanoseconds. Events at the same instant: requests first, in order of (arrival, place
in the trace), then the engine; so a step that starts at t has seen everything that arrived at t or
before.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Protocol

import simpy

from kvsim.cost import Cost, checked_prices
from kvsim.engine.loop import Host
from kvsim.engine.plan import Plan
from kvsim.engine.request import Request
from kvsim.replica.events import Later, Link, Process


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

    def take(self) -> list[Request]:
        """Removes and returns the arrived requests, in order of (arrival, place in the trace)."""

    def release(self, ended: Iterable[Request]) -> None:
        """Tells whoever listens that these requests have ended."""

    def wait(self, until_ns: float) -> Process:
        """Waits until a request arrives, at most until `until_ns`."""


class SimulatedTime(Host):
    """An inbox, a link and step times of a cost model, in one environment."""

    def __init__(
        self, env: simpy.Environment, cost: Cost, link: Link, inbox: Receiver, full_plans: bool
    ) -> None:
        """`full_plans` says whether plans list their decoding requests before they are priced."""
        self._env = env
        self._price = checked_prices(cost).step_ns
        self._full_plans = full_plans
        self._link = link
        self.inbox = inbox

    @property
    def next_ns(self) -> float:
        """When the next event outside the engine is due, which may be a request."""
        return min((at for at in self.inbox.upcoming() if at > self.now_ns), default=inf)

    def arrived(self) -> list[Request]:
        """Removes and returns the requests that have arrived until now."""
        self.inbox.collect(self.now_ns)
        return self.inbox.take()

    def tell(self, ended: list[Request]) -> None:
        """Tells the clients of completions, so that they may send more."""
        self.inbox.release(ended)

    def step_ns(self, plan: Plan) -> int:
        """The price of a step."""
        if self._full_plans:
            plan.members()
        return self._price(plan)

    def copy(self, plan: Plan) -> Process:
        """Copies blocks over the link, first out, then in."""
        waited = busy = 0
        for blocks in (len(plan.swaps_out), len(plan.swaps_in)):
            if blocks:
                wait_ns, copy_ns = yield from self._link.transfer(blocks)
                waited += wait_ns
                busy += copy_ns
        self.now_ns = int(self._env.now)
        return busy, waited

    def wait(self, until_ns: int) -> Process:
        """Lets time pass."""
        if until_ns > self.now_ns:
            yield Later(self._env, until_ns - self.now_ns)
            self.now_ns = until_ns
        self.inbox.collect(until_ns)

    def sleep(self, until_ns: float) -> Process:
        """Lets time pass until a request arrives, at most until `until_ns`; without end if neither
        comes."""
        yield from self.inbox.wait(until_ns)
        self.now_ns = int(self._env.now)
        return True

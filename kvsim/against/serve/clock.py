"""Lets a session keep pace with the wall clock, and measures how late it is."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import suppress

import numpy as np
from prometheus_client import CollectorRegistry, Histogram

from kvsim.against.serve.options import Options
from kvsim.against.serve.session import Session
from kvsim.against.serve.watch import Step
from kvsim.core.batch import Batch
from kvsim.core.host import NEVER_NS

_BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_KEPT = 100_000
"""Latest steps whose lateness is kept."""
_AT_ONCE_NS = 10_000_000
"""Wall time after which a session that is behind lets others be heard."""


class Clock:
    """Simulated time as the wall's times a speed, or as fast as possible.

    Lateness is the wall time from when the tokens of a step were due until all streams whose
    clients read fast enough have them. What is late is sent at once, several tokens together.
    """

    def __init__(self, session: Session, options: Options, registry: CollectorRegistry) -> None:
        self.hold = options.hold
        """Requests that have to come until the time goes on."""
        self.closing = False
        self._session, self._speed, self._virtual = session, options.speed, options.virtual
        self._origin_ns = time.monotonic_ns()
        self._wake = asyncio.Event()
        self._due_ns: list[int] = []
        """When the tokens that are not sent yet were due, by step."""
        self._late_s: deque[float] = deque(maxlen=_KEPT)
        self._steps_s: deque[float] = deque(maxlen=_KEPT)
        self._histogram = Histogram(
            "kvsim:lateness_seconds",
            "Wall time by which tokens were sent later than the simulated step ended.",
            registry=registry,
            buckets=_BOUNDS,
        )
        session.steps.listeners.append(self._stepped)

    def now_ns(self) -> int:
        """The simulated time at which something that happens now happens."""
        if self._virtual:
            return self._session.now_ns
        return max(self._session.now_ns, self._reached_ns())

    def wake(self) -> None:
        """A request is given up, or all are."""
        self._wake.set()

    def came(self) -> None:
        """A client has sent what it wants."""
        self.hold = max(0, self.hold - 1)
        self.wake()

    async def play(self) -> None:
        """Lets the session go on until it is closed."""
        session = self._session
        while not self.closing:
            self._wake.clear()
            now_ns = -1 if self.hold else NEVER_NS - 1 if self._virtual else self._reached_ns()
            until_ns = time.monotonic_ns() + _AT_ONCE_NS
            while session.next_ns <= now_ns and not (self._virtual and self._due_ns):
                session.step()
                if time.monotonic_ns() > until_ns:
                    break  # Others are heard, however far behind it is.
            if self._due_ns:
                session.steps.tell_clients()
                await asyncio.sleep(0)  # The event loop sends what streams wrote,
                await asyncio.sleep(0)  # and hears what comes.
                self._sent()
            elif session.next_ns > now_ns:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._left_s()):
                        await self._wake.wait()
            else:
                await asyncio.sleep(0)

    def report(self) -> list[str]:
        """How late the session was, for people."""
        if self._virtual or not self._late_s:
            return []
        late, step = np.percentile(self._late_s, [50, 99]), float(np.median(self._steps_s))
        said = (
            f"{len(self._late_s):,} steps, tokens late by {late[0] * 1e3:.1f} ms (p50),"
            f" {late[1] * 1e3:.1f} ms (p99); a step took {step * 1e3:.1f} ms (p50)"
        )
        if late[1] <= step:
            return [said]
        return [said, "p99 lateness exceeds a step: times that clients saw are not to be trusted;"
                " give a lower --speed, fewer streams or a faster machine"]  # fmt: skip

    def _reached_ns(self) -> int:
        return int((time.monotonic_ns() - self._origin_ns) * self._speed)

    def _left_s(self) -> float | None:
        """Wall time until something is due; None: nothing is."""
        if self.hold or self._session.next_ns == NEVER_NS:
            return None
        return max(0.0, (self._session.next_ns - self._reached_ns()) / 1e9 / self._speed)

    def _stepped(self, batch: Batch, step: Step) -> None:
        self._due_ns.append(step.now_ns)
        if not self._virtual:
            before_ns = next((each.last_ns for each, _ in step.tokens if each.last_ns >= 0), -1)
            if before_ns >= 0:
                self._steps_s.append((step.now_ns - before_ns) / 1e9 / self._speed)

    def _sent(self) -> None:
        due_ns, self._due_ns = self._due_ns, []
        if not self._virtual:
            for each in due_ns:
                late_s = (self._reached_ns() - each) / 1e9 / self._speed
                self._late_s.append(late_s)
                self._histogram.observe(late_s)

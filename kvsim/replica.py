"""The event loop: requests arrive, a replica steps, a link carries swapped blocks.

```
 clients ──arrive──► inbox ─► compose ─► price ─► wait ─► settle ─► record
    ▲                            ▲                            │
    └──── a completion releases ─┴──────── next step ◄────────┘
```

An engine that schedules asynchronously has two steps in flight: it composes a step while the one
before computes, so a request that arrives during step i runs in step i + 2.

Simulated time is integer nanoseconds. Events at the same instant: requests first, in order of
(arrival, place in the trace), then the engine; so a step that starts at t has seen everything that
arrived at t or before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol, cast

import simpy

from kvsim.batch.batch import Batch
from kvsim.batch.columns import composed_columns
from kvsim.batch.cruise import Course
from kvsim.batch.pace import Sprinter
from kvsim.batch.stretch import Stretches
from kvsim.blocks.tables import COUNTED, NAMED
from kvsim.cost import Cost
from kvsim.cost.decodes import PricesDecodes
from kvsim.engines import Scheduler
from kvsim.errors import EngineStopped
from kvsim.events import Later, Link, Process
from kvsim.inbox import Inbox
from kvsim.plan import Flight, Plan
from kvsim.recorder import Recorder
from kvsim.request import Request
from kvsim.workload.clients import Clients

NO_PROGRESS_STEPS = 100_000
"""Steps in a row without a new token and without an end that count as a livelock."""


class Watcher(Protocol):
    """Is shown every step in full; it must not change anything."""

    def begin(self) -> None:
        """A run begins; what was seen before belongs to an attempt that was given up."""
        ...

    def composed(self, batch: Batch, plan: Plan, now_ns: int, arrived: int) -> None:
        """A step was composed, before it runs; `arrived` requests joined the queue before it."""
        ...

    def settled(self, batch: Batch, ended: list[Request]) -> None:
        """The step that was composed last is over; `ended`: who ended in it, in order."""
        ...


class Replica:
    """One engine with its batch, stepping through simulated time."""

    def __init__(
        self,
        env: simpy.Environment,
        scheduler: Scheduler,
        batch: Batch,
        cost: Cost,
        link: Link,
        clients: Clients,
        recorder: Recorder,
        *,
        refused: Mapping[str, str] = MappingProxyType({}),
        watcher: Watcher | None = None,
        progress: Callable[[int], None] | None = None,
        over: Callable[[Request], None] | None = None,
    ) -> None:
        self.env = env
        self.scheduler = scheduler
        self.batch = batch
        self.cost = cost
        self.link = link
        self.clients = clients
        self.recorder = recorder
        self.refused = refused
        """Request id → why it is turned away at arrival."""
        self.watcher = watcher
        if watcher is not None:
            watcher.begin()
        self.progress = progress
        """Called with the number of requests that have just ended."""
        self.over = over
        """Called with each request that has ended and is in no step any more."""
        self._ended: deque[tuple[int, list[Request]]] = deque()
        """Requests that `over` was not called with, behind the number of steps when they ended."""
        self._inbox = Inbox(env, clients)
        self._flying: deque[Flight] = deque()
        self._in_flight: int = getattr(scheduler, "in_flight", 1)
        """Steps that may be under way when the next one is composed, that one included."""
        self._arrive = getattr(scheduler, "arrive", Batch.arrive)
        self._course = None if watcher is not None else self._plot()
        """What stretches go by; None: there are none."""
        self._advanced = 0
        """Number of the last step that produced a token or ended a request."""
        self._next_audit = 1
        env.process(self._steps())

    @property
    def now_ns(self) -> int:
        """Simulated time; all delays are integers, so the clock is one, too."""
        return cast(int, self.env.now)

    # -- the engine ------------------------------------------------------------------------------

    def _steps(self) -> Process:
        """Compose a step; unless more may be in flight, wait for the oldest and settle it."""
        env, batch, flying = self.env, self.batch, self._flying
        compose, overlap = self.scheduler.compose, self.scheduler.overlap
        now_ns = self.now_ns
        while True:
            self._inbox.collect(now_ns)
            arrived = self._take_in()
            if self._stretch(now_ns):
                if batch.now_ns > now_ns:
                    yield Later(env, batch.now_ns - now_ns)
                    now_ns = batch.now_ns
                self._landed(now_ns)
                continue
            plan = compose(batch, now_ns)
            if self.watcher is not None:
                self.watcher.composed(batch, plan, now_ns, arrived)
            overlap(batch, now_ns)
            ended = self._drain() if batch.ended else []
            if plan.computes or not (plan.empty or flying):
                before = composed_columns(batch, plan)
                moved = (0, 0)
                ready_ns = now_ns  # Composed at `now_ns`, it can run from here on.
                if plan.swaps_out or plan.swaps_in:
                    moved = yield from self._swap(plan)
                    ready_ns = self.now_ns
                self._dispatch(plan, now_ns, ready_ns, moved, before)
                now_ns = ready_ns
            elif ended or not plan.empty:
                # Nothing runs, but something happened: a step without duration.
                columns = composed_columns(batch, plan)
                self.recorder.step((now_ns, now_ns, 0, 0, *columns, len(ended)))
            elif not (flying or self._inbox):
                # Nothing can change before somebody arrives.
                yield from self._inbox.wait()
                now_ns = self.now_ns
                continue
            if flying and not (plan.computes and len(flying) < self._in_flight):
                flight = flying.popleft()
                if flight.end_ns > now_ns:
                    yield Later(env, flight.end_ns - now_ns)
                    now_ns = flight.end_ns
                ended += self._land(flight, len(ended))
            if self.watcher is not None:
                self.watcher.settled(batch, ended)

    def _plot(self) -> Course | None:
        """The course of stretches, if batch, cost model and scheduler are made for them."""
        cost, batch, terms_of = self.cost, self.batch, getattr(self.scheduler, "terms", None)
        if not (isinstance(batch, Stretches) and isinstance(cost, PricesDecodes) and terms_of):
            return None
        pace = cast(Sprinter, self.scheduler)
        terms = pace.terms(batch.blocks)
        fits = (COUNTED, NAMED) if pace.ahead else (COUNTED,)
        if terms is None or batch.blocks.lockstep not in fits or self._in_flight > 2:
            return None
        prices = cost.step_ns, cost.decode_ns, cost.decode_run_ns
        return Course(pace, terms, *prices, self.recorder, self._come, self.clients.listen)

    def _stretch(self, now_ns: int) -> bool:
        """Take the next steps in one go, where they are ordinary ones."""
        course, batch, flying = self._course, self.batch, self._flying
        if course is None or batch.ended or len(flying) != self._in_flight - 1:
            return False
        assert isinstance(batch, Stretches)
        until = self._inbox.next_ns, self.env.peek()
        if not flying:
            return batch.stretch(course, now_ns, *until)
        last = batch.run_ahead(course, flying[0], now_ns, min(until))
        if last is not None:
            flying[0] = last
        return last is not None

    def _come(self, now_ns: int) -> float:
        """Let those arrive who have been sent until now; answers when the next one will be."""
        self._inbox.collect(now_ns)
        self._take_in()
        return self._inbox.next_ns

    def _landed(self, now_ns: int) -> None:
        """The time of a stretch has passed: tell the clients who ended."""
        assert isinstance(self.batch, Stretches)
        self._inbox.collect(now_ns)
        self._tell(self.batch.left)
        self._advanced = len(self.recorder)
        self._audit(self._advanced)

    def _dispatch(
        self,
        plan: Plan,
        composed_ns: int,
        ready_ns: int,
        moved: tuple[int, int],
        before: tuple[int, ...],
    ) -> None:
        """Start a step behind those in flight; `moved` is what its swap copies, which block it,
        have taken until `ready_ns`."""
        flying = self._flying
        if flying:
            assert not moved[0], "copies block a step, so none may be in flight"
            composed_ns = ready_ns = flying[-1].end_ns
        end_ns = ready_ns + self.cost.step_ns(plan)
        flying.append(Flight(plan, composed_ns, end_ns, moved, before))
        self.batch.busy_until_ns = end_ns

    def _land(self, flight: Flight, already: int) -> list[Request]:
        """The time of the oldest step has passed: settle it; answers who ended."""
        batch = self.batch
        self._inbox.collect(flight.end_ns)
        self.scheduler.settle(batch, flight.plan, flight.end_ns)
        ended = self._drain() if batch.ended else []
        number = already + len(ended)
        row = (flight.start_ns, flight.end_ns, *flight.moved, *flight.before, number)
        self.recorder.step(row)
        self._check(flight.plan, number)
        return ended

    def _swap(self, plan: Plan) -> Process:
        """Copies block the step, as in vLLM 0.6.3 (`worker/worker.py`, `execute_worker`)."""
        waited = busy = 0
        for blocks in (len(plan.swaps_out), len(plan.swaps_in)):
            if blocks:
                wait_ns, copy_ns = yield from self.link.transfer(blocks)
                waited += wait_ns
                busy += copy_ns
        return busy, waited

    def _take_in(self) -> int:
        """Who has arrived joins the engine; answers how many."""
        if not self._inbox:
            return 0
        arrived, refused, batch = self._inbox.take(), self.refused, self.batch
        for request in arrived:
            if refused and request.id in refused:
                batch.refuse(request, refused[request.id])
            else:
                self._arrive(batch, request)
        return len(arrived)

    def _drain(self) -> list[Request]:
        """Tell the clients who ended; answers them."""
        ended, self.batch.ended = self.batch.ended, []
        self._tell(ended)
        return ended

    def _tell(self, ended: list[Request]) -> None:
        if ended:
            if self.clients.listen:
                self._inbox.release(ended)
            if self.progress is not None:
                self.progress(len(ended))
            if self.over is not None:
                self._bury(self.over, ended)

    def _bury(self, over: Callable[[Request], None], ended: list[Request]) -> None:
        """Let go of requests that ended before any step under way was composed."""
        steps = len(self.recorder)
        self._ended.append((steps, list(ended)))
        while self._ended[0][0] < steps - self._in_flight:
            for request in self._ended.popleft()[1]:
                over(request)

    def _check(self, plan: Plan, finished: int) -> None:
        """Audit the books now and then; stop a run that goes nowhere."""
        step = len(self.recorder)
        if plan.samples or finished:
            self._advanced = step
        elif step - self._advanced >= NO_PROGRESS_STEPS:
            raise EngineStopped(
                kind="livelock",
                request_id=plan.preempted[0][0].id if plan.preempted else "",
                explanation=f"{NO_PROGRESS_STEPS:,} steps in a row produced no token",
                remedy="give the engine more blocks (--num-gpu-blocks-override)",
                rule="no progress",
            )
        self._audit(step)

    def _audit(self, step: int) -> None:
        """Check the books after 1, 2, 4, 8... steps."""
        if step >= self._next_audit:
            self.batch.audit()
            self._next_audit = 2 * step

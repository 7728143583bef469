"""The loop of one engine: compose a step, run it, settle it. Its host delivers requests and lets
time pass.

```
          ┌────────────────────────── next step ◄──────────────────────────┐
 arrive ─► compose ─► run ─► (another, if more may be in flight) ─► wait ─► settle
   host    scheduler  host                                          host   scheduler
```

An engine that schedules asynchronously has two steps in flight: it composes a step while the one
before computes, so a request that arrives during step i runs in step i + 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from mypy_extensions import i64

from kvsim.core.batch import Batch
from kvsim.core.host import NEVER_NS, Host, Waiting
from kvsim.core.plan import NOTHING_MOVED, Moved, Plan
from kvsim.core.request import Request
from kvsim.core.rows import StepRows
from kvsim.core.scheduler import Scheduler
from kvsim.errors import EngineStopped

NOBODY: Mapping[str, str] = MappingProxyType({})


class Listeners(NamedTuple):
    """Who is told what an engine does while a run lasts."""

    watcher: Any = None
    """Sees every step (`kvsim.run.watchers.Watcher`)."""
    progress: Callable[[int], None] | None = None
    """Is called with the number of requests that have just ended."""
    step_over: Callable[[], None] | None = None
    """Is called after each step that is recorded."""


NO_LISTENERS = Listeners()


class Loop:
    """Steps one engine until its requests have ended."""

    _host: Host
    _scheduler: Scheduler
    _batch: Batch
    _rows: StepRows | None
    _step_over: Callable[[], None] | None
    _refused: Mapping[str, str]
    _watcher: Any
    _told: Callable[[int], None] | None
    _over: Callable[[Request], None] | None
    _departures: Any
    _gauged: bool
    _steps: i64
    _idle_steps: i64
    """Latest consecutive steps that produced no token and ended no request."""
    _tokens: i64
    _flying: list[Plan]
    _graves: list[tuple[int, list[Request]]]
    """Ended requests for which `over` has not been called yet, with the steps at their end."""
    _next_audit: i64

    def __init__(
        self,
        host: Host,
        scheduler: Scheduler,
        batch: Batch,
        *,
        rows: StepRows | None = None,
        listeners: Listeners = NO_LISTENERS,
        refused: Mapping[str, str] = NOBODY,
        over: Callable[[Request], None] | None = None,
        departures: Any = None,
    ) -> None:
        """`rows` takes the row of each step. `refused` maps a request id to the reason why it is
        rejected on arrival. `over` is called with each ended request once no step refers to it. The
        scheduler ends requests early at their `departures` (`kvsim.run.serving.Patience`)."""
        self._host, self._scheduler, self._batch = host, scheduler, batch
        self._watcher, self._told, self._step_over = listeners
        self._rows, self._refused, self._over = rows, refused, over
        self._departures = departures
        self._gauged = bool(scheduler.gauged)
        self._steps = self._idle_steps = self._tokens = 0
        self._flying, self._graves = [], []
        self._next_audit = 1
        if self._watcher is not None:
            self._watcher.begin()

    def run(self) -> Waiting:
        """Runs the loop. It composes steps up to the allowed number in flight, then waits for the
        oldest one and settles it."""
        host, batch, flying, watcher = self._host, self._batch, self._flying, self._watcher
        scheduler, departures = self._scheduler, self._departures
        most: i64 = scheduler.in_flight
        while True:
            came: i64 = self._hear()
            if came < 0:
                return
            goes_on: bool = False
            ended: list[Request] = []
            now_ns: i64 = host.now_ns
            if not flying or host.composes(batch):
                plan: Plan = self._composed(scheduler.compose(batch, now_ns))
                if watcher is not None:
                    watcher.composed(batch, plan, now_ns, came)
                rank_wait_ns = (yield from host.meet(plan)) if host.meets else 0
                timed: bool = plan.computes or host.takes_time(plan, len(flying))
                step_ns: i64 = host.step_ns(plan) if timed else 0
                scheduler.overlap(batch, now_ns)
                self._observe(plan)
                ended = self._drain()
                if timed or plan.waits:
                    swaps: bool = len(plan.swaps_out) > 0 or len(plan.swaps_in) > 0
                    copied_ns = (yield from host.copy(plan)) if swaps else None
                    moved = self._moved(plan, copied_ns, rank_wait_ns)
                    self._dispatch(plan, now_ns, moved, step_ns)
                elif ended or not plan.empty:
                    # Nothing runs, but something happened: a step without duration.
                    plan.start_ns = plan.end_ns = now_ns
                    self._end_step(plan, len(ended))
                elif not flying:
                    # Nothing can change before a request arrives or is given up.
                    until_ns: i64 = NEVER_NS if departures is None else departures.next_ns
                    if (yield from host.sleep(until_ns)):
                        continue
                    return
                goes_on = len(flying) < most and host.goes_on(batch, plan)
            if flying and not goes_on:
                oldest: Plan = flying.pop(0)
                if not host.passes(oldest.end_ns):
                    yield from host.wait(oldest.end_ns)
                scheduler.settle(batch, oldest, oldest.end_ns)
                landed: list[Request] = self._drain()
                ended = ended + landed if ended else landed
                self._end_step(oldest, len(ended))
            if watcher is not None:
                watcher.settled(batch, ended)

    def _composed(self, plan: Any) -> Plan:
        """The step that a scheduler has composed."""
        composed: Plan | None = self._batch.plan
        if composed is None or plan is not composed:
            raise TypeError(
                f"compose returned {plan!r}; return the plan that super().compose() returns, or"
                " that of batch.begin() for a step in which nothing happens"
            )
        return composed

    def _hear(self) -> i64:
        """Takes in who arrived, and ends what was given up. Returns how many arrived; -1: there is
        nothing left to do."""
        arrived = self._host.arrived()
        if arrived is None:
            return -1
        # Requests that a policy gives up from here on end now.
        self._batch.now_ns = self._host.now_ns
        came: i64 = self.take_in(arrived) if arrived else 0
        if self._departures is not None:
            self._give_up()
        return came

    def take_in(self, arrived: list[Request]) -> int:
        """Passes arrived requests to the scheduler; returns how many there were."""
        batch: Batch = self._batch
        for request in arrived:
            batch.enter(request)
            if self._refused and request.id in self._refused:
                batch.refuse(request, self._refused[request.id])
            else:
                self._scheduler.arrive(batch, request)
            if batch.arriving is not None:
                raise ValueError(
                    f"arrive left out {request!r}; give each request to super().arrive(),"
                    " batch.arrive() or batch.refuse()"
                )
            if self._departures is not None:
                self._departures.begins(request)
        return len(arrived)

    def _give_up(self) -> None:
        """Ends the requests that their clients have given up."""
        for request in self._departures.over(self._host.now_ns):
            self._scheduler.abort(self._batch, request)

    def _observe(self, plan: Plan) -> None:
        """Notes in the plan how the engine stands once a step is composed."""
        batch: Batch = self._batch
        plan.waiting, plan.running = len(batch.waiting), len(batch.running)
        plan.swapped = len(batch.swapped)
        batch.blocks.observe(plan)
        if self._gauged:
            plan.gauges = self._scheduler.gauges(batch)

    def _moved(self, plan: Plan, copied_ns: int | None, rank_wait_ns: int) -> Moved:
        """What a step spends besides computing. Where it waits for transfers, those in flight are
        over."""
        moved: Moved = NOTHING_MOVED
        if copied_ns is not None:
            moved = Moved(copied_ns)
        elif plan.waits:
            host, flying = self._host, self._flying
            start_ns: i64 = flying[-1].end_ns if flying else host.now_ns
            moved = self._scheduler.waits(self._batch, plan, start_ns, host.next_event_ns())
        return moved._replace(rank_wait_ns=rank_wait_ns) if rank_wait_ns else moved

    def _dispatch(self, plan: Plan, start_ns: i64, moved: Moved, step_ns: i64) -> None:
        """Starts a step after those in flight."""
        host, flying = self._host, self._flying
        after_ns: i64 = flying[-1].end_ns if flying else start_ns
        lasts_ns: i64 = step_ns
        if moved is not NOTHING_MOVED:
            lasts_ns += sum(moved)
        begin_ns, end_ns, free_ns = host.runs(plan, start_ns, after_ns, lasts_ns)
        plan.start_ns, plan.end_ns, plan.moved = begin_ns, end_ns, moved
        self._batch.busy_until_ns = free_ns
        if host.gauged:
            plan.gauges = plan.gauges + host.gauges()
        plan.flying = True
        flying.append(plan)

    def _drain(self) -> list[Request]:
        """Tells the clients which requests ended, and returns these requests."""
        if not self._batch.ended:
            return []
        ended, self._batch.ended = self._batch.ended, []
        self._host.tell(ended)
        if self._told is not None:
            self._told(len(ended))
        if self._over is not None:
            self._bury(ended)
        return ended

    def _bury(self, ended: list[Request]) -> None:
        """Releases requests that ended before any step in flight was composed."""
        graves: list[tuple[int, list[Request]]] = self._graves
        assert self._over is not None
        graves.append((self._steps, ended))
        while graves[0][0] < self._steps - self._scheduler.in_flight:
            for request in graves.pop(0)[1]:
                self._over(request)

    def _end_step(self, plan: Plan, ended: i64) -> None:
        """Records a step in which `ended` requests ended, and checks for progress."""
        plan.flying = False
        if self._rows is not None and (self._host.records_empty or not plan.empty):
            self._rows.add(plan, ended)
            if self._step_over is not None:
                self._step_over()
        self._steps += 1
        if ended or self._batch.tokens != self._tokens:
            self._idle_steps = 0
        elif plan.waits or not plan.empty:
            self._idle_steps += 1
        self._tokens = self._batch.tokens
        if self._idle_steps >= self._host.patience_steps:
            raise EngineStopped(
                kind="livelock",
                request_id=plan.preempted[0][0].id if plan.preempted else "",
                explanation=f"{self._host.patience_steps:,} steps in a row produced no token",
                remedy="give the engine more blocks (--num-gpu-blocks-override)",
                rule="no progress",
            )
        if self._steps >= self._next_audit:
            # After 1, 4, 16, 64... steps.
            self._batch.audit()
            self._next_audit = 4 * self._steps

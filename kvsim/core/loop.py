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
        host, batch, flying = self._host, self._batch, self._flying
        while (came := self._hear()) >= 0:
            now_ns: i64 = host.now_ns
            ended: list[Request] = []
            plan: Plan | None = None
            if not flying or host.composes(batch):
                plan = self._composed(now_ns, came)
                # A generator costs more than all else of a step, so each is made only where time
                # may pass.
                rank_wait_ns = (yield from host.meet(plan)) if host.meets else 0
                step_ns: i64 = self._priced(plan, now_ns)
                # Whoever ended while the step was composed is told of before time passes.
                ended = self._drain()
                if step_ns >= 0:
                    copied_ns = (yield from host.copy(plan)) if plan.swaps else None
                    moved = self._moved(plan, copied_ns, rank_wait_ns)
                    self._dispatch(plan, now_ns, moved, step_ns)
                elif self._idles(plan, now_ns, len(ended)):
                    if (yield from host.sleep(self._departure_ns())):
                        continue
                    return
            if self._settles(plan):
                # Most steps end before anything else happens: no event of the environment is
                # needed.
                if not host.passes(flying[0].end_ns):
                    yield from host.wait(flying[0].end_ns)
                ended = self._settle(ended)
            if self._watcher is not None:
                self._watcher.settled(batch, ended)

    def _composed(self, now_ns: i64, came: i64) -> Plan:
        """The step that the scheduler composes when `came` requests have just arrived."""
        plan: Any = self._scheduler.compose(self._batch, now_ns)
        composed: Plan | None = self._batch.plan
        if composed is None or plan is not composed:
            raise TypeError(
                f"compose returned {plan!r}; return the plan that super().compose() returns, or"
                " that of batch.begin() for a step in which nothing happens"
            )
        if self._watcher is not None:
            self._watcher.composed(self._batch, composed, now_ns, came)
        return composed

    def _priced(self, plan: Plan, now_ns: i64) -> i64:
        """How long a step computes; -1: it does not take place. Notes in the plan how the engine
        stands."""
        step_ns: i64 = -1
        if plan.computes or self._host.takes_time(plan, len(self._flying)):
            step_ns = self._host.step_ns(plan)
        # Whoever ends beside the model is over before it is noted how the engine stands.
        self._scheduler.overlap(self._batch, now_ns)
        self._observe(plan)
        if plan.waits:
            return max(step_ns, 0)
        return step_ns

    def _idles(self, plan: Plan, now_ns: i64, ended: i64) -> bool:
        """Whether nothing can change before a request arrives or is given up. Where nothing runs,
        but something happened, that is a step without duration."""
        # With steps in flight, the oldest of them is waited for instead.
        if ended == 0 and plan.empty:
            return not self._flying
        plan.start_ns = plan.end_ns = now_ns
        self._end_step(plan, ended)
        return False

    def _departure_ns(self) -> int:
        """When the next request is given up, at the latest."""
        return NEVER_NS if self._departures is None else int(self._departures.next_ns)

    def _settles(self, plan: Plan | None) -> bool:
        """Whether the oldest step in flight is settled before another is composed, if this one was
        composed last."""
        flying: i64 = len(self._flying)
        if flying == 0 or plan is None or flying >= self._scheduler.in_flight:
            return flying > 0
        return not self._host.goes_on(self._batch, plan)

    def _settle(self, ended: list[Request]) -> list[Request]:
        """Settles the oldest step in flight, whose time has passed. Returns the requests that ended
        with it, behind those that `ended` before."""
        oldest: Plan = self._flying.pop(0)
        self._scheduler.settle(self._batch, oldest, oldest.end_ns)
        landed: list[Request] = self._drain()
        ended = ended + landed if ended else landed
        self._end_step(oldest, len(ended))
        return ended

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
            # A policy's `arrive` that neither took the request in nor refused it would lose it
            # unnoticed.
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
        # A step in flight still lists its requests, and settling it reads them.
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
        # Tokens are the measure: an engine that preempts for ever looks busy, too.
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

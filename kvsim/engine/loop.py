"""The loop of one engine: compose a step, run it, settle it. Its host delivers requests and lets
time pass.

```
          ┌────────────────────────── next step ◄──────────────────────────┐
 arrive ─► compose ─► run ─► (another, if more may be in flight) ─► wait ─► settle
   host    scheduler  host                                          host   scheduler
```

There are three hosts: simulated time (`kvsim.replica.host`), the unit clock of recorded logs
(`kvsim.conform.virtual`), and a real device (`kvsim.validate.loop`).

An engine that schedules asynchronously has two steps in flight: it composes a step while the one
before computes, so a request that arrives during step i runs in step i + 2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from math import inf
from types import MappingProxyType
from typing import Protocol

from kvsim.core.host import Host, Waiting
from kvsim.engine.batch import Batch
from kvsim.engine.plan import NOTHING_MOVED, RECOMPUTE, Flight, Moved, Plan
from kvsim.engine.request import Request
from kvsim.engine.scheduler import Scheduler
from kvsim.errors import EngineStopped
from kvsim.schema import completed_row, gauge_row, pack


class Watcher(Protocol):
    """An observer that sees every step in full. It must not change anything."""

    def begin(self) -> None:
        """Called when a run begins. Earlier calls belong to an attempt that was abandoned."""
        ...

    def composed(self, batch: Batch, plan: Plan, now_ns: int, arrived: int) -> None:
        """Called when a step was composed, before it runs. `arrived` requests joined the queue
        before it."""
        ...

    def settled(self, batch: Batch, ended: list[Request]) -> None:
        """Called when the step composed last is over. `ended` lists the requests that ended in it,
        in order."""
        ...


class Departures(Protocol):
    """When clients give up the requests that they sent."""

    @property
    def next_ns(self) -> float:
        """When the next request in progress is given up; infinite: never."""
        ...

    def begins(self, request: Request) -> None:
        """A request was sent."""
        ...

    def over(self, now_ns: int) -> list[Request]:
        """Takes out the requests in progress that are given up until now, in order."""
        ...


class Progress:
    """Counts steps and detects a run that makes no progress."""

    def __init__(self, patience_steps: int) -> None:
        self.steps = 0
        self.idle_steps = 0
        """Number of latest consecutive steps that produced no token and ended no request."""
        self.patience_steps = patience_steps
        """Number of consecutive idle steps that counts as a livelock."""


class Repetition(Protocol):
    """Takes steps for which the scheduler need not be called (`kvsim.fast.repeat`)."""

    @property
    def ended(self) -> list[Request]:
        """The requests that ended in these steps, in order."""
        ...

    def repeat(self, flying: deque[Flight], now_ns: int, progress: Progress) -> bool:
        """Takes steps from `now_ns` to `Batch.now_ns`. Returns whether it took any.

        If a step is in flight, the method settles it and puts the step that is in flight at the end
        in its place.
        """
        ...


class Loop:
    """Steps one engine until its requests have ended."""

    def __init__(
        self,
        host: Host,
        scheduler: Scheduler,
        batch: Batch,
        *,
        record: Callable[[bytes], None] | None = None,
        refused: Mapping[str, str] = MappingProxyType({}),
        watcher: Watcher | None = None,
        progress: Callable[[int], None] | None = None,
        over: Callable[[Request], None] | None = None,
        repetition: Repetition | None = None,
        departures: Departures | None = None,
    ) -> None:
        """`record` is called with the row of each step. `refused` maps a request id to the
        reason why it is rejected on arrival. `progress` is called with the number of requests that
        have just ended. `over` is called with each ended request once no step refers to it.
        The scheduler ends requests early at their `departures`."""
        self._host, self._scheduler, self._batch = host, scheduler, batch
        self._record, self._refused, self._watcher = record, refused, watcher
        self._told, self._over, self._repetition = progress, over, repetition
        self._departures = departures
        self._progress = Progress(host.patience_steps)
        self._tokens = 0
        self._flying: deque[Flight] = deque()
        self._graves: deque[tuple[int, list[Request]]] = deque()
        """Ended requests for which `over` has not been called yet, with the step count at their
        end."""
        self._next_audit = 1
        if watcher is not None:
            watcher.begin()

    def run(self) -> Waiting:
        """Runs the loop. It composes steps up to the allowed number in flight, then waits for the
        oldest one and settles it."""
        host, batch, flying, watcher = self._host, self._batch, self._flying, self._watcher
        most, departures = self._scheduler.in_flight, self._departures
        while (arrived := host.arrived()) is not None:
            came = self.take_in(arrived) if arrived else 0
            if departures is not None:
                self._give_up(departures)
            if self._repeated():
                yield from host.wait(batch.now_ns)
                self._landed()
                continue
            goes_on, ended, now_ns = False, list[Request](), host.now_ns
            if not flying or host.composes(batch):
                plan = self._scheduler.compose(batch, now_ns)
                if watcher is not None:
                    watcher.composed(batch, plan, now_ns, came)
                rank_wait_ns = (yield from host.meet(plan)) if host.meets else 0
                timed = plan.computes or host.takes_time(plan, len(flying))
                step_ns = host.step_ns(plan) if timed else 0
                self._scheduler.overlap(batch, now_ns)
                ended = self._drain() if batch.ended else []
                if timed or plan.waits:
                    moved = NOTHING_MOVED
                    row = self._row(plan)
                    if plan.swaps_out or plan.swaps_in:
                        moved = Moved(*(yield from host.copy(plan)))
                    elif plan.waits:
                        moved = self._waits(plan)
                    if rank_wait_ns:
                        moved = moved._replace(rank_wait_ns=rank_wait_ns)
                    self._dispatch(plan, row, now_ns, moved, step_ns)
                elif ended or not plan.empty:
                    # Nothing runs, but something happened: a step without duration.
                    row = self._row(plan)
                    self._step_over(Flight(plan, now_ns, now_ns, NOTHING_MOVED, row), len(ended))
                elif not flying:
                    # Nothing can change before a request arrives or is given up.
                    if (yield from host.sleep(inf if departures is None else departures.next_ns)):
                        continue
                    return
                goes_on = len(flying) < most and host.goes_on(batch, plan)
            if flying and not goes_on:
                flight = flying.popleft()
                yield from host.wait(flight.end_ns)
                ended += self._land(flight, len(ended))
            if watcher is not None:
                watcher.settled(batch, ended)

    def _give_up(self, departures: Departures) -> None:
        """Ends the requests that their clients have given up."""
        now_ns = self._host.now_ns
        for request in departures.over(now_ns):
            self._batch.now_ns = now_ns
            self._scheduler.abort(self._batch, request)

    def _waits(self, plan: Plan) -> Moved:
        """Returns how long a step waits for transfers once those in flight are over."""
        host, flying = self._host, self._flying
        start_ns = flying[-1].end_ns if flying else host.now_ns
        return self._scheduler.waits(self._batch, plan, start_ns, host.next_event_ns())

    def _row(self, plan: Plan) -> bytes:
        """Returns the row of the step composed last; nothing if it is not recorded."""
        if self._record is None or (plan.empty and not self._host.records_empty):
            return b""
        row, scheduler = composed_row(self._batch, plan), self._scheduler
        return row + gauge_row(scheduler.gauges(self._batch)) if scheduler.gauged else row

    def _dispatch(self, plan: Plan, row: bytes, start_ns: int, moved: Moved, step_ns: int) -> None:
        """Starts a step after those in flight. `moved` is the time of its swap copies, which come
        first and block it (vLLM 0.6.3 `worker/worker.py`, `execute_worker`)."""
        flying, host, after_ns = self._flying, self._host, start_ns
        if flying:
            assert not moved.copy_ns, "copies block a step, so none may be in flight"
            after_ns = flying[-1].end_ns
        times = host.runs(plan, start_ns, after_ns, sum(moved) + step_ns)
        start_ns, end_ns, self._batch.busy_until_ns = times
        if row and host.gauged:
            row += gauge_row(host.gauges())
        flying.append(Flight(plan, start_ns, end_ns, moved, row))

    def _land(self, flight: Flight, already: int) -> list[Request]:
        """Settles the oldest step once its time has passed. Returns the requests that ended."""
        self._scheduler.settle(self._batch, flight.plan, flight.end_ns)
        ended = self._drain() if self._batch.ended else []
        self._step_over(flight, already + len(ended))
        return ended

    def _step_over(self, flight: Flight, ended: int) -> None:
        """Records a step in which `ended` requests ended, and checks for progress."""
        plan, start_ns, end_ns, moved, row = flight
        if row and self._record is not None:
            self._record(completed_row(row, start_ns, end_ns, *moved, ended))
        progress, tokens = self._progress, self._batch.tokens
        progress.steps += 1
        if ended or tokens != self._tokens:
            progress.idle_steps = 0
        elif not plan.empty or plan.waits:
            progress.idle_steps += 1
        self._tokens = tokens
        if progress.idle_steps >= progress.patience_steps or progress.steps >= self._next_audit:
            self._check(plan)

    # -- steps that are repeated -----------------------------------------------------------------

    def _repeated(self) -> bool:
        """Takes the following ordinary steps at once. Returns whether there were any."""
        repetition, flying = self._repetition, self._flying
        if repetition is None or self._batch.ended:
            return False
        if len(flying) != self._scheduler.in_flight - 1:
            return False
        return repetition.repeat(flying, self._host.now_ns, self._progress)

    def _landed(self) -> None:
        """Books that the time of repeated steps has passed."""
        assert self._repetition is not None
        self._tokens = self._batch.tokens
        self._tell(self._repetition.ended)
        self._check(self._batch.plan)

    # -- requests come and go --------------------------------------------------------------------

    def take_in(self, arrived: list[Request]) -> int:
        """Passes arrived requests to the engine. Returns how many there were."""
        refused, batch = self._refused, self._batch
        for request in arrived:
            if refused and request.id in refused:
                batch.refuse(request, refused[request.id])
            else:
                self._scheduler.arrive(batch, request)
            if self._departures is not None:
                self._departures.begins(request)
        return len(arrived)

    def _drain(self) -> list[Request]:
        """Tells the clients which requests ended, and returns these requests."""
        ended, self._batch.ended = self._batch.ended, []
        self._tell(ended)
        return ended

    def _tell(self, ended: list[Request]) -> None:
        if ended:
            self._host.tell(ended)
            if self._told is not None:
                self._told(len(ended))
            if self._over is not None:
                self._bury(self._over, ended)

    def _bury(self, over: Callable[[Request], None], ended: list[Request]) -> None:
        """Releases requests that ended before any step in flight was composed."""
        steps, graves = self._progress.steps, self._graves
        graves.append((steps, list(ended)))
        while graves[0][0] < steps - self._scheduler.in_flight:
            for request in graves.popleft()[1]:
                over(request)

    def _check(self, plan: Plan) -> None:
        """Audits the books after 1, 4, 16, 64... steps, and stops a run that makes no progress."""
        progress = self._progress
        if progress.idle_steps >= progress.patience_steps:
            raise EngineStopped(
                kind="livelock",
                request_id=plan.preempted[0][0].id if plan.preempted else "",
                explanation=f"{progress.patience_steps:,} steps in a row produced no token",
                remedy="give the engine more blocks (--num-gpu-blocks-override)",
                rule="no progress",
            )
        if progress.steps >= self._next_audit:
            self._batch.audit()
            self._next_audit = 4 * progress.steps


def composed_row(batch: Batch, plan: Plan) -> bytes:
    """Returns the row of a step (`kvsim.schema.STEP_COLUMNS`) with the values known when it is
    composed."""
    prefill_tokens = cached_tokens = recomputes = 0
    for tokens, _ in plan.chunks:
        prefill_tokens += tokens
    for prefill in plan.prefills:
        cached_tokens += prefill.cached
    for _, means in plan.preempted:
        recomputes += means == RECOMPUTE
    # By position: matching this many names would take as long as all the rest.
    return pack(
        *(0, 0, 0, 0, 0, 0),
        len(plan.prefills),
        prefill_tokens,
        cached_tokens,
        plan.decode_seqs,
        plan.context_tokens,
        plan.batched_tokens,
        recomputes,
        len(plan.preempted) - recomputes,
        len(plan.swapped_in),
        len(plan.swaps_out),
        len(plan.swaps_in),
        len(plan.copies),
        len(plan.ignored),
        len(batch.waiting),
        batch.num_running,
        len(batch.swapped),
        *batch.blocks.census(),
        plan.blocked,
        0,
    )

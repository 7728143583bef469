"""Serves requests without an event queue: take who arrived, compose, let the step's time pass.

```
 while requests remain:
     take arrivals up to now; compose; now += copies; now += step; settle
```

The rules of `kvsim.engine.replica`, without SimPy, for engines with one step in flight: with the same
times both decide and time everything alike. In front of a real engine the clock is the sum of
measured times, so that the host's own work between steps delays nobody.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any, Protocol

from kvsim.engine.batch import Batch
from kvsim.engine.plan import Plan
from kvsim.engine.request import Request
from kvsim.errors import EngineStopped
from kvsim.workload.clients import Clients

if TYPE_CHECKING:
    from kvsim.engines import Scheduler
    from kvsim.engine.loop import Watcher

NO_PROGRESS_STEPS = 1_000
"""Steps in a row without a token and without an end after which a run is given up."""

Pairs = list[tuple[int, int]]


class Times(Protocol):
    """Says how long a step takes, by pricing it or by running it."""

    def swap_out_ns(self, pairs: Pairs) -> int:
        """Nanoseconds to copy (GPU, CPU) blocks; they come before the step, first of all."""
        ...

    def swap_in_ns(self, pairs: Pairs) -> int:
        """Nanoseconds to copy (CPU, GPU) blocks; they come next."""
        ...

    def step_ns(self, plan: Plan) -> int:
        """Nanoseconds of the step itself, copies on the GPU included."""
        ...


def serve(
    scheduler: Scheduler,
    batch: Batch,
    times: Times,
    clients: Clients,
    watcher: Watcher | None = None,
) -> int:
    """Serve until nothing more can happen; answers when that is, in nanoseconds.

    What happened to a request is written into it. Raises `EngineStopped` where the engine would,
    and where requests are left that it can never schedule.
    """
    server = _Server(scheduler, batch, times, clients, watcher)
    while server.step():
        pass
    batch.audit()
    if len(batch):
        head = (batch.swapped or batch.waiting or batch.running)[0]
        raise _stuck("deadlock", head.id, "can never be scheduled")
    return server.now_ns


class _Server:
    def __init__(
        self,
        scheduler: Scheduler,
        batch: Batch,
        times: Times,
        clients: Clients,
        watcher: Watcher | None,
    ) -> None:
        self._clock_ns = 0
        self._scheduler, self._batch, self._times = scheduler, batch, times
        self._clients, self._watcher = clients, watcher
        self._arrive: Any = getattr(scheduler, "arrive", Batch.arrive)
        self._inbox: list[Request] = []
        self._first = iter(clients.start())
        self._coming: list[tuple[int, int, Request, bool]] = []
        """Heap of (time, order of asking, request, whether it is of `start`)."""
        self._asked = 0
        self._idle_steps = 0
        if watcher is not None:
            watcher.begin()
        self._start()

    @property
    def now_ns(self) -> int:
        """The virtual clock."""
        return self._clock_ns

    def step(self) -> bool:
        """One step, or a sleep until somebody arrives; False where nobody will."""
        batch, scheduler = self._batch, self._scheduler
        arrived = self._take_inbox()
        plan = scheduler.compose(batch, self._clock_ns)
        if self._watcher is not None:
            self._watcher.composed(batch, plan, self._clock_ns, arrived)
        # The step is under way when the host goes on: a request that turns out to have ended takes
        # part in it all the same.
        took_ns = 0 if plan.empty else self._run(plan)
        scheduler.overlap(batch, self._clock_ns)
        ended = self._drain()
        if not plan.empty:
            self._offer_until(self._clock_ns + took_ns)
            scheduler.settle(batch, plan, self._clock_ns)
            ended += self._drain()
            self._check(plan, bool(ended))
        elif not (ended or self._inbox):
            return self._sleep()
        if self._watcher is not None:
            self._watcher.settled(batch, ended)
        return True

    def _run(self, plan: Plan) -> int:
        """Nanoseconds that the copies and the step take."""
        took_ns = 0
        if plan.swaps_out:
            took_ns += self._times.swap_out_ns(plan.swaps_out)
        if plan.swaps_in:
            took_ns += self._times.swap_in_ns(plan.swaps_in)
        return took_ns + self._times.step_ns(plan)

    def _sleep(self) -> bool:
        while not self._inbox:
            if not self._coming:
                return False
            self._offer_until(self._coming[0][0])
        return True

    # -- requests come in ------------------------------------------------------------------------

    def _start(self) -> None:
        """Offer whose time has come of those that wait for nothing else; await the next."""
        for time_ns, request in self._first:
            if time_ns > self._clock_ns:
                self._await(time_ns, request, True)
                return
            self._offer(request)

    def _await(self, time_ns: int, request: Request, first: bool = False) -> None:
        self._asked += 1
        heapq.heappush(self._coming, (time_ns, self._asked, request, first))

    def _offer(self, request: Request) -> None:
        """A client wants to send a request; its concurrency limit may hold it back."""
        if self._clients.offer(request, self._clock_ns):
            self._inbox.append(request)

    def _offer_until(self, time_ns: int) -> None:
        """Time passes: everybody is offered at the right moment."""
        while self._coming and self._coming[0][0] <= time_ns:
            self._clock_ns, _, request, first = heapq.heappop(self._coming)
            self._offer(request)
            if first:
                self._start()
        self._clock_ns = time_ns

    def _drain(self) -> list[Request]:
        """Tell the clients who ended; answers them."""
        ended, self._batch.ended = self._batch.ended, []
        for request in ended:
            sent, later = self._clients.ended(request, self._clock_ns)
            self._inbox += sent
            for time_ns, other in later:
                if time_ns <= self._clock_ns:
                    self._offer(other)
                else:
                    self._await(time_ns, other)
        return ended

    def _take_inbox(self) -> int:
        inbox, self._inbox = self._inbox, []
        for request in sorted(inbox, key=lambda each: (each.arrival_ns, each.index)):
            self._arrive(self._batch, request)
        return len(inbox)

    def _check(self, plan: Plan, ended: bool) -> None:
        self._idle_steps = 0 if plan.samples or ended else self._idle_steps + 1
        if self._idle_steps >= NO_PROGRESS_STEPS:
            who = plan.preempted[0][0].id if plan.preempted else ""
            raise _stuck("livelock", who, f"got no token in {NO_PROGRESS_STEPS:,} steps in a row")


def _stuck(kind: str, request_id: str, what: str) -> EngineStopped:
    return EngineStopped(
        kind=kind,
        request_id=request_id,
        explanation=f"request {request_id} {what}",
        remedy="give the engine more blocks (--num-gpu-blocks-override)",
        rule="no progress",
    )

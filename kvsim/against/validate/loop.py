"""A real device as the host of a loop: its clock is the sum of measured times.

So the host's own work between steps delays no request. Copies come first, then the step; both run
as soon as the step is composed. For engines with one step in flight.
"""

from __future__ import annotations

import heapq
from typing import Protocol

from kvsim.core.batch import Batch
from kvsim.core.host import Host, Waiting
from kvsim.core.loop import Loop
from kvsim.core.plan import Plan
from kvsim.core.request import Request
from kvsim.core.scheduler import Scheduler
from kvsim.errors import EngineStopped
from kvsim.run.watchers import Watcher
from kvsim.workload.clients import Clients

Pairs = list[tuple[int, int]]


class Times(Protocol):
    """A source of step times, by pricing steps or by running them."""

    def swap_out_ns(self, pairs: Pairs) -> int:
        """Nanoseconds to copy (GPU, CPU) blocks, before everything else in the step."""
        ...

    def swap_in_ns(self, pairs: Pairs) -> int:
        """Nanoseconds to copy (CPU, GPU) blocks, after the copies out and before the step."""
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
    """Serve until nothing more can happen; returns that time in nanoseconds.

    The history of a request is written into it. Raises `EngineStopped` where the engine would, and
    if requests are left that it can never schedule.
    """
    device = Device(times, clients)
    for _ in Loop(device, scheduler, batch, watcher=watcher).run():
        pass
    batch.audit()
    if len(batch):
        head = (batch.swapped or batch.waiting or batch.running)[0]
        raise EngineStopped(
            kind="deadlock",
            request_id=head.id,
            explanation=f"request {head.id} can never be scheduled",
            remedy="give the engine more blocks (--num-gpu-blocks-override)",
            rule="no progress",
        )
    return device.now_ns


class Device(Host):
    """Clients, and a device that runs steps."""

    def __init__(self, times: Times, clients: Clients) -> None:
        super().__init__()
        self.patience_steps = 1_000
        self._times = times
        self._clients = clients
        self._inbox: list[Request] = []
        self._first = iter(clients.start())
        self._coming: list[tuple[int, int, Request, bool]] = []
        """Heap of (time, order of requesting, request, whether it is from `Clients.start`)."""
        self._asked = 0
        self._start()

    def arrived(self) -> list[Request]:
        """Take out the requests that have arrived by now."""
        inbox, self._inbox = self._inbox, []
        return sorted(inbox, key=lambda each: (each.arrival_ns, each.index))

    def tell(self, ended: list[Request]) -> None:
        """Report completions to the clients, which may let them send more."""
        for request in ended:
            sent, later = self._clients.ended(request, self.now_ns)
            self._inbox += sent
            for time_ns, other in later:
                if time_ns <= self.now_ns:
                    self._offer(other)
                else:
                    self._await(time_ns, other)

    def step_ns(self, plan: Plan) -> int:
        """Run a step and its copies."""
        took_ns = 0
        if plan.swaps_out:
            took_ns += self._times.swap_out_ns(plan.swaps_out)
        if plan.swaps_in:
            took_ns += self._times.swap_in_ns(plan.swaps_in)
        return took_ns + self._times.step_ns(plan)

    def wait(self, until_ns: int) -> Waiting:
        """Let time pass, and offer every request at its time."""
        yield
        self._offer_until(until_ns)

    def sleep(self, until_ns: float) -> Waiting:
        """Sleep until a request arrives."""
        while not self._inbox:
            if not self._coming:
                return False
            self._offer_until(self._coming[0][0])
        yield
        return True

    def _start(self) -> None:
        """Offer the initial requests whose time has come, and await the next one."""
        for time_ns, request in self._first:
            if time_ns > self.now_ns:
                self._await(time_ns, request, True)
                return
            self._offer(request)

    def _await(self, time_ns: int, request: Request, first: bool = False) -> None:
        self._asked += 1
        heapq.heappush(self._coming, (time_ns, self._asked, request, first))

    def _offer(self, request: Request) -> None:
        """A client wants to send a request; its concurrency limit may hold it back."""
        if self._clients.offer(request, self.now_ns):
            self._inbox.append(request)

    def _offer_until(self, time_ns: int) -> None:
        while self._coming and self._coming[0][0] <= time_ns:
            self.now_ns, _, request, first = heapq.heappop(self._coming)
            self._offer(request)
            if first:
                self._start()
        self.now_ns = time_ns

"""Who provides requests and time to a loop: simulated time, the clock of recorded logs, a device.

In simulated time, events of the same instant follow each other: requests first, in order of
(arrival, place in the trace), then the engine; so a step that starts at t has seen everything that
arrived at t or before. Time is integer nanoseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Final

from mypy_extensions import i64, mypyc_attr

NOBODY: list[Any] = []
NEVER_NS: Final = 1 << 62
"""When something happens that never does. Every step ends before, so that sums of a few times fit
into 64 bits."""
_LAST_NS: Final = NEVER_NS - 1
"""When a step ends at the latest. Compiled code compares with it at once, as it has 62 bits."""

Waiting = Generator[Any, Any, Any]
"""What a host yields while time passes. Only the driver of the loop interprets it."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Receiver:
    """Where the requests for an engine arrive."""

    next_ns: i64
    """When the next request with a fixed send time comes; `NEVER_NS`: none does."""
    listens: bool
    """Whether something outside the engine depends on when a request ends."""
    pending: list[Any]
    """Requests that have arrived and were not taken."""

    def __init__(self, listens: bool) -> None:
        self.next_ns, self.listens, self.pending = NEVER_NS, listens, []

    def upcoming(self) -> tuple[int, int]:
        """Two times, `NEVER_NS` for never: when the next request with a fixed send time comes, and
        when the next event outside the engine is due."""
        raise NotImplementedError

    def collect(self, now_ns: int) -> None:
        """Lets requests arrive that are due until now."""

    def take(self) -> list[Any]:
        """Removes and returns the arrived requests, in order of (arrival, place in the trace)."""
        arrived, self.pending = self.pending, []
        if len(arrived) > 1:
            arrived.sort(key=_arrival_order)
        return arrived

    def release(self, ended: list[Any]) -> None:
        """Tells whoever listens that these requests have ended."""

    def wait(self, until_ns: int) -> Waiting:
        """Waits until a request arrives, at most until `until_ns`."""
        raise NotImplementedError


def _arrival_order(request: Any) -> tuple[int, int]:
    return request.arrival_ns, request.index


@mypyc_attr(allow_interpreted_subclasses=True)
class Host:
    """Provides requests and time to a loop. Its constructor sets what is not as usual."""

    now_ns: i64
    """The current time. It advances only in `wait`, `copy` and `sleep`."""
    patience_steps: i64
    """Consecutive steps without a new token or an ended request that count as a livelock."""
    meets: bool
    """Whether other engines take part in each step (`meet`)."""
    records_empty: bool
    """Whether steps that take a place in the queue and change nothing are recorded."""
    gauged: tuple[str, ...]
    """Columns of `kvsim.core.schema.STEPS` that it knows of a step."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.patience_steps = 100_000
        self.meets, self.records_empty, self.gauged = False, True, ()

    def next_event_ns(self) -> int:
        """When something outside the engine happens next, as an arrival."""
        return NEVER_NS

    def arrived(self) -> list[Any] | None:
        """Removes and returns the requests that have arrived, ordered by arrival time and place in
        the trace. Returns None when there is nothing left to do."""
        raise NotImplementedError

    def tell(self, ended: list[Any]) -> None:
        """Tells the clients that these requests have ended, so that they may send more."""

    def meet(self, plan: Any) -> Waiting:
        """Waits for the engines that take part in the same step, before it is priced. Returns how
        long it will wait for the slowest of them at its end, in nanoseconds."""
        yield from ()
        return 0

    def step_ns(self, plan: Any) -> int:
        """The duration of a step in nanoseconds, without the copies that `copy` makes."""
        raise NotImplementedError

    def copy(self, plan: Any) -> Waiting:
        """Makes the swap copies of a step, which waits for them. Returns how long they took, in
        nanoseconds."""
        yield from ()
        return 0

    def runs(self, plan: Any, now_ns: int, after_ns: int, lasts_ns: int) -> tuple[int, int, int]:
        """Starts a step that was composed at `now_ns` and lasts `lasts_ns`, copies included.

        Those in flight are over at `after_ns`. Returns when it begins, when it ends, and when the
        next step can begin."""
        end_ns = after_ns + lasts_ns
        return after_ns, end_ns, end_ns

    def gauges(self) -> tuple[int, ...]:
        """The values of `gauged` in the step started last."""
        return ()

    def passes(self, until_ns: int) -> bool:
        """Lets time pass until `until_ns` if nothing else happens before. If not, `wait` does."""
        return False

    def wait(self, until_ns: int) -> Waiting:
        """Lets time pass until `until_ns`."""
        raise NotImplementedError

    def sleep(self, until_ns: int) -> Waiting:
        """Lets time pass until a request arrives, at most until `until_ns`. Returns False if
        neither comes."""
        raise NotImplementedError

    # -- which steps take time -------------------------------------------------------------------

    def composes(self, batch: Any) -> bool:
        """Whether to compose another step before the next step in flight is settled. At least one
        is in flight."""
        return True

    def takes_time(self, plan: Any, in_flight: int) -> bool:
        """Whether a step without model execution takes time, given the steps in flight."""
        return not (plan.empty or in_flight)

    def goes_on(self, batch: Any, plan: Any) -> bool:
        """Whether the engine composes another step while this one runs, if it may."""
        goes: bool = plan.computes
        return goes


@mypyc_attr(allow_interpreted_subclasses=True)
class SimulatedTime(Host):
    """An inbox, and the times of copies and of steps, in one environment of SimPy
    (`kvsim.run.replica.time.Clock`)."""

    inbox: Receiver
    _env: Any
    _events: list[Any]
    _price: Callable[[Any], int]
    _transfer_ns: Callable[[int], int]
    _listens: bool

    def __init__(
        self,
        env: Any,
        price: Callable[[Any], int],
        transfer_ns: Callable[[int], int],
        inbox: Receiver,
    ) -> None:
        """`price` returns the nanoseconds of a plan, `transfer_ns` those of a copy of so many
        blocks between GPU and CPU, which nobody else uses meanwhile."""
        super().__init__()
        self._env, self._price, self._transfer_ns, self.inbox = env, price, transfer_ns, inbox
        self._events, self._listens = env.events, inbox.listens

    def next_event_ns(self) -> int:
        # What is due just now was taken in before the step was composed.
        nearest_ns = NEVER_NS
        for at_ns in self.inbox.upcoming():
            if self.now_ns < at_ns < nearest_ns:
                nearest_ns = at_ns
        return nearest_ns

    def arrived(self) -> list[Any] | None:
        if self.now_ns < self.inbox.next_ns and not self.inbox.pending:
            return NOBODY
        self.inbox.collect(self.now_ns)
        return self.inbox.take()

    def tell(self, ended: list[Any]) -> None:
        self.inbox.release(ended)

    def step_ns(self, plan: Any) -> int:
        ns: int = self._price(plan)  # of any size, unlike the time
        if ns + int(self.now_ns) > _LAST_NS:
            raise OverflowError("times do not fit into 64 bits")
        return ns

    def copy(self, plan: Any) -> Waiting:
        """Copies blocks, first out, then in."""
        before_ns = self._env.now
        for blocks in (len(plan.swaps_out), len(plan.swaps_in)):
            if blocks:
                yield self._env.later(self._transfer_ns(blocks))
        self.now_ns = self._env.now
        return self._env.now - before_ns

    def passes(self, until_ns: int) -> bool:
        # Clients that listen read the clock of the environment.
        if self._listens or (self._events and self._events[0][0] <= until_ns):
            return False
        self.now_ns = max(self.now_ns, until_ns)
        return True

    def wait(self, until_ns: int) -> Waiting:
        now_ns = int(self._env.now)
        if until_ns > now_ns:
            yield self._env.later(until_ns - now_ns)
            self.now_ns = max(self.now_ns, until_ns)
        self.inbox.collect(until_ns)

    def sleep(self, until_ns: int) -> Waiting:
        """Lets time pass until a request arrives, at most until `until_ns`; without end if neither
        comes."""
        yield from self.inbox.wait(until_ns)
        self.now_ns = max(self.now_ns, int(self._env.now))
        return True

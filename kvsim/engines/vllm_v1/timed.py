"""How long the copies to and from lower tiers take, and which steps wait for them.

```
 step             ── computes ──┬───── computes ─────┬── waits ──┬─ computes ─
 stores           of this step: └──── copy ────┬─ copy ─┘ flush: a block of it is reused
 loads                 └─── copy, while the request waits in the queue
```

A store of the blocks that a step computes begins with the next step; one of blocks that earlier
steps computed, with its own. A load within a step is a lane of its own. vLLM 0.33.0
`v1/kv_offload/cpu/gpu_worker.py`, `distributed/kv_transfer/kv_connector/v1/offloading/worker.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from kvsim.core.host import NEVER_NS
from kvsim.core.plan import NOTHING_MOVED, Moved
from kvsim.engines.vllm_v1.connector import NOTHING, Done, Job, Transfers, Worker
from kvsim.engines.vllm_v1.storage import Below

T = TypeVar("T")

_FULL = 2000
"""Speed of a copy that is alone on its link. Shares of it are whole numbers, so that times are."""


class Lane(Generic[T]):
    """Copies that follow each other."""

    def __init__(self) -> None:
        self.copies: deque[tuple[int, T]] = deque()
        """(nanoseconds alone on the link, copy) of those that are not over, in order."""
        self._left = 0
        """What is left of the first one, in nanoseconds times `_FULL`."""
        self._over: deque[tuple[int, T]] = deque()
        """(end in nanoseconds, copy) of those that are over and were not taken out."""
        self.finished = 0
        """Number of copies that are over."""
        self.busy_ns = 0
        """Time with a copy under way."""

    def submit(self, copy: T, alone_ns: int) -> None:
        """A copy is asked for that takes `alone_ns` where it is alone on the link."""
        if not self.copies:
            self._left = alone_ns * _FULL
        self.copies.append((alone_ns, copy))

    def take(self, now_ns: int) -> list[T]:
        """Takes out the copies that are over at a time."""
        done = []
        while self._over and self._over[0][0] <= now_ns:
            done.append(self._over.popleft()[1])
        return done

    def due_ns(self, speed: int) -> int:
        """Returns how long the copy under way takes still at a speed."""
        # Rounded up: copies end at whole nanoseconds.
        return -(-self._left // speed)

    def go_on(self, speed: int, ns: int, now_ns: int) -> None:
        """Copies for so long, until `now_ns`, at most to the end of the copy under way."""
        self.busy_ns += ns
        self._left -= speed * ns
        if self._left <= 0:
            self._over.append((now_ns, self.copies.popleft()[1]))
            self.finished += 1
            if self.copies:
                self._left = self.copies[0][0] * _FULL


class Lanes(Generic[T]):
    """The lanes of a link. Time passes only in `advance`."""

    def __init__(self, directions: list[list[Lane[T]]], both_ways: float = 1.0) -> None:
        """`both_ways`: speed of each direction while both copy, as a share of that of one alone."""
        self._directions = directions
        # Even, as two lanes of a direction halve it.
        self._both = round(_FULL * both_ways / 2) * 2
        self.now_ns = 0

    def advance(self, until_ns: int) -> None:
        """Lets time pass. What is submitted later must not begin before `until_ns`."""
        while speeds := self._speeds():
            ns = min([lane.due_ns(speed) for lane, speed in speeds])
            if self.now_ns + ns > until_ns:
                break
            self._pass(speeds, ns)
        if until_ns > self.now_ns:
            self._pass(speeds, until_ns - self.now_ns)

    def next_ns(self) -> int:
        """Returns when the next copy is over, if no other is submitted."""
        due = [lane.due_ns(speed) for lane, speed in self._speeds()]
        return self.now_ns + min(due) if due else NEVER_NS

    def _pass(self, speeds: list[tuple[Lane[T], int]], ns: int) -> None:
        self.now_ns += ns
        for lane, speed in speeds:
            lane.go_on(speed, ns, self.now_ns)

    def _speeds(self) -> list[tuple[Lane[T], int]]:
        """Returns the lanes that copy, and how fast."""
        copying: list[list[Lane[T]]] = []
        for lanes in self._directions:
            for lane in lanes:
                if lane.copies:
                    copying.append([each for each in lanes if each.copies])
                    break
        if not copying:
            return []
        whole = _FULL if len(copying) == 1 else self._both
        return [(lane, whole // len(lanes)) for lanes in copying for lane in lanes]


class TimedWorker(Worker):
    """Copies blocks at the speed of the host link, and chunks at that of a storage device."""

    def __init__(
        self,
        transfer_ns: Callable[[int], int],
        *,
        both_ways: float = 1.0,
        stores_at_once: bool = False,
    ) -> None:
        """`transfer_ns` maps a number of GPU blocks to the nanoseconds of their copy alone.
        `both_ways`: as in `Lanes`. `stores_at_once`: stores begin with the step that asks."""
        self._transfer_ns, self._at_once = transfer_ns, stores_at_once
        self.stores, self.loads, self.within = Lane[Job](), Lane[Job](), Lane[Job]()
        self._all = (self.stores, self.loads, self.within)
        self._link = Lanes([[self.stores], [self.loads, self.within]], both_ways)
        self.reads, self.writes = Lane[Below](), Lane[Below]()
        self._device = Lanes([[self.reads], [self.writes]])
        self._later: list[Job] = []
        self.blocks = {"stored": 0, "loaded": 0}
        """GPU blocks copied so far, or being copied."""

    def launch(self, transfers: Transfers, start_ns: int, idle: bool, next_ns: int) -> Moved:
        self._link.advance(start_ns)
        self._device.advance(start_ns)
        before = [len(lane.copies) if transfers.flush_all else 0 for lane in self._all]
        flush = set(transfers.flush)
        # The copies of this step are not among those that it waits for, unless they are to be
        # flushed, too.
        self._submit(transfers, flush)
        if flush:
            before = [_last(lane, flush) for lane in self._all]
        flushed = any(before)
        if flushed:
            self._wait(before)
        # Only the waits moved the clock of the link on since then.
        flush_ns = self._link.now_ns - start_ns
        if self.within.copies:
            self._wait([0, 0, len(self.within.copies)])
        elif idle and not flushed:
            self._idle(start_ns, next_ns)
        wait_ns = self._link.now_ns - start_ns - flush_ns
        return Moved(0, wait_ns, flush_ns) if wait_ns or flush_ns else NOTHING_MOVED

    @property
    def busy(self) -> bool:
        return any(lane.copies for lane in self._all)

    @property
    def unsent(self) -> bool:
        return bool(self._later)

    def collect(self, now_ns: int) -> Done:
        self._link.advance(now_ns)
        self._device.advance(now_ns)
        stores, loads = self.stores.take(now_ns), self.loads.take(now_ns)
        loads += self.within.take(now_ns)
        below = self.reads.take(now_ns) + self.writes.take(now_ns)
        return Done(loads, stores, below) if loads or stores or below else NOTHING

    def _submit(self, transfers: Transfers, flush: set[int]) -> None:
        """Begins the transfers of a step."""
        now = transfers.stores
        if not self._at_once:
            now = self._later + [job for job in transfers.stores if job.number in flush]
            self._later = [job for job in transfers.stores if job.number not in flush]
        for job in now:
            self._copy(self.stores, job, "stored")
        for job in transfers.loads:
            self._copy(self.within if job.within_step else self.loads, job, "loaded")
        for each in transfers.below:
            (self.reads if each.upward else self.writes).submit(each, each.copy_ns)

    def _copy(self, lane: Lane[Job], job: Job, way: str) -> None:
        blocks = sum(map(len, job.gpu))
        self.blocks[way] += blocks
        lane.submit(job, self._transfer_ns(blocks))

    def _idle(self, start_ns: int, next_ns: int) -> None:
        """Lets time pass until the first transfer is over, or somebody arrives."""
        until = min(self._link.next_ns(), self._device.next_ns())
        if until < NEVER_NS:
            self._link.advance(next_ns if start_ns < next_ns < until else until)

    def _wait(self, numbers: list[int]) -> None:
        """Lets time pass until so many copies of each lane are over."""
        ends = [lane.finished + number for lane, number in zip(self._all, numbers, strict=True)]
        while any(lane.finished < end for lane, end in zip(self._all, ends, strict=True)):
            self._link.advance(self._link.next_ns())


def _last(lane: Lane[Job], wanted: set[int]) -> int:
    """Returns the place behind the last wanted copy of a lane."""
    places = [place for place, (_, job) in enumerate(lane.copies, 1) if job.number in wanted]
    return places[-1] if places else 0

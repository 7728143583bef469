"""How long the copies to and from a CPU tier take, and which steps wait for them.

```
 step             ── computes ──┬───── computes ─────┬── waits ──┬─ computes ─
 stores           of this step: └──── copy ────┬─ copy ─┘ flush: a block of it is reused
 loads                 └─── copy, while the request waits in the queue
```

Each direction copies one job after another. A store of the blocks that a step computes begins with
the next step. A load within a step is a queue of its own. vLLM 0.33.0 `v1/kv_offload/cpu/
gpu_worker.py`, `distributed/kv_transfer/kv_connector/v1/offloading/worker.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvsim.engines.vllm_v1_features.connector import Done, Job, Transfers, Worker


class Lane:
    """Copies of one direction, one after another."""

    def __init__(self, transfer_ns: Callable[[int], int]) -> None:
        """`transfer_ns` maps a number of GPU blocks to the nanoseconds of their copy."""
        self._transfer_ns = transfer_ns
        self.jobs: deque[tuple[int, Job]] = deque()
        """(end in nanoseconds, copy) in order."""
        self.blocks = 0
        """GPU blocks copied so far, or being copied."""
        self.busy_ns = 0
        """Time of these copies."""
        self._free_ns = 0

    def submit(self, job: Job, now_ns: int) -> None:
        """A copy is asked for."""
        blocks = sum(map(len, job.gpu))
        copy_ns = self._transfer_ns(blocks)
        self._free_ns = max(self._free_ns, now_ns) + copy_ns
        self.jobs.append((self._free_ns, job))
        self.blocks += blocks
        self.busy_ns += copy_ns

    def over(self, now_ns: int) -> list[Job]:
        """Takes out the copies that are over."""
        done = []
        while self.jobs and self.jobs[0][0] <= now_ns:
            done.append(self.jobs.popleft()[1])
        return done


class TimedWorker(Worker):
    """Copies blocks at the speed of the host link."""

    def __init__(self, transfer_ns: Callable[[int], int]) -> None:
        self.stores, self.loads, self.within = (Lane(transfer_ns) for _ in range(3))
        self._later: list[Job] = []

    def launch(self, transfers: Transfers | None, start_ns: int, idle: bool, next_ns: float) -> int:
        assert transfers is not None
        flush = set(transfers.flush)
        for job in self._later + [job for job in transfers.stores if job.number in flush]:
            self.stores.submit(job, start_ns)
        self._later = [job for job in transfers.stores if job.number not in flush]
        for job in transfers.loads:
            (self.within if job.within_step else self.loads).submit(job, start_ns)
        lanes = (self.stores, self.loads, self.within)
        until = [end for lane in lanes for end, job in lane.jobs if job.number in flush]
        until += [end for end, _ in self.within.jobs]
        if idle and not until:
            heads = [lane.jobs[0][0] for lane in lanes if lane.jobs]
            until = [min(heads)] if heads else []
            if until and start_ns < next_ns < until[0]:
                until = [int(next_ns)]
        return max(0, *until, start_ns) - start_ns

    @property
    def unsent(self) -> bool:
        return bool(self._later)

    def collect(self, now_ns: int) -> Done:
        loads = self.loads.over(now_ns) + self.within.over(now_ns)
        return Done(loads, self.stores.over(now_ns))

    def pause(self, now_ns: int) -> Done:
        return self.collect(now_ns)

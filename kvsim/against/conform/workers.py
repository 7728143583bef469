"""Workers of recorded cases, whose transfers take a number of steps, and what logs say of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from zlib import crc32

from kvsim.core.request import Request
from kvsim.engines.vllm_v1.connector import Connector, Done, Job, Transfers, Worker
from kvsim.engines.vllm_v1.cpu_tier import POLICIES, CpuTier
from kvsim.engines.vllm_v1.manager import KVCacheManager
from kvsim.engines.vllm_v1.nixl import Nixl
from kvsim.engines.vllm_v1.offloading import Offloading
from kvsim.engines.vllm_v1.simple import SimpleOffload

Config = Mapping[str, Any]


class Lane:
    """Transfers of one direction, one after the other."""

    def __init__(self, steps: int) -> None:
        """`steps`: number of steps after which a transfer is reported; 0: in its own step."""
        self._steps = steps
        self._jobs: deque[tuple[int, Job]] = deque()

    def submit(self, job: Job, step: int) -> None:
        """A transfer begins."""
        self._jobs.append((step + self._steps, job))

    def numbers(self) -> set[int]:
        """Returns the numbers of the transfers that are not over."""
        return {job.number for _, job in self._jobs}

    def over(self, step: int, flush: set[int]) -> list[Job]:
        """Takes out the transfers that are over in a step. Those of `flush` are waited for, and so
        are those before them."""
        flushed = [place for place, (_, job) in enumerate(self._jobs) if job.number in flush]
        waited = flushed[-1] + 1 if flushed else 0
        done: list[Job] = []
        while self._jobs and (len(done) < waited or self._jobs[0][0] <= step):
            done.append(self._jobs.popleft()[1])
        return done


class StepWorker(Worker):
    """A worker whose transfers take a number of steps."""

    def __init__(self) -> None:
        self._step = 0
        self._results: deque[Done] = deque()
        self.heard = Done([], [])
        """What the last result reported."""

    def start(self, transfers: Transfers | None) -> None:
        assert transfers is not None
        self._results.append(self.done(transfers, self._step))
        self._step += 1

    def collect(self, now_ns: int) -> Done:
        self.heard = self._results.popleft()
        return self.heard

    def done(self, transfers: Transfers, step: int) -> Done:
        """Returns what is over in a step that begins with these transfers."""
        raise NotImplementedError

    def handed_over(self, transfers: Transfers) -> dict[str, Any]:
        """What a record says of the transfers of a step."""
        raise NotImplementedError

    def reported(self) -> list[Any]:
        """What a record says of the transfers that are over."""
        raise NotImplementedError


class OffloadingWorker(StepWorker):
    """Copies to and from a CPU tier. A store begins with the step after the one that computes."""

    def __init__(self, config: Config, connector: Offloading) -> None:
        super().__init__()
        self._connector = connector
        self._loads = Lane(config.get("load_steps", 1))
        self._stores = Lane(config.get("store_steps", 1))
        self._later: list[Job] = []

    def done(self, transfers: Transfers, step: int) -> Done:
        flush = set(transfers.flush)
        for job in transfers.loads:
            if not job.within_step:
                self._loads.submit(job, step)
        within = [job for job in transfers.loads if job.within_step]
        for job in self._later:
            self._stores.submit(job, step)
        for job in transfers.stores:
            if job.number in flush:
                self._stores.submit(job, step)
        self._later = [job for job in transfers.stores if job.number not in flush]
        stores = self._stores.over(step, flush)
        return Done(self._loads.over(step, flush) + within, stores)

    def handed_over(self, transfers: Transfers) -> dict[str, Any]:
        tier = self._connector.tier
        return {
            "loads": [_copied(job) for job in transfers.loads],
            "stores": [_copied(job) for job in transfers.stores],
            "flush": transfers.flush,
            "cpu": [tier.free, tier.evictable, tier.pending],
        }

    def reported(self) -> list[Any]:
        return [job.number for job in (*self.heard.stores, *self.heard.loads)]


class SimpleWorker(StepWorker):
    """Copies to and from a second pool. Stores begin with the step that hands them over."""

    def __init__(self, config: Config, connector: SimpleOffload) -> None:
        super().__init__()
        self._connector = connector
        self._loads, self._stores = (
            Lane(config.get(f"{name}_steps", 1)) for name in ("load", "store")
        )

    def done(self, transfers: Transfers, step: int) -> Done:
        over = []
        for lane, jobs in ((self._loads, transfers.loads), (self._stores, transfers.stores)):
            before = lane.numbers() if transfers.flush_all else set()
            for job in jobs:
                lane.submit(job, step)
            over.append(lane.over(step, before))
        return Done(*over)

    def handed_over(self, transfers: Transfers) -> dict[str, Any]:
        cpu = self._connector.cpu
        return {
            "loads": [_moved(job) for job in transfers.loads],
            "stores": [_moved(job) for job in transfers.stores],
            "flush": [1] if transfers.flush_all else [],
            "cpu": [cpu.free, cpu.labelled],
        }

    def reported(self) -> list[Any]:
        loads = [f"L{job.number}" for job in self.heard.loads]
        return loads + [f"S{job.number}" for job in self.heard.stores]


def _moved(job: Job) -> list[Any]:
    number, _, blocks, _, digest = _copied(job)
    return [number, blocks, digest]


class NixlWorker(StepWorker):
    """Pulls blocks from another engine, and waits until the other has read them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._steps = [
            (config.get(f"{name}_steps", 1), config.get(f"{name}_spread", 0) + 1)
            for name in ("load", "send")
        ]
        self._pulls: list[tuple[int, Request]] = []
        self._reads: list[tuple[int, Request]] = []

    def done(self, transfers: Transfers, step: int) -> Done:
        for job in transfers.loads:
            if job.awaited and job.request is not None:
                self._pulls.append((self._due(step, job.request, "~", 0), job.request))
        for request in transfers.sends:
            self._reads.append((self._due(step, request, "^", 1), request))
        return Done(_take_due(self._pulls, step), _take_due(self._reads, step))

    def _due(self, step: int, request: Request, mark: str, number: int) -> int:
        steps, spread = self._steps[number]
        return step + int(steps) + crc32(f"{request.id}{mark}".encode()) % int(spread)

    def handed_over(self, transfers: Transfers) -> dict[str, Any]:
        return {
            "loads": [_pulled(job) for job in transfers.loads],
            "sends": [request.id for request in transfers.sends],
        }

    def reported(self) -> list[Any]:
        return [request.id for request in (*self.heard.loads, *self.heard.stores)]


def _take_due(waiting: list[tuple[int, Request]], step: int) -> list[Request]:
    """Takes out the requests whose transfer is over."""
    over = [request for due, request in waiting if due <= step]
    waiting[:] = [entry for entry in waiting if entry[0] > step]
    return over


def _pulled(job: Job) -> list[Any]:
    assert job.request is not None
    text = ";".join(",".join(map(str, blocks)) for blocks in job.gpu)
    return [job.number, job.request.id, len(_flat(job.gpu)), int(job.awaited), crc32(text.encode())]


def _copied(job: Job) -> list[Any]:
    assert job.other is not None
    here, there = (_flat(job.gpu), _flat(job.other))
    text = ";".join(",".join(map(str, blocks)) for blocks in (here, there))
    return [job.number, job.request and job.request.id, len(here), len(there), crc32(text.encode())]


def _flat(blocks: list[list[int]]) -> list[int]:
    return [block for group in blocks for block in group]


class Built(NamedTuple):
    """A connector of a case, and its worker."""

    connector: Connector
    worker: StepWorker


def _offloading(config: Config, blocks: KVCacheManager) -> Built:
    settings = config["offload"]
    tier = CpuTier(
        settings["cpu_chunks"],
        policy=POLICIES[settings.get("eviction_policy", "lru")],
        store_threshold=settings.get("store_threshold", 0),
        max_tracker_size=settings.get("max_tracker_size", 64_000),
    )
    connector = Offloading(
        blocks,
        tier,
        blocks_per_chunk=settings.get("blocks_per_chunk", 1),
        offload_prompt_only=settings.get("offload_prompt_only", True),
        sync_load_budget_bytes=settings.get("sync_load_budget_bytes", 0),
        bytes_per_token=4 * len(blocks.groups),
    )
    return Built(connector, OffloadingWorker(settings, connector))


def _simple(config: Config, blocks: KVCacheManager) -> Built:
    settings = config["simple"]
    connector = SimpleOffload(
        blocks,
        settings["cpu_blocks"],
        config["max_num_batched_tokens"],
        settings.get("lazy_offload", False),
    )
    return Built(connector, SimpleWorker(settings, connector))


def _nixl(config: Config, blocks: KVCacheManager) -> Built:
    connector = Nixl(blocks, config.get("kv_role", "kv_both"))
    return Built(connector, NixlWorker(config.get("nixl", {})))


CONNECTORS: dict[str, Callable[[Config, KVCacheManager], Built]] = {
    "offloading": _offloading,
    "simple": _simple,
    "nixl": _nixl,
}
"""Connector → what builds it and its worker for a case."""

"""Recorded cases of vLLM V1, with aborts, adapters, drafts, connectors and pipelines.

The model and the copies are replaced by rules. A transfer is over a fixed number of steps after it
was submitted. A verify step accepts as many drafts as a rule says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from zlib import crc32

from kvsim.against.conform.step_log import (
    SERVED,
    Record,
    UnitClock,
    build,
    corpus_requests,
    played,
    queue_digest,
    seconds,
)
from kvsim.core.batch import Batch
from kvsim.core.plan import Plan
from kvsim.core.request import Options, Request
from kvsim.engines.vllm_v1.connector import NOTHING, Connector, Done, Job, Transfers, Worker
from kvsim.engines.vllm_v1.cpu_tier import POLICIES, CpuTier
from kvsim.engines.vllm_v1.drafts import Drafts, Speculation
from kvsim.engines.vllm_v1.groups import groups_of
from kvsim.engines.vllm_v1.manager import KVCacheManager
from kvsim.engines.vllm_v1.nixl import Nixl
from kvsim.engines.vllm_v1.offloading import Offloading
from kvsim.engines.vllm_v1.releases import LATEST, release_of
from kvsim.engines.vllm_v1.scheduler import VllmV1, VllmV1Async
from kvsim.engines.vllm_v1.simple import SimpleOffload
from kvsim.settings.versions import release as version_of

Config = Mapping[str, Any]


class Lane:
    """Transfers of one direction, one after the other."""

    def __init__(self, steps: int) -> None:
        """`steps`: number of steps after which a transfer is reported; 0: in its own step."""
        self._steps = steps
        self._jobs: deque[tuple[int, Job]] = deque()

    def turn(self, jobs: list[Job], transfers: Transfers, step: int) -> list[Job]:
        """Begins these transfers of a step, and takes out those that are over in it. Those of a
        flush are waited for, and so are those before them."""
        flush = set(transfers.flush)
        if transfers.flush_all:
            flush = {job.number for _, job in self._jobs}
        self._jobs += [(step + self._steps, job) for job in jobs]
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

    def start(self, transfers: Transfers) -> None:
        self._results.append(self.done(transfers, self._step))
        self._step += 1

    def pause(self, now_ns: int) -> Done:
        return NOTHING

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


class CopyWorker(StepWorker):
    """Copies to and from a tier. A store begins with the step that hands it over where the
    connector says so; if not, with the step after the one that computes."""

    def __init__(self, config: Config, connector: Connector) -> None:
        super().__init__()
        self._at_once = connector.stores_at_once
        self._loads = Lane(config.get("load_steps", 1))
        self._stores = Lane(config.get("store_steps", 1))
        self._later: list[Job] = []

    def done(self, transfers: Transfers, step: int) -> Done:
        stores, flush = transfers.stores, set(transfers.flush)
        if not self._at_once:
            stores = self._later + [job for job in transfers.stores if job.number in flush]
            self._later = [job for job in transfers.stores if job.number not in flush]
        within = [job for job in transfers.loads if job.within_step]
        loads = [job for job in transfers.loads if not job.within_step]
        loaded = self._loads.turn(loads, transfers, step)
        return Done(loaded + within, self._stores.turn(stores, transfers, step))


class OffloadingWorker(CopyWorker):
    """Copies to and from a CPU tier."""

    def __init__(self, config: Config, connector: Offloading) -> None:
        super().__init__(config, connector)
        self._connector = connector

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


class SimpleWorker(CopyWorker):
    """Copies to and from a second pool."""

    def __init__(self, config: Config, connector: SimpleOffload) -> None:
        super().__init__(config, connector)
        self._connector = connector

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


Built = tuple[Connector, StepWorker]
"""A connector of a case, and its worker."""


def _offloading(config: Config, blocks: KVCacheManager) -> Built:
    settings = config["offload"]
    policy = POLICIES[settings.get("eviction_policy", "lru")]
    tier = build(CpuTier, settings, capacity=settings["cpu_chunks"], policy=policy)
    width = 4 * len(blocks.groups)
    connector = build(Offloading, settings, blocks=blocks, tier=tier, bytes_per_token=width)
    return connector, OffloadingWorker(settings, connector)


def _simple(config: Config, blocks: KVCacheManager) -> Built:
    settings = config["simple"]
    connector = build(
        SimpleOffload,
        settings,
        blocks=blocks,
        block_bytes=1,
        world_size=1,
        max_num_batched_tokens=config["max_num_batched_tokens"],
        cpu_bytes_to_use=settings["cpu_blocks"],
    )
    return connector, SimpleWorker(settings, connector)


def _nixl(config: Config, blocks: KVCacheManager) -> Built:
    return Nixl(blocks, config.get("kv_role", "kv_both")), NixlWorker(config.get("nixl", {}))


CONNECTORS: dict[str, Callable[[Config, KVCacheManager], Built]] = {
    "offloading": _offloading,
    "simple": _simple,
    "nixl": _nixl,
}
"""Connector → what builds it and its worker for a case."""


def replay(config: Config, trace: list[dict[str, Any]], audit_every: int = 0) -> Iterator[Record]:
    """The step log of a case; an engine that dies or gets stuck ends it with an error record.

    `audit_every`: check the books after every so many steps, 0: never. Raises `ValueError` where it
    refuses to start.
    """
    rows = [child for row in trace for child in _children(row)]
    scheduler, worker = _build(config)
    arrivals = corpus_requests(rows)
    for _, request in arrivals:
        request.options = _options(rows[request.index])
    lengths = [max(row.get("output_lens") or [row["output_len"]]) for row in rows]
    batch = Batch(scheduler.blocks, lengths.__getitem__, scheduler.longest_sequence)
    aborts = [(rows[r.index]["abort"], r) for _, r in arrivals if "abort" in rows[r.index]]
    mid = {request for _, request in aborts if rows[request.index].get("abort_mid", False)}
    clock = _Clock(batch, arrivals, config.get("max_steps", 1_000_000), scheduler, worker)
    scheduler.give_up(clock, sorted(aborts, key=lambda entry: (entry[0], entry[1].index)), mid)
    return played(clock, scheduler, batch, audit_every)


def _children(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The requests that the front end makes of one with several samples
    (vLLM 0.33.0 `v1/engine/parallel_sampling.py`)."""
    n = row.get("n", 1)
    if n == 1:
        return [row]
    return [{**row, "id": f"{number}_{row['id']}", "n": 1} for number in range(n)]


def _options(row: Mapping[str, Any]) -> Options:
    return Options(
        lora=row.get("lora", ""),
        skip_reading_prefix_cache=row.get("skip_prefix_read", False),
        grammar_ready_ns=round(row.get("grammar_ready", 0) * 1e9),
        kv_transfer=row.get("pd", ""),
    )


class _RuleDrafts(Drafts):
    """Drafts whose number and acceptance follow from the id of the request."""

    def __init__(self, config: Mapping[str, Any], connector: bool) -> None:
        options = ("draft_slots", "disable_eagle_block_drop", "disable_lookahead_block_hashes")
        given = {key: config[key] for key in options if key in config}
        super().__init__(config["method"], config["num_spec_tokens"], connector=connector, **given)
        self._varies = config["method"] == "ngram"
        self._accept = config.get("accept")

    def propose(self, sequence: Request) -> int:
        return self._rule("?", sequence) if self._varies else self.num_spec_tokens

    def accepted(self, sequence: Request, drafts: int) -> int:
        most = self._rule("!", sequence) if self._accept is None else self._accept
        return min(drafts, most)

    def _rule(self, mark: str, sequence: Request) -> int:
        text = f"{sequence.request.id}{mark}{sequence.length - sequence.request.input_length}"
        return crc32(text.encode()) % (self.num_spec_tokens + 1)


class _Played(VllmV1):
    """A scheduler whose clients give up requests at recorded times."""

    clock: _Clock

    def give_up(
        self, clock: _Clock, aborts: list[tuple[float, Request]], mid: set[Request]
    ) -> None:
        """`aborts`: (time, request) in order; `mid`: those that come while a step computes."""
        self.clock = clock
        self._aborts = deque(aborts)
        self._mid = mid

    def compose(self, batch: Batch, now_ns: int) -> Plan:
        self.clock.begin_step()
        self._abort_due(batch, False)
        plan: Plan = super().compose(batch, now_ns)
        return plan

    def settle(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        self._abort_due(batch, True)
        super().settle(batch, plan, now_ns)

    def _abort_due(self, batch: Batch, mid: bool) -> None:
        """Before a step, an abort in mid-step holds up those behind it."""
        aborts, now_s = self._aborts, seconds(self.clock.now_ns)
        while aborts and aborts[0][0] <= now_s and (mid or aborts[0][1] not in self._mid):
            request = aborts.popleft()[1]
            batch.now_ns = self.clock.now_ns
            if self.abort(batch, request):
                self.clock.aborted.append(request.id)


class _PlayedAsync(_Played, VllmV1Async):
    """The same with asynchronous scheduling."""


def _build(config: Config) -> tuple[_Played, StepWorker | None]:
    """The engine of a case, and the worker of its connector."""
    connector, recorded = config.get("kv_connector"), config.get("vllm_version")
    asynchronous, cached = (config.get(key, False) for key in ("v1_async", "enable_prefix_caching"))
    # A case may be of several engines; keys with v1_ are meant for this one.
    settings = {
        **config,
        "enable_prefix_caching": cached,
        "enable_chunked_prefill": config.get("v1_enable_chunked_prefill", True),
        "scheduling_policy": config.get("policy", "fcfs"),
        "watermark": config.get("v1_watermark", 0.0),
        "scheduler_reserve_full_isl": config.get("v1_reserve_full_isl", True),
    }
    drafts = _RuleDrafts(config["spec"], bool(connector)) if "spec" in config else Speculation()
    blocks = build(
        KVCacheManager,
        settings,
        groups=groups_of(
            config.get("kv_groups", [{"type": "full", "block_size": config["block_size"]}])
        ),
        keyed=cached or bool(connector),
        eagle_drop=drafts.eagle_drop,
        lookahead_keys=drafts.lookahead_keys,
        num_spec_tokens=drafts.num_spec_tokens,
        in_flight=config.get("pipeline_parallel_size", 1) + asynchronous,
        release=release_of(version_of(recorded)) if recorded else LATEST,
    )
    linked, worker = CONNECTORS[connector](config, blocks) if connector else (None, None)
    kind = _PlayedAsync if asynchronous else _Played
    scheduler = build(
        kind, settings, blocks=blocks, connector=linked, worker=worker, speculation=drafts
    )
    return scheduler, worker


class _Clock(UnitClock):
    """The unit clock, with what drafts, transfers and aborts add to a record."""

    def __init__(
        self,
        batch: Batch,
        arrivals: list[tuple[float, Request]],
        max_steps: int,
        scheduler: VllmV1,
        worker: StepWorker | None,
    ) -> None:
        super().__init__(batch, arrivals, max_steps, SERVED)
        self._scheduler, self._worker = scheduler, worker
        self.aborted: list[str] = []
        """Requests given up in this step, in order."""

    def takes_time(self, plan: Plan, in_flight: int) -> bool:
        return self._scheduler.release.queues_empty_steps or plan.computes or not in_flight

    def goes_on(self, batch: Batch, plan: Plan) -> bool:
        if self._scheduler.release.goes_on_after_empty_steps:
            return super().goes_on(batch, plan)
        return plan.computes

    def begin_step(self) -> None:
        """A step begins."""
        if self._worker is not None:
            self._worker.heard = NOTHING

    def unfinished(self) -> bool:
        if self._worker is None:
            return super().unfinished()
        return self._scheduler.unfinished(self._batch) or bool(self._scheduler.finished)

    @property
    def has_news(self) -> bool:
        return bool(self._scheduler.finished)

    def composed(self, batch: Batch, plan: Plan, now_ns: int, arrived: int) -> None:
        super().composed(batch, plan, now_ns, arrived)
        record = self._record
        if plan.ghosts:
            record["ghost"] = [[request.id, tokens] for request, tokens in plan.ghosts]
        if self._scheduler.speculation.num_spec_tokens:
            record["spec"] = [[m.request.id, m.drafts] for m in plan.moves if m.drafts]
        if self._worker is not None:
            record["holding"] = len(batch.holding)
            record["q"][2] = queue_digest(batch.holding)
            record.update(self._worker.handed_over(plan.transfers))

    def settled(self, batch: Batch, ended: list[Request]) -> None:
        if self._worker is not None:
            self._record["xdone"] = self._worker.reported()
        if self.aborted:
            self._record["aborted"], self.aborted = self.aborted, []
        super().settled(batch, ended)

"""SGLang's step log: another clock, and other fields, than those of the other engines.

Each iteration of the event loop takes one second, also one that runs nothing; in overlap, it
settles the step of the iteration before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from sys import maxsize
from typing import Any
from zlib import crc32

from kvsim.against.conform.step_log import (
    LogClock,
    Record,
    RuleStream,
    build,
    corpus_requests,
    played,
    queue_digest,
)
from kvsim.core.batch import Batch
from kvsim.core.host import Waiting
from kvsim.core.plan import Plan
from kvsim.core.request import Request
from kvsim.engines.sglang.manager import SglangRadixTables, SglangTables
from kvsim.engines.sglang.scheduler import Sglang, SglangOverlap
from kvsim.engines.sglang.server import Environment

NEVER = 1 << 40
"""Tokens of an output that no end of sequence ends."""

_BUSY = ("prefill", "decode", "finished", "added", "aborted")
"""Fields of a record, all empty in an iteration that counts towards a deadlock."""


class _Notes:
    """The requests that were given up in an iteration, in the order of the log."""

    def __init__(self) -> None:
        self.retracted: list[str] = []
        self.preempted: list[str] = []
        self.aborted: list[str] = []
        self.finished: list[str] = []


class _Noting(Sglang):
    """An SGLang scheduler that notes what the log contains, and goes round its event loop once per
    step."""

    notes: _Notes

    def stand_in(self, request: Request) -> RuleStream:
        return RuleStream(request.id, [0])

    def _spins(self, batch: Batch) -> bool:
        return False

    def _enqueue(self, batch: Batch, request: Request) -> Request | None:
        loser = super()._enqueue(batch, request)
        if loser is not None:
            self.notes.aborted.append(loser.id)
        return loser

    def _queue_again(self, batch: Batch, request: Request, retracted: bool) -> None:
        (self.notes.retracted if retracted else self.notes.preempted).append(request.id)
        super()._queue_again(batch, request, retracted)

    def _abort(self, batch: Batch, request: Request, reason: str) -> None:
        if reason == "out-of-memory":
            self.notes.aborted.append(request.id)
        super()._abort(batch, request, reason)

    def _complete(self, batch: Batch, request: Request) -> None:
        super()._complete(batch, request)
        self.notes.finished.append(request.id)
        if request.reason:
            self.notes.aborted.append(request.id)


class _NotingOverlap(_Noting, SglangOverlap):
    """The noting scheduler with overlap."""


def replay(
    config: Mapping[str, Any], trace: list[dict[str, Any]], audit_every: int = 0
) -> Iterator[Record]:
    """The step log of a case; an engine that dies or gets stuck ends it with an error record.

    `audit_every`: check the books after every so many steps, 0: never. Raises `ValueError` where it
    refuses to start.
    """
    scheduler, blocks = _build(config)
    ends = [NEVER if _ignores_eos(config, row) else row["output_len"] or NEVER for row in trace]
    arrivals = corpus_requests(trace, partial(_request, config))
    batch = Batch(blocks, ends.__getitem__)
    clock = _Clock(batch, scheduler, arrivals, config.get("max_steps", 1_000_000))
    return played(clock, scheduler, batch, audit_every)


def _build(config: Mapping[str, Any]) -> tuple[_Noting, SglangTables]:
    size, chunk = config.get("page_size", 1), config.get("chunked_prefill_size", 8192) or 0
    cached = not config.get("disable_radix_cache", False)
    settings = {
        **config,
        "block_size": size,
        "num_gpu_blocks": config["max_total_num_tokens"] // size,
        "max_model_len": config.get("context_len", 4096),
        "max_num_seqs": max(1, config.get("max_running_requests", 64)),
        "max_num_batched_tokens": chunk if chunk > 0 else maxsize,
        "enable_chunked_prefill": chunk > 0,
        "enable_prefix_caching": cached,
        "environment": {key: config[key] for key in Environment._fields if key in config},
    }
    scheduler = build(_NotingOverlap if config.get("overlap", False) else _Noting, settings)
    return scheduler, build(SglangRadixTables if cached else SglangTables, settings)


def _request(config: Mapping[str, Any], index: int, row: dict[str, Any]) -> Request:
    tokens, output, ignores = row["prompt_token_ids"], row["output_len"], _ignores_eos(config, row)
    return Request(
        index,
        row["id"],
        len(tokens),
        RuleStream(row["id"], tokens, lengths=[0 if ignores else output]),
        priority=row.get("priority", 0),
        max_new_tokens=row.get("max_new_tokens", output),
        ignore_eos=ignores,
        session=row.get("routing_key"),
    )


def _ignores_eos(config: Mapping[str, Any], row: dict[str, Any]) -> bool:
    return bool(row.get("ignore_eos", config.get("ignore_eos", False)))


class _Clock(LogClock):
    """A host that takes down what is decided, and its time."""

    def __init__(
        self,
        batch: Batch,
        scheduler: _Noting,
        arrivals: list[tuple[float, Request]],
        max_steps: int,
    ) -> None:
        super().__init__(arrivals, max_steps, _BUSY)
        self._batch, self._scheduler = batch, scheduler
        scheduler.notes = _Notes()
        self._time = 0.0

    def time_s(self) -> float:
        return self._time

    # -- a host ----------------------------------------------------------------------------------

    def arrived(self) -> list[Request] | None:
        """Returns the requests that have arrived until now."""
        if self._ended or not (self._arrivals or self._batch or self._in_flight):
            return None
        self._scheduler.notes = _Notes()
        found = self._due(self._time)
        longest = self._scheduler.max_model_len
        self._rejected = [each.id for each in found if each.input_length >= longest]
        return found

    def wait(self, until_ns: int) -> Waiting:
        """Lets the oldest step finish."""
        yield
        self._in_flight -= 1

    def takes_time(self, plan: Plan, in_flight: int) -> bool:
        """Whether a step takes time: only one that runs something is settled."""
        return False

    def sleep(self, until_ns: int) -> Waiting:
        """Ends an idle iteration. Without requests it leaves no record, and time jumps."""
        if self._batch:
            self.settled(self._batch, [])
        else:
            self._time = max(self._time, float(math.ceil(self._arrivals[0][0])))
        yield
        return True

    # -- a watcher -------------------------------------------------------------------------------

    def composed(self, batch: Batch, plan: Plan, now_ns: int, arrived: int) -> None:
        """Take down a step that has just been composed."""
        scheduler, blocks, notes = self._scheduler, batch.blocks, self._scheduler.notes
        assert isinstance(blocks, SglangTables)
        decodes = plan.decodes
        modes = {(0, 0): "idle", (0, 1): "decode", (1, 0): "extend", (1, 1): "mixed"}
        unfinished = scheduler.unfinished
        running = scheduler.running.members
        self._record = {
            "step": self._number,
            "time": self._time,
            "added": arrived - len(self._rejected),
            "rejected": self._rejected,
            "mode": modes[bool(plan.prefills), bool(decodes)],
            "prefill": [
                [p.request.id, p.charged, p.cached, p.computed_before, int(p.samples)]
                for p in plan.prefills
            ],
            "decode": [request.id for request in decodes],
            "retracted": notes.retracted,
            "preempted": notes.preempted,
            "waiting": len(batch.waiting),
            "running": len(running),
            "chunked": unfinished.id if unfinished else None,
            "full": int(scheduler.full),
            "free": blocks.gpu.blank * blocks.block_size,
            "evictable": blocks.gpu.evictable * blocks.block_size,
            "protected": blocks.tree.locked_pages * blocks.block_size,
            "rows": scheduler.free_slots(batch),
            "ratio": scheduler.ratio,
            "q": [queue_digest(queue) for queue in (batch.waiting, running)],
            "kv": _slots_digest(plan, blocks),
        }

    def settled(self, batch: Batch, ended: list[Request]) -> None:
        """Complete the record; end the log where the engine is stuck."""
        record, notes, blocks = self._record, self._scheduler.notes, batch.blocks
        assert isinstance(blocks, SglangTables)
        record["aborted"], record["finished"] = notes.aborted, notes.finished
        record["free_end"] = blocks.gpu.blank * blocks.block_size
        record["evictable_end"] = blocks.gpu.evictable * blocks.block_size
        self._records.append(dict(record))
        self._scheduler.notes = _Notes()
        self._number, self._time = self._number + 1, self._time + 1.0
        self._end_if_stuck(record)


def _slots_digest(plan: Plan, blocks: SglangTables) -> int:
    """Returns the digest of the slots of each prompt up to the end of its chunk, and of the new
    slot of each decode."""
    digest = 0
    for prefill in plan.prefills:
        slots = _slots(blocks, prefill.request, 0, prefill.computed_before + prefill.scheduled)
        digest = crc32(f"{prefill.request.id}={','.join(slots)};".encode(), digest)
    for request in plan.decodes:
        (slot,) = _slots(blocks, request, request.filled - 1, request.filled)
        digest = crc32(f"{request.id}={slot};".encode(), digest)
    return digest


def _slots(blocks: SglangTables, request: Request, first: int, last: int) -> list[str]:
    [table], size = blocks.tables(request), blocks.block_size
    return [str(table[token // size] * size + token % size) for token in range(first, last)]

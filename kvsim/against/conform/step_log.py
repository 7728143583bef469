"""Writes the step log of any run, record by record."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple
from zlib import crc32

from kvsim.core.batch import Batch
from kvsim.core.blocks import BlockManager
from kvsim.core.plan import SWAP, Plan
from kvsim.core.request import RUNNING, Request
from kvsim.engines.nano import NanoTables
from kvsim.writing import replacing

Record = dict[str, Any]


def step_record(batch: Batch, plan: Plan, step: int, time: float, added: int) -> Record:
    """The record of a step just composed; `finish_record` completes it."""
    blocks: Any = batch.blocks
    return {
        "step": step,
        "time": time,
        "added": added,
        "prefill": [
            [p.request.id, p.charged, p.cached, p.computed_before, int(p.samples)]
            for p in plan.prefills
        ],
        "decode": _ids(plan.decodes),
        "preempted": [[request.id, means] for request, means in plan.preempted],
        "swapped_out": [request.id for request, means in plan.preempted if means == SWAP],
        "swapped_in": _ids(plan.swapped_in),
        "ignored": _ids(plan.ignored),
        "waiting": len(batch.waiting),
        "running": len(batch.running),
        "swapped": len(batch.swapped),
        "free_gpu_blocks": blocks.gpu.free,
        "free_cpu_blocks": blocks.cpu.free,
        "batched_tokens": plan.batched_tokens,
        "blocks_to_copy": len(plan.copies),
        "blocks_to_swap_in": len(plan.swaps_in),
        "blocks_to_swap_out": len(plan.swaps_out),
        "q": [queue_digest(q) for q in (batch.waiting, batch.running, batch.swapped)],
        "bt": _table_digest(blocks, plan),
    }


def finish_record(record: Record, batch: Batch, ended: Iterable[Request]) -> Record:
    """Add what output processing did."""
    record["finished"] = [request.id for request in ended if not request.reason]
    blocks: Any = batch.blocks
    record["free_gpu_blocks_end"] = blocks.gpu.free
    return record


def _ids(requests: Iterable[Any]) -> list[str]:
    return [request.id for request in requests]


def queue_digest(queue: Iterable[Any]) -> int:
    """Returns the digest of the ids in a queue, in order."""
    return crc32(",".join(_ids(queue)).encode())


def _table_digest(blocks: BlockManager, plan: Plan) -> int:
    digest = 0
    below = isinstance(blocks, NanoTables)  # The engine counts its blocks from 0.
    for request, _, _ in plan.entries:
        for sequence in request.sequences:
            if sequence.state == RUNNING:
                for group, table in enumerate(blocks.tables(sequence)):
                    label = f"{request.id}#{group}" if group else request.id
                    ids = ",".join([str(block - below) for block in table])
                    digest = crc32(f"{label}={ids};".encode(), digest)
    return digest


class StepLog:
    """A file of step records; it appears under its name only when the run is over.

    A context manager, and a watcher of a replica. `time` is in simulated seconds. Raises
    `OutputError` where the file cannot be written.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._record: Record = {}
        self._step = 0

    def __enter__(self) -> StepLog:
        with ExitStack() as opened:
            partial = opened.enter_context(replacing(self._path))
            self._file = opened.enter_context(partial.open("w", encoding="utf-8", newline="\n"))
            self._opened = opened.pop_all()
        return self

    def begin(self) -> None:
        """Start over: what was written belongs to an attempt that was given up."""
        self._file.seek(0)
        self._file.truncate()
        self._step = 0

    def composed(self, batch: Batch, plan: Plan, now_ns: int, arrived: int) -> None:
        """Take down a step that has just been composed."""
        self._record = step_record(batch, plan, self._step, now_ns / 1e9, arrived)

    def settled(self, batch: Batch, ended: list[Request]) -> None:
        """Complete the record and write it."""
        finish_record(self._record, batch, ended)
        self._file.write(json.dumps(self._record, separators=(",", ":")) + "\n")
        self._step += 1

    def stopped(self, outcome: Mapping[str, Any]) -> None:
        """The run is over; if the engine died or got stuck, the last record says so."""
        if outcome["kind"] != "finished":
            text = outcome["rule"] or outcome["kind"]
            record = {"step": self._step, "time": outcome["time_s"], "error": text}
            self._file.write(json.dumps(record, separators=(",", ":")) + "\n")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._opened.__exit__(kind, error, trace)


MEANINGS = {
    "step": "the steps are numbered differently",
    "time": "the steps happen at different times",
    "added": "different requests had arrived",
    "snapshot": "other reports of the workers",
    "inflight": "other requests in flight",
    "load": "other requests in flight",
    "qps": "other rates of requests",
    "tiers": "other overlaps with the caches below the GPU's",
    "cand": "the workers stand differently",
    "match": "another part of the prompt is known",
    "branch": "another rule decides",
    "set": "the worker is drawn from others",
    "chosen": "another worker is chosen",
    "state": "the same decision, but other books after it",
    "rejected": "other requests were turned away",
    "mode": "another kind of step",
    "prefill": "other prompts, chunk sizes or prefix hits",
    "decode": "other requests decode, or in another order",
    "retracted": "other requests were retracted",
    "preempted": "another victim, or another means of preemption",
    "aborted": "other requests were aborted",
    "swapped_out": "other requests were swapped out",
    "swapped_in": "other requests came back from the CPU",
    "ignored": "other requests were given up",
    "waiting": "the waiting queues differ in length",
    "running": "the running queues differ in length",
    "swapped": "the swapped queues differ in length",
    "chunked": "another prompt is unfinished",
    "full": "one engine finds its running batch full",
    "free": "other numbers of free token slots",
    "evictable": "other cached tokens that no request holds",
    "protected": "other cached tokens that requests hold",
    "rows": "other numbers of free request slots",
    "ratio": "another ratio of expected new tokens",
    "free_gpu_blocks": "other numbers of free GPU blocks",
    "free_cpu_blocks": "other numbers of free CPU blocks",
    "batched_tokens": "other charges to the token budget",
    "blocks_to_copy": "other copies on write",
    "blocks_to_swap_in": "other numbers of blocks swapped in",
    "blocks_to_swap_out": "other numbers of blocks swapped out",
    "q": "the queues have another order",
    "bt": "the same decisions, but other physical blocks",
    "kv": "the same decisions, but other token slots",
    "finished": "other requests finished",
    "free_gpu_blocks_end": "other numbers of blocks were given back",
    "free_end": "other numbers of token slots were given back",
    "evictable_end": "other tokens entered the cache",
    "drain": "one log processes a pending result without scheduling",
    "error": "one engine ended here",
}
"""Field of a record → what a difference in it means. In order of cause: the first one that differs
is the one to look at."""


class Divergence(NamedTuple):
    """The first record in which two logs differ."""

    record: int
    step: int | None
    fields: dict[str, tuple[Any, Any]]
    """Differing field → the values of the two logs, in order of cause."""

    def __str__(self) -> str:
        field, (a, b) = next(iter(self.fields.items()))
        meaning = MEANINGS.get(field, "the records differ")
        others = ", ".join(list(self.fields)[1:])
        also = f"; also {others}" if others else ""
        step = "" if self.step is None else f", step {self.step}"
        return f"record {self.record}{step}: {meaning} ({field}: {a} | {b}{also})"


def first_divergence(one: list[Record], other: list[Record]) -> Divergence | None:
    """The first difference; None where the logs are equal.

    Extra fields do no harm. Of an error record only step, time and kind count.
    """
    for number, (a, b) in enumerate(zip_longest(one, other)):
        fields = _differences(a, b)
        if fields:
            return Divergence(number, (a or b or {}).get("step"), fields)
    return None


def error_kind(record: Record | None) -> str | None:
    """`deadlock`, `max_steps` or `engine error`; None for a step."""
    if record is None or "error" not in record:
        return None
    text = str(record["error"])
    if text.startswith("deadlock"):
        return "deadlock"
    return text if text == "max_steps" else "engine error"


def _differences(a: Record | None, b: Record | None) -> dict[str, tuple[Any, Any]]:
    if a == b:
        return {}
    if a is None or b is None:
        missing = "the log ends"
        return {"error": (missing if a is None else "a step", missing if b is None else "a step")}
    if error_kind(a) != error_kind(b):
        return {"error": (a.get("error", "a step"), b.get("error", "a step"))}
    ignored = {"error"} if "error" in a else set()
    shared = [key for key in (*MEANINGS, *a) if key in a and key in b and key not in ignored]
    different = {key: (a[key], b[key]) for key in shared if a[key] != b[key]}
    if ("drain" in a) != ("drain" in b):
        different["drain"] = ("drain" in a, "drain" in b)
    return different

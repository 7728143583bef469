"""One step as a record of the step-log format, with digests of queues and block tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from zlib import crc32

from kvsim.core.batch import Batch
from kvsim.core.blocks import BlockManager
from kvsim.core.plan import SWAP, Plan
from kvsim.core.request import RUNNING, Request

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
    for request, _, _ in plan.entries:
        for sequence in request.sequences:
            if sequence.state == RUNNING:
                for group, table in enumerate(blocks.tables(sequence)):
                    label = f"{request.id}#{group}" if group else request.id
                    digest = crc32(f"{label}={','.join(map(str, table))};".encode(), digest)
    return digest

"""Small worlds for tests: traces in memory, times that can be added in the head, batches."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvsim.engine.batch import Batch, Endings
from kvsim.engine.scheduler import Scheduler
from kvsim.engine.tables import Tables
from kvsim.workload.trace import HashContent, Row, Trace

MS = 1_000_000


def trace(*rows: tuple[float, int, int], **more: Any) -> Trace:
    """A trace of (arrival in ms, input length, output length)."""
    made = [
        Row(i, f"r{i}", i + 2, round(arrival * MS), length, output)
        for i, (arrival, length, output) in enumerate(rows)
    ]
    return Trace("in memory", "native", "0" * 64, made, **more)


def hashed(block_size: int, *rows: tuple[float, int, int, list[int]]) -> Trace:
    """A trace of (arrival in ms, input length, output length, ids of the full prompt blocks)."""
    made = [
        Row(
            i,
            f"r{i}",
            i + 2,
            round(arrival * MS),
            length,
            output,
            HashContent(tuple((each, 1) for each in ids)),
        )
        for i, (arrival, length, output, ids) in enumerate(rows)
    ]
    return Trace(
        "in memory",
        "native",
        "0" * 64,
        made,
        block_size=block_size,
        hash_kind="prefix",
        partial_hash=False,
    )


def config(**settings: Any) -> dict[str, Any]:
    """A tiny vLLM 0.6.3: blocks of 4 tokens, 10 ms a step and 1 ms a prompt token, decodes free."""
    table: dict[str, Any] = {
        "engine": "vllm-0.6.3",
        "block_size": 4,
        "num_gpu_blocks_override": 100,
        "max_model_len": 64,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "watermark": 0.0,
        "swap_space": 0.0,
        "disable_async_output_proc": True,
        "cost": {
            "model": "constant",
            "step_us": 10_000,
            "prefill_token_us": 1_000,
            "decode_seq_us": 0,
            "context_token_ns": 0,
            "link": {"block_us": 500},
        },
    }
    table["cost"].update(settings.pop("cost", {}))
    return {**table, **settings}


def batch_of(
    tables: Tables, scheduler: Scheduler, lengths: Mapping[int, int] | Sequence[int]
) -> Batch:
    """A batch for a scheduler; `lengths`: the output length of each request, by its index."""
    return Batch(tables, Endings(lengths.__getitem__, scheduler.longest_sequence))

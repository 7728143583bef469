"""Small worlds for tests: traces in memory, times that can be added in the head, batches."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from kvsim.core.batch import Batch
from kvsim.engines.vllm_v1.groups import Full
from kvsim.engines.vllm_v1.manager import KVCacheManager
from kvsim.engines.vllm_v1.scheduler import VllmV1
from kvsim.workload import HashContent, Row, Trace

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


def batch_of(tables: Any, scheduler: Any, lengths: Mapping[int, int] | Sequence[int]) -> Batch:
    """A batch for a scheduler; `lengths`: the output length of each request, by its index."""
    return Batch(tables, lengths.__getitem__, scheduler.longest_sequence)


def arrive(scheduler: Any, batch: Any, request: Any) -> None:
    """A request arrives, as from a loop."""
    batch.enter(request)
    scheduler.arrive(batch, request)


def manager(
    block_size: int = 4, num_gpu_blocks: int = 9, caching: bool = False, **more: Any
) -> KVCacheManager:
    """The block manager of vLLM V1 with one group; one of its blocks is never used."""
    limits = {"max_model_len": 1000, "max_num_batched_tokens": 1000, **more}
    group = Full(block_size=block_size)
    return KVCacheManager([group], num_gpu_blocks, enable_prefix_caching=caching, **limits)


def v1(
    kind: type[VllmV1] = VllmV1,
    block_size: int = 4,
    num_gpu_blocks: int = 9,
    caching: bool = False,
    eviction: Any = "lru",
    **knobs: Any,
) -> tuple[VllmV1, KVCacheManager]:
    """vLLM V1, and its block manager."""
    limits = {"max_model_len": 100, "max_num_seqs": 8, "max_num_batched_tokens": 64, **knobs}
    names = ("max_model_len", "max_num_batched_tokens", "long_prefill_token_threshold")
    shared = {name: limits[name] for name in names if name in limits}
    blocks = manager(block_size, num_gpu_blocks, caching, eviction=eviction, **shared)
    return kind(blocks=blocks, **limits), blocks


class Steps:
    """Composes steps, and settles each when it is told to."""

    def __init__(self, scheduler: Any, batch: Any) -> None:
        self.scheduler, self.batch = scheduler, batch
        self.flying: deque[Any] = deque()

    def compose(self, now_ns: int) -> Any:
        """The next step, which is in flight if it computes something or nothing else can be."""
        plan = self.scheduler.compose(self.batch, now_ns)
        self.scheduler.overlap(self.batch, now_ns)
        if plan.computes or self.scheduler.in_flight == 1:
            self.flying.append(plan)
            plan.flying = True
        return plan

    def late(self, plan: Any) -> bool:
        """Whether the oldest step must be settled before another one is composed."""
        full = len(self.flying) == self.scheduler.in_flight
        return bool(self.flying) and (full or not plan.computes)

    def settle(self, now_ns: int) -> None:
        """Settles the oldest step in flight."""
        oldest = self.flying.popleft()
        self.scheduler.settle(self.batch, oldest, now_ns)
        oldest.flying = False

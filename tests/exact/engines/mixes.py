"""Small engines with any rules, and requests of known tokens to run them on.

Blocks of 4 tokens, 8 sequences, no watermark; 40 blocks and a roomy token budget unless said
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from worlds import batch_of, v1

from kvsim.against.conform.step_log import (
    SERVED,
    Record,
    UnitClock,
    corpus_requests,
    played,
    replay,
)
from kvsim.engines.nano import Nano, Nano2025, NanoTables, NanoTables2025
from kvsim.engines.vllm_063.blocks import PrefixCaching
from kvsim.engines.vllm_063.scheduler import Vllm063, Vllm063Async
from kvsim.engines.vllm_v1.scheduler import VllmV1, VllmV1Async

SIZE = 4
Made = tuple[Any, Any]
Maker = Callable[..., Made]


def vllm063(engine: Any = Vllm063, **more: Any) -> Maker:
    def make(blocks: int, budget: int, requeue: str | None, **rules: str) -> Made:
        scheduler = engine(
            block_size=SIZE,
            num_gpu_blocks=blocks,
            max_model_len=1000 if more.get("enable_chunked_prefill") else budget,
            max_num_seqs=8,
            max_num_batched_tokens=budget,
            enable_prefix_caching=True,
            watermark=0.0,
            requeue=requeue,
            **more,
        )
        return scheduler, PrefixCaching(SIZE, blocks, 100, **rules)

    return make


def vllm_v1(engine: Any = VllmV1, **more: Any) -> Maker:
    def make(blocks: int, budget: int, requeue: str | None, **rules: str) -> Made:
        limits = {"max_model_len": 1000, "max_num_batched_tokens": budget, "requeue": requeue}
        return v1(engine, SIZE, blocks + 1, True, **limits, **more, **rules)

    return make


def nano(engine: Any, tables: Any) -> Maker:
    def make(blocks: int, budget: int, requeue: str | None, **rules: str) -> Made:
        scheduler = engine(
            block_size=SIZE, max_num_seqs=8, max_num_batched_tokens=budget, requeue=requeue
        )
        return scheduler, tables(SIZE, blocks, **rules)

    return make


ENGINES: dict[str, Maker] = {
    "0.6.3": vllm063(),
    "v1": vllm_v1(enable_chunked_prefill=False),
    "nano": nano(Nano, NanoTables),
    "nano 2025": nano(Nano2025, NanoTables2025),
}
"""One engine of each line, none of which cuts the prompts of these tests."""

VARIANTS: dict[str, Maker] = {
    **ENGINES,
    "0.6.3 async": vllm063(Vllm063Async),
    "0.6.3 swap": vllm063(preemption_mode="swap"),
    "0.6.3 chunked": vllm063(enable_chunked_prefill=True),
    "0.6.3 chunked async": vllm063(Vllm063Async, enable_chunked_prefill=True),
    "v1 chunked": vllm_v1(),
    "v1 unreserved": vllm_v1(scheduler_reserve_full_isl=False),
    "v1 async": vllm_v1(VllmV1Async),
}
CHUNKED = tuple(name for name in VARIANTS if "chunked" in name or name in ("nano", "v1 async"))
"""Those that cut prompts, so that a budget may be smaller than a request."""


def make(
    engine: str, blocks: int = 40, budget: int = 60, requeue: str | None = None, **rules: str
) -> Made:
    """A scheduler and its block tables."""
    return VARIANTS[engine](blocks, budget, requeue, **rules)


def rows(*requests: tuple[float, list[int], int], first: int = 0) -> list[Record]:
    """Requests r`first`, ... as (arrival, prompt, output length)."""
    return [
        {"id": f"r{i}", "arrival": arrival, "prompt_token_ids": prompt, "output_len": output}
        for i, (arrival, prompt, output) in enumerate(requests, first)
    ]


def play(made: Made, trace: list[Record]) -> Iterator[Record]:
    """The step log, with the books audited after every step."""
    scheduler, tables = made
    if not isinstance(scheduler, VllmV1):
        return replay(scheduler, tables, trace, 3000, audit_every=1)
    batch = batch_of(tables, scheduler, [row["output_len"] for row in trace])
    clock = UnitClock(batch, corpus_requests(trace), 3000, SERVED)
    return played(clock, scheduler, batch, 1)


def prefills(log: list[Record], name: str) -> list[list[Any]]:
    """Charged and cached tokens of each prefill of a request."""
    return [each[1:3] for step in log for each in step.get("prefill", ()) if each[0] == name]

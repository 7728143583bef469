"""Broken books are found within the run in which they break.

A fault is planted when half of the requests are over.
"""

from collections.abc import Callable
from typing import Any

import pytest

from kvsim import simulate
from kvsim.against.bench_workloads import Lengths, poisson
from kvsim.core.pool import CONTENT, FIELDS, REFS
from kvsim.run.assembly import Parts, assemble
from kvsim.settings.config import RunConfig
from kvsim.workload import SegmentContent

REQUESTS = 60
TRACE = poisson(REQUESTS, 20, Lengths(100, 0.5, 400), Lengths(60, 0.5, 200))
for row in TRACE.rows[::2]:
    # What nobody can look up is in few books.
    row.content = SegmentContent((("shared", row.input_length // 2),))
SETTINGS = {
    "block_size": 16,
    "num_gpu_blocks_override": 2000,
    "max_num_batched_tokens": 2048,
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "cost": {"model": "constant"},
}
ENGINES: dict[str, dict[str, Any]] = {
    "v1": {"engine": "vllm-v1"},
    "v1, synchronous": {"engine": "vllm-v1", "async_scheduling": False},
    "0.6.3": {"engine": "vllm-0.6.3"},
    "0.6.3, merged": {"engine": "vllm-0.6.3", "enable_prefix_caching": True},
    "0.3.3": {"engine": "vllm-0.3.3"},
    "nano": {"engine": "nano-vllm"},
}


def lose_content(blocks: Any) -> None:
    """That of an idle block."""
    pool = blocks.gpu
    pool._cells[pool.cached_blocks()[0] * FIELDS + CONTENT] = 0


def lose_a_free_block(blocks: Any) -> None:
    blocks.gpu.num_free -= 1


def hold_twice(blocks: Any) -> None:
    pool = blocks.gpu
    pool._cells[next(iter(pool.references)) * FIELDS + REFS] += 1


def miscount_cached(blocks: Any) -> None:
    blocks.gpu.num_cached += 1


def miscount_empty(blocks: Any) -> None:
    blocks.empty_slots += 1


CORE = (lose_a_free_block, hold_twice, miscount_cached, miscount_empty)
FAULTS: dict[str, tuple[Callable[[Any], None], ...]] = {
    "v1": (*CORE, lose_content),
    "v1, synchronous": (*CORE, lose_content),
    "0.6.3": CORE,
    "0.6.3, merged": (*CORE, lose_content),
    "0.3.3": (miscount_empty,),  # Its counts are wrong on purpose.
    "nano": (*CORE, lose_content),
}


@pytest.mark.parametrize(
    ("engine", "fault"), [(name, fault) for name, faults in FAULTS.items() for fault in faults]
)
def test_a_fault_is_found_within_the_run(engine: str, fault: Callable[[Any], None]) -> None:
    made: list[Any] = []
    over = 0

    def remember(config: RunConfig) -> Parts:
        parts = assemble(config)
        made.append(parts.blocks)
        return parts

    def plant(number: int) -> None:
        nonlocal over
        before, over = over, over + number
        if before < REQUESTS // 2 <= over:
            fault(made[-1])

    settings = SETTINGS | ENGINES[engine]
    assert simulate(TRACE, settings).meta["outcome"]["kind"] == "finished"
    with pytest.raises(AssertionError):
        simulate(TRACE, settings, progress=plant, parts_of=remember)
    assert over >= REQUESTS // 2

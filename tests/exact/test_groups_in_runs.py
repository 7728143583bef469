"""Models with KV cache groups in whole runs: `kvsim run`, with times and clients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvsim.engines.vllm_v1.manager import KVCacheManager
from kvsim.policies.order import Order
from kvsim.run.result import Result
from kvsim.run.simulation import simulate
from kvsim.workload import ParentContent, Row, TokenContent, Trace

MILLISECOND = 1_000_000


def columns(result: Result) -> dict[str, Any]:
    """Everything that a run recorded of steps and requests."""
    return {**{f"step {k}": v for k, v in result.steps.items()}, **result.requests}


def chats() -> Trace:
    """Four turns of six chats: each prompt is the last one, its answer, and 256 tokens more."""
    rows = []
    for index in range(24):
        turn, chat = divmod(index, 6)
        content = ParentContent(index - 6, 512 * turn + 256) if turn else None
        sent_ns = (1000 * turn + 10 * chat) * MILLISECOND
        rows.append(Row(index, f"r{index}", index + 2, sent_ns, 512 + 512 * turn, 256, content))
    return Trace("chats", "native", "", rows)


SMALL = {
    "engine": "vllm-v1",
    "hardware": "h100-sxm",
    "max_model_len": 4096,
    "cost": {"model": "constant", "step_us": 2000},
}


def run(model: str, **settings: Any) -> Result:
    return simulate(chats(), {**SMALL, "model": model, **settings})


def hit_tokens(result: Result) -> int:
    return int(np.sum(result.requests["num_cached_tokens"]))


def test_retention_decides_what_a_later_turn_hits() -> None:
    """gpt-oss: the prompt of turn k has 512 k tokens. With interval 0, its window keeps what an
    equal prompt would hit: all but the last block. With `none`, turn k + 1 also hits the answer of
    256 tokens, except the block with the last token, which was never computed."""
    ends = run("gpt-oss-20b")
    assert hit_tokens(ends) == 6 * sum(512 * turn - 16 for turn in (1, 2, 3))
    everything = run("gpt-oss-20b", prefix_cache_retention_interval="none")
    assert hit_tokens(everything) == 6 * sum(512 * turn + 256 - 16 for turn in (1, 2, 3))
    full = run("gpt-oss-20b", disable_hybrid_kv_cache_manager=True)
    assert hit_tokens(full) == hit_tokens(everything)


def test_the_same_memory_holds_more_blocks_of_fewer_layers() -> None:
    """gemma-3-27b: 10 of 62 layers have a part of each block, so there are 6.2 times as many."""
    groups, one = run("gemma-3-27b"), run("gemma-3-27b", disable_hybrid_kv_cache_manager=True)
    memory, other = groups.meta["memory"], one.meta["memory"]
    assert memory["block_bytes"] * 62 == other["block_bytes"] * 10
    assert memory["kv_bytes"] == other["kv_bytes"]
    assert memory["num_gpu_blocks"] == memory["kv_bytes"] // memory["block_bytes"]


@pytest.mark.parametrize("model", ["gemma-3-27b", "qwen3-next-80b-a3b"])
def test_a_run_is_the_same_each_time_and_says_what_it_did(model: str) -> None:
    settings = {
        "tensor_parallel_size": 4,
        "num_gpu_blocks_override": 1500,
        "max_num_batched_tokens": 1024,
        "max_num_seqs": 64,
    }
    one, other = run(model, **settings), run(model, **settings)
    assert one.meta["outcome"]["kind"] == "finished"
    first, second = columns(one), columns(other)
    assert all(np.array_equal(first[key], second[key]) for key in first)
    assert one.meta["block_manager"] == "vllm-v1-prefix-caching"
    assert any("KV cache groups share the pool" in note for note in one.meta["notes"])
    assert any("prefix_cache_retention_interval 0" in note for note in one.meta["notes"])


class Newest(Order):
    """Reuses the block that became idle last."""

    def __init__(self, first: int, size: int) -> None:
        self._idle: dict[int, None] = {}

    def put(self, block: int, key: int | None, tokens: int, access_ns: int) -> None:
        self._idle[block] = None

    def hit(self, block: int) -> None:
        self._idle.pop(block, None)

    def pop(self) -> int:
        return self._idle.popitem()[0]


class Oldest(Newest):
    """Reuses the block that became idle first, as vLLM does."""

    def pop(self) -> int:
        block = next(iter(self._idle))
        del self._idle[block]
        return block


def test_vllms_order_as_ones_own_changes_nothing() -> None:
    settings = {"num_gpu_blocks_override": 700, "prefix_cache_retention_interval": "none"}
    own = {"block_manager_args": {"eviction": f"{__name__}:Oldest"}}
    one, other = (columns(run("gpt-oss-20b", **settings, **more)) for more in ({}, own))
    assert all(np.array_equal(one[key], other[key]) for key in one)
    assert sum(one["num_cached_tokens"])


@pytest.mark.parametrize(("order", "kept"), [("Oldest", "b"), ("Newest", "a")])
def test_an_eviction_order_of_ones_own_is_obeyed(order: str, kept: str) -> None:
    """Prompts a, b and c of 32 blocks in each of two groups, and room for two of them: c takes the
    place of a if the oldest go, that of b if the newest do. What is asked for again hits all blocks
    but the last one, or, if it is the other one, nothing."""
    for again in "ab":
        rows = [
            Row(index, f"r{index}", index + 2, index * 1000 * MILLISECOND, 512, 1, content)
            for index, content in enumerate(TokenContent((ord(n),) * 512) for n in f"abc{again}")
        ]
        settings = {
            "max_model_len": 1024,
            "num_gpu_blocks_override": 150,
            "prefix_cache_retention_interval": "none",
            "block_manager_args": {"eviction": f"{__name__}:{order}"},
        }
        settings |= {"model": "gpt-oss-20b"}
        result = simulate(Trace("three", "native", "", rows), {**SMALL, **settings})
        found = list(result.requests["num_cached_tokens"])
        assert found == [0, 0, 0, 512 - 16 if again == kept else 0], again


def test_the_manager_holds_nothing_when_all_is_over() -> None:
    held: list[int] = []

    class Watch:
        def begin(self) -> None: ...

        def composed(self, batch: Any, *_: Any) -> None:
            assert isinstance(batch.blocks, KVCacheManager)

        def settled(self, batch: Any, *_: Any) -> None:
            held.append(batch.blocks.gpu.used)

    simulate(chats(), {**SMALL, "model": "gpt-oss-20b"}, watcher=Watch())
    assert max(held) > 0 == held[-1]

"""A tier in CPU memory under `kvsim run`: its size, its time, and what is refused."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from made import make_trace
from marks import long

from kvsim.assembly import assemble
from kvsim.config import make_config
from kvsim.engine.plan import NOTHING_MOVED
from kvsim.engines.vllm_v1_features.connector import Job, Transfers
from kvsim.engines.vllm_v1_features.cpu_tier import Access, CpuTier
from kvsim.engines.vllm_v1_features.timed import TimedWorker
from kvsim.errors import ConfigError
from kvsim.result import Result
from kvsim.run import simulate
from kvsim.workload.trace import TokenContent, Trace

MS = 1_000_000
SMALL = {
    "model": "qwen2.5-0.5b",
    "hardware": "h100",
    "num_gpu_blocks_override": 12,
    "max_model_len": 176,
    "async_scheduling": False,
}


def cost(block_us: int) -> dict[str, Any]:
    """Every step takes 1 ms, and the copy of a block that many microseconds."""
    none = {"prefill_token_us": 0, "decode_seq_us": 0, "context_token_ns": 0}
    return {"model": "constant", "step_us": 1000, **none, "link": {"block_us": block_us}}


def prompts(*rows: tuple[int, int], every_s: int = 1) -> Trace:
    """Requests with one output token, one every so many seconds, as (token, prompt length)."""
    trace = make_trace([(n, 1, TokenContent((token,) * n)) for token, n in rows])
    later = [replace(row, arrival_ns=row.arrival_ns * every_s) for row in trace.rows]
    return replace(trace, rows=later)


AGAIN = prompts((1, 40), (2, 172), (1, 40))
"""A prompt of two whole blocks, one that evicts them, and the first one again."""


def run(trace: Trace, gib: float = 1.0, block_us: int = 200, **settings: Any) -> Result:
    table = {**SMALL, "cost": cost(block_us), "kv_offloading_size": gib}
    return simulate(trace, table | settings)


def ttft_ms(result: Result) -> list[float]:
    requests = result.requests
    return [float(t) / MS for t in requests["first_token_ns"] - requests["arrival_ns"]]


def test_a_load_takes_the_time_of_its_copy_and_saves_the_computation() -> None:
    """Two blocks in 0.4 ms while the request waits, then a step of 1 ms."""
    result = run(AGAIN)
    assert ttft_ms(result) == [1.0, 1.0, 1.4]
    assert list(result.requests["num_cached_tokens"]) == [0, 0, 32]
    moved = result.meta["kv_offload"]
    assert (moved["stored_blocks"], moved["loaded_blocks"]) == (12, 2)
    assert (moved["stored_copy_s"], moved["loaded_copy_s"]) == (0.0024, 0.0004)
    assert moved["loaded_bytes"] == 2 * 16 * 12_288  # 12 KiB a token


def test_without_a_tier_the_prefix_is_computed_again() -> None:
    assert list(run(AGAIN, gib=0).requests["num_cached_tokens"]) == [0, 0, 0]


def test_a_load_within_the_step_makes_it_wait() -> None:
    result = run(AGAIN, kv_connector_extra_config={"sync_load_budget_bytes": 1 << 30})
    assert ttft_ms(result) == [1.0, 1.0, 1.4]
    assert max(result.steps["link_wait_ns"]) == 0.4 * MS


def test_reuse_of_a_block_waits_for_its_store() -> None:
    """The store of ten blocks begins after the step of 1 ms and takes 1 s; at 1 s, the next prompt
    needs these blocks."""
    result = run(prompts((1, 160), (2, 160)), block_us=100_000)
    assert result.meta["kv_offload"]["flushed_jobs"] == 1
    assert ttft_ms(result) == [1.0, 2.0]


def test_a_request_that_arrives_during_a_load_is_served_at_once() -> None:
    """The prompt that comes back at 20 s is loaded until 21.4 s; another one arrives at 21 s."""
    rows = prompts((1, 40), (2, 172), (1, 40), every_s=10).rows
    late = replace(prompts((3, 9)).rows[0], index=3, id="late", arrival_ns=21_000 * MS)
    result = run(replace(AGAIN, rows=[*rows, late]), block_us=700_000)
    assert ttft_ms(result) == [1.0, 1.0, 1401.0, 1.0]


def test_results_do_not_depend_on_the_mode_of_the_simulator() -> None:
    results = [run(AGAIN, exact_twin=twin) for twin in (False, True)]
    assert ttft_ms(results[0]) == ttft_ms(results[1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"engine": "vllm-0.6.3", "async_scheduling": None},
            "kv_offloading_size: vllm-0.6.3 has no such setting",
        ),
        ({"block_manager": "vllm-v1"}, "kv_offloading_size: it needs the block manager"),
        ({"kv_offloading_size": 1e-6}, "a chunk takes 196,608 bytes, more than"),
        ({"kv_offloading_size": 0.0}, ""),
        (
            {"kv_connector_extra_config": {"eviction": "lru"}},
            "takes no 'eviction'; did you mean 'eviction_policy'?",
        ),
        ({"kv_connector_extra_config": {"blocks_per_chunk": 0}}, "of at least 1"),
        (
            {"kv_offloading_size": 0.0, "kv_connector_extra_config": {"store_threshold": 2}},
            "there is no KV offload; set --kv-offloading-size",
        ),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    table = {**SMALL, "kv_offloading_size": 1.0, **settings}
    if not message:
        assert assemble(make_config(table)).offload is None
        return
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        assemble(make_config(table))


def test_a_tier_no_larger_than_the_pool_is_remarked_upon() -> None:
    size = 5 * 16 * 12_288 / (1 << 30)
    notes = assemble(make_config({**SMALL, "kv_offloading_size": size})).notes
    assert any("room for 5 blocks, and the GPU for 11" in note for note in notes)


INF = float("inf")


def job(number: int, blocks: int, within: bool = False) -> Job:
    return Job(number, None, [[*range(blocks)]], [[]], True, within)


def test_copies_of_one_direction_follow_each_other() -> None:
    worker = TimedWorker(lambda blocks: 10 * blocks)
    loads = Transfers([job(0, 3), job(1, 2)], [], [], [])
    assert worker.launch(loads, 100, False, INF) == NOTHING_MOVED
    assert [done.number for done in worker.collect(130).loads] == [0]
    assert [done.number for done in worker.collect(150).loads] == [1]


def test_a_store_begins_with_the_next_step_unless_it_is_flushed() -> None:
    worker = TimedWorker(lambda blocks: 10 * blocks)
    nothing = Transfers([], [], [], [])
    assert worker.launch(Transfers([], [job(0, 3)], [], []), 100, False, INF) == NOTHING_MOVED
    assert worker.unsent
    assert worker.launch(nothing, 200, False, INF) == NOTHING_MOVED
    assert not worker.collect(229)
    assert worker.collect(230).stores
    assert worker.launch(Transfers([], [job(1, 3)], [1], []), 300, False, INF).flush_ns == 30


def test_an_idle_engine_waits_for_a_transfer_or_a_request() -> None:
    worker = TimedWorker(lambda blocks: 10 * blocks)
    assert worker.launch(Transfers([job(0, 3)], [], [], []), 100, True, 120).wait_ns == 20
    assert worker.launch(Transfers([], [], [], []), 120, True, INF).wait_ns == 10


def test_tails_are_evicted_before_heads_and_offers_are_all_or_nothing() -> None:
    tier, first, second = CpuTier(4), Access(), Access()
    keys = [(number, 0) for number in range(3)]
    first.position = {key: 16 * (key[0] + 1) for key in keys}
    assert tier.offer(keys, first) == {(0, 0): 0, (1, 0): 1, (2, 0): 2}
    tier.stored(keys)
    tier.ended(first)
    new = [(number, 0) for number in range(10, 15)]
    second.position = {key: key[0] for key in new}
    assert tier.offer(new, second) is None
    assert tier.offer(new[:2], second) == {(10, 0): 3, (11, 0): 2}
    assert [tier.look_up(key) for key in keys] == [0, 0, None]


def random_run(seed: int) -> tuple[Trace, dict[str, Any]]:
    """Prompts of three tokens that continue each other, small pools, slow and fast links."""
    rng, tokens = Random(seed), list[tuple[int, ...]]()
    for _ in range(rng.randint(1, 25)):
        start = rng.choice(tokens)[: rng.randint(1, 100)] if tokens and rng.random() < 0.6 else ()
        more = tuple(rng.randrange(3) for _ in range(rng.randint(1, 60)))
        tokens.append(start + more)
    trace = make_trace([(len(t), rng.randint(1, 16), TokenContent(t)) for t in tokens])
    gap_ns = rng.choice([0, MS, 5 * MS, 300 * MS])
    rows = [replace(row, arrival_ns=row.index * gap_ns) for row in trace.rows]
    extra = {
        "blocks_per_chunk": rng.choice([1, 1, 2]),
        "eviction_policy": rng.choice(["lru", "arc"]),
        "store_threshold": rng.choice([0, 2]),
        "offload_prompt_only": rng.random() < 0.5,
        "sync_load_budget_bytes": rng.choice([0, 0, 10**6]),
    }
    return replace(trace, rows=rows), {
        "num_gpu_blocks_override": rng.choice([12, 16, 24, 50]),
        "async_scheduling": rng.random() < 0.5,
        "scheduling_policy": rng.choice(["fcfs", "fcfs", "priority"]),
        "max_num_seqs": rng.choice([1, 3, 16]),
        "max_num_batched_tokens": rng.choice([32, 64, 512]),
        "enable_prefix_caching": rng.random() < 0.8,
        "gib": rng.choice([0.001, 0.003, 0.02, 1.0]),
        "block_us": rng.choice([0, 50, 1000, 100_000]),
        "kv_connector_extra_config": extra,
    }


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(s, marks=long) for s in range(12, 80))]
)
def test_random_runs_end_add_up_and_repeat(seed: int) -> None:
    """The ledger asserts that all times and tokens add up."""
    trace, settings = random_run(seed)
    first, second = run(trace, **settings), run(trace, **settings)
    assert first.meta["outcome"]["kind"] == "finished"
    assert list(first.requests["finish_ns"]) == list(second.requests["finish_ns"])
    assert first.meta["kv_offload"] == second.meta["kv_offload"]

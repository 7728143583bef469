"""Where the prompt tokens of a run went: the parts add up, and the bounds bound."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import worlds

import kvsim
from kvsim.explain.cache_eviction import Audit, Recorded, audit, bounds
from kvsim.policies.eviction import EVICTIONS
from kvsim.report.pages.cache import PARTS, Audited, audit_rows, audit_sentences
from kvsim.workload import Trace
from kvsim.workload.keys import streams

ENGINES = ("vllm-v1", "vllm-0.6.3", "nano-vllm", "sglang")


def random_trace(rng: Random) -> Trace:
    """Paths in a tree, some of them long enough to run out of blocks."""
    ids: dict[tuple[int, ...], int] = {}
    rows: list[tuple[Any, ...]] = []
    at = 0.0
    for _ in range(rng.randint(10, 40)):
        at += rng.choice([0, 0, 3, 10, 40])
        path = tuple(rng.randrange(2) for _ in range(rng.randint(1, 6)))
        chain = [ids.setdefault(path[: end + 1], len(ids)) for end in range(len(path))]
        rows.append((at, 4 * len(chain) + rng.choice([0, 0, 1, 3]), rng.randint(1, 12), chain))
    return worlds.hashed(4, *rows)


def settings(engine: str, rng: Random, **further: Any) -> dict[str, Any]:
    table = worlds.config(
        engine=engine,
        disable_async_output_proc=None,
        enable_prefix_caching=True,
        num_gpu_blocks_override=rng.choice([14, 18, 26]),
        max_model_len=40,
        **further,
    )
    if engine in ("sglang", "nano-vllm"):
        del table["watermark"], table["swap_space"]
    return {key: value for key, value in table.items() if value is not None}


def audited(trace: Trace, table: dict[str, Any]) -> tuple[Audit, tuple[int, ...], kvsim.Result]:
    run = kvsim.simulate(trace, table)
    recorded = Recorded(run.summary, run.requests, run.steps, run.transitions, streams(trace))
    return audit(recorded), bounds(recorded), run


@pytest.mark.parametrize("engine", ENGINES)
def test_hits_never_exceed_the_bounds_and_the_parts_add_up(engine: str) -> None:
    lost = dict.fromkeys(PARTS, 0)
    for seed in range(12):
        rng = Random(seed)
        trace = random_trace(rng)
        found, (pinned, optimum), run = audited(trace, settings(engine, rng))
        assert found.hit <= pinned <= optimum <= found.ceiling, f"seed {seed}"
        parts = found._asdict()
        assert sum(parts[name] for name in PARTS) == found.prompt_tokens, f"seed {seed}"
        assert min(parts.values()) >= 0, f"seed {seed}"
        assert found.hit == run.summary["prefix_cache_hit_tokens"]
        assert (found.hit, found.pinned_optimum, found.optimum) == (found.hit, pinned, optimum)
        for name in PARTS:
            lost[name] += parts[name]
    assert min(lost[name] for name in ("hit", "policy", "capacity", "cold")) > 0, lost


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_every_eviction_serves_all_requests_within_the_bounds(eviction: str) -> None:
    rules = {"block_manager_args": {"eviction": eviction}}
    for seed in range(3):
        rng = Random(seed)
        trace = random_trace(rng)
        table = settings("vllm-v1", rng, **rules)
        found, (pinned, optimum), run = audited(trace, table)
        assert found.hit <= pinned <= optimum <= found.ceiling, f"seed {seed}"
        assert set(run.requests["status"]) == {"completed"}, f"seed {seed}"
        oracles = ["eviction: belady"] if eviction == "belady" else []
        assert run.meta["oracles"] == oracles


def test_the_oracle_finds_what_least_recently_used_loses() -> None:
    """Three prompts in turn, and room for two and a bit: LRU drops what comes back next."""
    prompts = [list(range(100 * i, 100 * i + 4)) for i in range(3)]
    rows = [(500.0 * i, 17, 2, prompts[i % 3]) for i in range(30)]
    trace = worlds.hashed(4, *rows)
    table = settings("vllm-v1", Random(0), block_manager_args={"eviction": "lru"})
    table["num_gpu_blocks_override"] = 11
    lru, _, _ = audited(trace, table)
    best, _, _ = audited(trace, {**table, "block_manager_args": {"eviction": "belady"}})
    assert lru.hit < best.hit <= best.pinned_optimum
    lines = list(audit_sentences([Audited("lru", lru), Audited("belady", best, oracle=True)]))
    assert lines[1].startswith("belady (ORACLE): ")
    assert [name for name, _ in audit_rows([Audited("lru", lru)])][-1] == "all prompt tokens"


def test_the_oracle_keeps_what_comes_back_although_it_is_deeper() -> None:
    """One prompt of five blocks comes back each time; those of three between never do."""
    again = list(range(5))
    rows = [
        (500.0 * i, 13, 2, [100 * i, 100 * i + 1, 100 * i + 2])
        if i % 2
        else (500.0 * i, 21, 2, again)
        for i in range(20)
    ]
    table = settings("vllm-v1", Random(0), block_manager_args={"eviction": "belady"})
    table["num_gpu_blocks_override"] = 11
    best, _, _ = audited(worlds.hashed(4, *rows), table)
    assert best.hit == 9 * 20


def test_room_that_running_requests_hold_is_no_fault_of_the_policy() -> None:
    """A prompt of 8 blocks comes back while another request holds all but a few of the blocks."""
    prompt, long_one = list(range(8)), list(range(100, 110))
    rows = [(0.0, 33, 1, prompt), (200.0, 41, 60, long_one), (5000.0, 33, 1, prompt)]
    trace = worlds.hashed(4, *rows)
    table = worlds.config(
        engine="vllm-v1",
        disable_async_output_proc=None,
        enable_prefix_caching=True,
        num_gpu_blocks_override=28,
        max_model_len=104,
    )
    found, _, _ = audited(trace, table)
    assert found.pinning > 0 == found.policy
    assert found.hit + found.pinning == 32

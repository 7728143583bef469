"""What a tier below the GPU makes requests wait for, to the nanosecond."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from marks import long
from shared import SHARED, needs_shared
from tiered import AGAIN, MS, check, prompts, random_run, run

from kvsim.explain.differences import pair, waterfalls
from kvsim.explain.story import tell
from kvsim.results.ledger import TIME_PARTS
from kvsim.run.result import Result
from kvsim.run.simulation import simulate

WEKA = "traces/native-samples/weka_100_sessions.jsonl.gz"


def parts(result: Result, place: int) -> dict[str, float]:
    """The parts of one request in ms, without those of no time."""
    found = {name: int(result.requests[name][place]) / MS for name in TIME_PARTS}
    return {name.removesuffix("_ns"): ms for name, ms in found.items() if ms}


def story(result: Result, place: int) -> list[str]:
    told = tell(result.summary, result.requests, result.steps, result.transitions, place)
    return [text.replace("\xa0", " ") for _, text in told.moments]


def test_a_request_waits_for_its_load() -> None:
    """Two blocks of 0.2 ms, then a step of 1 ms, all of it the host's."""
    result = run(AGAIN)
    assert parts(result, 2) == {"waiting_load": 0.4, "host_overhead": 1.0}
    assert [int(n) for n in result.requests["tier1_hit_tokens"]] == [0, 0, 32]
    assert result.summary["tier1_hit_tokens"] == 32
    told = story(result, 2)
    assert any("began to load 32 tokens into its blocks" in text for text in told)
    assert any("its load was over after 400" in text for text in told)
    assert any("32 of 40 prompt tokens hit, 32 of them in tier 1" in text for text in told)


def test_of_two_requests_one_loads_and_the_other_waits_for_it() -> None:
    """Both come at 2 s. The load is over at 0.4 ms; the other finds it on the GPU, one step on."""
    rows = prompts((1, 40), (2, 172), (1, 40), (1, 40)).rows
    both = replace(AGAIN, rows=[*rows[:3], replace(rows[3], arrival_ns=rows[2].arrival_ns)])
    result = run(both)
    assert parts(result, 2)["waiting_load"] == 0.4
    assert parts(result, 3)["waiting_tier"] == 0.4
    assert [int(n) for n in result.requests["tier1_hit_tokens"]] == [0, 0, 32, 0]
    assert [int(n) for n in result.requests["num_cached_tokens"]] == [0, 0, 32, 32]
    assert any("for a store, or a load of another" in text for text in story(result, 3))
    assert any("until another one had loaded" in note for note in result.meta["notes"])


def test_a_hit_that_is_being_stored_makes_a_request_wait() -> None:
    """The store of ten blocks takes from 1 ms to 1.001 s. The prompt comes again at 0.5 s, when its
    blocks are lost on the GPU, as there is no prefix cache."""
    trace = prompts((1, 160), (1, 160))
    trace = replace(trace, rows=[trace.rows[0], replace(trace.rows[1], arrival_ns=500 * MS)])
    result = run(trace, block_us=100_000, enable_prefix_caching=False)
    assert parts(result, 1)["waiting_tier"] == 501.0
    assert any("still on its way to CPU memory" in note for note in result.meta["notes"])


def test_a_flush_holds_up_those_who_run() -> None:
    """The second prompt reuses blocks whose store takes from 1.001 s to 2.001 s: 1 ms is left."""
    result = run(prompts((1, 160), (2, 160)), block_us=100_000)
    assert parts(result, 1) == {"flush_stall": 1.0, "host_overhead": 1.0}
    assert max(result.steps["flush_ns"]) == 1 * MS and not result.steps["link_wait_ns"].any()
    assert result.summary["flush_s"] == 0.001
    assert any("1 stores held up a whole step" in note for note in result.meta["notes"])


@pytest.mark.parametrize(
    "seeds", [(6, 11, 12, 13, 30), pytest.param(range(100, 150), marks=long)], ids=["some", "many"]
)
def test_parts_of_random_runs_add_up_and_all_occur(seeds: Iterable[int]) -> None:
    """Every part that a tier brings, and the time of every step."""
    met: dict[str, int] = {}
    for seed in seeds:
        trace, settings = random_run(seed)
        result = run(trace, **settings)
        check(result)
        for name in TIME_PARTS:
            met[name] = met.get(name, 0) + int(result.requests[name].sum())
    wanted = {"waiting_tier_ns", "waiting_load_ns", "reload_ns", "link_queue_ns"}
    wanted |= {"flush_stall_ns", "deferred_free_ns"}
    assert not {name for name in wanted if not met[name]}, "a part that no seed has"


def assert_explained(without: Result, tier: Result) -> None:
    """The difference of mean and p99 is the sum of that of its parts, without a rest."""
    pairs = pair(without.requests, tier.requests)
    assert pairs is not None
    for fall in waterfalls(pairs):
        end = "finish_ns" if fall.metric == "e2el" else "first_token_ns"
        first, other = pairs.values(end) - pairs.values("arrival_ns")
        if fall.statistic == "mean":
            assert fall.difference * len(first) == int(np.sum(other)) - int(np.sum(first))
        else:
            gap = np.percentile(other, 99) - np.percentile(first, 99)
            assert abs(float(fall.difference) - gap) < 1
        assert fall.difference == sum(change for _, change in fall.changes())


def test_the_difference_that_a_tier_makes_adds_up_exactly() -> None:
    assert_explained(run(AGAIN, gib=0), run(AGAIN))


@long
@needs_shared(WEKA)
def test_the_difference_that_a_tier_makes_to_claude_code_adds_up_exactly() -> None:
    """The first 60 requests of the sample; the pool has room for one and a half prompts."""
    settings = {"num_prompts": 60, "model": "llama-3.1-8b", "hardware": "h100"}
    settings |= {"num_gpu_blocks_override": 12_000}
    without, tier = (
        simulate(str(SHARED / WEKA), {**settings, "kv_offloading_size": gib}) for gib in (0.0, 64.0)
    )
    loaded, hits = (tier.requests[name] for name in ("tier1_hit_tokens", "num_cached_tokens"))
    assert loaded.sum() > 100_000 and hits.sum() > without.requests["num_cached_tokens"].sum()
    assert tier.requests["waiting_load_ns"].any()
    assert_explained(without, tier)


def test_a_run_without_a_tier_has_none_of_it() -> None:
    result = run(AGAIN, gib=0)
    new: tuple[Any, ...] = ("waiting_tier_ns", "waiting_load_ns", "reload_ns", "flush_stall_ns")
    assert not any(result.requests[name].any() for name in new)
    assert "kv_offload" not in result.meta and not result.steps["flush_ns"].any()

"""Whole runs: conservation, causality, determinism, and books that balance after every step."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from marks import examples, long
from places import ROOT
from shared import SHARED, needs_shared
from small_engines import make_trace
from worlds import MS, config

import kvsim
from kvsim.core.batch import Batch
from kvsim.core.plan import Plan
from kvsim.core.request import Request
from kvsim.policies.eviction import EVICTIONS
from kvsim.policies.order import IDLE_ORDERS
from kvsim.policies.tables import GROWTH
from kvsim.workload import Trace, open_trace

TRACES = ROOT / "traces"


class Auditor:
    """Checks the books after every step."""

    def begin(self) -> None:
        pass

    def composed(self, batch: Batch, plan: Plan, now_ns: int, arrived: int) -> None:
        batch.audit()

    def settled(self, batch: Batch, ended: list[Request]) -> None:
        batch.audit()


def check(result: kvsim.Result, trace: Trace) -> None:
    """What holds of every run, however it ends."""
    requests, steps = result.requests, result.steps
    assert len(requests["id"]) == len(trace.rows)
    status = np.array(requests["status"])
    assert set(status) <= {"completed", "rejected"}
    assert result.summary["completed"] + result.summary["rejected"] == len(trace.rows)
    done = status == "completed"
    for before, after in (
        ("released_ns", "arrival_ns"),
        ("arrival_ns", "first_scheduled_ns"),
        ("first_scheduled_ns", "first_token_ns"),
        ("first_token_ns", "finish_ns"),
    ):
        assert (requests[before][done] <= requests[after][done]).all(), (before, after)
    wanted = requests["output_length"] * requests["n"]
    assert (requests["output_tokens"][done] <= wanted[done]).all()
    assert (requests["num_cached_tokens"] < requests["input_length"]).all()
    total = result.meta["num_gpu_blocks"]
    pool = steps["used_blocks"] + steps["cached_blocks"] + steps["free_blocks"]
    assert (pool == total).all()
    assert (steps["cpu_used_blocks"] <= result.meta["num_cpu_blocks"]).all()
    assert (steps["empty_slots"] >= 0).all()
    assert (steps["start_ns"] <= steps["end_ns"]).all()
    assert (steps["end_ns"][:-1] <= steps["start_ns"][1:]).all()
    preempted = steps["preempted_recompute"].sum() + steps["preempted_swap"].sum()
    if result.meta["outcome"]["kind"] == "finished":
        # An engine that dies while it composes leaves no row of that step.
        assert steps["swap_out_blocks"].sum() == requests["swapped_out_blocks"].sum()
        assert steps["swap_in_blocks"].sum() == requests["swapped_in_blocks"].sum()
        assert preempted == requests["num_preemptions"].sum()
        # A request that is turned away while nothing runs is in the row of no step.
        ended = (requests["finish_ns"] >= 0).sum()
        assert done.sum() <= steps["finished"].sum() <= ended
    gaps = sum(result.token_gaps_ns.values())
    started = (requests["first_token_ns"] >= 0).sum()
    assert gaps >= requests["output_tokens"].sum() - (started * requests["n"].max())


settings_of_runs = st.fixed_dictionaries(
    {
        "num_gpu_blocks_override": st.integers(16, 40),
        "num_cpu_blocks_override": st.integers(0, 30),
        "max_num_seqs": st.integers(3, 8),
        "watermark": st.sampled_from((0.0, 0.01, 0.1, 0.3)),
        "preemption_mode": st.sampled_from((None, None, "recompute", "swap")),
        "scheduling_policy": st.sampled_from(("fcfs", "priority")),
        "enable_chunked_prefill": st.booleans(),
        "enable_prefix_caching": st.booleans(),
        "max_concurrency": st.sampled_from((None, None, 1, 3)),
        "n": st.sampled_from((1, 1, 1, 2, 3)),
    }
)
rows = st.lists(
    st.tuples(
        st.sampled_from((0, 0, 10, 20, 25, 40)),  # many clock ties
        st.integers(1, 40),
        st.integers(1, 24),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=14,
)


@settings(deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
@given(rows, settings_of_runs)
def test_every_run_balances(drawn: list[tuple[int, int, int, int]], chosen: dict[str, Any]) -> None:
    trace = make_trace(drawn)
    table = config(**chosen, cost={"step_us": 10_000, "prefill_token_us": 0})
    result = kvsim.simulate(trace, table, watcher=Auditor())
    check(result, trace)


@settings(deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
@given(
    rows,
    settings_of_runs,
    st.sampled_from(tuple(GROWTH)),
    st.sampled_from(tuple(IDLE_ORDERS)),
    st.sampled_from(tuple(EVICTIONS)),
)
def test_rules_can_be_mixed_freely(
    drawn: list[tuple[int, int, int, int]],
    chosen: dict[str, Any],
    growth: str,
    idle_order: str,
    eviction: str,
) -> None:
    rules = {"growth": growth, "idle_order": idle_order}
    if chosen["enable_prefix_caching"]:
        rules["eviction"] = eviction
    trace = make_trace(drawn)
    table = config(**chosen, block_manager_args=rules, cost={"prefill_token_us": 0})
    result = kvsim.simulate(trace, table, watcher=Auditor())
    check(result, trace)


@settings(deadline=None, max_examples=examples(25))
@given(rows, settings_of_runs)
def test_two_runs_are_identical(
    drawn: list[tuple[int, int, int, int]], chosen: dict[str, Any]
) -> None:
    one, two = (kvsim.simulate(make_trace(drawn), config(**chosen)) for _ in range(2))
    assert json.dumps(one.summary) == json.dumps(two.summary)
    for name in one.steps:
        assert (one.steps[name] == two.steps[name]).all()


@settings(deadline=None, max_examples=examples(40))
@given(rows, st.integers(20, 40))
def test_prefix_caching_without_shared_content_decides_as_naive(
    drawn: list[tuple[int, int, int, int]], blocks: int
) -> None:
    """True as long as nothing is preempted: a preempted request finds its own blocks."""
    unique = [
        (gap, length, output, number) for number, (gap, length, output, _) in enumerate(drawn)
    ]
    trace = make_trace(unique)
    naive, caching = (
        kvsim.simulate(trace, config(num_gpu_blocks_override=blocks, enable_prefix_caching=caching))
        for caching in (False, True)
    )
    if naive.requests["num_preemptions"].sum() == 0:
        assert (naive.requests["finish_ns"] == caching.requests["finish_ns"]).all()
        assert (naive.steps["used_blocks"] == caching.steps["used_blocks"]).all()


@pytest.mark.parametrize(
    "name", ["chat", *(pytest.param(name, marks=long) for name in ("api", "agents"))]
)
@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"enable_prefix_caching": True},
        {"preemption_mode": "swap"},
        {"enable_chunked_prefill": True, "on_engine_error": "reject"},
        {"engine": "vllm-v1"},
        {"engine": "vllm-0.3.3"},
        {"engine": "nano-vllm", "block_size": 16, "on_engine_error": "reject"},
        pytest.param({"block_manager": "contiguous"}, marks=long),
    ],
    ids=str,
)
def test_shipped_traces_end_with_every_request_accounted_for(
    name: str, chosen: dict[str, Any]
) -> None:
    trace = open_trace(str(TRACES / f"{name}.jsonl"))
    trace.rows = trace.rows[:250]
    # A model of 8,192 tokens, which fit into the pool.
    settings = {"engine": "vllm-0.6.3", "model": "llama-3-8b", "num_gpu_blocks_override": 1000}
    result = kvsim.simulate(trace, settings | chosen)
    check(result, trace)
    assert result.meta["outcome"]["kind"] == "finished"


PUBLIC = [
    "traces/mooncake/conversation_trace.jsonl.gz",
    "traces/mooncake/synthetic_trace.jsonl.gz",
    "traces/azure/AzureLLMInferenceTrace_code.csv.gz",
    "traces/azure/AzureLLMInferenceTrace_conv.csv.gz",
    "traces/native-samples/weka_100_sessions.jsonl.gz",
    "traces/native-samples/mooncake_conversation.jsonl.gz",
]


@needs_shared("traces")
@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.parametrize(
    "caching", [pytest.param(False, marks=long), True], ids=["naive", "prefix-caching"]
)
def test_public_traces_are_accounted_for(name: str, caching: bool) -> None:
    """The first 300 requests on a pool that some prompts outgrow; sessions without think time."""
    trace = open_trace(str(SHARED / name))
    trace.rows = trace.rows[:300]
    result = kvsim.simulate(
        trace,
        {
            "model": "llama-3.1-8b",
            "max_model_len": 32_768,
            "num_gpu_blocks_override": 3_000,
            "enable_prefix_caching": caching,
            "max_think_time_s": 0.0,
        },
    )
    check(result, trace)
    assert result.summary["completed"] > 0


@long
@needs_shared("traces/mooncake")
@pytest.mark.parametrize("block_size", [16, 512])
@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_an_unlimited_pool_reaches_the_ceiling_of_the_trace(name: str, block_size: int) -> None:
    """One request at a time: hits are full blocks known before, and never the last token.

    Golden counts of the first 1,000 rows at 512 tokens are those of the public index of the
    traces; at 16 they come from counting distinct prefixes here.
    """
    trace = open_trace(str(SHARED / f"traces/mooncake/{name}_trace.jsonl.gz"))
    trace.rows = trace.rows[:1000]
    result = kvsim.simulate(
        trace,
        {
            "model": "llama-3.1-8b",
            "block_size": block_size,
            "max_model_len": 200_000,
            "num_gpu_blocks_override": 10_000_000,
            "enable_prefix_caching": True,
            "max_concurrency": 1,
            "cost": {"model": "constant"},
        },
    )
    hits = result.summary["prefix_cache_hit_tokens"]
    assert hits == ceiling(trace, block_size)
    if block_size == 512:
        assert hits == {"conversation": 2_959_360, "synthetic": 2_044_928}[name]


def ceiling(trace: Trace, block_size: int) -> int:
    """Hit tokens of an unlimited cache, by a set of all prefixes seen."""
    seen: set[int] = set()
    hits = 0
    for row in trace.rows:
        ids = [start + i for start, count in row.content.prompt for i in range(count)]  # type: ignore[union-attr]
        ends = range(block_size - 1, row.input_length, block_size)
        keys = [ids[p // 512] * 512 + p % 512 for p in ends]
        known = next((i for i, key in enumerate(keys) if key not in seen), len(keys))
        hits += min(known * block_size, (row.input_length - 1) // block_size * block_size)
        seen.update(keys)
    return hits


@long
def test_tight_pools_are_where_policies_differ() -> None:
    """Waste shrinks from reservation to paging to sharing on the shipped chat trace."""
    trace = open_trace(str(TRACES / "chat.jsonl"))
    trace.rows = trace.rows[:400]
    pool = {"engine": "vllm-0.6.3", "num_gpu_blocks_override": 2000}
    runs = {
        name: kvsim.simulate(trace, {**pool, **chosen}).summary
        for name, chosen in {
            "contiguous": {"block_manager": "contiguous"},
            "naive": {},
            "prefix-caching": {"enable_prefix_caching": True},
        }.items()
    }
    waste = {name: run["internal_fragmentation"] for name, run in runs.items()}
    assert waste["contiguous"] > 0.5 > 0.05 > waste["naive"]
    speed = [run["duration"] for run in runs.values()]
    assert speed == sorted(speed, reverse=True)
    assert runs["prefix-caching"]["prefix_cache_hit_rate"] > 0


def test_time_scale_stretches_arrivals() -> None:
    trace = make_trace([(10, 4, 2, 0), (10, 4, 2, 1)])
    result = kvsim.simulate(trace, config(time_scale=10.0))
    assert list(result.requests["arrival_ns"]) == [100 * MS, 200 * MS]

import json
import math

import numpy as np
import pytest
from runs import real_run
from tiny import MS, no_run, tiny_run

from kvsim.results.summary import summarise


@pytest.fixture(scope="module")
def tiny():
    return summarise(*tiny_run())


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("duration", 0.25),
        ("num_requests", 4),
        ("completed", 3),
        ("failed", 1),
        ("rejected", 1),
        ("unfinished", 0),
        ("rejected_by_reason", {"too long": 1}),
        ("total_input_tokens", 8 + 6 + 5),
        ("total_output_tokens", 3 + 1 + 2),
        ("request_throughput", 3 / 0.25),
        ("output_throughput", 6 / 0.25),
        ("total_token_throughput", 25 / 0.25),
        ("request_goodput", 2 / 0.25),  # B took 80 ms
        ("max_concurrent_requests", 2),
        ("mean_ttft_ms", (20 + 80 + 10) / 3),
        ("median_ttft_ms", 20.0),
        ("p90_ttft_ms", 20 + 0.8 * 60),
        ("std_ttft_ms", math.sqrt((20**2 + 80**2 + 10**2) / 3 - (110 / 3) ** 2)),
        ("mean_tpot_ms", (15 + 40) / 2),  # B has one token only
        ("p99_tpot_ms", 15 + 0.99 * 25),
        ("mean_itl_ms", (10 + 20 + 40) / 3),
        ("p50_itl_ms", 20.0),
        ("mean_e2el_ms", (50 + 80 + 50) / 3),
        ("mean_queue_ms", 40 / 3),
        ("mean_prefill_ms", (20 + 40 + 10) / 3),
        ("mean_decode_ms", (30 + 0 + 40) / 3),
        ("mean_client_queue_ms", 5 / 4),
        ("num_preemptions", 1),
        ("num_preemptions_by_mode", {"recompute": 1, "swap": 0}),
        ("preempted_requests", 1),
        ("recomputed_tokens", 1),
        ("recompute_tax", 1 / (16 + 2)),
        ("kv_cache_usage_mean", (20 * 2 + 10 * 3 + 20 * 3 + 40 * 2 + 10 * 2 + 30 * 2) / 250 / 10),
        ("kv_cache_usage_max", 0.3),
        ("cpu_cache_usage_mean", None),
        ("internal_fragmentation", (10 * 3 + 20 * 2 + 40 * 2 + 10 * 3 + 30 * 2) / (290 * 4)),
        ("external_fragmentation", 0.0),
        ("prefix_cache_query_tokens", 19),
        ("prefix_cache_hit_tokens", 4),
        ("prefix_cache_preempted_hit_tokens", 4),
        ("prefix_cache_hit_rate", 4 / 19),
        ("prefix_cache_hit_rate_with_preempted", (4 + 4) / (19 + 4 + 1)),
        ("prefix_cache_block_hit_rate", 2 / 8),
        ("prefix_cache_request_hit_share", 1 / 3),
        ("running_mean", (20 + 10 + 20 + 40 + 10 + 30) / 250),
        ("running_max", 1),
        ("waiting_mean", (10 + 20 + 10) / 250),
        ("watermark_wait_steps", 1),
        ("watermark_wait_s", 0.01),
        ("link_busy_share", 5 / 250),
        ("steps", 7),
    ],
)  # fmt: skip
def test_every_figure_of_the_tiny_run_is_what_a_hand_computes(tiny, key, expected):
    assert tiny[key] == (expected if expected is None else pytest.approx(expected, rel=1e-12))


def test_the_head_of_the_queue_waited_for_each_cause_as_long_as_its_steps_lasted(tiny):
    assert {cause: s for cause, s in tiny["head_blocked_s"].items() if s} == {
        "watermark": 0.01,
        "blocks": 0.02,
    }


def test_a_summary_is_plain_json(tiny):
    assert json.loads(json.dumps(tiny, allow_nan=False)) == tiny
    assert tiny["meta"]["config"]["request_rate"] == "inf"


def test_the_phases_of_a_request_add_up_to_its_latencies():
    summary = summarise(*real_run())
    parts = sum(summary[f"mean_{phase}_ms"] for phase in ("queue", "prefill", "decode"))
    assert parts == pytest.approx(summary["mean_e2el_ms"])


def test_without_requests_or_steps_figures_are_none_or_zero():
    summary = summarise(*no_run())
    assert summary["duration"] == 0.0
    assert summary["completed"] == summary["steps"] == summary["num_preemptions"] == 0
    for key in ("request_throughput", "mean_ttft_ms", "p99_itl_ms", "kv_cache_usage_mean"):
        assert summary[key] is None


def test_where_nothing_completed_only_latencies_are_missing():
    steps, requests, _, meta = tiny_run()
    requests["status"] = ["unfinished"] * 3 + ["rejected"]
    summary = summarise(steps, requests, {}, meta)
    assert (summary["completed"], summary["unfinished"], summary["rejected"]) == (0, 3, 1)
    assert summary["mean_ttft_ms"] is None
    assert summary["output_throughput"] == 0.0
    assert summary["kv_cache_usage_max"] == 0.3


def test_without_prefix_caching_there_are_no_hit_rates():
    summary = summarise(*real_run(caching=False))
    assert summary["prefix_cache_hit_rate"] is None
    assert summary["prefix_cache_request_hit_share"] is None


def test_goodput_takes_an_undefined_tpot_for_0_and_needs_all_objectives():
    steps, requests, gaps, meta = tiny_run()
    meta["goodput"] = {"tpot": 20}
    assert summarise(steps, requests, gaps, meta)["request_goodput"] == 2 / 0.25  # A, B
    meta["goodput"] = {"tpot": 20, "ttft": 50}
    assert summarise(steps, requests, gaps, meta)["request_goodput"] == 1 / 0.25  # A
    meta["goodput"] = {}
    assert summarise(steps, requests, gaps, meta)["request_goodput"] is None


def test_a_request_that_ends_when_another_starts_is_not_concurrent_with_it():
    steps, requests, gaps, meta = tiny_run()
    requests["arrival_ns"] = np.array([10, 60, 200, 5]) * MS
    assert summarise(steps, requests, gaps, meta)["max_concurrent_requests"] == 1


def test_swap_and_recompute_are_counted_apart():
    by_recompute, by_swap = (summarise(*real_run(rate=8, swap=swap)) for swap in (False, True))
    assert by_recompute["num_preemptions_by_mode"]["swap"] == 0
    assert by_recompute["recomputed_tokens"] > 0
    assert by_swap["num_preemptions_by_mode"]["recompute"] == 0
    assert by_swap["swapped_out_blocks"] == by_swap["swapped_in_blocks"] > 0
    assert by_swap["cpu_cache_usage_max"] > 0

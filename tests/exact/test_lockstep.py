"""The fast core against its dull twin: the same step records and request metrics, always.

Cases are drawn from a seed, small and under memory pressure, with clocks that tie as often as not.
A part of them runs each time, the others with `-m long`. `KVSIM_TWIN_CASES` asks for more; a
failing case names its seed.
"""

import os
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from marks import long, mostly_long

from kvsim.engine.request import Request
from kvsim.fast import decodes, series
from kvsim.fast.cohort import Cohort
from kvsim.run import simulate
from kvsim.workload.requests import Requests
from kvsim.workload.trace import ParentContent, Row, TokenContent, Trace

CASES = int(os.environ.get("KVSIM_TWIN_CASES", "1200"))
GROUPS = 24


def draw_trace(rng: random.Random, tick_ns: int) -> Trace:
    """Requests that come in bursts, some with common prefixes, some with known outputs."""
    rows = []
    now_ns = 0
    longest = rng.choice((12, 40, 90))
    for index in range(rng.randrange(3, 30)):
        if rng.random() < 0.6:
            now_ns += rng.randrange(0, 12) * tick_ns
        prompt = tuple([rng.randrange(2)] * rng.randrange(1, longest))
        tokens = rng.choice((1, 2, rng.randrange(1, 8), rng.randrange(1, 60)))
        output = tuple([rng.randrange(2)] * tokens) if rng.random() < 0.5 else None
        content = TokenContent(prompt, output) if rng.random() < 0.7 else None
        row = Row(index, f"r{index}", index + 2, now_ns, len(prompt), tokens, content)
        rows.append(replace(row, priority=rng.randrange(3)))
    return Trace("drawn", "native", "", rows)


def draw_settings(rng: random.Random) -> dict[str, Any]:
    """An engine with some of its knobs, in a pool that is often too small."""
    block_size = rng.choice((1, 2, 4, 8, 16))
    settings: dict[str, Any] = {
        "model": "tiny",
        "engine": "vllm-0.6.3",
        "block_size": block_size,
        "max_model_len": 160,
        "max_num_seqs": rng.choice((2, 5, 16)),
        "num_gpu_blocks_override": 160 // block_size + rng.choice((1, 4, 20, 60)),
        "cost": {"model": "constant"},
        "seed": rng.randrange(1000),
    }
    tick_us = 10_000
    if rng.random() < 0.2:
        settings["cost"] = {"model": "roofline"}
    elif rng.random() < 0.7:
        # Every time is a multiple of 10 ms, so arrivals, ends and steps coincide.
        settings["cost"] |= {
            "step_us": tick_us,
            "prefill_token_us": 0,
            "decode_seq_us": rng.choice((0, tick_us)),
            "context_token_ns": 0,
        }
    if rng.random() < 0.3:
        settings["max_concurrency"] = rng.randrange(1, 8)
    if rng.random() < 0.2:
        settings["victim"] = rng.choice(("head", "least-computed", "random", "cost-aware"))
    settings["enable_prefix_caching"] = rng.random() < 0.4
    settings["watermark"] = rng.choice((0.0, 0.01, 0.1))
    if rng.random() < 0.15:
        settings["scheduling_policy"] = "priority"
    settings["disable_async_output_proc"] = rng.random() < 0.4
    settings["max_model_len"] = rng.choice((60, 160))
    if rng.random() < 0.4:
        settings["enable_chunked_prefill"] = True
        settings["max_num_batched_tokens"] = rng.choice((16, 64, 512))
    if rng.random() < 0.35:
        settings["preemption_mode"] = "swap"
        settings["num_cpu_blocks_override"] = rng.choice((20, 200))
    elif rng.random() < 0.15:
        settings["n"] = 2
    return settings


@pytest.mark.parametrize("group", mostly_long(GROUPS, quick=1))
def test_fast_and_dull_decide_and_measure_the_same(
    group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(group, CASES, GROUPS):
        rng = random.Random(seed)
        settings = draw_settings(rng)
        trace = draw_trace(rng, 10_000_000)
        # Few of these stretches are long.
        monkeypatch.setattr(decodes, "LONG_STEPS", rng.choice((1, 3, 48)))
        fast = simulate(trace, settings)
        dull = simulate(trace, {**settings, "exact_twin": True})
        where = f"seed {seed}: {settings}"
        for key in ("outcome", "cost", "cache"):
            assert fast.meta[key] == dull.meta[key], f"{where}: {key}"
        for name, column in dull.steps.items():
            same = len(column) == len(fast.steps[name]) and np.array_equal(column, fast.steps[name])
            assert same, f"{where}: steps: {name}: {_first(column, fast.steps[name])}"
        for name, column in dull.requests.items():
            assert list(column) == list(fast.requests[name]), f"{where}: requests: {name}"
        assert fast.token_gaps_ns == dull.token_gaps_ns, where


def _first(dull: Any, fast: Any) -> str:
    for place, (left, right) in enumerate(zip(dull, fast, strict=False)):
        if left != right:
            return f"step {place}: {left} in the twin, {right} in the fast core"
    return f"{len(dull)} against {len(fast)} steps"


def test_the_fast_core_is_really_taken() -> None:
    """In most steps of an ordinary run, and in no step where every request is to be seen."""
    rows = [Row(i, f"r{i}", i + 2, i * 300_000_000, 40, 200) for i in range(40)]
    trace = Trace("made", "native", "", rows)
    settings = {"model": "tiny", "engine": "vllm-0.6.3", "num_gpu_blocks_override": 400}
    settings |= {"max_model_len": 512, "enable_prefix_caching": False}
    taken = simulate(trace, settings).meta["fast_path"]
    steps = len(simulate(trace, settings).steps["start_ns"])
    assert taken["together_steps"] > 0.9 * steps
    assert taken["repeated_steps"] > 0.5 * steps
    twin = simulate(trace, {**settings, "exact_twin": True}).meta["fast_path"]
    assert twin["composed_because"] == {"exact_twin": steps}
    assert not twin["repeated_steps"]


def test_a_victim_policy_of_ones_own_sees_true_fields() -> None:
    """Whoever looks at running requests finds them up to date."""
    rows = [Row(i, f"r{i}", i + 2, 0, 8, 60) for i in range(12)]
    trace = Trace("made", "native", "", rows)
    settings = {
        "engine": "vllm-0.6.3",
        "model": "tiny",
        "block_size": 4,
        "num_gpu_blocks_override": 90,
        "max_model_len": 128,
        "victim": "least-computed",
    }
    fast = simulate(trace, settings)
    dull = simulate(trace, {**settings, "exact_twin": True})
    assert fast.meta["fast_path"]["dissolutions"] > 0
    assert sum(dull.requests["num_preemptions"]) > 0
    assert list(fast.requests["finish_ns"]) == list(dull.requests["finish_ns"])


@pytest.mark.parametrize("lingers", [False, True])
def test_a_member_that_is_preempted_no_longer_ends_with_the_others(
    monkeypatch: pytest.MonkeyPatch, lingers: bool
) -> None:
    rows = [Row(i, f"r{i}", i + 2, i * 1_000_000, 8, 60) for i in range(12)]
    trace = Trace("made", "native", "", rows)
    settings = {"model": "tiny", "block_size": 4, "num_gpu_blocks_override": 90}
    settings |= {"max_model_len": 128, "disable_async_output_proc": not lingers}
    settings |= {"engine": "vllm-0.6.3"}
    left, leave = [], Cohort.leave

    def checked(self: Cohort, request: Request) -> None:
        leave(self, request)
        left.append(request.id)
        assert not any(request in ending for ending in self.ends.values())

    monkeypatch.setattr(Cohort, "leave", checked)
    made = simulate(trace, settings)
    assert sum(made.requests["num_preemptions"]) > 0
    assert left


def test_a_requeue_rule_by_its_place_is_obeyed() -> None:
    """A rule that is not called by a name of its table sees blocks with ids."""
    rows = [Row(i, f"r{i}", i + 2, 0, 24 + i, 90) for i in range(12)]
    trace = Trace("made", "native", "", rows)
    settings = {"engine": "vllm-0.6.3", "model": "tiny", "num_gpu_blocks_override": 40}
    settings |= {"max_model_len": 256, "cost": {"model": "constant"}}
    settings |= {"scheduler_args": {"requeue": "kvsim.rules.requeue:tail"}}
    fast, dull = simulate(trace, settings), simulate(trace, {**settings, "exact_twin": True})
    assert fast.meta["fast_path"]["together_steps"] > 0
    assert sum(dull.requests["num_preemptions"]) > 0
    for name, column in dull.requests.items():
        assert list(column) == list(fast.requests[name]), name


def settings_in_stretches() -> list[Any]:
    """Settings in which nearly every step is ordinary, with what makes it hard."""
    base = {"model": "tiny", "max_model_len": 512, "enable_prefix_caching": False}
    v063, sync = {"engine": "vllm-0.6.3"}, {"disable_async_output_proc": True}
    chunked = {"enable_chunked_prefill": True, "max_num_batched_tokens": 64, "max_num_seqs": 32}
    few, many = {"num_gpu_blocks_override": 60}, {"num_gpu_blocks_override": 400}
    cached = {"enable_prefix_caching": True}
    cases = {
        "prompts": {**v063, **sync, **many},
        "who ended lingers": {**v063, **many},
        "the tail gives way": {**v063, **sync, **few},
        "chunks": {**v063, **sync, **chunked, **many},
        "chunks, and who ended lingers": {**v063, **chunked, **many},
        "some are too long": {**v063, "max_model_len": 200, **many},
        "0.6.3's prefix cache": {**v063, **sync, **cached, **many},
        "a cost of many terms": {**v063, "cost": {"model": "roofline"}, **many},
    }
    return [pytest.param({**base, **case}, id=name) for name, case in cases.items()]


@pytest.mark.parametrize("settings", settings_in_stretches())
def test_ordinary_steps_are_taken_in_stretches(settings: dict[str, Any]) -> None:
    rng = random.Random(5)
    rows = [
        Row(i, f"r{i}", i + 2, i * 250_000_000, rng.randrange(20, 260), rng.randrange(1, 200))
        for i in range(80)
    ]
    for row in rows[1::3]:
        earlier = rows[rng.randrange(row.index)]
        # Part of an earlier prompt, or all of it and some of its output.
        keep = rng.choice((earlier.input_length // 2, earlier.input_length + 16))
        row.content = ParentContent(
            earlier.index, min(keep, row.input_length, earlier.input_length + earlier.output_length)
        )
    trace = Trace("made", "native", "", rows)
    settings = {"cost": {"model": "constant"}, **settings}
    fast, dull = simulate(trace, settings), simulate(trace, {**settings, "exact_twin": True})
    steps = len(dull.steps["start_ns"])
    assert fast.meta["fast_path"]["repeated_steps"] > 0.9 * steps
    for name, column in dull.steps.items():
        assert np.array_equal(column, fast.steps[name]), name
    for name, column in dull.requests.items():
        assert list(column) == list(fast.requests[name]), name


@long
def test_requests_are_let_go_of_when_they_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the memory of a long run is that of the requests under way."""
    rows = [Row(i, f"r{i}", i + 2, i * 500_000_000, 40, 20) for i in range(3_000)]
    trace = Trace("made", "native", "", rows)
    settings = {"model": "tiny", "num_gpu_blocks_override": 400, "max_model_len": 512}
    settings |= {"engine": "vllm-0.6.3"}
    most = 0
    make = Requests.__getitem__

    def counting(self: Requests, index: Any) -> Any:
        nonlocal most
        request = make(self, index)
        most = max(most, sum(each is not None for each in self._held))
        return request

    monkeypatch.setattr(Requests, "__getitem__", counting)
    monkeypatch.setattr(series, "MOST_STEPS", 100)
    for twin in (False, True):
        most = 0
        result = simulate(trace, {**settings, "exact_twin": twin})
        assert result.requests["status"] == ["completed"] * len(rows)
        assert 0 < most < 60

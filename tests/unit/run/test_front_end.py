"""The front end of a server, which prepares requests for its engine.

A step takes 10 ms, whatever it computes.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made import make_trace

from kvsim.against.serve.session import Session
from kvsim.errors import ConfigError
from kvsim.fleet.fleet import simulate_fleet
from kvsim.run.result import Result
from kvsim.run.simulation import simulate
from kvsim.settings.config import make_config
from kvsim.workload.trace import TokenContent, Trace

MS = 1_000_000
FLAT = {
    "model": "constant",
    "step_us": 10_000,
    "prefill_token_us": 0,
    "decode_seq_us": 0,
    "context_token_ns": 0,
}


def run(trace: Trace, front_end: dict[str, float] | None, **changes: Any) -> Result:
    cost = FLAT if front_end is None else {**FLAT, "front_end": front_end}
    return simulate(trace, {"model": "qwen2.5-0.5b", "hardware": "h100", "cost": cost, **changes})


def requests(*arrivals_ms: float, prompt: int = 100, output: int = 2) -> Trace:
    trace = make_trace([(prompt, output, TokenContent((i,) * prompt)) for i in range(20)])
    trace.rows = trace.rows[: len(arrivals_ms)]
    for row, at_ms in zip(trace.rows, arrivals_ms, strict=True):
        row.arrival_ns = round(at_ms * MS)
    return trace


def begun_ms(result: Result) -> list[float]:
    """When the first step of each request began."""
    return [float(ns) / MS for ns in result.requests["first_scheduled_ns"]]


def test_requests_of_one_instant_wait_for_each_other() -> None:
    result = run(requests(*[0] * 8), {"request_ms": 7})
    assert begun_ms(result) == [56] * 8
    assert result.summary["mean_ttft_ms"] == 66
    assert result.summary["duration"] == pytest.approx(0.076)


def test_who_comes_while_it_works_waits_for_the_next_turn() -> None:
    """The first is alone; those of 1 and 2 ms are prepared together; nobody is left at 60 ms."""
    result = run(requests(0, 1, 2, 60), {"request_ms": 20}, async_scheduling=False)
    assert begun_ms(result) == [20, 60, 60, 80]


def test_long_prompts_take_longer() -> None:
    result = run(requests(0, prompt=500), {"request_ms": 1, "token_us": 10})
    assert begun_ms(result) == [6]


def test_clients_that_wait_send_again_after_the_answer() -> None:
    """One at a time: 5 ms in front of the engine, and two steps of 10 ms."""
    trace = requests(*[0] * 6)
    result = run(trace, {"request_ms": 5}, max_concurrency=1, async_scheduling=False)
    assert begun_ms(result) == [5, 30, 55, 80, 105, 130]
    assert result.summary["mean_ttft_ms"] == 15


arrivals = st.lists(st.integers(0, 60), min_size=1, max_size=12)


@given(arrivals, st.sampled_from([None, 1]), st.booleans())
def test_one_that_takes_no_time_changes_nothing(
    at_ms: list[int], clients: int | None, ahead: bool
) -> None:
    """Where no request comes at the very instant at which a step ends."""
    trace = requests(*(each + index / 1000 for index, each in enumerate(sorted(at_ms))))
    settings = {"max_concurrency": clients, "async_scheduling": ahead}
    one, other = (run(trace, each, **settings) for each in (None, {}))
    assert {**one.summary, "meta": None} == {**other.summary, "meta": None}
    for name, values in one.requests.items():
        np.testing.assert_array_equal(values, other.requests[name], name)


@given(arrivals, st.integers(1, 30), st.sampled_from([None, 2]))
def test_each_request_is_late_by_its_own_time_at_least(
    at_ms: list[int], request_ms: int, clients: int | None
) -> None:
    result = run(requests(*sorted(at_ms)), {"request_ms": request_ms}, max_concurrency=clients)
    found = result.requests
    late = (found["first_scheduled_ns"] - found["arrival_ns"]) / MS
    assert late.min() >= request_ms
    busy = found["first_scheduled_ns"].max() - found["arrival_ns"].min()
    assert busy / MS >= request_ms * len(at_ms)


@pytest.mark.parametrize("request_ms", [-1, float("inf"), float("nan"), "slow"])
def test_what_is_no_time_is_refused(request_ms: Any) -> None:
    with pytest.raises(ConfigError, match=r"cost\.front_end"):
        run(requests(0), {"request_ms": request_ms})


def test_it_stands_before_one_engine() -> None:
    config = {"model": "qwen2.5-0.5b", "hardware": "h100", "cost": {"front_end": {"token_us": 1}}}
    with pytest.raises(ConfigError, match="before one engine"):
        simulate_fleet(requests(0), [config, config], router="round-robin")
    with pytest.raises(ConfigError, match="a front end itself"):
        Session(make_config(config))

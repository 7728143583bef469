"""Offered and served rates, and what is called overloaded, on loads that are known by hand."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Any

import pytest

import kvsim
from kvsim.report import verdict
from kvsim.results.load import load_words, state_of
from kvsim.run.simulation import simulate
from kvsim.workload.spec import Workload, make_trace


def summary(requests: int = 400, **settings: Any) -> dict[str, Any]:
    """One request at a time, each 100 ms: ten steps, one token each. Capacity: 10 requests/s."""
    trace = make_trace(Workload("random", requests=requests, input_len=20, output_len=10), 1)
    cost = {"model": "constant", "step_us": 10_000, "prefill_token_us": 0}
    cost |= {"decode_seq_us": 0, "context_token_ns": 0}
    fixed = {"max_num_seqs": 1, "async_scheduling": False, "burstiness": inf, "cost": cost}
    found: dict[str, Any] = simulate(trace, {"max_model_len": 64, **fixed, **settings}).summary
    return found


def test_a_run_that_keeps_up() -> None:
    figures = summary(request_rate=8.0)
    assert figures["request_rate"] == pytest.approx(8.0)
    assert figures["output_token_rate"] == pytest.approx(80.0)
    assert figures["total_token_rate"] == pytest.approx(240.0)
    assert figures["request_throughput"] == pytest.approx(8.0, rel=0.01)
    assert figures["queue_growth"] in (0, 1)
    assert state_of(figures) == "steady"
    assert figures["demand_rate"] == figures["request_rate"]
    assert verdict(figures)[0].text.startswith("Steady: offered 8.00")


def test_an_overloaded_run_says_so_first() -> None:
    """Twice as much is sent as can be served: half of the late requests pile up."""
    figures = summary(request_rate=20.0)
    assert figures["request_throughput"] == pytest.approx(10.0, rel=0.01)
    assert figures["late_requests"] == pytest.approx(200, abs=1)
    assert figures["queue_growth"] == pytest.approx(100, abs=2)
    assert state_of(figures) == "overloaded"
    first = verdict(figures)[0]
    assert first.tone == "bad"
    assert first.text.startswith("Overloaded, bound by max_num_seqs: the head of the queue lacked")
    assert first.text.endswith("a higher --max-num-seqs would help.")
    second = verdict(figures)[1].text
    assert second.startswith("Offered 20.0") and "served 9.99" in second


def test_requests_at_the_gate_of_the_client_count() -> None:
    figures = summary(request_rate=20.0, max_concurrency=2)
    assert figures["mean_ttft_ms"] < 300
    assert state_of(figures) == "overloaded"


def test_a_run_that_ends_while_it_still_fills_up() -> None:
    """Nobody waits, but the requests in progress rise to the last one."""
    figures = summary(request_rate=4000.0, max_num_seqs=400, max_num_batched_tokens=8192)
    assert figures["queue_growth"] < figures["backlog_growth"]
    assert state_of(figures) == "never steady"
    assert verdict(figures)[0].text.startswith("Never steady: offered")


@pytest.mark.parametrize(("clients", "state"), [(5, "steady"), (30, "backlogged")])
def test_clients_that_wait_for_replies_hide_no_overload(
    clients: int, state: str, tmp_path: Path
) -> None:
    """Each thinks for a second after each of ten answers, so one sends 0.9 requests/s at most.
    Thirty would send 27; 10 are served, and they send no more, so that no queue grows."""
    lines: list[dict[str, Any]] = [{"kvsim_trace": 1}]
    for turn in range(10):
        for client in range(clients):
            row = {"id": f"{client}/{turn}", "session": str(client), "arrival_s": 0.2 * client / 6}
            row |= {"input_length": 20, "output_length": 10}
            lines.append(row | ({"after": f"{client}/{turn - 1}", "delay_s": 1} if turn else {}))
            lines[-1]["arrival_s"] += 2.0 * turn
    path = tmp_path / "closed.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    cost = {"model": "constant", "step_us": 10_000, "prefill_token_us": 0}
    cost |= {"decode_seq_us": 0, "context_token_ns": 0}
    fixed = {"max_num_seqs": 1, "async_scheduling": False, "max_model_len": 64, "cost": cost}
    figures = simulate(kvsim.open_trace(str(path)), fixed).summary
    assert figures["queue_growth"] <= 5
    assert figures["demand_rate"] == pytest.approx(clients / 1.1, rel=0.15)
    assert state_of(figures) == state
    first, second = verdict(figures)[:2]
    if state == "backlogged":
        assert first.text.startswith("Bound by max_num_seqs, backlogged: the head of the queue")
        assert "clients would send 2" in second.text


@pytest.mark.parametrize("requests", [1, 50])
def test_all_at_once_has_no_offered_rate(requests: int) -> None:
    figures = summary(requests, request_rate=inf)
    assert figures["request_rate"] is None
    assert state_of(figures) == "unknown"
    assert load_words(figures).startswith("served 10.0")

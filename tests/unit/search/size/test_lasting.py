"""A rate that was found also holds when the run lasts four times as long."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import pytest
from marks import long, whole

from kvsim.errors import ConfigError
from kvsim.results.load import state_of
from kvsim.run.simulation import simulate
from kvsim.search.size import Answer, Bounds, Laboratory, lasting_answer, make_knob, open_arrivals
from kvsim.search.size_verdict import verdict
from kvsim.search.slo import parse_slo
from kvsim.search.store import Store
from kvsim.settings.config import make_config, to_table
from kvsim.workload import Trace, open_trace
from kvsim.workload.keys import streams
from kvsim.workload.spec import Workload, make_trace
from kvsim.workload.trace import repeated

COST = {"model": "constant", "step_us": 10_000, "prefill_token_us": 0}
ONE_BY_ONE: dict[str, Any] = {
    "max_num_seqs": 1,
    "max_model_len": 64,
    "async_scheduling": False,
    "cost": COST | {"decode_seq_us": 0, "context_token_ns": 0},
}
"""Ten steps of 10 ms a request: a capacity of 10 requests/s."""


def search(
    trace: Trace,
    settings: dict[str, Any],
    slo: str,
    folder: Path,
    bounds: Bounds = Bounds(),  # noqa: B008
) -> tuple[Any, Answer]:
    config = open_arrivals(make_config(settings))
    objectives = parse_slo(slo)._replace(steady=True)
    knob = make_knob("request_rate", trace, to_table(config), bounds)
    lab = Laboratory(trace, config, knob, objectives, [0], Store(folder), jobs=1)
    return lasting_answer(lab, ("arrivals",))


@long
@whole
def test_a_generous_bound_does_not_hide_a_growing_queue(tmp_path: Path) -> None:
    """40 requests at 20/s wait 2 s at most; under a longer load they would wait for ever."""
    trace = make_trace(Workload("random", requests=40, input_len=20, output_len=10), 1)
    settings = {**ONE_BY_ONE, "burstiness": inf}
    short = simulate(trace, {**settings, "request_rate": 20.0}).summary
    assert short["p99_ttft_ms"] < 2000
    lab, found = search(trace, settings, "p99_ttft<2s", tmp_path, Bounds(8, 24))
    assert found.value is not None
    assert 10 <= found.value < 10.5
    assert found.held == 16 * 40
    longest = repeated(lab.trace, 4)
    assert len(longest.rows) == found.held
    again = simulate(longest, {**settings, "request_rate": found.value}).summary
    assert again["p99_ttft_ms"] < 2000
    assert state_of(again) != "overloaded"
    assert "also holds with 640" in "\n".join(remark.text for remark in verdict(lab, found))


@long
@whole
def test_sessions_that_wait_do_not_flatter_the_rate(tmp_path: Path) -> None:
    """With closed sessions, `chat` seems to bear 28.7 requests/s, of which 12 are not served."""
    trace = open_trace("chat")
    trace.rows = trace.rows[:400]
    settings = {"model": "llama-3.1-8b", "hardware": "h100"}
    closed = simulate(trace, {**settings, "request_rate": 28.7}).summary
    assert closed["p99_tpot_ms"] < 60
    assert closed["request_throughput"] < 12
    _, found = search(trace, settings, "p99_ttft<2s,p99_tpot<60ms", tmp_path)
    assert found.value is not None
    assert 20 < found.value < 28
    assert found.held == 16 * len(trace.rows)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sessions": "closed"}, r"use --sessions recorded"),
        ({"max_concurrency": 4}, r"max_concurrency.*leave it out"),
    ],
)
def test_clients_that_wait_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_arrivals(make_config(settings))


def test_copies_share_nothing_with_each_other_and_all_within() -> None:
    trace = open_trace("chat")
    rows = len(trace.rows)
    twice = repeated(trace, 2)
    assert len({row.id for row in twice.rows}) == 2 * rows
    times = [row.arrival_ns or 0 for row in twice.rows]
    assert times == sorted(times)
    assert [row.after + rows for row in trace.rows if row.after >= 0] == [
        row.after for row in twice.rows[rows:] if row.after >= 0
    ]
    keys = [set(stream.keys(0, 4, 16)) for stream in streams(twice)]
    first, second = (set.union(*keys[part : part + rows]) for part in (0, rows))
    assert len(first) == len(second)
    assert not first & second

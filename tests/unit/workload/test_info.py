"""The figures of a trace, on one small enough to count by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made import make_trace

from kvsim.explain.info import render, trace_info
from kvsim.workload import HashContent, ParentContent, Trace

S = 1_000_000_000


@pytest.fixture
def trace() -> Trace:
    made = make_trace(
        [
            (40, 8, HashContent(((0, 3),))),
            (40, 8, HashContent(((0, 2), (3, 1)))),
            (9000, 10, None),
            (100, 2, ParentContent(0, 48)),
        ],
        block_size=16,
        hash_kind="prefix",
        partial_hash=True,
    )
    times = (0, 0, 30 * S, 40 * S)
    made.rows = [replace(row, arrival_ns=t) for row, t in zip(made.rows, times, strict=True)]
    made.rows[3] = replace(made.rows[3], after=0, delay_ns=2 * S, session="a", turn=1, salt="t")
    made.rows[0] = replace(made.rows[0], session="a", turn=0, salt="t")
    made.notes.append("something was changed")
    return made


def test_counts_lengths_and_rates(trace: Trace) -> None:
    info = trace_info(trace)
    assert info["requests"] == 4
    assert info["input_tokens"] == {
        "mean": 2295.0,
        "p50": 70.0,
        "p90": pytest.approx(6330.0),
        "p99": pytest.approx(8733.0),
        "max": 9000,
        "total": 9180,
    }
    assert info["too_long"] == {8192: 0.25, 32768: 0, 131072: 0}
    arrivals = info["arrivals"]
    assert (arrivals["span_s"], arrivals["rate"], arrivals["distinct_times"]) == (40, 0.1, 3)
    assert arrivals["peak_rate"] == {1: 2, 10: 0.2, 60: 4 / 60}
    assert arrivals["zero_gap_share"] == pytest.approx(1 / 3)
    assert arrivals["median_step_s"] == 20
    assert arrivals["empty_10s_share"] == pytest.approx(2 / 5)
    assert arrivals["gap_cv"] == pytest.approx(0.9354, abs=1e-4)


def test_prefix_figures(trace: Trace) -> None:
    prefix = trace_info(trace)["prefix"]
    assert prefix["blocks"] == 2 + 2 + 562 + 6
    assert prefix["ids"] == {"total": 6, "distinct": 6, "used_once": 1, "in_every_request": 0}
    # Row 3 has the salt and the prompt of row 0: two full blocks; a third is in its output.
    assert prefix["ceiling"] == {16: 32 / 9180}
    assert prefix["ceiling_with_outputs"] == 48 / 9180
    assert prefix["capacity_tokens"] == [8192, 32768]
    assert prefix["lru"] == [0, 32 / 9180]
    assert prefix["min"] == [32 / 9180, 32 / 9180]


def test_ids_in_every_request_are_counted() -> None:
    rows = [(16, 1, HashContent(((0, 1),))), (40, 1, HashContent(((0, 3),)))]
    made = make_trace(rows, block_size=16, hash_kind="prefix", partial_hash=True)
    ids = trace_info(made)["prefix"]["ids"]
    assert (ids["total"], ids["distinct"], ids["in_every_request"]) == (4, 3, 1)


def test_sessions_and_think_times(trace: Trace) -> None:
    sessions = trace_info(trace)["sessions"]
    assert sessions["sessions"] == 1
    assert sessions["turns"]["max"] == 2
    assert sessions["think_s"] == {"p50": 2, "p90": 2, "p99": 2}
    assert sessions["without_predecessor"] == 3


def test_the_text_says_the_same(trace: Trace) -> None:
    text = render(trace_info(trace))
    assert "4 over 40.0 s, 0.10/s; peak 2 / 0.2 / 0.0667 per s over 1 / 10 / 60 s" in text
    assert "33.3 % of gaps are 0" in text
    assert "25.0 % need more than 8,192" in text
    assert "something was changed" in text
    assert max(map(len, text.splitlines())) < 160


def test_a_trace_of_lengths_alone_has_no_prefix_figures() -> None:
    made = make_trace([(9, 2, None)])
    made.rows = [replace(made.rows[0], arrival_ns=None)]
    info = trace_info(made)
    assert (info["prefix"], info["sessions"], info["arrivals"]) == (None, None, None)
    text = render(info)
    assert "no prefix information" in text and "--request-rate" in text


def test_a_single_request_has_no_rate() -> None:
    info = trace_info(make_trace([(9, 2, None)]))
    assert info["arrivals"]["rate"] is None
    assert "all at once" in render(info)

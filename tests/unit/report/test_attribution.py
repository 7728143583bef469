"""Differences of latencies split into parts that add up, to the nanosecond."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.explain.differences import LABELS, blocks, carriers, pair, waterfalls
from kvsim.results.ledger import TIME_PARTS

PARTS = st.lists(st.integers(0, 10**12), min_size=len(TIME_PARTS), max_size=len(TIME_PARTS))
RUN = st.lists(PARTS, min_size=1, max_size=130)


def requests_of(table):
    """Columns of requests whose time is split as the table says."""
    parts = np.array(table, dtype=np.int64)
    number = len(parts)
    waiting = [i for i, part in enumerate(TIME_PARTS) if part.startswith("waiting_")]
    queue = parts[:, waiting].sum(axis=1)
    prefill = parts[:, TIME_PARTS.index("own_prefill_ns")]
    arrival = np.arange(number, dtype=np.int64) * 7
    zeros = np.zeros(number, dtype=np.int64)
    columns = {
        "id": [f"r{i}" for i in range(number)],
        "index": np.arange(number),
        "status": ["completed"] * number,
        "input_length": zeros + 20,
        "output_length": zeros + 2,
        "output_tokens": zeros + 2,
        "n": zeros + 1,
        "arrival_ns": arrival,
        "client_queue_ns": zeros,
        "first_scheduled_ns": arrival + queue,
        "first_token_ns": arrival + queue + prefill,
        "finish_ns": arrival + parts.sum(axis=1),
        "num_preemptions": zeros,
        "recomputed_tokens": zeros,
    }
    return columns | dict(zip(TIME_PARTS, parts.T, strict=True))


def exact_percentile(values, percent=99):
    """numpy's linear percentile in whole numbers."""
    ordered = sorted(map(int, values))
    below, rest = divmod((len(ordered) - 1) * percent, 100)
    above = ordered[min(below + 1, len(ordered) - 1)]
    return ordered[below] + Fraction(rest, 100) * (above - ordered[below])


@given(st.data())
def test_parts_add_up_exactly_to_the_mean_and_to_the_percentile(data):
    first = data.draw(RUN)
    other = data.draw(st.lists(PARTS, min_size=len(first), max_size=len(first)))
    runs = [requests_of(table) for table in (first, other)]
    falls = waterfalls(pair(*runs))
    assert [(f.metric, f.statistic) for f in falls] == [
        *(("ttft", "mean"), ("ttft", "p99"), ("e2el", "mean"), ("e2el", "p99")),
    ]
    for fall in falls:
        end = {"ttft": "first_token_ns", "e2el": "finish_ns"}[fall.metric]
        for i, run in enumerate(runs):
            values = run[end] - run["arrival_ns"]
            mean = Fraction(sum(map(int, values)), len(values))
            expected = mean if fall.statistic == "mean" else exact_percentile(values)
            assert fall.totals[i] == expected
        assert fall.difference == sum(change for _, change in fall.changes())
        assert set(fall.parts) <= set(LABELS)


@given(RUN)
def test_the_percentile_is_numpys(table):
    values = requests_of(table)["finish_ns"] - requests_of(table)["arrival_ns"]
    assert float(exact_percentile(values)) == pytest.approx(float(np.percentile(values, 99)))


def test_a_percentile_names_the_requests_it_is_made_of():
    """Of 101 values the 99th percentile is the second largest, of 100 it lies between two."""
    table = [[i if part == "own_decode_ns" else 0 for part in TIME_PARTS] for i in range(101)]
    run = requests_of(table)
    fall = waterfalls(pair(run, run))[3]
    assert [(place.id, place.weight) for place in fall.places[0]] == [("r99", 1)]
    run = requests_of(table[:100])
    fall = waterfalls(pair(run, run))[3]
    assert [(p.id, p.weight) for p in fall.places[1]] == [
        ("r98", Fraction(99, 100)),
        ("r99", Fraction(1, 100)),
    ]
    assert fall.changes() == []


def test_carriers_are_those_that_changed_most():
    table = [[0] * len(TIME_PARTS) for _ in range(10)]
    first = requests_of(table)
    table[3][TIME_PARTS.index("recompute_ns")] = 80
    table[5][TIME_PARTS.index("own_decode_ns")] = 30
    table[5][TIME_PARTS.index("waiting_blocks_ns")] = 10
    other = requests_of(table)
    share, listed = carriers(pair(first, other))
    assert (share.half, share.changed, share.total) == (1, 2, 10)
    assert [(c.id, c.part, c.part_ns) for c in listed] == [
        ("r3", "recompute_ns", 80),
        ("r5", "own_decode_ns", 30),
    ]
    same, none = carriers(pair(first, first))
    assert (same.half, same.changed, none) == (0, 0, [])


def test_blocks_are_counted_by_fate():
    first = requests_of([[0] * len(TIME_PARTS)] * 3)
    other = {**first, "recomputed_tokens": np.array([0, 32, 8])}
    [found] = blocks(pair(first, other), 16)
    assert found == ("recomputed_tokens", (0.0, 2.5), "r1", 2.0)

"""Release times: as recorded, spread, scaled, or drawn like `vllm bench serve` draws them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made import make_trace

from kvsim.errors import ConfigError
from kvsim.settings.config import make_config
from kvsim.workload import Row
from kvsim.workload.clients import missing_arrivals, release_times, think_times, waits_for

S = 1_000_000_000


def rows_at(*times: int | None, **facts: Any) -> list[Row]:
    trace = make_trace([(4, 4, None)] * len(times))
    return [replace(row, arrival_ns=t) for row, t in zip(trace.rows, times, strict=True)]


def test_recorded_times_are_kept() -> None:
    assert release_times(rows_at(3, 5, 5), make_config({})) == [3, 5, 5]


def test_recorded_times_are_scaled() -> None:
    assert release_times(rows_at(3, 5, 10), make_config({"time_scale": 0.5})) == [2, 2, 5]


def test_without_times_all_are_sent_at_once_and_a_note_says_so() -> None:
    without, with_rate = make_config({}), make_config({"request_rate": inf})
    for config in (without, with_rate):
        assert release_times(rows_at(None, None), config) == [0, 0]
    (note,) = missing_arrivals(rows_at(None, None), without)
    assert "as with --request-rate inf" in note
    assert not missing_arrivals(rows_at(None, None), with_rate)
    assert not missing_arrivals(rows_at(0, 1), without)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_a_rate_draws_gamma_gaps(burstiness: float) -> None:
    config = make_config({"request_rate": 4.0, "burstiness": burstiness, "seed": 3})
    times = release_times(rows_at(*[None] * 4000), config)
    gaps = np.diff([0, *times])
    assert times == sorted(times)
    assert times[0] > 0, "the first request waits one gap, too"
    assert times[-1] == 1000 * S, "the last is at n / rate"
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1)


def test_a_burstiness_of_infinity_is_a_constant_gap() -> None:
    config = make_config({"request_rate": 8.0, "burstiness": inf})
    assert release_times(rows_at(*[None] * 4), config) == [S // 8, S // 4, 3 * S // 8, S // 2]


def test_the_seed_decides_the_times() -> None:
    rows = rows_at(*[None] * 50)
    one, same, other = (
        release_times(rows, make_config({"request_rate": 1.0, "seed": seed})) for seed in (1, 1, 2)
    )
    assert one == same != other


def test_turns_take_no_part_in_a_random_process() -> None:
    rows = rows_at(*[None] * 40)
    rows[1:] = [replace(row, after=row.index - 1 if row.index % 2 else -1) for row in rows[1:]]
    config = make_config({"request_rate": 2.0})
    times = release_times(rows, config)
    assert times[1::2] == [0] * 20
    assert times[38] == 10 * S
    alone = make_config({"request_rate": 2.0, "sessions": "recorded"})
    assert release_times(rows, alone)[-1] == 20 * S


@given(st.lists(st.integers(0, 9), min_size=2, max_size=60), st.integers(0, 3))
def test_spreading_moves_ties_into_the_gap_that_follows(ticks: list[int], seed: int) -> None:
    recorded = sorted(tick * 1000 for tick in ticks)
    distinct = sorted(set(recorded))
    config = make_config({"spread_ties": True, "seed": seed})
    if len(distinct) == 1:
        with pytest.raises(ConfigError, match="spread_ties"):
            release_times(rows_at(*recorded), config)
        return
    times = release_times(rows_at(*recorded), config)
    assert times == sorted(times)
    last_gap = int(np.median(np.diff(distinct)))
    following = {
        **dict(itertools.pairwise(distinct)),
        distinct[-1]: distinct[-1] + last_gap,
    }
    for before, after in zip(recorded, times, strict=True):
        if recorded.count(before) == 1:
            assert after == before
        else:
            assert before <= after < following[before]


def test_sessions_can_be_closed_recorded_or_as_the_trace_says() -> None:
    rows = rows_at(0, 1, 2)
    turns = [rows[0], replace(rows[1], after=0), rows[2]]
    assert waits_for(turns, make_config({})) == [-1, 0, -1]
    assert waits_for(turns, make_config({"sessions": "closed"})) == [-1, 0, -1]
    assert waits_for(turns, make_config({"sessions": "recorded"})) == [-1, -1, -1]
    with pytest.raises(ConfigError, match="sessions: closed"):
        waits_for(rows, make_config({"sessions": "closed"}))


def test_think_times_are_scaled_then_capped() -> None:
    rows = [
        replace(row, delay_ns=d * S) for row, d in zip(rows_at(0, 0, 0), (0, 2, 60), strict=True)
    ]
    config = make_config({"think_time_scale": 0.5, "max_think_time_s": 10})
    assert think_times(rows, config) == [0, S, 10 * S]
    assert think_times(rows, make_config({"max_think_time_s": inf}))[2] == 60 * S


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"time_scale": 1e300}, "time_scale: 1e"),
        ({"request_rate": 1e-300}, "request_rate: 1e"),
        ({"request_rate": 1.0, "burstiness": 1e-320}, "burstiness: "),
    ],
)
def test_runs_beyond_all_measure_are_refused(settings: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        release_times(rows_at(1, 2, 3), make_config(settings))

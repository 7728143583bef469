"""The collector is as it was, however the pause ends."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from kvsim import simulate
from kvsim.core.collector import collector_paused
from kvsim.core.request import Request
from kvsim.fleet import simulate_fleet
from kvsim.run.result import Result
from kvsim.workload import Row, Trace


@pytest.mark.parametrize("before", [True, False])
def test_the_collector_pauses_and_goes_on_as_before(before: bool) -> None:
    usual = gc.isenabled()
    try:
        (gc.enable if before else gc.disable)()
        with collector_paused():
            assert not gc.isenabled()
        assert gc.isenabled() is before
        with pytest.raises(KeyError), collector_paused():
            raise KeyError
        assert gc.isenabled() is before
    finally:
        (gc.enable if usual else gc.disable)()


CONFIG: dict[str, Any] = {"cost": {"model": "constant"}}


def run(trace: Trace) -> list[Result]:
    return [simulate(trace, CONFIG)]


def replicas(trace: Trace) -> list[Result]:
    """These need the rows until somebody looks at what they did."""
    results = simulate_fleet(trace, [CONFIG] * 2, "round-robin").replicas
    assert [len(each.requests["id"]) for each in results] == [4, 4]
    return results


@pytest.mark.parametrize("play", [run, replicas])
def test_the_rows_of_a_trace_are_free_when_its_run_is_over(
    play: Callable[[Trace], list[Result]],
) -> None:
    """The collector seldom passes, so that no cycle may hold what a long trace takes."""

    class Watched(Row):
        pass

    rows = [Watched(index, str(index), index, 0, 20, 5) for index in range(8)]
    watched = [weakref.ref(row) for row in rows]
    trace = Trace("made", "native", "", [*rows])
    del rows
    usual = gc.isenabled()
    try:
        gc.disable()
        results = play(trace)
        assert all(row() is not None for row in watched), "the trace is still there"
        del trace
        assert all(row() is None for row in watched)
        assert sum(each.summary["completed"] for each in results) == 8
    finally:
        (gc.enable if usual else gc.disable)()


def requests_alive() -> int:
    return sum(type(each) is Request for each in gc.get_objects())


def test_requests_that_are_over_are_free_before_the_run_is() -> None:
    """Each of these takes the place of the one before it in a queue of one."""
    times_ns = [index * 5_000_000 for index in range(40)]
    rows = [Row(i, str(i), i, time_ns, 20, 9, priority=i) for i, time_ns in enumerate(times_ns)]
    queue = {"enable_priority_scheduling": True, "max_queued_requests": 1}
    settings = CONFIG | {"engine": "sglang", "max_num_seqs": 1, "scheduler_args": queue}
    alive: list[int] = []
    gc.collect()
    with collector_paused():
        before = requests_alive()
        trace = Trace("made", "native", "", rows)
        result = simulate(trace, settings, progress=lambda _: alive.append(requests_alive()))
    assert before < max(alive) < before + 20
    assert result.requests["status"].count("rejected") > 30


def test_simulate_keeps_its_name_and_arguments() -> None:
    import inspect

    from kvsim import simulate

    assert simulate.__name__ == "simulate"
    assert list(inspect.signature(simulate).parameters)[:2] == ["trace", "config"]

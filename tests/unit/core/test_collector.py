"""The collector is as it was, however the pause ends."""

import gc
import weakref

import pytest

from kvsim import simulate
from kvsim.core.collector import collector_paused
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


def test_the_rows_of_a_trace_are_free_when_its_run_is_over() -> None:
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
        result = simulate(trace, {"cost": {"model": "constant"}})
        assert all(row() is not None for row in watched), "the trace is still there"
        del trace
        assert all(row() is None for row in watched)
        assert result.summary["completed"] == 8
    finally:
        (gc.enable if usual else gc.disable)()


def test_simulate_keeps_its_name_and_arguments() -> None:
    import inspect

    from kvsim import simulate

    assert simulate.__name__ == "simulate"
    assert list(inspect.signature(simulate).parameters)[:2] == ["trace", "config"]

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.report.pages.figures import time_axis
from kvsim.report.pages.view import bin_states, even_edges, sums_of


@st.composite
def states(draw):
    """Start of each state, end of the last, a value for each; some have no duration."""
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=40))
    start = np.concatenate(([0], np.cumsum(lengths[:-1]))).astype(np.int64)
    values = draw(st.lists(st.integers(0, 100), min_size=len(start), max_size=len(start)))
    return start, int(sum(lengths)), np.array(values, dtype=np.int64)


def binned(start, end, values, limit):
    return bin_states(start, end, ["x"], lambda _, first, last: values[first:last], limit)


def value_at(start, values, instant):
    """The state that holds from `instant` on: the last one that has started."""
    return next(v for s, v in zip(start[::-1], values[::-1], strict=True) if s <= instant)


@given(states(), st.integers(1, 12))
def test_bins_are_what_a_loop_over_every_nanosecond_gives(run, limit):
    start, end, values = run
    bins = binned(start, end, values, limit)
    assert len(bins.edges_ns) - 1 <= limit
    for i, (a, b) in enumerate(zip(bins.edges_ns[:-1], bins.edges_ns[1:], strict=True)):
        inside = [value_at(start, values, instant) for instant in range(a, b)]
        assert bins.mean["x"][i] == pytest.approx(sum(inside) / len(inside))
        assert (bins.low["x"][i], bins.high["x"][i]) == (min(inside), max(inside))


@given(states(), st.integers(1, 12))
def test_the_mean_over_all_bins_is_the_mean_of_the_run(run, limit):
    start, end, values = run
    bins = binned(start, end, values, limit)
    whole = float(np.sum(bins.mean["x"] * np.diff(bins.edges_ns)))
    assert whole == pytest.approx(sum(value_at(start, values, i) for i in range(end)))


@given(states(), st.integers(1, 12), st.integers(1, 4))
def test_bins_do_not_depend_on_how_many_are_filled_at_once(run, limit, at_once):
    whole = binned(*run, limit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvsim.report.pages.view._AT_ONCE", at_once)
        pieces = binned(*run, limit)
    for one, other in zip(whole[2:], pieces[2:], strict=True):
        assert one["x"].tolist() == other["x"].tolist()


def test_few_states_are_kept_as_they_are():
    bins = binned(np.array([0, 10, 10, 30]), 40, np.array([1, 2, 3, 4]), 5)
    assert bins.exact
    assert list(bins.edges_ns) == [0, 10, 30, 40]
    assert list(bins.mean["x"]) == [1, 3, 4]


@given(
    st.integers(1, 1000),
    st.integers(1, 20),
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 9))),
)
def test_events_are_neither_lost_nor_counted_twice(end, limit, events):
    instants = np.array([min(t, end) for t, _ in events], dtype=np.int64)
    amounts = np.array([n for _, n in events], dtype=np.int64)
    edges = even_edges(end, limit)
    assert (edges[0], edges[-1]) == (0, end)
    assert len(edges) <= limit + 1
    sums = sums_of(time_axis(end), end, instants, limit).of(amounts)
    assert sums.sum() == amounts.sum()
    last = len(edges) - 2
    for i in range(last + 1):
        inside = (instants >= edges[i]) & ((instants < edges[i + 1]) | (i == last))
        assert sums[i] == amounts[inside].sum()


def test_no_time_has_no_bins():
    bins = binned(np.array([0, 0]), 0, np.array([1, 2]), 5)
    assert len(bins.mean["x"]) == len(bins.low["x"]) == 0

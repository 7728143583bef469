"""Lane packing against a twin that tries every lane."""

from hypothesis import given
from hypothesis import strategies as st

from kvsim.report.tracks import pack

intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12))).map(
    lambda drawn: [(begin, begin + length) for begin, length in sorted(drawn)]
)


def dull(intervals):
    ends, lanes = [], []
    for begin, end in intervals:
        lane = next((i for i, busy in enumerate(ends) if busy <= begin), len(ends))
        ends[lane : lane + 1] = [end]
        lanes.append(lane)
    return lanes


@given(intervals)
def test_each_takes_the_lowest_free_lane(given_intervals):
    assert pack(given_intervals) == dull(given_intervals)


@given(intervals)
def test_there_are_as_many_lanes_as_intervals_at_once(given_intervals):
    most = max(
        (sum(b <= at < e for b, e in given_intervals) for at, _ in given_intervals), default=0
    )
    assert len(set(pack(given_intervals))) == most

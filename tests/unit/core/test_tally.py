"""A tally counts as a dictionary of counts does, however it is packed in between."""

import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.core.records import tally
from kvsim.core.records.tally import Tally

NUMBERS = st.integers(-(2**62), 2**62) | st.integers(0, 5)
ENTRIES = st.lists(st.tuples(st.lists(NUMBERS, min_size=1, max_size=5), st.integers(1, 9)))


@given(ENTRIES, st.integers(1, 6), st.integers(0, 20))
def test_counts_are_those_of_a_dictionary(
    entries: list[tuple[list[int], int]], piece: int, rough: int
) -> None:
    expected: Counter[int] = Counter()
    found = Tally()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tally, "_PIECE", piece)
        patch.setattr(tally, "_ROUGH", rough)
        for numbers, times in entries:
            expected.update(dict.fromkeys(numbers, 0))
            for number in numbers:
                expected[number] += times
            for number in numbers[:1]:
                found.add(number, times)
            rest = np.array(numbers[1:], np.int64)
            found.add_vectors(rest, np.full(len(rest), times, np.int64))
        assert found == expected
    numbers_, times_ = found.arrays()
    assert numbers_.tolist() == sorted(expected) and len(found) == len(expected)
    assert times_.tolist() == [expected[number] for number in sorted(expected)]
    found.add(3)
    assert found == expected + Counter({3: 1})
    assert pickle.loads(pickle.dumps(found)) == found


def test_an_empty_tally_is_empty() -> None:
    assert Tally() == {} and not Tally() and len(Tally().arrays()[0]) == 0

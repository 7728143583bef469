"""What a run notes comes back as it went in, however it is packed and wherever it is kept."""

import pickle
import tempfile
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.core import records
from kvsim.core.records import PackedColumns, Tally
from kvsim.core.schema import STEP_COLUMNS
from kvsim.errors import OutputError

WIDTH = len(STEP_COLUMNS)
VALUES = st.one_of(st.integers(0, 3), st.integers(0, 70_000), st.integers(-(2**62), 2**62))
ROWS = st.lists(st.lists(VALUES, min_size=3, max_size=3), min_size=1, max_size=30)


def rows(number: int, start: int = 0) -> np.ndarray:
    count = np.arange(start, start + number)
    return np.stack([count * (10**i % 1_000_003) % 2 ** (1 + i) for i in range(WIDTH)], axis=1)


@given(st.lists(ROWS, max_size=4), st.integers(0, 60))
def test_packed_columns_give_back_what_was_added(blocks: list[list[list[int]]], most: int) -> None:
    columns = PackedColumns(("a", "b", "c"), most)
    for block in blocks:
        columns.add(np.array(block, dtype=np.int64))
    everything = [row for block in blocks for row in block]
    assert columns.rows == len(everything)
    assert list(columns) == ["a", "b", "c"]
    for i, name in enumerate(columns):
        assert columns[name].dtype == np.int64
        assert columns[name].tolist() == [row[i] for row in everything]
        for first, last in ((0, 2), (1, columns.rows), (3, 40)):
            assert columns.part(name, first, last).tolist() == columns[name][first:last].tolist()


def test_what_exceeds_the_memory_goes_to_a_file_and_can_be_pickled() -> None:
    held, spilled = PackedColumns(STEP_COLUMNS), PackedColumns(STEP_COLUMNS, most=10)
    for columns in (held, spilled):
        for start in range(0, 40, 8):
            columns.add(rows(8, start))
    assert spilled._file is not None and held._file is None
    kept = sum(
        len(p.narrow) for ps in spilled._columns.values() for p in ps if p.narrow is not None
    )
    assert kept <= 10 * WIDTH
    views = [p.narrow.base for ps in spilled._columns.values() for p in ps if p.narrow is not None]
    assert not [base for base in views if base is not None], "the file's rows are in memory too"
    copy = pickle.loads(pickle.dumps(spilled))
    for name in STEP_COLUMNS:
        assert spilled[name].tolist() == held[name].tolist() == copy[name].tolist()


def test_a_disk_that_takes_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(OutputError, match=r"No space left on device; .* or set TMPDIR"):
        PackedColumns(STEP_COLUMNS, most=0).add(rows(2))


NUMBERS = st.integers(-(2**62), 2**62) | st.integers(0, 5)
ENTRIES = st.lists(st.tuples(st.lists(NUMBERS, min_size=1, max_size=5), st.integers(1, 9)))


@given(ENTRIES, st.integers(0, 20))
def test_counts_are_those_of_a_dictionary(entries: list[tuple[list[int], int]], rough: int) -> None:
    expected: Counter[int] = Counter()
    found = Tally()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_ROUGH", rough)
        for numbers, times in entries:
            expected.update(dict.fromkeys(numbers, 0))
            for number in numbers:
                expected[number] += times
            found.add(np.array(numbers), np.full(len(numbers), times))
        assert found == expected
    numbers_, times_ = found.arrays()
    assert numbers_.tolist() == sorted(expected) and len(found) == len(expected)
    assert times_.tolist() == [expected[number] for number in sorted(expected)]
    found.add(np.array([3]), np.array([1]))
    assert found == expected + Counter({3: 1})
    assert found.get(10) == expected.get(10)
    assert pickle.loads(pickle.dumps(found)) == found


def test_an_empty_tally_is_empty() -> None:
    assert Tally() == {} and not Tally() and len(Tally().arrays()[0]) == 0

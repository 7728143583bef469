"""Rows of steps come back as they went in, however many there are and wherever they are kept."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.errors import OutputError
from kvsim.records import packed, recorder
from kvsim.records.packed import PackedColumns
from kvsim.records.recorder import Recorder
from kvsim.schema import STEP_COLUMNS, pack

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

    monkeypatch.setattr(packed.tempfile, "TemporaryFile", full)
    with pytest.raises(OutputError, match=r"No space left on device; .* or set TMPDIR"):
        PackedColumns(STEP_COLUMNS, most=0).add(rows(2))


@pytest.mark.parametrize("piece", [1, 3, 1 << 15])
def test_rows_keep_their_order_packed_or_not(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(recorder, "PIECE_STEPS", piece)
    kept = Recorder()
    expected = rows(20)
    for number, row in enumerate(expected, 1):
        values = tuple(row.tolist())
        kept.packed(pack(*values))
        assert len(kept) == number
    columns = kept.columns()
    assert list(columns) == list(STEP_COLUMNS)
    for i, name in enumerate(STEP_COLUMNS):
        assert columns[name].tolist() == expected[:, i].tolist()
    assert len(kept) == 20


SOME = st.integers(0, 9)
RUN = st.tuples(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 3)), max_size=6),
    st.integers(1, 8),
    st.tuples(SOME, SOME, SOME, st.booleans()),
)


@given(st.lists(RUN, max_size=8), st.integers(1, 20))
def test_decode_steps_in_a_row_unfold_to_the_rows_they_stand_for(
    runs: list[tuple[list[tuple[int, int]], int, tuple[int, int, int, bool]]], piece: int
) -> None:
    """Runs of decode steps between single rows, against rows written out one by one."""
    size, now_ns = 4, 0
    expected: list[dict[str, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "PIECE_STEPS", piece)
        kept = Recorder(size)
        for steps, number, (cached, waiting, finished, queued) in runs:
            row = dict.fromkeys(STEP_COLUMNS, 7) | {"start_ns": now_ns, "finished": finished}
            row |= {"decode_seqs": number, "context_tokens": 100, "waiting": waiting}
            row |= {"used_blocks": 5, "cached_blocks": 30 + cached, "free_blocks": 4}
            row |= {"empty_slots": 200}
            ends_ns = [now_ns + sum(ns for ns, _ in steps[: i + 1]) for i in range(len(steps))]
            if not steps:
                kept.packed(pack(*row.values()))
                expected.append(row)
                continue
            opened = [blocks for _, blocks in steps]
            # Every other block that is taken has content, or those after the blank ones.
            evicted = [sum(opened[: i + 1]) // 2 for i in range(len(steps))] if queued else []
            kept.decodes(pack(*row.values()), ends_ns, opened, evicted)
            for place, (end_ns, (_, blocks)) in enumerate(zip(ends_ns, steps, strict=True)):
                blank = min(blocks, row["free_blocks"])
                if queued:
                    blank = blocks - evicted[place] + (evicted[place - 1] if place else 0)
                row = row | {
                    "start_ns": now_ns,
                    "end_ns": end_ns,
                    "context_tokens": 100 + place * number,
                    "used_blocks": row["used_blocks"] + blocks,
                    "free_blocks": row["free_blocks"] - blank,
                    "cached_blocks": row["cached_blocks"] - (blocks - blank),
                    "empty_slots": row["empty_slots"] + blocks * size - number,
                    "finished": finished if place == len(steps) - 1 else 0,
                }
                expected.append(row)
                now_ns = end_ns
        columns = kept.columns()
    assert len(kept) == len(expected)
    for name in STEP_COLUMNS:
        assert columns[name].tolist() == [row[name] for row in expected], name


def test_a_run_without_steps_has_empty_columns() -> None:
    columns = Recorder().columns()
    assert all(len(columns[name]) == 0 and columns[name].dtype == np.int64 for name in columns)
    assert len(columns) == WIDTH

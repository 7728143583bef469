"""Rows kept as columns are the rows that their lines say, wherever they are looked up."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.errors import TraceError
from kvsim.workload import HashContent, Row, column, open_trace
from kvsim.workload.clients import Requests
from kvsim.workload.trace import Rows, collapse, hash_runs

IDS = st.integers(0, 5) | st.integers(2**64 - 3, 2**64 - 1)
SAID = st.lists(st.tuples(*[st.integers(1, 2**62)] * 4, st.lists(IDS, max_size=6)), max_size=6)


def kept(said: list[tuple[int, int, int, int, list[int]]], cut: int) -> tuple[Rows, list[Row]]:
    """Rows as columns, added in two parts, and the rows as they are."""
    rows = Rows()
    for part in (said[:cut], said[cut:]):
        further = Rows(len(rows))
        further.add([[each[i] for each in part] for i in range(4)], [each[4] for each in part])
        rows.extend(further)
    plain = [
        Row(place, str(place), *facts, HashContent(collapse(ids)))
        for place, (*facts, ids) in enumerate(said)
    ]
    return rows, plain


@given(SAID, st.integers(0, 6), st.data())
def test_rows_are_what_was_said_of_them(
    said: list[tuple[int, int, int, int, list[int]]], cut: int, data: st.DataObject
) -> None:
    rows, plain = kept(said, cut)
    assert rows == plain == list(rows) == [rows[place] for place in range(len(plain))]
    assert pickle.loads(pickle.dumps(rows)) == plain
    part = slice(*(data.draw(st.none() | st.integers(-7, 7)) for _ in "ab"))
    assert list(rows[part]) == plain[part]
    for name in ("id", "index", "line", "output_length", "content", "session", "after"):
        assert list(column(rows, name)) == column(plain, name)
    for found, twin in zip(hash_runs(rows), hash_runs(plain), strict=True):
        assert list(found) == list(twin)


def test_requests_of_replicas_share_the_columns_of_a_long_trace() -> None:
    rows, plain = kept([(1, 2, 3, 4, [5])], 0)
    one, other = Requests(rows, None), Requests(rows, None)
    assert one.output_lengths is other.output_lengths
    assert one.output_lengths == Requests(plain, None).output_lengths


def test_a_place_that_is_not_there() -> None:
    rows, plain = kept([(1, 2, 3, 4, [5])], 0)
    assert rows[-1] == plain[-1]
    for place in (1, -2):
        with pytest.raises(IndexError):
            rows[place]


@pytest.mark.parametrize(
    "text",
    [
        "{row}\n{row}\n",
        "{row}\r\n{row}\r\n",
        "{row}\n{row}",
        "\ufeff{row}\n{row}\n",
        "{row}\n\n{row}\n",
        "{row} \n{row}\n",
    ],
)
def test_rows_are_the_same_however_lines_end(text: str, tmp_path: Path) -> None:
    row = '{"timestamp": 5, "input_length": 9, "output_length": 3, "hash_ids": [7]}'
    path = tmp_path / "x.jsonl"
    path.write_bytes(text.replace("{row}", row).encode())
    first, second = open_trace(str(path)).rows
    assert (first.line, first.arrival_ns, first.content) == (1, 5_000_000, HashContent(((7, 1),)))
    assert second.line == 2 + ("\n\n" in text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{row}{row}\n\n", ":1: not JSON: Extra data"),
        ('{row}\n{"timestamp": 5,\n"input_length": 9}', ":2: not JSON"),
        ('{row}\n{"hash_ids": [3], {rest}\n', ':2: not strict JSON: key "hash_ids" is given twice'),
    ],
)
def test_one_object_is_on_each_line_and_no_key_in_it_twice(
    text: str, says: str, tmp_path: Path
) -> None:
    rest = '"timestamp": 5, "input_length": 9, "output_length": 3, "hash_ids": [7]}'
    path = tmp_path / "x.jsonl"
    path.write_text(text.replace("{rest}", rest).replace("{row}", "{" + rest))
    with pytest.raises(TraceError, match=says):
        open_trace(str(path), "mooncake")

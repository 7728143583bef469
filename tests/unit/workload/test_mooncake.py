"""Mooncake files as they are, and as other tools write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made import jsonl, read_with

from kvsim.errors import TraceError
from kvsim.workload import HashContent, open_trace
from kvsim.workload.formats import mooncake

ROW = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
MS = 1_000_000


def read(folder: Path, *rows: dict[str, Any]) -> Any:
    return read_with(mooncake.read, jsonl(folder, *rows))


def test_a_plain_trace(tmp_path: Path) -> None:
    trace = open_trace(
        jsonl(tmp_path, ROW, {**ROW, "timestamp": 27_482, "hash_ids": [0, 14]}, name="trace")
    )
    assert (trace.format, trace.block_size) == ("mooncake", 512)
    assert (trace.hash_kind, trace.partial_hash) == ("prefix", True)
    assert trace.source == {"format": "mooncake", "file": "trace", "sha256": trace.sha256}
    first, second = trace.rows
    assert (first.id, first.line, first.input_length, first.output_length) == ("0", 1, 600, 5)
    assert second.arrival_ns == 27_482 * MS
    assert second.content == HashContent(((0, 1), (14, 1)))


def test_names_and_numbers_of_other_tools(tmp_path: Path) -> None:
    row = {"created_time": 1.5, "input_tokens": 600.0, "output_tokens": 5.0, "hash_ids": [0, 1]}
    trace = read(tmp_path, row)
    assert trace.rows == read(tmp_path, {**ROW, "timestamp": 1.5}).rows
    assert trace.rows[0].arrival_ns == 1_500_000


@pytest.mark.parametrize("aliased", [0, 999, 1_500, 2_999])
def test_rows_are_the_same_whether_they_are_checked_together_or_one_by_one(
    aliased: int, tmp_path: Path
) -> None:
    rows = [{**ROW, "timestamp": i // 3, "output_length": i % 7} for i in range(3_000)]
    together = read(tmp_path, *rows)
    row = rows[aliased]
    rows[aliased] = row | {"output_tokens": float(row.pop("output_length"))}
    apart = read(tmp_path, *rows)
    assert together.rows == apart.rows
    assert together.notes == apart.notes == ["output_length 0 read as 1 (429 of 3,000 rows)"]
    assert [row.line for row in apart.rows] == list(range(1, 3_001))


@pytest.mark.parametrize("later", ["", '{"timestamp"', '{"timestamp": 1, "timestamp": 2}'])
@pytest.mark.parametrize(
    "wrong",
    [
        {"timestamp": 1 << 62},
        {"input_length": 1.5},
        {"output_length": True},
        {"input_length": 1 << 23, "output_length": 1 << 23},
        {"hash_ids": [0, 1.0]},
        {"hash_ids": {"0": 1}},
        {"request_id": "a"},
    ],
    ids=str,
)
def test_the_first_wrong_line_is_named_wherever_it_is(
    wrong: dict[str, Any], later: str, tmp_path: Path
) -> None:
    path = Path(jsonl(tmp_path, *[ROW] * 1_200, ROW | wrong, *[ROW] * 5))
    path.write_text(path.read_text() + later)
    with pytest.raises(TraceError, match=rf":1201: {next(reversed(wrong))}: |:1201: input_length"):
        read_with(mooncake.read, str(path))


@pytest.mark.parametrize("text", ["\n{0}{0}", "{0} {0}\n", "{0}\n\n{0}{0}\n", "\n{0}{0}\n"])
def test_two_objects_on_a_line_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "two.jsonl"
    path.write_text(text.replace("{0}", json.dumps(ROW)))
    with pytest.raises(TraceError, match="write one object a line"):
        read_with(mooncake.read, str(path))


def test_a_block_size_on_the_rows_is_taken(tmp_path: Path) -> None:
    trace = read(tmp_path, {**ROW, "block_size": 500}, {**ROW, "input_length": 501})
    assert trace.block_size == 500


def test_ids_of_full_blocks_only_are_told_by_their_number(tmp_path: Path) -> None:
    rows = [{**ROW, "input_length": n, "hash_ids": list(range(n // 512))} for n in (600, 1024)]
    trace = read(tmp_path, *rows)
    assert trace.partial_hash is False
    assert "full blocks only" in trace.notes[0]


def test_ids_that_are_not_chained_are_read_as_content(tmp_path: Path) -> None:
    trace = read(tmp_path, ROW, {**ROW, "hash_ids": [7, 1]})
    assert trace.hash_kind == "content"
    assert "line 2: id 1 follows 7 and elsewhere" in trace.notes[0]


def test_sessions_become_turns(tmp_path: Path) -> None:
    rows = [
        {**ROW, "session_id": "a", "request_id": "x", "priority": 2},
        {**ROW, "session_id": 7, "request_id": "y", "delay": None},
        {**ROW, "session_id": "a", "request_id": "z", "delay": 2.5},
        {**ROW, "session_id": "a", "request_id": "u"},
    ]
    trace = read(tmp_path, *rows)
    assert [row.id for row in trace.rows] == ["x", "y", "z", "u"]
    assert [row.session for row in trace.rows] == ["a", "7", "a", "a"]
    assert [row.turn for row in trace.rows] == [0, 0, 1, 2]
    assert [row.after for row in trace.rows] == [-1, -1, 0, 2]
    assert [row.delay_ns for row in trace.rows] == [0, 0, 2_500_000, 0]
    assert [row.priority for row in trace.rows] == [2, 0, 0, 0]
    text = "; ".join(trace.notes)
    assert "wait for the row before them in their session_id" in text
    assert "follow the row before them without delay, as none is given (1 of 4 rows)" in text
    assert "priority: lower is served first" in text


def test_what_is_changed_or_left_out_is_counted(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 9, "output_length": 0},
        {**ROW, "type": "chat"},
        {**ROW, "output_length": 0, "turn": 1},
    ]
    trace = read(tmp_path, *rows)
    assert [row.output_length for row in trace.rows] == [1, 5, 1]
    assert trace.rows[0].content is None
    assert trace.notes == [
        "output_length 0 read as 1 (2 of 3 rows)",
        "no hash_ids, so nothing is shared (1 of 3 rows)",
        "keys ignored: turn, type",
    ]


def test_a_file_without_ids_or_times_is_read(tmp_path: Path) -> None:
    trace = read(tmp_path, {"input_length": 9, "output_length": 3})
    assert (trace.block_size, trace.hash_kind) == (None, None)
    assert trace.rows[0].arrival_ns is None


@pytest.mark.parametrize(("step_ms", "warned"), [(0.5, True), (2, False)])
def test_a_rate_that_suggests_another_unit_is_noted(
    tmp_path: Path, step_ms: float, warned: bool
) -> None:
    rows = [{**ROW, "timestamp": k * step_ms} for k in range(9)]
    notes = open_trace(jsonl(tmp_path, *rows)).notes
    assert any("2,000 requests/s" in note for note in notes) == warned


def test_a_grid_of_times_is_noted(tmp_path: Path) -> None:
    rows = [{**ROW, "timestamp": 3000 * (k // 4)} for k in range(12)]
    (note,) = open_trace(jsonl(tmp_path, *rows)).notes
    assert note.startswith("81.8 % of the gaps between arrivals are 0")
    assert "--spread-ties" in note


@pytest.mark.parametrize("time", [1.5, 3, "2026-01-01T00:00:02Z"])
def test_a_time_by_another_name_is_refused(time: object, tmp_path: Path) -> None:
    row = {"startTime": time, "input_length": 5, "output_length": 6, "model": "m"}
    with pytest.raises(TraceError, match='may be in "startTime": name it timestamp, in ms, or'):
        read(tmp_path, row)
    known = read(tmp_path, {**row, "timestamp": 3})
    assert known.notes[-1] == "keys ignored: model, startTime"
    assert read(tmp_path, {**row, "startTime": None}).rows[0].arrival_ns is None

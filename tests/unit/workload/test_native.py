"""The native format: its documented examples, and every trace written comes back."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import jsonl, make_trace, read_with, traces, without_lines
from marks import examples

from kvsim.errors import OutputError
from kvsim.workload import (
    HashContent,
    ParentContent,
    SegmentContent,
    TokenContent,
    Trace,
    native,
    open_trace,
)

S = 1_000_000_000


def test_a_session_with_known_outputs(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path,
        '{"kvsim_trace":1,"block_size":64,"hash_kind":"prefix","hash_scope":"session",'
        '"partial_hash":false,"model":"m","origin":"2025-01-01","x_mine":1}',
        '{"id":"w/0","session":"w","turn":0,"arrival_s":6.635,"input_length":62013,'
        '"output_length":220,"hash_runs":[[1,968]],"output_hash_runs":[[969,4]],"x_note":""}',
        '{"id":"w/1","session":"w","turn":1,"arrival_s":20.635,"after":"w/0","delay_s":1.5,'
        '"input_length":63504,"output_length":607,"hash_runs":[[1,900],[901,92]],"priority":-1,'
        '"deadline_s":2,"salt":"t","model":"n","tags":{"a":[1]},"observed":{"ttft_s":0.2}}',
    )
    trace = open_trace(path)
    first, second = trace.rows
    assert (trace.block_size, trace.hash_kind, trace.partial_hash) == (64, "prefix", False)
    assert (trace.hash_scope, trace.origin) == ("session", "2025-01-01")
    assert (first.extra, second.extra, trace.notes) == ({"note": ""}, None, [])
    assert first.content == HashContent(((1, 968),), ((969, 4),))
    assert (first.id, first.line, first.arrival_ns, first.model) == ("w/0", 2, 6_635_000_000, "m")
    assert (first.session, first.turn, first.scope) == ("w", 0, "w")
    assert second.content == HashContent(((1, 992),))
    assert (second.after, second.delay_ns, second.deadline_ns) == (0, 3 * S // 2, 2 * S)
    assert (second.priority, second.salt, second.model) == (-1, "t", "n")
    assert (second.tags, second.observed) == ({"a": [1]}, {"ttft_s": 0.2})


def test_the_other_contents(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path,
        '{"kvsim_trace":1}',
        '{"id":"r1","arrival_s":0.5,"input_length":300,"output_length":20}',
        '{"id":"r2","arrival_s":1.5,"input_length":900,"output_length":64,'
        '"prefix":[["system-A",512],["doc-7",200]],"salt":"tenant-3"}',
        '{"id":"r3","arrival_s":1.6,"input_length":4,"output_length":8,"tokens":[101,7,9,12]}',
        '{"id":"r4","arrival_s":9.0,"after":"r3","delay_s":2.0,"input_length":20,'
        '"output_length":5,"parent":"r3"}',
        '{"id":"r5","arrival_s":12.0,"after":"r4","input_length":30,"output_length":5,'
        '"parent":"r4","keep":10}',
    )
    assert [row.content for row in open_trace(path).rows] == [
        None,
        SegmentContent((("system-A", 512), ("doc-7", 200))),
        TokenContent((101, 7, 9, 12)),
        ParentContent(2, 12),
        ParentContent(3, 10),
    ]


def test_ids_and_runs_say_the_same(tmp_path: Path) -> None:
    header = {"kvsim_trace": 1, "block_size": 4, "hash_kind": "content", "partial_hash": False}
    row = {"input_length": 16, "output_length": 1}
    spelled = read_with(native.read, jsonl(tmp_path, header, {**row, "hash_ids": [3, 4, 5, 9]}))
    in_runs = read_with(
        native.read, jsonl(tmp_path, header, {**row, "hash_runs": [[3, 1], [4, 2], [9, 1]]})
    )
    assert spelled.rows == in_runs.rows
    assert spelled.rows[0].content == HashContent(((3, 3), (9, 1)))


@settings(max_examples=examples(100), deadline=None)
@given(traces(), st.booleans())
def test_what_is_written_is_read_back(trace: Trace, named: bool) -> None:
    if named:
        trace.rows = [
            replace(
                row,
                id=f"r{row.index}",
                session=f"s{row.index % 2}",
                turn=row.index,
                after=row.index - 1,
                delay_ns=row.index * 1_234_567,
                arrival_ns=row.index * 123_456_789_012,
                model="m" if row.index else None,
                priority=row.index - 2,
                deadline_ns=row.index or None,
                tags={"k": row.index},
                extra={"tenant": f"t{row.index}"},
                observed={"itl_s": [0.1]},
            )
            for row in trace.rows
        ]
    with TemporaryDirectory() as folder:
        native.write(trace, f"{folder}/x.jsonl")
        again = read_with(native.read, f"{folder}/x.jsonl")
    assert without_lines(again) == without_lines(trace)
    for fact in ("block_size", "hash_kind", "partial_hash", "hash_scope", "origin", "source"):
        assert getattr(again, fact) == getattr(trace, fact)


def test_times_survive_to_the_nanosecond(tmp_path: Path) -> None:
    trace = make_trace([(1, 1, None)] * 3)
    times = [1, 3_436_000_000_123, 26 * 86_400 * S - 1]
    trace.rows = [replace(row, arrival_ns=t) for row, t in zip(trace.rows, times, strict=True)]
    native.write(trace, str(tmp_path / "x"))
    again = open_trace(str(tmp_path / "x"))
    assert [row.arrival_ns for row in again.rows] == times


def test_a_name_in_gz_is_written_gzipped_and_without_a_time(tmp_path: Path) -> None:
    trace = make_trace([(3, 2, None)])
    native.write(trace, str(tmp_path / "a.jsonl"))
    native.write(trace, str(tmp_path / "b.jsonl.gz"))
    packed = (tmp_path / "b.jsonl.gz").read_bytes()
    assert gzip.decompress(packed) == (tmp_path / "a.jsonl").read_bytes()
    assert packed[4:8] == b"\0\0\0\0"


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    trace = make_trace([(3, 2, None)])
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be written"):
        native.write(trace, str(tmp_path / "file" / "x.jsonl"))
    trace.rows = [replace(trace.rows[0], tags={"bad": object()})]
    with pytest.raises(TypeError):
        native.write(trace, str(tmp_path / "new" / "x.jsonl"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_written_file_is_what_people_expect(tmp_path: Path) -> None:
    trace = make_trace(
        [(8, 2, None), (12, 1, ParentContent(0, 10)), (12, 1, ParentContent(0, 4))],
        source={"format": "made"},
    )
    trace.rows[1] = replace(trace.rows[1], after=0, delay_ns=S // 2)
    assert [json.loads(line) for line in native.lines(trace)] == [
        {"kvsim_trace": 1, "source": {"format": "made"}},
        {"arrival_s": 0, "input_length": 8, "output_length": 2},
        {
            "arrival_s": 1,
            "after": 0,
            "delay_s": 0.5,
            "input_length": 12,
            "output_length": 1,
            "parent": 0,
        },
        {"arrival_s": 2, "input_length": 12, "output_length": 1, "parent": 0, "keep": 4},
    ]

"""A converted trace says the same, or says what it lost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import jsonl, make_trace, traces
from marks import examples

from kvsim.errors import ConfigError
from kvsim.workload import HashContent, ParentContent, SegmentContent, Trace, convert, open_trace
from kvsim.workload.formats.mooncake import bench_command
from kvsim.workload.keys import streams


@settings(max_examples=examples(60), deadline=None)
@given(traces(), st.integers(1, 9))
def test_exported_ids_are_equal_where_prompts_are(trace: Trace, block_size: int) -> None:
    with TemporaryDirectory() as folder:
        convert(trace, f"{folder}/x", "mooncake", block_size)
        rows = [json.loads(line) for line in Path(f"{folder}/x").read_text().splitlines()]
    ids, keys = [], []
    for row, written, stream in zip(trace.rows, rows, streams(trace), strict=True):
        keys_of_all = {"timestamp", "input_length", "output_length", "hash_ids"}
        assert written.keys() - keys_of_all == ({"block_size"} if block_size != 512 else set())
        assert (written["input_length"], written["output_length"]) == (
            row.input_length,
            row.output_length,
        )
        full, tail = divmod(row.input_length, block_size)
        assert len(written["hash_ids"]) == full + (tail > 0)
        ids += written["hash_ids"][:full]
        keys += stream.keys(0, full, block_size)
    pairs = set(zip(ids, keys, strict=True))
    assert len(pairs) == len(set(ids)) == len(set(keys))
    every_id = [one for row in rows for one in row["hash_ids"]]
    assert sorted(set(every_id)) == list(range(len(set(every_id))))
    assert list(dict.fromkeys(every_id)) == sorted(set(every_id)), "in order of first use"


def test_a_partial_block_is_shared_by_equal_prompts_alone(tmp_path: Path) -> None:
    shared = SegmentContent((("a", 6),))
    trace = make_trace([(6, 1, shared), (6, 1, shared), (8, 1, shared), (6, 1, None)])
    convert(trace, str(tmp_path / "x"), "mooncake", 4)
    rows = [json.loads(line)["hash_ids"] for line in (tmp_path / "x").read_text().splitlines()]
    assert rows == [[0, 1], [0, 1], [0, 2], [3, 4]]


def test_an_exported_file_is_read_back(tmp_path: Path) -> None:
    trace = make_trace([(1500, 3, SegmentContent((("a", 1100),))), (1200, 9, None)])
    convert(trace, str(tmp_path / "x"), "mooncake", 512)
    again = open_trace(str(tmp_path / "x"))
    assert [row.arrival_ns for row in again.rows] == [0, 1_000_000_000]
    assert again.rows[0].content == HashContent(((0, 3),))


@settings(max_examples=examples(100), deadline=None)
@given(traces(), st.integers(1, 600))
def test_a_file_of_any_block_size_is_read_back(trace: Trace, block_size: int) -> None:
    with TemporaryDirectory() as folder:
        convert(trace, f"{folder}/x", "mooncake", block_size)
        again = open_trace(f"{folder}/x")
        lines = Path(f"{folder}/x").read_text()
        convert(again, f"{folder}/y", "mooncake")
        assert Path(f"{folder}/y").read_text() == lines
    assert again.block_size == block_size
    assert [row.input_length for row in again.rows] == [row.input_length for row in trace.rows]


def test_what_is_lost_is_said(tmp_path: Path) -> None:
    trace = make_trace([(6, 1, SegmentContent((("a", 6),))), (40, 1, ParentContent(0, 7))])
    trace.rows[1] = replace(trace.rows[1], after=0, priority=3, arrival_ns=1_500_001, model="m")
    notes = convert(trace, str(tmp_path / "x"), "mooncake", 32)
    assert "lost: after and delay_s: every row is sent at its recorded time (1 of 2 rows)" in notes
    assert "lost: priority (1 of 2 rows)" in notes
    assert "lost: model (1 of 2 rows)" in notes
    assert "lost: fractions of a millisecond (1 of 2 rows)" in notes
    assert any(note.startswith("tell every reader that ids stand for 32 tokens") for note in notes)
    assert notes[-1].endswith(f": {bench_command(str(tmp_path / 'x'), 32, 2)}")


def test_sharing_below_a_block_is_said(tmp_path: Path) -> None:
    shared = SegmentContent((("a", 40),))
    trace = make_trace([(60, 1, shared), (60, 1, shared)])
    notes = convert(trace, str(tmp_path / "x"), "mooncake", 512)
    assert notes[0] == (
        "sharing below 512 tokens: at most 0.00 % of the input tokens can hit, 26.67 % at block 16"
    )


def test_the_command_names_all_that_vllm_would_guess_wrong() -> None:
    assert bench_command("my trace.jsonl", 512, 12_031) == (
        "vllm bench serve --backend openai --dataset-name timed_trace"
        " --dataset-path 'my trace.jsonl' --timed-trace-chunk-hash-size 512"
        " --timed-trace-sec-multiplier 0.001 --num-prompts 12031"
    )


def test_content_without_a_block_size_needs_one(tmp_path: Path) -> None:
    trace = make_trace([(6, 1, SegmentContent((("a", 6),)))])
    with pytest.raises(ConfigError, match="--block-size"):
        convert(trace, str(tmp_path / "x"), "mooncake")
    assert not list(tmp_path.iterdir())
    convert(make_trace([(6, 1, None)]), str(tmp_path / "x"), "mooncake")


@pytest.mark.parametrize(
    ("name", "to", "block_size", "says"),
    [
        ("x", "azure", None, "trace format: unknown 'azure'"),
        ("x", "native", 16, "block_size: a native file keeps"),
        ("x", "mooncake", 0, "block_size: 0 is not above 0"),
        ("x.gz", "mooncake", 16, "Mooncake files are plain text"),
    ],
)
def test_impossible_conversions_are_refused(
    tmp_path: Path, name: str, to: str, block_size: int | None, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        convert(make_trace([(6, 1, None)]), str(tmp_path / name), to, block_size)
    assert not list(tmp_path.iterdir())


def test_mooncake_rows_need_times(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"kvsim_trace": 1}, {"input_length": 3, "output_length": 3})
    with pytest.raises(ConfigError, match="no arrival times"):
        convert(open_trace(path), str(tmp_path / "y"), "mooncake")


def test_what_a_reader_changed_is_kept_in_the_native_header(tmp_path: Path) -> None:
    rows = [{"timestamp": 0, "input_length": 9, "output_length": 0} for _ in range(4)]
    trace = open_trace(jsonl(tmp_path, *rows))
    assert len(trace.notes) == 3, "outputs, ids, and a warning about the times"
    assert convert(trace, str(tmp_path / "y"), "native") == []
    again = open_trace(str(tmp_path / "y"))
    assert again.source["note"] == (
        "output_length 0 read as 1 (4 of 4 rows); no hash_ids, so nothing is shared (4 of 4 rows)"
    )
    convert(again, str(tmp_path / "z"), "native")
    assert (tmp_path / "y").read_bytes() == (tmp_path / "z").read_bytes()

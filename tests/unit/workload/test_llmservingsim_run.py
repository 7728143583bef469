"""`requests.jsonl` of LLMServingSim's benchmark: true arrivals, and the engine's clock."""

import json
from pathlib import Path
from typing import Any

import pytest
from command import run_here
from shared import SHARED, needs_shared

from kvsim.errors import TraceError
from kvsim.workload import open_trace
from kvsim.workload.formats.table import join_measured

EPOCH, BOOT = 1_787_267_980.25, 27_536.5
"""Seconds of the front end's clock and of the engine's, at the same moment."""
SENT = ((0.0, 0.004, 0.005, 0.5, 2.0), (0.75, 0.75, 0.75, 1.25, 3.0), (1.0, 1.5, 1.75, 2.0, 4.0))
"""When each request came, was queued, scheduled, had its first and its last token."""


def line(number: int, times: tuple[float, ...], **other: Any) -> dict[str, Any]:
    keys = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
    engine = {key: BOOT + time for key, time in zip(keys, times[1:], strict=True)}
    lengths = {"request_id": f"bench-{number}", "input_toks": 40 + number, "output_toks": 9}
    return {**lengths, "arrival_time": EPOCH + times[0], **engine, **other}


def write(path: Path, lines: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return str(path)


@pytest.fixture
def run(tmp_path: Path) -> str:
    return write(tmp_path / "requests.jsonl", [line(i, times) for i, times in enumerate(SENT)])


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    """What was sent: all ids alike, so that prompts share their blocks; sent together."""
    rows = [
        {"input_toks": 40 + i, "output_toks": 9, "arrival_time_ns": 0}
        | {"input_tok_ids": [7] * (40 + i)}
        for i in range(3)
    ]
    return write(tmp_path / "dataset.jsonl", rows)


def test_times_count_from_when_the_front_end_saw_a_request(run: str) -> None:
    trace = open_trace(run)
    assert [row.arrival_ns for row in trace.rows] == pytest.approx([0, 75e7, 1e9], abs=1e3)
    for row, times in zip(trace.rows, SENT, strict=True):
        assert row.observed is not None
        expected = [time - times[0] for time in times[2:]]
        found = [row.observed[key] for key in ("queue_s", "ttft_s", "e2e_s")]
        assert found == pytest.approx(expected, abs=1e-6)


def test_the_dataset_gets_its_arrivals_and_keeps_its_content(run: str, dataset: str) -> None:
    sent = open_trace(dataset)
    trace = join_measured(sent, run)
    assert [row.arrival_ns for row in trace.rows] == [r.arrival_ns for r in open_trace(run).rows]
    assert [row.content for row in trace.rows] == [row.content for row in sent.rows]
    assert [row.index for row in trace.rows] == [0, 1, 2]
    assert all(row.observed for row in trace.rows)


def test_requests_are_sent_in_the_order_in_which_they_came(tmp_path: Path, dataset: str) -> None:
    late = [line(i, times) for i, times in enumerate((SENT[1], SENT[0], SENT[2]))]
    trace = join_measured(open_trace(dataset), write(tmp_path / "late.jsonl", late))
    assert [row.input_length for row in trace.rows] == [41, 40, 42]
    assert [row.index for row in trace.rows] == [0, 1, 2]


def test_requests_without_times_are_left_out(tmp_path: Path, dataset: str) -> None:
    keys = ("arrival_time", "queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
    lines = [line(0, SENT[0]), line(1, SENT[1], **dict.fromkeys(keys)), line(2, SENT[2])]
    trace = join_measured(open_trace(dataset), write(tmp_path / "r.jsonl", lines))
    assert any("1 of 3 requests left out: they have no times" in note for note in trace.notes)
    assert trace.notes[-1].endswith("no measured times of 1 requests")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"first_token_ts": 1.0}, ":1: first_token_ts: before the time that it follows"),
        ({"scheduled_ts": "soon"}, ':1: scheduled_ts: "soon" is not a number'),
        ({"request_id": "bench-9"}, ":1: request_id bench-9: not a request of"),
        ({"output_toks": 8}, ":1: request_id bench-0: 40 and 8 tokens, but 40 and 9 in"),
    ],
)
def test_a_wrong_line_is_named(
    other: dict[str, Any], message: str, tmp_path: Path, dataset: str
) -> None:
    path = write(tmp_path / "wrong.jsonl", [line(0, SENT[0], **other)])
    with pytest.raises(TraceError, match=message):
        join_measured(open_trace(dataset), path)


def test_the_command_finds_both(run: str, dataset: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    told = ["--model", "llama-3.1-8b", "--hardware", "h100"]
    done = run_here(["check", dataset, "--measured", run, *told, "--out", str(out)])
    assert done.returncode == 0, done.stderr
    assert json.loads((out / "check.json").read_text())


@needs_shared("groundtruth/rtx4090-llama-3.1-8b")
def test_a_published_run_has_the_true_arrivals_that_were_found_by_hand(tmp_path: Path) -> None:
    """Its lines are made anew: when the engine queued a request, and when it had come."""
    where = SHARED / "groundtruth" / "rtx4090-llama-3.1-8b"
    names = ("measured.jsonl", "measured-true-arrivals.jsonl")
    by_engine, by_hand = (
        {each["id"]: each for each in map(json.loads, (where / name).read_text().splitlines())}
        for name in names
    )
    sent = open_trace(str(where / "trace-true-arrivals.jsonl"))
    lines = []
    for row in sent.rows:
        came, true = (row.arrival_ns or 0) / 1e9, by_hand[row.id]
        scheduled = came + true["queue_s"]
        queued = scheduled - by_engine[row.id]["queue_s"]
        times = (came, queued, scheduled, came + true["ttft_s"], came + true["e2e_s"])
        lengths = {"input_toks": row.input_length, "output_toks": row.output_length}
        lines.append(line(0, times, request_id=row.id, **lengths))
    path = write(tmp_path / "requests.jsonl", lines)
    dataset = open_trace(str(where / "trace.jsonl"))
    for row, original in zip(join_measured(dataset, path).rows, sent.rows, strict=True):
        assert row.arrival_ns == pytest.approx(original.arrival_ns, abs=2e3)
        assert row.content == original.content
        for key, value in (row.observed or {}).items():
            assert value == pytest.approx(by_hand[row.id][key], abs=2e-6)

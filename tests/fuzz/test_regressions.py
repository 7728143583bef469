"""Small runs that once went wrong, and the same done again."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fuzz.equal import assert_equal_runs
from shared import SHARED, needs_shared

from kvsim.run.result import Result

CHUNKED = {"enable_chunked_prefill": True}
TINY = {"model": "tiny", "cost": {"model": "constant"}}
OLD = {"engine": "vllm-0.6.3"}
"""The engine of cases that name none."""
NARROW = {"block_size": 32, "num_gpu_blocks_override": 8, "max_model_len": 240, **CHUNKED}


class Case(NamedTuple):
    """A trace, settings, and how both runs end."""

    rows: list[dict[str, Any]]
    settings: dict[str, Any]
    outcome: str = "finished"
    rejected: tuple[int, ...] = ()
    """Requests that do not complete."""
    header: dict[str, Any] = {}  # noqa: RUF012 - never changed


def row(arrival_s: float, length: int, output: int, **more: Any) -> dict[str, Any]:
    return {"arrival_s": arrival_s, "input_length": length, "output_length": output, **more}


CASES = {
    "the last chunk never gets its block": Case(
        [row(0, 58, 9)],
        TINY
        | CHUNKED
        | {"block_size": 8, "num_gpu_blocks_override": 8, "max_model_len": 60}
        | {"max_num_batched_tokens": 16, "max_num_seqs": 8},
        "livelock",
    ),
    "the last chunk never gets its block, one request at a time": Case(
        [row(0.4, 58, 9)],
        TINY
        | CHUNKED
        | {"block_size": 8, "num_gpu_blocks_override": 8, "max_model_len": 60}
        | {"max_num_batched_tokens": 16, "max_num_seqs": 1},
        "livelock",
    ),
    "who lingers has left": Case(
        [row(0.2, 47, 3), row(0.5, 1, 1)],
        TINY | {"block_size": 16, "num_gpu_blocks_override": 4, "max_model_len": 50},
    ),
    "preempted and admitted at one instant": Case(
        [row(0, 1, 50), row(0, 1, 50), row(0.14781312, 1, 15)],
        TINY | {"block_size": 7, "num_gpu_blocks_override": 14, "max_model_len": 98},
    ),
    "a prompt is too long while another is in chunks": Case(
        [row(0, 1, 90), row(0.1, 60, 1), row(0.102, 200, 1), row(0.103, 80, 20)],
        TINY
        | CHUNKED
        | {"block_size": 1, "num_gpu_blocks_override": 160, "max_model_len": 150}
        | {"max_num_batched_tokens": 32, "max_num_seqs": 8},
        rejected=(2,),
    ),
    "a prompt is too long for its reservation": Case(
        [row(0, 90, 1)],
        TINY
        | CHUNKED
        | {"block_manager": "contiguous", "max_model_len": 60, "block_size": 16}
        | {"num_gpu_blocks_override": 16, "max_num_batched_tokens": 32, "max_num_seqs": 8},
        rejected=(0,),
    ),
}

RECORDED = {
    "livelock-undetected/t.jsonl": (
        NARROW | {"max_num_batched_tokens": 64, "max_num_seqs": 8},
        "livelock",
    ),
    "livelock-undetected/t2.jsonl": (
        CHUNKED | {"num_gpu_blocks_override": 250, "max_model_len": 4_000, "watermark": 0.0},
        "livelock",
    ),
    "livelock-undetected/t3.jsonl": (
        CHUNKED
        | {"num_gpu_blocks_override": 64, "max_model_len": 1_024, "max_num_batched_tokens": 512},
        "livelock",
    ),
    "hang-2/trace.jsonl": (None, "livelock"),
    "keyerror-two-requests/t.jsonl": (
        {"num_gpu_blocks_override": 4, "max_model_len": 50},
        "finished",
    ),
    "twin-chunked-overlong-prompt/trace.jsonl": (None, "finished"),
    "twin-transition-order/trace.jsonl": (None, "finished"),
    "contiguous-overlong/t.jsonl": (
        CHUNKED | {"block_manager": "contiguous", "max_model_len": 947},
        "finished",
    ),
    "assertion-2/trace.jsonl": (None, "finished"),
}
"""File of ../shared/repro -> its settings (None: its config.json), and how both runs end."""


def run_both(path: Path, settings: dict[str, Any], outcome: str) -> Result:
    """Both runs of the trace, which are equal and end as they should."""
    both = assert_equal_runs(str(path), OLD | settings, path.name, limit_s=4)
    assert both.kind == outcome
    assert both.result is not None
    return both.result


@pytest.mark.parametrize("name", CASES)
def test_small_runs_that_went_wrong(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    path = tmp_path / "trace.jsonl"
    lines = [{"kvsim_trace": 1, **case.header}, *case.rows]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    result = run_both(path, case.settings, case.outcome)
    if case.outcome == "finished":
        status = result.requests["status"]
        found = [index for index, each in enumerate(status) if each == "rejected"]
        assert found == list(case.rejected)


@needs_shared("repro")
@pytest.mark.parametrize("name", RECORDED)
def test_recorded_runs_that_went_wrong(name: str) -> None:
    path = SHARED / "repro" / name
    settings, outcome = RECORDED[name]
    if settings is None:
        settings = json.loads((path.parent / "config.json").read_text())
    result = run_both(path, settings, outcome)
    if path.parent.name in ("contiguous-overlong", "assertion-2"):
        assert result.requests["status"] == ["rejected"]

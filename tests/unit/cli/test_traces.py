"""Traces on the command line: any format, tables, shipped names, files without arrivals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import run_here

PROMPTS = '{"prompt":"What is a KV cache?","output_tokens":9}\n' * 5
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,500,100\n0.75,501,101\n"
AT_ONCE = "note: the trace has no arrival times: all requests are sent at once"


def kvsim(*arguments: str, cwd: Path, code: int = 0) -> tuple[str, str]:
    """Standard output and standard error of a command in a folder without traces."""
    result = run_here(arguments, cwd)
    assert result.returncode == code, result.stderr
    return result.stdout, result.stderr


def test_a_trace_without_arrivals_runs_as_at_an_infinite_rate(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text(PROMPTS)
    trace = ("--trace", "prompts")
    out, errors = kvsim("run", *trace, "--json", cwd=tmp_path)
    assert errors.count(AT_ONCE) == 1
    told, silent = kvsim("run", *trace, "--json", "--request-rate", "inf", cwd=tmp_path)
    assert AT_ONCE not in silent
    one, other = json.loads(out), json.loads(told)
    del one["meta"], other["meta"]
    assert one == other


def test_a_sweep_over_a_trace_without_arrivals_says_so_and_runs(tmp_path: Path) -> None:
    load = ("--trace", "burst", "--num-prompts", "20", "--jobs", "1")
    command = ("sweep", *load, "--grid", "max_num_seqs=4,8")
    out, errors = kvsim(*command, "--out", "swept", cwd=tmp_path)
    assert errors.count(AT_ONCE) == 1
    assert "refused" not in out
    for path in (tmp_path / "swept").rglob("*.json"):
        assert '"refused"' not in path.read_text()
    _, errors = kvsim(*command, "--request-rate", "5", "--out", "timed", cwd=tmp_path)
    assert AT_ONCE not in errors


@pytest.mark.parametrize("name", ["chat", "api", "agents", "burst"])
def test_shipped_traces_are_found_from_anywhere(name: str, tmp_path: Path) -> None:
    out, _ = kvsim("trace", "check", name, cwd=tmp_path)
    assert out.startswith(f"{name}: native, ")
    (tmp_path / name).write_text(VIDUR)
    out, _ = kvsim("trace", "check", name, cwd=tmp_path)
    assert out.startswith(f"{name}: vidur, 2 requests")


def test_a_name_that_is_no_trace_lists_those_that_are(tmp_path: Path) -> None:
    _, errors = kvsim("trace", "check", "chta", cwd=tmp_path, code=2)
    assert errors == (
        "kvsim: chta: no such file; did you mean 'chat'? give the path of a trace, or one of"
        " agents, api, burst, chat\n"
    )


def test_check_names_all_faults_and_exits_with_2(tmp_path: Path) -> None:
    lines = ['{"kvsim_trace":1}', '{"input_length":0,"output_length":1}', '{"input_length":1}']
    (tmp_path / "x").write_text("\n".join(lines))
    out, errors = kvsim("trace", "check", "x", cwd=tmp_path, code=2)
    assert not out
    assert [line.split(": ")[:3] for line in errors.splitlines()] == [
        ["kvsim", "x:2", "input_length"],
        ["kvsim", "x:3", "output_length"],
    ]


def test_columns_reach_every_command_that_takes_a_trace(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("ts,a,b\n100,20,3\n0,20,3\n")
    columns = ("--columns", "arrival_ms=ts,input=a,output=b")
    out, errors = kvsim("run", "--trace", "t.csv", *columns, "--json", cwd=tmp_path)
    assert json.loads(out)["completed"] == 2
    assert "sorted (1 of 2 requests)" in errors
    out, _ = kvsim("trace", "info", "t.csv", *columns, cwd=tmp_path)
    assert "2 over 0.1 s" in out
    kvsim("trace", "convert", "t.csv", "native.jsonl", *columns, cwd=tmp_path)
    assert "sorted" in (tmp_path / "native.jsonl").read_text()
    for command in ("compare", "sweep", "size", "validate"):
        out, _ = kvsim(command, "--help", cwd=tmp_path)
        assert "--columns" in out
    _, errors = kvsim("run", "--trace", "t.csv", cwd=tmp_path, code=2)
    assert "--columns arrival_s=ts,input=COLUMN,output=COLUMN" in errors
    assert errors.count("\n") == 1

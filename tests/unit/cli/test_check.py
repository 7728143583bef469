"""`kvsim check` from a benchmark's result to its page, its record and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from served import bench_result, serve, write

from kvsim.against.matched import Change
from kvsim.cli import main

OPTIONS = ["--hardware", "h100", "--no-async-scheduling", "--max-model-len", "4096"]


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A result of a machine that is 10 % slower than the profile says."""
    return write(tmp_path_factory.mktemp("bench"), bench_result(serve(Change(1.1, 1.1))))


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["check", *arguments])
    return int(end.value.code or 0)


def test_a_slow_server_in_one_command(
    slow: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user's own result says model, arrivals and times; the GPU is a flag."""
    code = run(slow, *OPTIONS, "--tolerance", "0.05", "--out", str(tmp_path))
    shown = " ".join(capsys.readouterr().out.split())
    assert code == 3
    assert "Correct first: every step takes 1." in shown
    assert "beyond the tolerance of 5.0 %" in shown
    record = json.loads((tmp_path / "check.json").read_text())
    assert record["schema"] == "kvsim.against.check/1"
    assert record["meta"]["model"] == "llama-3.1-8b"
    assert record["corrections"][0]["value"] == pytest.approx(1.1, rel=0.02)
    page = (tmp_path / "check.html").read_text()
    for text in ("TTFT p99", "Where the difference comes from", "scatter-e2el", "Correct first"):
        assert text in page


def test_within_the_tolerance_the_exit_code_is_0(
    slow: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(slow, *OPTIONS, "--tolerance", "0.5", "--no-corrections", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["passed"]
    assert record["corrections"] == []


def test_settings_of_a_server_count(slow: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = "vllm serve Qwen/Qwen2.5-7B-Instruct --max-num-seqs 4 --max-model-len 4096"
    run(slow, "--hardware", "h100", "--vllm", command, "--no-corrections", "--json")
    record = json.loads(capsys.readouterr().out)
    assert record["meta"]["model"] == "qwen2.5-7b-instruct"
    assert record["meta"]["config"]["max_num_seqs"] == 4


def test_nobody_said_which_gpu(slow: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(slow, "--no-corrections") == 0
    assert "Nobody said which hardware was measured" in capsys.readouterr().out


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("chat") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no measured times" in captured.err


def test_a_first_token_after_the_last_one_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "measured.csv"
    path.write_text("arrival_s,input,output,ttft_s,e2e_s\n0,100,20,0.1,0.3\n1,100,20,0.5,0.3\n")
    assert run(str(path), "--model", "llama-3-8b") == 2
    told = "observed.ttft_s of request 1: 0.5 s is above its observed.e2e_s, 0.3 s; fix them"
    assert capsys.readouterr().err.splitlines()[-1] == f"kvsim: {path}: {told}"

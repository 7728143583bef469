"""`calibrate` and `profile fit` hand over to the measuring process, and return its exit code."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from kvsim.cli import main


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Commands that would be started; the first item decides their exit code."""
    found: list[Any] = [0]

    def run(command: list[str], env: dict[str, str], check: bool) -> Any:
        found.append((command, env))
        return subprocess.CompletedProcess(command, found[0])

    monkeypatch.setattr(subprocess, "run", run)
    return found


def code_of(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code


def test_everything_given_is_passed_on(started: list[Any]) -> None:
    sizes = ["--block-size", "16", "--block-size", "32"]
    given = ["--device", "cpu", *sizes, "--limit-s", "90", "--max-num-seqs", "8"]
    assert code_of("calibrate", "--model", "small", "--out", "a.json", *given) == 0
    command, environment = started[1]
    assert command[:3] == [sys.executable, "-m", "kvsim_kernels.calibrate"]
    options = " ".join(command[3:])
    assert f"--model {ROOT}/configs/models/small.toml --device cpu" in options
    assert "--block-size 16 32" in options and options.endswith("--out a.json")
    assert "--limit-s 90.0" in options and "--max-num-seqs 8" in options
    assert "--max-model-len" not in options
    assert environment["PYTHONPATH"].startswith(f"{ROOT}/kernels:")


@pytest.mark.parametrize(("code", "returned"), [(0, 0), (1, 1), (2, 2), (-9, 1)])
def test_the_exit_code_is_passed_back(started: list[Any], code: int, returned: int) -> None:
    started[0] = code
    assert code_of("profile", "fit", "a.jsonl", "b.jsonl", "--out", "a.json") == returned
    assert started[1][0][3:] == ["--fit", "a.jsonl", "b.jsonl", "--out", "a.json"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "lama-3-8b"], "did you mean 'llama-3-8b'"),
        (["--model", "CONFIG"], "calibrate takes a TOML as in configs/models"),
        (["--block-size", "0"], "'--block-size'"),
        (["--limit-s", "soon"], "'--limit-s'"),
    ],
)
def test_bad_input_is_one_line(
    started: list[Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    given = [str(config) if word == "CONFIG" else word for word in arguments]
    assert code_of("calibrate", "--out", str(tmp_path / "a.json"), *given) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert len(started) == 1

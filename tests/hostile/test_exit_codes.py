"""Every exit code of `docs/reference/exit-codes.md`; those of signals: `test_kills.py`,
of a tolerance: `tests/unit/against/check`."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hostile.damage import outcome
from places import ROOT

TRACE = ["--trace", str(ROOT / "traces" / "chat.jsonl"), "--num-prompts", "3"]


def test_the_reference_lists_what_is_tested() -> None:
    text = (ROOT / "docs" / "reference" / "exit-codes.md").read_text()
    assert re.findall(r"^\| (\d+) ", text, re.M) == [*"0123", "129", "130", "141", "143"]


def test_done(tmp_path: Path) -> None:
    assert outcome(["run", *TRACE]) == (0, "")


def test_an_engine_that_stops_is_an_outcome(tmp_path: Path) -> None:
    small = ["--engine", "vllm-0.6.3", "--num-gpu-blocks-override", "40", "--max-model-len", "640"]
    swap = ["--num-cpu-blocks-override", "0", "--preemption-mode", "swap", "--request-rate", "inf"]
    assert outcome(["run", *TRACE[:2], *small, *swap])[0] == 0


def test_logs_that_differ(tmp_path: Path) -> None:
    for seqs in ("1", "2"):
        log = ["--step-log", str(tmp_path / seqs), "--max-num-seqs", seqs]
        assert outcome(["run", *TRACE, *log, "--request-rate", "inf"])[0] == 0
    assert outcome(["conform", "--against", str(tmp_path / "1"), str(tmp_path / "1")])[0] == 0
    assert outcome(["conform", "--against", str(tmp_path / "1"), str(tmp_path / "2")])[0] == 1


@pytest.mark.parametrize("arguments", [["runn"], ["run", "--trace", "/nowhere"]])
def test_bad_input(arguments: list[str]) -> None:
    assert outcome(arguments)[0] == 2


def test_a_reader_that_stops() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        result = subprocess.run(
            [sys.executable, "-m", "kvsim", "policies"],
            stdout=closed,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=False,
        )
    assert (result.returncode, result.stderr) == (141, b"")


@pytest.mark.parametrize("words", [["policies"], ["run", *TRACE, "--out", "run"], [], ["runn"]])
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_nobody_reads_a_stream_that_is_closed(
    words: list[str], closed: str, tmp_path: Path
) -> None:
    command = shlex.join([sys.executable, "-m", "kvsim", *words])
    done = subprocess.run(
        f"{command} {closed}",
        shell=True,
        capture_output=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == (2 if words == ["runn"] else 0), done.stderr
    assert b"Traceback" not in done.stderr
    assert (tmp_path / "run" / "summary.json").exists() == ("--out" in words)

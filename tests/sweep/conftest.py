"""A small load under pressure, and the command line in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvsim.workload.lengths import Lengths, synthesise_lengths
from kvsim.workload.native import write

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def load():
    """20 requests without content; 60 blocks of 16 tokens put them under pressure."""
    return synthesise_lengths(Lengths(60), Lengths(40), 3, range_ratio=0.4, requests=20)


@pytest.fixture
def folder(tmp_path, load):
    """A working folder with `load.jsonl` and `base.toml`."""
    write(load, str(tmp_path / "load.jsonl"))
    (tmp_path / "base.toml").write_text(
        "request_rate = 50.0\nmax_model_len = 256\nnum_gpu_blocks_override = 60\n"
    )
    return tmp_path


@pytest.fixture
def environment():
    """Variables of a process that runs the command line."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture
def kvsim(folder, environment):
    """Run the command line in the folder."""

    def run(*arguments, check=True):
        result = subprocess.run(
            [sys.executable, "-m", "kvsim", *arguments],
            capture_output=True,
            text=True,
            cwd=folder,
            env=environment,
            timeout=120,
            check=False,
        )
        if check:
            assert result.returncode == 0, result.stderr
        return result

    return run

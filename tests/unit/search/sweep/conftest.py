"""A small load under pressure, and the command line in its folder."""

import os

import pytest
from command import run_here
from places import ROOT

from kvsim.workload.native import write
from kvsim.workload.spec import Workload, make_trace


@pytest.fixture(scope="session")
def load():
    """20 requests without content; 60 blocks of 16 tokens put them under pressure."""
    return make_trace(
        Workload("random", requests=20, input_len=60, output_len=40, range_ratio=0.4), 3
    )


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
def kvsim(folder):
    """Run the command line in the folder."""

    def run(*arguments, check=True):
        result = run_here(arguments, folder)
        if check:
            assert result.returncode == 0, result.stderr
        return result

    return run

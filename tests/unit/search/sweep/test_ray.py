"""A sweep on a Ray cluster of this machine gives the bytes of a local one."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
from marks import long

pytestmark = pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is not installed: pip install 'kvsim[ray]'"
)

SPACE = [
    *["--trace", "load.jsonl", "--base", "base.toml", "--seeds", "2"],
    *["--grid", "watermark=0,0.1", "--grid", "num_gpu_blocks_override=10,40"],
]


@pytest.fixture
def kvsim(folder, environment):
    """Run the command line in a process of its own, which Ray ends with."""

    def run(*arguments, check=True):
        command = [sys.executable, "-m", "kvsim", *arguments]
        result = subprocess.run(
            command, capture_output=True, text=True, cwd=folder, env=environment, timeout=120
        )
        if check:
            assert result.returncode == 0, result.stderr
        return result

    return run


@long
def test_on_ray_as_in_local_processes(kvsim, folder):
    kvsim("sweep", *SPACE, "--out", "local", "--jobs", "1")
    kvsim("sweep", *SPACE, "--shard", "1/4", "--out", "ray", "--jobs", "1")
    result = kvsim("sweep", *SPACE, "--out", "ray", "--backend", "ray", "--jobs", "1")
    assert "6 runs made, 2 already there" in result.stderr
    for name in ("sweep.json", "sweep.parquet", "sweep.html"):
        assert (folder / "ray" / name).read_bytes() == (folder / "local" / name).read_bytes()


def test_a_cluster_that_is_not_there_is_one_line(kvsim):
    nowhere = ["--backend", "ray", "--ray-address", "127.0.0.1:1"]
    result = kvsim("sweep", *SPACE, *nowhere, "--out", "ray", check=False)
    assert result.returncode == 2
    assert "127.0.0.1:1: no connection" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1

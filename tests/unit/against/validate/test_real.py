"""Calibrate, validate, draw: the whole way on a CPU, with a toy model under real pressure.

Counts and equalities are asserted. Errors are asked to be numbers, not to be small: a machine that
does other things at the same time is no place to judge them.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from marks import long
from places import ROOT
from small import write_trace

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = long

POLICIES = ("recompute", "swap", "prefix-caching")
SIZES = ("--max-num-seqs", "8", "--max-num-batched-tokens", "192")
POOLS = ("--num-gpu-blocks-override", "26", "--num-cpu-blocks-override", "40")


def python(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """A command of the checkout, in a process of its own; `settings` of its environment."""
    paths = [str(ROOT), str(ROOT / "kernels"), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **settings}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True, text=True, env=environment, check=False, cwd=ROOT,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real")


@pytest.fixture(scope="module")
def profile(folder: Path) -> Path:
    """Made by `kvsim calibrate` here and now. Exit code 1: measured, but not trusted."""
    path = folder / "profile.json"
    done = python(
        "-m", "kvsim", "calibrate", "--device", "cpu", "--model", "tiny", "--out", str(path),
        *SIZES, "--max-model-len", "192",
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    return path


@pytest.fixture(scope="module")
def trace(folder: Path) -> Path:
    return write_trace(folder, requests=24)


@pytest.fixture(scope="module")
def validated(folder: Path, profile: Path, trace: Path) -> Path:
    out = folder / "out"
    done = python(
        "-m", "kvsim", "validate", "--device", "cpu", "--profile", str(profile),
        "--trace", str(trace), "--out", str(out), *SIZES, *POOLS, "--request-rate", "inf",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "All steps" in done.stdout
    return out


@pytest.fixture(scope="module")
def result(validated: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((validated / "validation.json").read_text())
    return found


def test_every_policy_was_under_pressure(result: dict[str, Any]) -> None:
    assert [policy["name"] for policy in result["policies"]] == list(POLICIES)
    recompute, swap, prefix = (policy["counts"] for policy in result["policies"])
    for side in ("real", "repeat", "simulated"):
        assert recompute["preemptions"][side] > 0
        assert recompute["recomputed_tokens"][side] > 0
        assert swap["swapped_out_blocks"][side] == swap["swapped_in_blocks"][side] > 0
        assert prefix["hit_tokens"][side] > 0


def test_all_at_once_leaves_nothing_to_chance(result: dict[str, Any]) -> None:
    """With every request there from the start, step times decide nothing: counts are equal."""
    for policy in result["policies"]:
        for name in ("preemptions", "swapped_out_blocks", "hit_tokens", "steps"):
            assert len(set(policy["counts"][name].values())) == 1, (policy["name"], name)


def test_every_figure_is_a_number(result: dict[str, Any]) -> None:
    for policy in result["policies"]:
        judged = [policy["steps"]["all"]]
        judged += [policy["copies"]] if policy["name"] == "swap" else []
        for part in judged:
            for figures in (part["prediction"], part["noise"]):
                assert all(math.isfinite(value) for value in figures.values())
        for latency in policy["requests"].values():
            for figures in latency.values():
                assert all(math.isfinite(value) for value in figures.values())
                assert figures["real"] > 0
        assert all(us > 0 for us in policy["points"]["measured_us"])
        assert len(policy["points"]["measured_us"]) == policy["steps"]["count"]


def test_the_page_can_be_drawn_again(validated: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.html"
    source = str(validated / "validation.json")
    done = python("-m", "kvsim", "validate", "--from", source, "--html", str(again))
    assert done.returncode == 0, done.stderr
    assert again.read_bytes() == (validated / "validation.html").read_bytes()


def test_a_recording_is_compared_without_an_engine(
    validated: Path, profile: Path, tmp_path: Path
) -> None:
    done = python(
        "-m", "kvsim", "validate", "--from", str(validated / "recording.json"),
        "--profile", str(profile), "--out", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "validation.json").read_bytes() == (
        validated / "validation.json"
    ).read_bytes()


def test_measuring_does_without_the_libraries_of_the_simulator(
    validated: Path, profile: Path, trace: Path, tmp_path: Path
) -> None:
    """As on a machine that has torch, numpy and xxhash, and none of `bare.ABSENT`."""
    from kvsim_kernels.provenance import ALLOCATOR

    setup, out = tmp_path / "setup.json", tmp_path / "recording.json"
    prepared = python(
        "-m", "kvsim", "validate", "--prepare", str(setup), "--trace", str(trace),
        "--policies", "swap", "--model", "tiny", "--dtype", "float32", "--block-size", "16",
        *SIZES, *POOLS, "--request-rate", "inf",
    )  # fmt: skip
    assert prepared.returncode == 0, prepared.stderr
    done = python(
        str(Path(__file__).with_name("bare.py")), "kvsim.against.validate", str(setup),
        "--profile", str(profile), "--device", "cpu", "--out", str(out),
        # With these it does not start anew, which would bring the libraries back.
        **ALLOCATOR, OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    bare = json.loads(out.read_text())["policies"][0]
    full = json.loads((validated / "recording.json").read_text())["policies"][1]
    assert len(bare["real"]["step_ns"]) == len(full["real"]["step_ns"])
    assert len(bare["real"]["swap_ns"]) == len(full["real"]["swap_ns"]) > 0

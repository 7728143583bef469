"""The command itself: in a bare process, end to end on CPU, and against bad input."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from batches import DEVICE, torch
from kvsim_kernels import provenance
from kvsim_kernels.calibrate import main
from kvsim_kernels.rows import read_rows
from marks import long
from places import ROOT

BLOCKED = ("simpy", "plotly", "msgspec", "pyarrow", "rich", "typer", "pandas", "scipy", "kvsim")

PROGRAM = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} must not be imported")
sys.meta_path.insert(0, Blocker())
from kvsim_kernels.calibrate import main
from kvsim_kernels.timing import CpuClock
CpuClock.rounds = CpuClock.fewest = CpuClock.most = 2  # Times need not be good here.
main(sys.argv[1:])
"""
EXPERTS = """
[experts]
num_experts = 8
num_experts_per_tok = 2
moe_intermediate_size = 96
"""
SMALLEST = ["--max-num-seqs", "2", "--max-num-batched-tokens", "32", "--max-model-len", "128"]


def calibrate(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command where nothing but torch and numpy may be imported."""
    settings = {**provenance.ALLOCATOR, "OMP_NUM_THREADS": "1"}
    kernels = str(ROOT / "kernels")
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(blocked=BLOCKED), *arguments],
        env={**os.environ, **settings, "PYTHONPATH": kernels},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration of the tiny model as a mixture of experts, stopped once on its way; beside it,
    all-reduces between two processes."""
    folder = tmp_path_factory.mktemp("made")
    model, out = folder / "mixture.toml", folder / "tiny.json"
    model.write_text((ROOT / "configs" / "models" / "tiny.toml").read_text() + EXPERTS)
    arguments = ["--model", str(model), "--device", "cpu", "--out", str(out), *SMALLEST]
    arguments += ["--all-reduce-gpus", "2"]
    stopped = calibrate(*arguments, "--limit-s", "1")
    assert stopped.returncode == 1
    assert "the same command goes on from here" in stopped.stderr
    assert not out.exists()
    done = calibrate(*arguments)
    assert done.returncode in (0, 1), done.stderr
    assert f"written to {out}" in done.stdout
    assert ("NOT trusted" in done.stdout) == bool(done.returncode)
    return out


@long
def test_a_calibration_says_what_it_measured_and_how_well(made: Path) -> None:
    profile = json.loads(made.read_text())
    assert profile["model"]["name"] == "tiny" and profile["model"]["dtype"] == "float32"
    assert profile["engine"]["block_size"] == 16
    assert profile["software"]["environment"] == provenance.ALLOCATOR
    assert profile["error"]["step"]["points"] == 32
    assert profile["error"]["trusted"] == (not profile["error"]["why"])
    assert {row["split"] for row in profile["rows"]} >= {"fit", "held_out", "start", "end"}
    assert all(us > 0 for line in profile["fit"]["decode_v2"]["us"] for us in line)


@long
def test_a_calibration_measures_every_term(made: Path) -> None:
    profile = json.loads(made.read_text())
    fit, error = profile["fit"], profile["error"]
    assert 0 <= fit["tail"]["share_ns"] <= fit["tail"]["alone_ns"]
    assert fit["all_reduce"]["gpus"] == 2
    assert fit["all_reduce"]["bandwidth_gb_s"] > 0
    assert profile["model"]["experts"]["num_experts"] == fit["experts"]["active"][-1] == 8
    assert all(error[part]["points"] > 2 for part in ("uneven", "experts", "all_reduce"))
    assert set(profile["terms"]) == {"uneven batches", "all-reduce"}


@long
def test_rows_of_a_sweep_are_measured_once(made: Path) -> None:
    _, rows = read_rows(made.with_suffix(".16.rows.jsonl"))
    kept = [json.dumps([r[k] for k in ("kernel", "method", "split", "shape", "round")])
            for r in rows if "session" not in r]  # fmt: skip
    assert len(set(kept)) == len(kept)
    assert {row["session"] for row in rows if row["kernel"] == "session"} == {0, 1}


@long
def test_fitting_the_rows_again_makes_the_same_bytes(made: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.json"
    done = calibrate("--fit", str(made.with_suffix(".16.rows.jsonl")), "--out", str(again))
    assert done.returncode in (0, 1), done.stderr
    assert again.read_bytes() == made.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "nope", "--device", "cpu"], "no model named 'nope'; give one of "),
        (["--model", "tiny", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["--device", "cpu", "--out", "/nowhere/p.json"], "/nowhere: no such folder"),
        (["--model", "tiny", "--device", "cpu", "--max-num-seqs", "1"], "--max-num-seqs: 1 leaves"),
        (["--model", "tiny", "--device", "cpu", "--block-size", "0"], "0 is not above 0"),
        (["--fit", "none.jsonl"], "none.jsonl: cannot be read: No such file"),
        pytest.param(
            ["--model", "tiny", "--device", "cuda"],
            "--device cuda: torch sees no GPU here; use --device cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (
        provenance.ALLOCATOR | {"OMP_NUM_THREADS": "1"}
    ).items():  # or else it starts anew
        monkeypatch.setenv(name, value)
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "p.json")]
    with pytest.raises(SystemExit) as stop:
        main([*arguments, *out])
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert words in said
    assert said.startswith("kvsim: ") and said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_without_torch_the_remedy_is_named(tmp_path: Path) -> None:
    program = "import importlib.util, sys; importlib.util.find_spec = lambda name: None\n"
    program += "from kvsim_kernels.calibrate import main; main(sys.argv[1:])"
    arguments = ["--model", "tiny", "--device", "cpu", "--out", str(tmp_path / "p.json")]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "kernels")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == 'kvsim: torch is not installed; pip install "kvsim[kernels]"\n'


def test_timed_code_is_told_by_its_digest() -> None:
    assert DEVICE in ("cpu", "cuda")
    assert len(provenance.digest()) == 12
    missing = [n for n in provenance.TIMED if not (ROOT / f"kernels/kvsim_kernels/{n}.py").exists()]
    assert missing == []

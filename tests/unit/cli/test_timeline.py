"""`kvsim timeline` and `kvsim run --block-map` as a user runs them."""

import gzip
import json
from pathlib import Path
from subprocess import CompletedProcess

import pyarrow.parquet as pq
import pytest
from command import run_here
from marks import long
from places import ROOT

from kvsim.report.tracks import STEP_TRACK

SHORT = ["--trace", str(ROOT / "traces" / "chat.jsonl"), "--num-prompts", "120"]
SHORT += ["--num-gpu-blocks-override", "700", "--engine", "vllm-v1"]


def kvsim(*arguments: str) -> CompletedProcess[str]:
    return run_here(arguments, columns=150)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("timeline") / "run"
    done = kvsim("run", *SHORT, "--block-map", "--out", str(folder))
    assert done.returncode == 0, done.stderr
    return folder


def test_a_run_becomes_a_trace_plain_or_packed(run: Path, tmp_path: Path) -> None:
    for name in ("all.json", "all.json.gz"):
        written = kvsim("timeline", str(run), "--out", str(tmp_path / name))
        assert written.returncode == 0, written.stderr
        assert written.stdout.strip() == str(tmp_path / name)
    plain = (tmp_path / "all.json").read_bytes()
    assert gzip.decompress((tmp_path / "all.json.gz").read_bytes()) == plain
    steps = pq.read_metadata(run / "steps.parquet").num_rows
    listed = json.loads(plain)["traceEvents"]
    assert sum(e["ph"] == "X" and (e["pid"], e["tid"]) == STEP_TRACK for e in listed) == steps
    part = tmp_path / "part.json"
    window = ["--from", "5", "--to", "6.5", "--request", "57", "--request", "58"]
    assert kvsim("timeline", str(run), "--out", str(part), *window).returncode == 0
    few = json.loads(part.read_text())["traceEvents"]
    assert 0 < len(few) < len(listed)
    assert all(5e6 <= e["ts"] <= 6.5e6 for e in few if "ts" in e)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "/proc/none/t.json"], "cannot be written"),
        (["--out", "t.json", "--request", "5777"], "no '5777' among 120"),
        (["--out", "t.json", "--from", "7", "--to", "3"], "nothing lies between 7 s and 3 s"),
        (["--out", "t.json", "--from", "nan"], "--from: nan is not a number"),
        ([], "nothing to write; give --out"),
    ],
)
def test_what_cannot_be_written_is_one_line(run: Path, arguments: list[str], words: str) -> None:
    told = kvsim("timeline", str(run), *arguments)
    assert told.returncode == 2
    assert told.stderr.count("\n") == 1
    assert words in told.stderr.replace("\u00a0", " ")


def test_a_folder_that_is_no_run_is_one_line(tmp_path: Path) -> None:
    told = kvsim("timeline", str(tmp_path), "--out", str(tmp_path / "t.json"))
    assert told.returncode == 2
    assert "summary.json" in told.stderr
    assert not (tmp_path / "t.json").exists()


def test_the_map_of_a_run_is_on_its_page_and_stays_there(run: Path) -> None:
    page = (run / "report.html").read_text()
    assert 'id="block-map-data"' in page
    assert kvsim("report", str(run)).returncode == 0
    assert (run / "report.html").read_text() == page


@long
def test_a_map_changes_nothing_else(run: Path, tmp_path: Path) -> None:
    """Nor does a step log beside it."""
    log = tmp_path / "log.jsonl"
    both = kvsim(
        "run", *SHORT, "--block-map", "--step-log", str(log), "--no-report", "--out", str(tmp_path)
    )
    assert both.returncode == 0, both.stderr
    plain = kvsim("run", *SHORT, "--no-report", "--out", str(tmp_path / "plain"))
    assert plain.returncode == 0
    assert log.read_text().count("\n") > 100
    for name in ("requests.parquet", "steps.parquet", "transitions.parquet"):
        assert (tmp_path / name).read_bytes() == (run / name).read_bytes()
        assert (tmp_path / "plain" / name).read_bytes() == (run / name).read_bytes()
    assert (tmp_path / "block_map.parquet").read_bytes() == (run / "block_map.parquet").read_bytes()


def test_a_map_that_cannot_be_made_is_one_line() -> None:
    told = kvsim("run", *SHORT, "--block-map")
    assert told.returncode == 2
    assert told.stderr.count("\n") == 1
    assert "--block-map: needs --out DIR" in told.stderr

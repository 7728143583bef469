"""`kvsim bench` as a user meets it."""

import json
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import msgspec
import pytest
from marks import long

from kvsim.against import bench as measure
from kvsim.against.bench import columns_of
from kvsim.against.bench_workloads import DEFAULT, SETTINGS, WORKLOADS, Lengths, named, poisson
from kvsim.cli import main
from kvsim.errors import ConfigError

NAME = "decode-1"
CASE = "--workload", NAME, "--settings", "constant"


def kvsim(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["bench", *arguments])
    return int(end.value.code or 0), *capsys.readouterr()


@long
def test_a_stored_run_can_be_compared_with(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, _ = kvsim(capsys, *CASE, "--repeats", "2", "--json")
    assert code == 0
    row, *others = json.loads(out)["rows"]
    assert (row["workload"], row["settings"], len(row["runs"]), others) == (NAME, "constant", 2, [])
    path = tmp_path / "then.json"
    path.write_text(out)
    code, out, _ = kvsim(capsys, *CASE, "--repeats", "1", "--compare", str(path))
    assert code == 0
    for words in ("us/step", "CPU now / then"):
        assert words in out


def test_features_policies_and_fleets_are_compared_with_the_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each shipped case of the tables, on loads of a few requests and in this process."""
    monkeypatch.setattr(measure, "in_fresh_process", lambda function, *args: function(*args))
    for name in ("W1", "marked", "W2x", "fleet-1", "fleet-64"):
        make = partial(poisson, 30, 20, Lengths(50), Lengths(60))
        small = WORKLOADS[name]._replace(make=make, whole=False)
        monkeypatch.setitem(WORKLOADS, name, small._replace(replicas=min(small.replicas, 2)))
    asked = ("--settings", "feature", "--settings", "own", "--settings", "sglang")
    code, out, _ = kvsim(capsys, *asked, "--repeats", "1", "--json")
    assert code == 0
    measured = msgspec.json.decode(out, type=measure.Bench)
    steps = {(row.workload, row.settings): row.runs[0].steps for row in measured.rows}
    assert {case.settings for case in measure.over_base(measured)} == {
        *named("--settings", "feature", SETTINGS),
        *named("--settings", "own", SETTINGS),
    }
    assert steps["W2x", "own-scheduler"] == steps["W2x", "own-victim"] == steps["W2x", DEFAULT]
    assert steps["W2x", "own-price"] == steps["W2x", "constant"]
    code, out, _ = kvsim(capsys, "--workload", "fleet-64", "--repeats", "1")
    assert code == 0
    assert "over base" in out and "fleet-1" in out


@long
def test_the_parts_around_a_run_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = kvsim(capsys, "--workload", NAME, "--around")
    assert code == 0
    for part in ("kvsim --help", "trace", "imports", "summary", "files", "page"):
        assert part in out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--workload", "W22"], "--workload: unknown 'W22'; did you mean 'W2'? choose from "),
        (
            ["--workload", "conversation"],
            "bench: conversation-30000 needs Mooncake's conversation_trace.jsonl; give --trace",
        ),
        (
            ["--settings", "vlm-v1"],
            "--settings: unknown 'vlm-v1'; did you mean 'vllm-v1'? choose from",
        ),
        (["--compare", "none.json"], "none.json: cannot be read: No such file"),
        (
            ["--peer", "ai-simulate"],
            "--peer: unknown 'ai-simulate'; did you mean 'aisimulate'? choose",
        ),
        (
            ["--peer", "aisimulate", "--peer-python", "nowhere/python"],
            "--peer aisimulate: nowhere/python cannot import dynamo._core; give --peer",
        ),
        (["--repeats", "0"], "Invalid value for '--repeats'"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    code, out, errors = kvsim(capsys, *arguments)
    assert (code, out, errors.count("\n")) == (2, "", 1)
    assert errors.startswith(f"kvsim: {line}")


@long
def test_a_peer_runs_the_same_requests_in_turns(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A Python whose `dynamo._core` notes what it is asked for, and takes a while."""
    core = tmp_path / "dynamo" / "_core.py"
    core.parent.mkdir()
    core.write_text(
        "import json, pathlib\n"
        "def run_mocker_trace_replay(files, **asked):\n"
        "    asked['rows'] = len(pathlib.Path(files[0]).read_text().splitlines())\n"
        f"    pathlib.Path({str(tmp_path / 'asked.json')!r}).write_text(json.dumps(asked))\n"
        "    sum(range(10 ** 6))\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    code, out, _ = kvsim(
        capsys,
        *CASE,
        "--repeats",
        "1",
        "--peer",
        "aisimulate",
        "--peer-python",
        str(python),
        "--json",
    )
    (row,) = json.loads(out)["rows"]
    (peer,), (whole,) = row["peer"], row["whole"]
    assert code == 0
    assert 0 < peer["core_s"] < peer["whole"]["cpu_s"] and whole["cpu_s"] > 0
    asked = json.loads((tmp_path / "asked.json").read_text())
    engine = asked["extra_engine_args"]["engine"]
    assert (asked["rows"], asked["trace_block_size"]) == (1, 512)
    assert engine["enable_prefix_caching"] and engine["num_gpu_blocks"] == 1_000_000
    (tmp_path / "then.json").write_text(out)
    measured = measure.load(str(tmp_path / "then.json"))
    tables = [([head for head, _ in columns], len(rows)) for rows, columns in columns_of(measured)]
    assert [heads[0] for heads, rows in tables if rows][1:3] == ["CPU s", "kvsim run --out: CPU s"]


def test_without_unixs_accounts_bench_says_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.delitem(sys.modules, "kvsim.against.bench", raising=False)
    with pytest.raises(ConfigError, match="use WSL, Linux or macOS"):
        import_module("kvsim.against.bench")

"""KV events and metrics of a run that is over."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.support.command import run_here
from tests.unit.against.serve.test_kv_events import Index


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("again")
    settings = ["--num-gpu-blocks-override", "900", "--max-model-len", "8192", "--no-report"]
    done = run_here(["run", "chat", "--num-prompts", "60", *settings, "--out", "run"], out)
    assert done.returncode == 0, done.stderr
    return out


def test_metrics_of_each_interval(folder: Path) -> None:
    done = run_here(
        ["timeline", "run", "--openmetrics", "m.txt", "--interval", "5", "--start", "100"], folder
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "run" / "summary.json").read_text())
    lines = (folder / "m.txt").read_text().splitlines()
    stamps = sorted({float(line.split()[-1]) for line in lines if not line.startswith("#")})
    assert stamps[0] == 100 and stamps[1] == 105
    assert stamps[-1] == pytest.approx(100 + summary["meta"]["outcome"]["time_s"])
    generated = []
    for stamp in stamps:  # The parser of Python takes one scrape at a time.
        kept = [line for line in lines if line[0] == "#" or float(line.split()[-1]) == stamp]
        found = {each.name: each for each in text_string_to_metric_families("\n".join(kept) + "\n")}
        generated.append(found["vllm:generation_tokens"].samples[0].value)
    assert generated == sorted(generated) and generated[0] == 0
    assert generated[-1] == summary["total_output_tokens"]
    preempted = found["vllm:num_preemptions"].samples[0].value
    assert preempted == summary["num_preemptions"] > 0


def test_kv_events_as_lines_and_as_messages(folder: Path) -> None:
    for name in ("e.jsonl", "e.msgpack"):
        done = run_here(["timeline", "run", "--kv-events", name], folder)
        assert done.returncode == 0, done.stderr
    index = Index()
    lines = (folder / "e.jsonl").read_bytes().splitlines()
    batches = [msgspec.json.decode(line) for line in lines]
    for batch in batches:
        index.take(msgspec.msgpack.encode(batch))
    assert len(index.blocks) > 300 and any(
        event["type"] == "BlockRemoved" for batch in batches for event in batch[1]
    )
    unpacked = pytest.importorskip("msgpack").Unpacker(use_list=True)
    unpacked.feed((folder / "e.msgpack").read_bytes())
    assert [*unpacked] == batches


def test_a_run_of_requests_sent_at_once_is_replayed(tmp_path: Path) -> None:
    """Its summary has the infinite rate as a text."""
    settings = ["--request-rate", "inf", "--workload", "victims", "--out", "run"]
    done = run_here(["run", "api", "--num-prompts", "9", *settings], tmp_path)
    assert done.returncode == 0, done.stderr
    for command in (["timeline", "run", "--openmetrics", "m"], ["cache", "audit", "run"]):
        done = run_here(command, tmp_path)
        assert done.returncode == 0, done.stderr


def test_what_cannot_be_replayed_is_refused(folder: Path) -> None:
    assert "nothing to write" in run_here(["timeline", "run"], folder).stderr
    low = run_here(["timeline", "run", "--openmetrics", "m", "--interval", "0"], folder)
    assert low.returncode == 2 and "--interval" in low.stderr
    path = folder / "run" / "summary.json"
    kept = path.read_text()
    try:
        for key, value in (("format", "served"), ("sha256", "0")):
            summary = json.loads(kept)
            summary["meta"]["trace"][key] = value
            path.write_text(json.dumps(summary))
            done = run_here(["timeline", "run", "--openmetrics", "m"], folder)
            assert done.returncode == 2 and "timeline: " in done.stderr, done.stderr
    finally:
        path.write_text(kept)


def test_a_folder_of_somebody_else_runs_no_code(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(folder / "run", out)
    summary = json.loads((out / "summary.json").read_text())
    summary["meta"]["config"]["victim"] = "antigravity:fly"
    (out / "summary.json").write_text(json.dumps(summary))
    asked = ["timeline", "run", "--openmetrics", "m.txt"]
    refused = run_here(asked, tmp_path)
    assert refused.returncode == 2
    assert "'antigravity:fly', which is not of kvsim" in refused.stderr
    assert "antigravity" not in sys.modules
    known = run_here([*asked, "--trust", "antigravity:fly"], tmp_path)
    assert known.returncode == 2
    assert "fly" in known.stderr
    assert "not of kvsim" not in known.stderr

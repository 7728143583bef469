"""The commands as a user runs them: files, bytes, words."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command import run_here
from marks import long
from places import ROOT

CHAT = str(ROOT / "traces" / "chat.jsonl")
SHORT = ["--trace", CHAT, "--num-prompts", "250", "--num-gpu-blocks-override", "700"]


def kvsim(*arguments: str, cwd: Path, code: int = 0) -> str:
    result = run_here(arguments, cwd, columns=150)
    assert result.returncode == code, result.stderr
    return result.stdout


def in_a_process(*arguments: str, cwd: Path, seed: str = "0") -> str:
    """Another process, with its own hash seed and its own imports."""
    result = subprocess.run(
        [sys.executable, "-m", "kvsim", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONHASHSEED": seed,
        },
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("engine", [pytest.param("vllm-0.6.3", marks=long), "vllm-v1"])
def test_two_runs_write_the_same_bytes(engine: str, tmp_path: Path) -> None:
    """In two processes with other hash seeds and folders; the page and the tables, too."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder, seed in zip(folders, "17", strict=True):
        folder.mkdir()
        arguments = [*SHORT, "--engine", engine, "--enable-prefix-caching", "--csv"]
        in_a_process("run", *arguments, "--out", "result", "--seed", "5", cwd=folder, seed=seed)
    names = sorted(path.name for path in (folders[0] / "result").iterdir())
    assert names == [
        "report.html",
        "requests.csv",
        "requests.parquet",
        "steps.csv",
        "steps.parquet",
        "summary.json",
        "transitions.parquet",
    ]
    for name in names:
        one, two = ((folder / "result" / name).read_bytes() for folder in folders)
        assert one == two, name


def test_the_summary_has_the_keys_of_vllm_bench_serve_and_those_of_the_cache(
    tmp_path: Path,
) -> None:
    text = kvsim("run", *SHORT, "--json", "--goodput", "ttft:500", "tpot:50", cwd=tmp_path)
    summary = json.loads(text)
    assert summary["completed"] == 250
    assert 0 <= summary["request_goodput"] <= summary["request_throughput"]
    for key in (
        *["duration", "request_throughput", "output_throughput", "total_token_throughput"],
        *["mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p90_itl_ms"],
        *["p95_e2el_ms", "num_requests", "rejected", "num_preemptions", "recomputed_tokens"],
        *["swapped_out_blocks", "swapped_in_blocks", "kv_cache_usage_mean"],
        *["kv_cache_usage_max", "prefix_cache_query_tokens", "prefix_cache_hit_tokens"],
    ):
        assert key in summary, key
    meta = summary["meta"]
    assert meta["trace"]["sha256"] and meta["kvsim_version"] and meta["cost"]["source"]
    assert meta["config"]["block_size"] == 16


def test_a_page_is_rebuilt_from_its_folder(tmp_path: Path) -> None:
    kvsim("run", *SHORT, "--out", "result", cwd=tmp_path)
    page = tmp_path / "result" / "report.html"
    before = page.read_bytes()
    page.unlink()
    kvsim("report", "result", cwd=tmp_path)
    assert page.read_bytes() == before


def test_a_configuration_compared_with_itself_shows_no_difference(tmp_path: Path) -> None:
    shown = kvsim("compare", "naive", "naive", *SHORT, "--out", "both", cwd=tmp_path)
    assert "are the same configuration" in shown
    summaries = [
        json.loads((tmp_path / "both" / name / "summary.json").read_text())
        for name in ("naive", "naive-2")
    ]
    assert summaries[0] == summaries[1]
    assert (tmp_path / "both" / "comparison.html").stat().st_size > 100_000


@long
def test_step_logs_of_two_policies_part_at_a_named_decision(tmp_path: Path) -> None:
    for mode in ("recompute", "swap"):
        log = f"{mode}.steps.jsonl"
        kvsim(
            "run",
            *[*SHORT, "--num-prompts", "80", "--request-rate", "inf"],
            "--engine",
            "vllm-0.6.3",
            "--preemption-mode",
            mode,
            "--step-log",
            log,
            cwd=tmp_path,
        )
    same = kvsim("conform", "--against", *["swap.steps.jsonl"] * 2, cwd=tmp_path)
    assert same.startswith("identical: ")
    logs = ["recompute.steps.jsonl", "swap.steps.jsonl"]
    shown = kvsim("conform", "--against", *logs, cwd=tmp_path, code=1)
    assert "another victim, or another means of preemption" in shown


def test_an_own_scheduler_and_block_manager_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from kvsim.engines import Naive\n"
        "from kvsim.engines.vllm_063.scheduler import Vllm063\n"
        "class Scheduler(Vllm063):\n"
        "    def _admission(self, batch, request):\n"
        "        return super()._admission(batch, request)\n"
        "class Blocks(Naive):\n"
        "    pass\n"
    )
    text = in_a_process(
        *["run", *SHORT, "--engine", "mine:Scheduler", "--block-manager", "mine:Blocks", "--json"],
        cwd=tmp_path,
    )
    assert json.loads(text)["completed"] == 250


@pytest.mark.parametrize("kind", ["chat", "api", "agents"])
def test_a_trace_can_be_made_looked_at_and_converted(kind: str, tmp_path: Path) -> None:
    kvsim("trace", "synth", kind, "--requests", "60", "--out", "t.jsonl.gz", cwd=tmp_path)
    assert "60" in kvsim("trace", "info", "t.jsonl.gz", cwd=tmp_path)
    kvsim("trace", "convert", "t.jsonl.gz", "u.jsonl", cwd=tmp_path)
    one, two = (kvsim("trace", "info", name, cwd=tmp_path) for name in ("t.jsonl.gz", "u.jsonl"))
    assert one.split("\n")[1:] == two.split("\n")[1:]


def test_every_policy_is_listed_with_its_parameters(tmp_path: Path) -> None:
    shown = kvsim("policies", cwd=tmp_path)
    for word in (
        *["vllm-0.3.3", "vllm-0.6.3", "vllm-v1", "nano-vllm", "nano-vllm-2025-08"],
        *["naive", "prefix-caching", "contiguous", "constant", "roofline", "table"],
        *["--watermark", "--max-num-seqs", "recompute", "swap", "fcfs", "priority"],
    ):
        assert word in shown, word

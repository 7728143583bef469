"""Bad settings, flags and folders: one clear line, exit code 2, no traceback, nothing written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command import run_here
from places import ROOT

CHAT = str(ROOT / "traces" / "chat.jsonl")
OLD = ("--trace", CHAT, "--engine", "vllm-0.6.3")
CASES = [
    # flags: (arguments, words that the line must hold)
    (["run"], ["--trace"]),
    (["runn"], ["runn"]),
    (["run", "--trace", CHAT, "--blok-size", "16"], ["--blok-size", "--block-size"]),
    (["run", "--trace", CHAT, "--block-size", "0"], ["--block-size", ">= 1", "0"]),
    (["run", "--trace", CHAT, "--block-size", "-16"], ["--block-size", "-16"]),
    (["run", "--trace", CHAT, "--block-size", "16.5"], ["--block-size", "16.5"]),
    (
        ["run", "--trace", CHAT, "--block-size", "many"],
        ["--block-size", "expected `int`, got 'many'"],
    ),
    (["compare", "--trace", CHAT, "--margin", "nan"], ["--margin: nan is not a number"]),
    (
        ["size", "--trace", CHAT, "--find", "request_rate", "--slo", "p99_ttft<2s", "--to", "nan"],
        ["--to: nan is not a number"],
    ),
    (["run", "--trace", CHAT, "--watermark", "1.5"], ["watermark", "1.5"]),
    (["run", "--trace", CHAT, "--watermark", "-0.1"], ["watermark", "-0.1"]),
    (["run", "--trace", CHAT, "--watermark", "nan"], ["watermark", "nan"]),
    (["run", "--trace", CHAT, "--watermark", "low"], ["--watermark", "low"]),
    (["run", "--trace", CHAT, "--preemption-mode", "swop"], ["--preemption-mode", "swap"]),
    (["run", "--trace", CHAT, "--scheduling-policy", "lifo"], ["--scheduling-policy", "fcfs"]),
    (["run", "--trace", CHAT, "--engine", "vllm-0.6.4"], ["vllm-0.6.4", "vllm-0.6.3"]),
    (["run", "--trace", CHAT, "--block-manager", "naiv"], ["naiv", "naive"]),
    (["run", "--trace", CHAT, "--engine", "no.such:Thing"], ["no.such"]),
    (["run", "--trace", CHAT, "--cost-model", "rooflin"], ["rooflin", "roofline"]),
    (["run", "--trace", CHAT, "--model", "llama-3-9b"], ["llama-3-9b", "llama-3-8b"]),
    (["run", "--trace", CHAT, "--hardware", "h300"], ["h300"]),
    (["run", "--trace", CHAT, "--gpu-memory-utilization", "1.2"], ["gpu_memory_utilization"]),
    (["run", "--trace", CHAT, "--gpu-memory-utilization", "0.1"], ["gpu_memory_utilization"]),
    (["run", "--trace", CHAT, "--swap-space", "-1"], ["swap_space", "-1"]),
    (["run", "--trace", CHAT, "--swap-space", "inf"], ["swap_space", "inf"]),
    (["run", "--trace", CHAT, "--tensor-parallel-size", "3"], ["tensor_parallel_size", "3"]),
    (["run", "--trace", CHAT, "--request-rate", "0"], ["request_rate"]),
    (["run", "--trace", CHAT, "--burstiness", "0"], ["burstiness"]),
    (["run", "--trace", CHAT, "--time-scale", "0"], ["time_scale"]),
    (["run", "--trace", CHAT, "--time-scale", "inf"], ["time_scale", "inf"]),
    (["run", "--trace", CHAT, "--max-concurrency", "0"], ["--max-concurrency", ">= 1"]),
    (
        ["run", "--trace", CHAT, "--num-gpu-blocks-override", "100", "--max-model-len", "8192"],
        ["max_model_len", "100"],
    ),
    (["run", *OLD, "--max-num-batched-tokens", "100"], ["max_num_batched_tokens"]),
    (
        ["run", *OLD, "--enable-chunked-prefill", "--max-num-batched-tokens", "100"],
        ["max_num_batched_tokens", "max_num_seqs"],
    ),
    (
        [
            *["run", *OLD, "--enable-chunked-prefill", "--enable-prefix-caching"],
            *["--max-num-batched-tokens", "500"],
        ],
        ["max_num_batched_tokens", "500", "16"],
    ),
    (
        ["run", "--trace", CHAT, "--set", "scheduler_args.requeue=last"],
        ["requeue", "last", "head", "tail"],
    ),
    (
        ["run", "--trace", CHAT, "--set", "scheduler_args.requeue=priority"],
        ["requeue", "--scheduling-policy priority"],
    ),
    (
        ["run", *OLD, "--set", "block_manager_args.publish_at=computed"],
        ["block_manager_args.publish_at", "naive", "--enable-prefix-caching"],
    ),
    (["run", "--trace", CHAT, "--seed", "-1"], ["--seed", "-1"]),
    (["run", "--trace", CHAT, "--goodput", "ttft=500"], ["--goodput", "ttft:500"]),
    (["run", "--trace", CHAT, "--goodput", "speed:5"], ["--goodput", "speed"]),
    (["run", "--trace", CHAT, "--goodput", "ttft:-5"], ["goodput", "{'ttft': -5.0}"]),
    (["run", "--trace", CHAT, "--goodput", "ttft:inf"], ["goodput", "{'ttft': inf}"]),
    (["run", "--trace", CHAT, "--set", "watermark"], ["--set", "watermark"]),
    (["run", "--trace", CHAT, "--set", "water=1"], ["water", "watermark"]),
    (["run", "--trace", CHAT, "--set", "cost.model=constant", "--set", "cost.step=1"], ["step_us"]),
    (["run", "--trace", CHAT, "--set", "scheduler_args.nope=1"], ["nope"]),
    (["run", "--trace", CHAT, "--config", "prefix"], ["prefix", "prefix-caching"]),
    (["run", "--trace", CHAT, "--config", "/nowhere/x.toml"], ["/nowhere/x.toml"]),
    (["run", "--trace", "/nowhere/x.jsonl"], ["/nowhere/x.jsonl"]),
    (["run", "--trace", CHAT, "--trace-format", "moncake"], ["moncake", "mooncake"]),
    (
        ["run", *OLD, "--block-manager", "contiguous", "--preemption-mode", "swap"],
        ["contiguous", "recompute"],
    ),
    (
        ["run", *OLD, "--block-manager", "naive", "--enable-prefix-caching"],
        ["naive", "--enable-prefix-caching"],
    ),
    (["run", "--trace", CHAT, "--engine", "nano-vllm", "--watermark", "0.1"], ["watermark"]),
    (["run", "--trace", CHAT, "--engine", "nano-vllm", "--n", "2"], ["nano-vllm", "--n 1"]),
    (["run", "--trace", CHAT, "--engine", "vllm-0.3.3", "--enable-prefix-caching"], ["0.3.3"]),
    (["run", "--trace", CHAT, "--engine", "nano-vllm", "--no-enable-prefix-caching"], ["nano"]),
    (["run", "--trace", CHAT, "--engine", "vllm-v1", "--block-manager", "nano-vllm"], ["vllm-v1"]),
    (["run", *OLD, "--async-scheduling"], ["async_scheduling", "vllm-v1"]),
    (["compare", "naive", "--trace", CHAT], ["two configurations"]),
    (["compare", "naive", "naiv", "--trace", CHAT], ["naiv"]),
    (
        ["compare", "naive", "swap", "--trace", CHAT, "--confidence", "nan"],
        ["--confidence: nan is not a number"],
    ),
    (["compare", "naive", "swap", "--trace", CHAT, "--margin", "inf"], ["--margin inf"]),
    (
        [
            *["size", "--trace", CHAT, "--find", "watermark", "--slo", "p99_ttft<2s"],
            *["--price-per-gpu-hour", "nan"],
        ],
        ["--price-per-gpu-hour: nan"],
    ),
    (["report", "/nowhere"], ["/nowhere"]),
    (["trace", "info", "/nowhere"], ["/nowhere"]),
    (["trace", "synth", "chatt", "--out", "x.jsonl"], ["chatt", "chat"]),
    (["conform", "/nowhere", "--engine", "vllm-0.6.3"], ["/nowhere"]),
    (["conform", str(ROOT), "--engine", "vllm-0.6"], ["vllm-0.6.3"]),
    (["conform", str(ROOT)], ["--engine"]),
]


def refused(arguments: list[str], words: list[str], cwd: Path) -> None:
    result = run_here(arguments, cwd)
    assert result.returncode == 2, result
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("kvsim: ")
    for word in words:
        assert word in lines[0], lines[0]
    assert result.stdout == ""


@pytest.mark.parametrize(("arguments", "words"), CASES, ids=lambda x: " ".join(x[-2:]))
def test_one_line_and_nothing_written(
    arguments: list[str], words: list[str], tmp_path: Path
) -> None:
    if arguments[0] == "run" and len(arguments) > 1:
        arguments = [*arguments, "--out", "result"]
    refused(arguments, words, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("block_sise = 16", ["block_sise", "block_size"]),
        ("block_size = '16'", ["block_size", "'16'"]),
        ("block_size = true", ["block_size", "True"]),
        ("block_size = = 3", ["bad.toml", "line 1"]),
        (
            "[cost]\nmodel = 'constant'\nprefil_token_us = 3",
            ["prefil_token_us", "prefill_token_us"],
        ),
        ("[cost]\nmodel = 3", ["cost", "3"]),
        ("[cost]\nmodel = 'constant'\nstep_us = 'slow'", ["step_us", "slow"]),
        ("[cost.link]\nbandwith_gb_s = 3", ["bandwith_gb_s", "bandwidth_gb_s"]),
        ("cost = 3", ["cost", "3"]),
        ("[goodput]\ntttf = 500", ["tttf", "ttft"]),
        ("model = 'sub/folder'", ["sub/folder"]),
    ],
)
def test_a_bad_configuration_names_file_and_key(
    text: str, words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "bad.toml").write_text(text)
    refused(["run", "--trace", CHAT, "--config", "bad.toml"], words, tmp_path)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    few = ["--num-prompts", "3", "--out", "file/result"]
    result = run_here(["run", "--trace", CHAT, *few], tmp_path)
    assert result.returncode == 2
    assert "file" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "kvsim", "policies"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            timeout=60,
            check=False,
        )
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "No space left" in result.stderr

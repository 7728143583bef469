"""A recorded run of data-parallel ranks that share experts: from its tables to the errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from command import run_here
from marks import long
from unit.cost.calibrate.tables import (
    LAYERS,
    META,
    attention_us,
    measured_us,
    others_us,
    write_experts,
    write_sparse_model,
    write_tables,
)

from kvsim.against.check import check
from kvsim.against.fit import fit_run, with_constants
from kvsim.cost.calibrate.llmservingsim import import_profile
from kvsim.cost.profile import load_profile, to_json
from kvsim.fleet import simulate_engine
from kvsim.machine import load_hardware, load_model
from kvsim.settings.config import RunConfig, make_config
from kvsim.workload import Trace, open_trace

L40S = load_hardware("l40s")
HIDDEN = load_model("tiny").hidden_size
ARGUMENTS = {
    "model": "someone/Sparse",
    "tensor_parallel_size": 1,
    "data_parallel_size": 2,
    "enable_expert_parallel": True,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 2048,
    "dtype": "bfloat16",
    "kv_cache_dtype": "auto",
    "seed": 42,
}
SLOWER = 1.25
"""How much longer the recorded run took than its kernels."""


def step_us(tokens: int, attention: float) -> float:
    """A step in which either rank has so many tokens and one row of logits.

    Each has half of the experts; every token has 2 of 16. All-gather and reduce-scatter of the
    hidden states in bfloat16 take the figures of an all-reduce.
    """
    active = 8 * (1 - (1 - 2 / 16) ** (2 * tokens))
    experts = measured_us(tokens, max(active, 2))  # a token has two
    exchange = L40S.all_reduce.us(2 * tokens * HIDDEN * 2, 2)
    return others_us(tokens) + LAYERS * (attention + experts + exchange) + 50 + 5 + 2


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A folder as published: two requests at the same moment, one for each rank, that both wait for
    the slower prompt of 64 tokens, and then decode one token each."""
    prompts = step_us(64, attention_us(64, 0, 0, 0)) * SLOWER / 1e6
    decodes = step_us(1, attention_us(0, 0, 1, 65)) * SLOWER / 1e6
    meta = {"model": "someone/Sparse", "vllm_version": "0.19.0", "engine_kwargs": ARGUMENTS}
    meta |= {"kv_cache": {"num_gpu_blocks": 4001, "block_size": 16, "num_cpu_blocks": None}}
    meta |= {"hardware": {"device_name": "NVIDIA L40S"}, "tick_seconds": 1.0}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    rows = [
        {"id": f"bench-{i}", "arrival_s": 0, "input_length": tokens, "output_length": 2}
        for i, tokens in enumerate((32, 64))
    ]
    _write(tmp_path / "trace.jsonl", [{"kvsim_trace": 1}, *rows])
    times = {"queue_s": 0.0, "ttft_s": prompts, "e2e_s": prompts + decodes}
    _write(tmp_path / "measured.jsonl", [{"id": row["id"], **times} for row in rows])
    write_sparse_model(tmp_path)
    write_experts(write_tables(tmp_path / "kernels", META))
    return tmp_path


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_from_the_tables_to_the_errors_by_commands(recorded: Path) -> None:
    """The replay takes as long as the kernels, worked out by hand: 20 % less than recorded."""
    importing = ["profile", "import", "kernels", "--model", "sparse.toml", "--out", "p.json"]
    assert run_here(importing, recorded).returncode == 0
    command = ["check", "trace.jsonl", "--measured", "measured.jsonl", "--model", "sparse.toml"]
    command += ["--max-model-len", "4096", "--set", "cost.profile=p.json"]
    of_record = [*command, "--vllm-file", "meta.json"]
    done = run_here([*of_record, "--json"], recorded)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["requests"] == {"measured": 2, "compared": 2}
    for kind in ("ttft", "tpot", "e2el"):
        for name in ("mean", "p50", "p90", "p99"):
            error = record["figures"][f"{name}_{kind}_ms"]["error"]
            assert error == pytest.approx(1 / SLOWER - 1, abs=1e-5)
    assert record["corrections"][0]["value"] == pytest.approx(SLOWER, rel=1e-3)
    meta = record["meta"]
    assert (meta["replicas"], meta["router"]["name"]) == (2, "vllm-dp")
    assert meta["config"]["num_gpu_blocks_override"] == 2000
    assert "experts: measured" in meta["cost"]["source"]
    assert "exchange of replicas: figures of l40s" in meta["cost"]["source"]
    assert meta["cost"]["kind"] == "estimated"

    flags = ["--data-parallel-size", "2", "--enable-expert-parallel", "--hardware", "l40s"]
    flags += ["--dtype", "bfloat16", "--num-gpu-blocks-override", "2000", "--block-size", "16"]
    flags += ["--max-num-batched-tokens", "2048", "--max-num-seqs", "128"]
    flags += ["--vllm-version", "0.19.0"]
    flags += ["--no-corrections"]
    by_hand = json.loads(run_here([*command, *flags, "--json"], recorded).stdout)
    assert by_hand["figures"] == record["figures"]
    of_record += ["--no-corrections"]
    alone = run_here([*of_record, "--data-parallel-size", "1", "--json"], recorded)
    assert json.loads(alone.stdout)["figures"] != record["figures"]

    shown = run_here([*of_record, "--out", "checked"], recorded)
    assert shown.returncode == 0 and "−20.0\N{NO-BREAK SPACE}%" in shown.stdout
    assert "2 behind vllm-dp" in (recorded / "checked" / "check.html").read_text()


NUMBER, FIRST = 60, 40


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    model = write_sparse_model(tmp_path)
    folder = write_experts(write_tables(tmp_path / "kernels", META))
    (tmp_path / "p.json").write_text(to_json(import_profile(folder, model)))
    return make_config(
        {"model": model, "hardware": "l40s", "dtype": "bfloat16", "max_model_len": 4096}
        | {"data_parallel_size": 2, "enable_expert_parallel": True}
        | {"num_gpu_blocks_override": 2000, "async_scheduling": False}
        | {"cost": {"model": "table", "profile": str(tmp_path / "p.json")}}
    )


def served(folder: Path, config: RunConfig) -> Trace:
    """What two ranks make of a load, as measured times."""
    path = folder / "served.jsonl"
    rows: list[dict[str, Any]] = [
        {"arrival_s": 0.06 * i + 0.004 * (i * i % 13)}
        | {"input_length": 20 + 37 * i % 160, "output_length": 6 + 11 * i % 9}
        for i in range(NUMBER)
    ]
    _write(path, [{"kvsim_trace": 1}, *rows])
    requests = simulate_engine(open_trace(str(path)), config).requests
    for place in range(NUMBER):
        arrival, first, last = (
            int(requests[name][place]) for name in ("arrival_ns", "first_token_ns", "finish_ns")
        )
        assert requests["index"][place] == place
        rows[place]["observed"] = {
            "ttft_s": (first - arrival) / 1e9,
            "e2e_s": (last - arrival) / 1e9,
        }
    _write(path, [{"kvsim_trace": 1}, *rows])
    return open_trace(str(path))


def test_all_ranks_are_replayed(tmp_path: Path, config: RunConfig) -> None:
    trace = served(tmp_path, config)
    assert check(trace, config)["worst_error"] < 1e-6
    one = msgspec.structs.replace(config, data_parallel_size=1)
    assert check(trace, one, correct=False)["worst_error"] > 0.05


@long
def test_constants_are_fitted_on_all_ranks(tmp_path: Path, config: RunConfig) -> None:
    profile, truth = load_profile(config.cost["profile"]), {"prompt_step_us": 4000.0}
    made = tmp_path / "true.json"
    made.write_text(to_json(with_constants(profile, truth)))
    machine = msgspec.structs.replace(config, cost={"model": "table", "profile": str(made)})
    found = fit_run(profile, served(tmp_path, machine), config, FIRST).fitted
    assert found["constants"]["prompt_step_us"] == pytest.approx(4000, rel=0.1)
    assert max(map(abs, found["error_percent"].values())) < 2
    assert max(map(abs, found["error_percent_before"].values())) > 5

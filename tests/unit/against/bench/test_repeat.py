"""Stored measurements, and how two of them compare."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from kvsim.against import bench as measuring
from kvsim.against.bench import (
    Measurement,
    Peer,
    Whole,
    in_fresh_process,
    kvsim_run,
    measure,
    store_bytecode,
    write_requests,
)
from kvsim.against.bench_workloads import CONSTANT, WORKLOADS, Case
from kvsim.errors import ConfigError

ONE = Measurement(
    cpu_s=2.0,
    requests=10,
    steps=100,
    seq_steps=1000,
    preemptions=0,
    rss_mb=50.0,
)


CASE = Case("W1", "vllm-v1")


def bench(*measured: Measurement, settings: str = CASE.settings) -> measuring.Bench:
    whole = Whole(cpu_s=1.0, rss_mb=2.0)
    row = measuring.Row(
        workload=CASE.workload,
        settings=settings,
        runs=list(measured),
        whole=[whole],
        peer=[Peer(core_s=0.5, whole=whole)],
    )
    return measuring.Bench(
        kvsim_version="1",
        python="3",
        machine="m",
        load_average=None,
        peer="aisimulate",
        rows=[row],
    )


def test_a_stored_run_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(measuring.to_json(bench(ONE, replace(ONE, steps=3))))
    assert measuring.load(str(path)) == bench(ONE, replace(ONE, steps=3))


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"kvsim_version": 1}'])
def test_anything_else_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="give what `kvsim bench --json` printed") as caught:
        measuring.load(str(path))
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        measuring.load(str(tmp_path / "none"))


def test_ratios_compare_the_least_of_each() -> None:
    now = bench(replace(ONE, cpu_s=1.5), replace(ONE, cpu_s=1.0))
    then = bench(ONE, replace(ONE, cpu_s=4.0))
    assert measuring.ratios(now, then) == {CASE: 0.5}
    assert measuring.ratios(now, bench(ONE, settings="vllm-0.6.3")) == {}


def test_a_feature_is_compared_by_the_step_and_a_fleet_by_the_request() -> None:
    rows = [
        measuring.Row(workload=workload, settings=settings, runs=[replace(ONE, **more)])
        for workload, settings, more in (
            ("W1", "vllm-v1", {}),
            ("W1", "own-scheduler", {"cpu_s": 6.0, "steps": 200}),
            ("fleet-1", "vllm-v1", {}),
            ("fleet-64", "vllm-v1", {"cpu_s": 256.0, "requests": 640}),
            ("fleet-64", "sglang", {}),
        )
    ]
    assert measuring.over_base(replace(bench(), rows=rows)) == {
        Case("W1", "own-scheduler"): 1.5,
        Case("fleet-64", "vllm-v1"): 2.0,
    }


def test_a_measurement_counts_what_was_simulated(tmp_path: Path) -> None:
    path = str(tmp_path / "trace.jsonl")
    write_requests("decode-1", None, path)
    measured = measure(Case("decode-1", CONSTANT), path)
    assert (measured.requests, measured.steps, measured.seq_steps) == (1, 4_331, 4_330)
    assert measured.cpu_s > 0 and measured.rss_mb > 0


def test_a_run_that_fails_is_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "trace.jsonl")
    write_requests("decode-1", None, path)
    own = WORKLOADS["decode-1"]
    small = {"num_gpu_blocks_override": 2, "block_size": 256, "max_model_len": 512}
    monkeypatch.setitem(WORKLOADS, "decode-1", own._replace(settings=own.settings | small))
    with pytest.raises(
        ConfigError, match="decode-1 nano-vllm: the run ended as nothing-schedulable"
    ):
        measure(Case("decode-1", "nano-vllm"), path)


def test_an_error_in_a_process_of_its_own_is_raised_here(tmp_path: Path) -> None:
    settings = tmp_path / "swap.toml"
    settings.write_text('engine = "vllm-v1"\npreemption_mode = "swap"\n')
    with pytest.raises(ConfigError, match="no such setting"):
        in_fresh_process(measure, Case("W2", str(settings)), "chat")


def test_a_whole_process_is_that_of_the_command_line(tmp_path: Path) -> None:
    path = str(tmp_path / "trace.jsonl")
    write_requests("decode-1", None, path)
    whole = kvsim_run(Case("decode-1", "vllm-v1"), path)
    assert whole.cpu_s > 0 and whole.rss_mb > 0


def test_bytecode_is_stored_whatever_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    (tmp_path / "inner").mkdir()
    for name in ("one.py", "inner/two.py"):
        (tmp_path / name).write_text("x = 1\n")
    store_bytecode(tmp_path)
    stored = sorted(path.name.partition(".")[0] for path in tmp_path.rglob("*.pyc"))
    assert stored == ["one", "two"]

"""Stored measurements, and how two of them compare."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from kvsim.against.bench import repeat
from kvsim.against.bench.measure import Measurement, measure
from kvsim.against.bench.peers import Peer
from kvsim.against.bench.processes import (
    Whole,
    in_fresh_process,
    kvsim_run,
    store_bytecode,
    write_requests,
)
from kvsim.against.bench.settings import Case
from kvsim.against.bench.workloads import WORKLOADS
from kvsim.errors import ConfigError

ONE = Measurement(
    cpu_s=2.0,
    ping_ns=500.0,
    requests=10,
    steps=100,
    seq_steps=1000,
    preemptions=0,
    end_ns=5,
    digest="0",
    events=7,
    rss_mb=50.0,
    idle_rss_mb=40.0,
    outcome="finished",
)


CASE = Case("W1", "vllm-v1")


def bench(*measured: Measurement, settings: str = CASE.settings) -> repeat.Bench:
    whole = Whole(cpu_s=1.0, rss_mb=2.0)
    row = repeat.Row(
        workload=CASE.workload,
        settings=settings,
        runs=list(measured),
        whole=[whole],
        peer=[Peer(core_s=0.5, whole=whole)],
    )
    return repeat.Bench(
        kvsim_version="1",
        python="3",
        machine="m",
        load_average=None,
        peer="aisimulate",
        rows=[row],
    )


def test_a_stored_run_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(repeat.to_json(bench(ONE, replace(ONE, steps=3))))
    assert repeat.load(str(path)) == bench(ONE, replace(ONE, steps=3))


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"kvsim_version": 1}'])
def test_anything_else_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="give what `kvsim bench --json` printed") as caught:
        repeat.load(str(path))
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        repeat.load(str(tmp_path / "none"))


def test_ratios_compare_the_least_of_each() -> None:
    now = bench(replace(ONE, cpu_s=1.5), replace(ONE, cpu_s=1.0, ping_ns=1000.0))
    then = bench(ONE, replace(ONE, cpu_s=4.0))
    assert repeat.ratios(now, then) == {CASE: (0.5, 0.25)}
    assert repeat.ratios(now, bench(ONE, settings="vllm-0.6.3")) == {}


def test_a_measurement_counts_events_and_leaves_simpy_as_it_was() -> None:
    import simpy

    before = simpy.Environment.__init__
    measured = measure(Case("decode-1", "vllm-v1"))
    assert simpy.Environment.__init__ is before
    assert measured.events >= 1
    assert measured.requests == len(WORKLOADS["decode-1"].make(None).rows)
    assert measured.cpu_s > 0 and measured.pings > 0
    assert measured.rss_mb >= measured.idle_rss_mb > 0
    assert measured.decode_step_us is not None


def test_an_error_in_a_process_of_its_own_is_raised_here() -> None:
    with pytest.raises(ConfigError, match="no such setting"):
        in_fresh_process(measure, Case("W2s", "vllm-v1"))


def test_a_whole_process_is_that_of_the_command_line(tmp_path: Path) -> None:
    path = str(tmp_path / "trace.jsonl")
    write_requests("decode-1", None, path)
    whole = kvsim_run(Case("decode-1", "vllm-v1-table"), path)
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

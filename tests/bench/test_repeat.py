"""Stored measurements, and how two of them compare."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from kvsim.bench import repeat
from kvsim.bench.measure import Measurement, measure
from kvsim.bench.workloads import WORKLOADS
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


def bench(*measured: Measurement, engine: str = "vllm-0.6.3") -> repeat.Bench:
    return repeat.Bench(
        kvsim_version="1",
        python="3",
        machine="m",
        load_average=None,
        engine=engine,
        cost="constant",
        workloads={"W1": list(measured)},
    )


def test_a_stored_run_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(repeat.to_json(bench(ONE, replace(ONE, fast_path={"steps": 3}))))
    assert repeat.load(str(path)) == bench(ONE, replace(ONE, fast_path={"steps": 3}))


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
    assert repeat.ratios(now, then) == {"W1": (0.5, 0.25)}
    assert repeat.ratios(now, replace(then, workloads={})) == {}
    with pytest.raises(ConfigError, match="compare like with like"):
        repeat.ratios(now, bench(ONE, engine="vllm-v1"))


def test_a_measurement_counts_events_and_leaves_simpy_as_it_was() -> None:
    import simpy

    before = simpy.Environment.__init__
    measured = measure("decode-1", "vllm-0.6.3", "constant")
    assert simpy.Environment.__init__ is before
    assert measured.events >= 1
    assert measured.requests == len(WORKLOADS["decode-1"].make(None).rows)
    assert measured.cpu_s > 0 and measured.pings > 0
    assert measured.rss_mb >= measured.idle_rss_mb > 0
    assert measured.decode_step_us is not None


def test_an_error_in_a_process_of_its_own_is_raised_here() -> None:
    with pytest.raises(ConfigError, match="no such setting"):
        repeat.in_fresh_process(measure, "W2s", "vllm-v1", "constant")

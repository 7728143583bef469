"""Loads that are made from a few figures."""

from pathlib import Path

import pytest
from places import ROOT

from kvsim import simulate
from kvsim.errors import ConfigError
from kvsim.settings.config import make_config
from kvsim.settings.library import names
from kvsim.workload import open_trace
from kvsim.workload.native import write
from kvsim.workload.spec import (
    Workload,
    load_workload,
    made_from,
    make_trace,
    trace_of,
)


def test_the_shipped_workloads_are_those_of_the_published_experiments() -> None:
    watermark = make_trace(
        Workload("random", requests=450, input_len=1000, output_len=5000, range_ratio=0.2), 3
    )
    assert make_trace(load_workload("watermark"), 3).rows == watermark.rows
    longer = {"long_inputs": "0.1:5", "long_outputs": "0.1:8", "range_ratio": 0.5}
    victims = make_trace(Workload("random", 300, input_len=172, output_len=188, **longer), 3)
    assert make_trace(load_workload("victims"), 3).rows == victims.rows
    assert names("workloads") == ["agentx", "victims", "watermark"]


def test_a_run_without_a_trace_makes_its_requests_from_the_seed() -> None:
    settings = {"workload": "victims", "num_prompts": 5, "request_rate": float("inf"), "seed": 2}
    result = simulate(None, settings)
    expected = make_trace(load_workload("victims"), 2)
    assert list(result.requests["input_length"]) == [r.input_length for r in expected.rows[:5]]
    assert result.meta["trace"]["sha256"] == expected.sha256


@pytest.mark.parametrize(
    "workload",
    [
        Workload("chat", requests=20, rate=3.0),
        Workload("random", requests=9, input_len=50, long_inputs="0.5:3", range_ratio=0.25),
    ],
)
def test_a_made_trace_tells_what_it_was_made_from(workload: Workload, tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    write(make_trace(workload, 7), str(path))
    found = made_from(open_trace(str(path)))
    assert found is not None
    again, seed = found
    assert seed == 7
    assert make_trace(again, 8).rows == make_trace(workload, 8).rows


def test_what_was_not_made_so_is_not_made_again(tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    write(make_trace(Workload("api", requests=20), 0), str(path))
    changed = path.read_text().splitlines()
    path.write_text("\n".join(changed[:-1]) + "\n")
    assert made_from(open_trace(str(path))) is None
    for command in ("", "kvsim trace synth", "kvsim trace synth chatt", "cp a b"):
        trace = open_trace(str(ROOT / "traces/chat.jsonl"))
        trace.source = {"format": "synthetic", "command": command}
        assert made_from(trace) is None


def test_bad_workloads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--trace FILE"):
        trace_of(make_config({}))
    with pytest.raises(ConfigError, match="'watermarks'; did you mean 'watermark'"):
        trace_of(make_config({"workload": "watermarks"}))
    with pytest.raises(ConfigError, match="output_len: chat traces have lengths of their own"):
        make_trace(Workload("chat", output_len=5), 0)
    path = tmp_path / "load.toml"
    path.write_text('kind = "random"\nrequest = 5\n')
    with pytest.raises(ConfigError, match=r"load.toml: unknown key 'request'; did you"):
        load_workload(str(path))

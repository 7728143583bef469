"""The random data set of `vllm bench serve`, and what mixed loads add to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsim.cli import main
from kvsim.errors import ConfigError
from kvsim.workload import open_trace
from kvsim.workload.spec import Workload, make_trace, parse_long


def test_lengths_are_drawn_as_vllm_draws_them() -> None:
    """`integers(low, high + 1)` of `default_rng(seed)`: all inputs, then all outputs."""
    rows = make_trace(
        Workload("random", requests=450, input_len=1000, output_len=5000, range_ratio=0.2), 3
    ).rows
    random = np.random.default_rng(3)
    assert [row.input_length for row in rows] == random.integers(800, 1201, 450).tolist()
    assert [row.output_length for row in rows] == random.integers(4000, 6001, 450).tolist()
    assert all(row.arrival_ns is None and row.content is None for row in rows)


def test_seed_0_has_the_mean_output_of_the_published_watermark_run() -> None:
    """Its tokens per second over its requests per second, 5,022.1 .. 5,022.7."""
    rows = make_trace(
        Workload("random", requests=450, input_len=1000, output_len=5000, range_ratio=0.2), 0
    ).rows
    assert 5022.1 < np.mean([row.output_length for row in rows]) < 5022.7


def test_bounds_are_rounded_outwards_and_an_output_has_a_token() -> None:
    rows = make_trace(
        Workload("random", requests=500, input_len=5, output_len=1, range_ratio=0.5), 0
    ).rows
    assert {row.input_length for row in rows} == set(range(2, 9))
    assert {row.output_length for row in rows} == {1, 2}


def test_a_share_of_the_requests_is_longer() -> None:
    rows = make_trace(
        Workload(
            "random",
            requests=80,
            input_len=10,
            output_len=20,
            long_inputs="0.1:5",
            long_outputs="0.25:1.5",
        ),
        0,
    ).rows
    inputs, outputs = (
        [getattr(row, f"{side}_length") for row in rows] for side in ("input", "output")
    )
    assert (sorted(inputs), sorted(outputs)) == ([10] * 72 + [50] * 8, [20] * 60 + [30] * 20)
    assert inputs != sorted(inputs)


def test_the_command_makes_the_file_again(tmp_path: Path) -> None:
    file = str(tmp_path / "random.jsonl")
    wish = ["--input-len", "172", "--output-len", "188", "--range-ratio", "0.5"]
    wish += ["--long-inputs", "0.1:5", "--long-outputs", "0.1:8", "--seed", "4", "--requests", "40"]
    with pytest.raises(SystemExit) as stop:
        main(["trace", "synth", "random", "--out", file, *wish])
    assert stop.value.code == 0
    trace = make_trace(
        Workload(
            "random",
            requests=40,
            input_len=172,
            output_len=188,
            range_ratio=0.5,
            long_inputs="0.1:5",
            long_outputs="0.1:8",
        ),
        4,
    )
    read = open_trace(file)
    assert read.rows == trace.rows
    assert read.sha256 == trace.sha256
    words = set(trace.source["command"].split())
    assert words == {"kvsim", "trace", "synth", "random", *wish}


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        ({"input_len": 0}, "input_len: 0 is not a length"),
        ({"range_ratio": 1.0}, "range_ratio: 1 is not from 0 to below 1"),
        ({"range_ratio": float("nan")}, "range_ratio: nan"),
        ({"long_inputs": "1.5:2"}, "long inputs: a share of 1.5"),
        ({"long_inputs": "0.5:0.5"}, "long inputs: a factor of 0.5"),
        ({"requests": 0}, "requests: 0 is not above 0"),
    ],
)
def test_impossible_wishes_are_refused(wish: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_trace(Workload("random", **{"input_len": 9, "output_len": 9, **wish}), 0)


def test_a_long_share_is_a_pair() -> None:
    assert parse_long("--long-inputs", "0.1:5") == (0.1, 5.0)
    with pytest.raises(ConfigError, match=r"--long-inputs: '0\.1' is not SHARE:FACTOR"):
        parse_long("--long-inputs", "0.1")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["random", "--rate", "2"], "--rate: random traces have no arrivals"),
        (["randon"], "did you mean 'random'"),
    ],
)
def test_the_command_line_refuses(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["trace", "synth", *arguments, "--out", str(tmp_path / "x")])
    assert stop.value.code == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "x").exists()

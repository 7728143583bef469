"""A real vLLM run under memory exhaustion, replayed with the published kernel times of its GPU.

Nothing is fitted to the run: the times are those that the profiler measured, the block count and
the settings are the run's own. The bound is what the replay reaches, rounded up. Requests count
from their arrival at the front end.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shared import SHARED, needs_shared

from kvsim.cost.calibrate.llmservingsim import import_profile
from kvsim.cost.profile import to_json
from kvsim.run.result import Result
from kvsim.run.simulation import simulate

RUN = SHARED / "groundtruth" / "rtx4090-llama-3.1-8b"
SETTINGS: dict[str, Any] = {
    "engine": "vllm-v1",
    "model": "llama-3.1-8b",
    "hardware": "rtx-4090",
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "max_model_len": 32768,
    "num_gpu_blocks_override": 2588,
}
STATISTICS = ("mean", "p50", "p90", "p99")

pytestmark = needs_shared("groundtruth/rtx4090-llama-3.1-8b")


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("profile") / "rtx-4090.json"
    path.write_text(to_json(import_profile(RUN / "kernels")))
    return str(path)


@pytest.fixture(scope="module")
def result(profile: str) -> Result:
    return replay(profile)


def replay(profile: str, **settings: Any) -> Result:
    cost = {"model": "table", "profile": profile}
    return simulate(RUN / "trace-true-arrivals.jsonl", {**SETTINGS, "cost": cost, **settings})


def statistics(seconds: Any) -> list[float]:
    return [float(np.mean(seconds)), *map(float, np.percentile(seconds, [50, 90, 99]))]


def measured() -> dict[str, list[float]]:
    rows = [
        json.loads(line)
        for line in Path(RUN / "measured-true-arrivals.jsonl").read_text().splitlines()
    ]
    lengths = {
        row["id"]: row["output_length"]
        for row in map(
            json.loads, Path(RUN / "trace-true-arrivals.jsonl").read_text().splitlines()[1:]
        )
    }
    return {
        "ttft": statistics([row["ttft_s"] for row in rows]),
        "tpot": statistics(
            [(row["e2e_s"] - row["ttft_s"]) / (lengths[row["id"]] - 1) for row in rows]
        ),
        "e2el": statistics([row["e2e_s"] for row in rows]),
    }


def simulated(result: Result) -> dict[str, list[float]]:
    frame = result.requests_frame()
    return {metric: statistics(frame[f"{metric}_s"]) for metric in ("ttft", "tpot", "e2el")}


def errors_percent(result: Result) -> dict[str, float]:
    real = measured()
    return {
        f"{name} {metric}": abs(ours / theirs - 1) * 100
        for metric, values in simulated(result).items()
        for name, ours, theirs in zip(STATISTICS, values, real[metric], strict=True)
    }


def test_every_latency_statistic_is_within_1_percent(result: Result) -> None:
    assert result.summary["completed"] == 300
    errors = errors_percent(result)
    assert len(errors) == 12
    assert max(errors.values()) < 1.0, errors
    assert np.mean(list(errors.values())) < 0.4, errors


def test_the_run_lasts_as_long(result: Result) -> None:
    rows = [
        json.loads(line)
        for line in Path(RUN / "measured-true-arrivals.jsonl").read_text().splitlines()
    ]
    arrivals = {
        row["id"]: row["arrival_s"]
        for row in map(
            json.loads, Path(RUN / "trace-true-arrivals.jsonl").read_text().splitlines()[1:]
        )
    }
    real = max(arrivals[row["id"]] + row["e2e_s"] for row in rows)
    assert result.summary["duration"] == pytest.approx(real, rel=0.01)


def test_hardly_anything_is_priced_outside_the_measured_points(result: Result) -> None:
    cost = result.summary["meta"]["cost"]
    assert cost["kind"] == "measured"
    assert cost["extrapolated_ns"] < 0.002 * cost["priced_ns"]


@pytest.mark.parametrize(
    ("settings", "least_percent"),
    [({"num_gpu_blocks_override": 2459}, 5), ({"enable_prefix_caching": False}, 2)],
)
def test_the_agreement_is_no_accident(
    profile: str, settings: dict[str, Any], least_percent: float
) -> None:
    """With 5 % fewer blocks, or without the prefix cache, the statistics are visibly off."""
    assert max(errors_percent(replay(profile, **settings)).values()) > least_percent

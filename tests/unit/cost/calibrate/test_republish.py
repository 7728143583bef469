"""The published profile of the RTX PRO 6000: surfaces, judged on other rows and on a real run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from marks import long
from shared import SHARED, needs_shared
from unit.cost.calibrate.tables import META, write_tables

from kvsim.cost.calibrate.compare import points, reader
from kvsim.cost.calibrate.llmservingsim import import_profile, import_surface, read_bundle
from kvsim.cost.calibrate.surface import MIXED, table_error
from kvsim.cost.profile import DecodeGrid, MixedGrid, Profile, load_profile, to_json
from kvsim.errors import ConfigError
from kvsim.machine import load_hardware
from kvsim.run.simulation import simulate

SHIPPED = "rtx-pro-6000-server-llama-3.1-8b-public"
RUN = SHARED / "groundtruth" / "rtxpro6000-llama-3.1-8b"
KERNELS = RUN / "kernels"
needs_run = needs_shared("groundtruth/rtxpro6000-llama-3.1-8b")

L40S = META.replace("Test GPU", "NVIDIA L40S")


def test_surfaces_come_near_the_rows(tmp_path: Path) -> None:
    folder = write_tables(tmp_path / "tables", L40S)
    rows, surface = import_profile(folder), import_surface(folder)
    assert (rows.source, surface.source) == ("measured", "public-table")
    assert surface.fit.step == (load_hardware("l40s").step_overhead_us, 1.0, 0.0)
    assert isinstance(surface.fit.mixed, MixedGrid)
    assert isinstance(rows.fit.decode_v2, DecodeGrid)
    assert table_error(surface.fit.decode_v2, dict(points(rows.fit.decode_v2)))["max_percent"] < 10


def test_a_gpu_without_figures_is_refused(tmp_path: Path) -> None:
    folder = write_tables(tmp_path / "tables")
    with pytest.raises(ConfigError, match="no hardware named 'Test GPU'"):
        import_surface(folder)


def test_points_outside_a_table_do_not_judge_it() -> None:
    grid = DecodeGrid([1, 2], [16, 32], [[10, 20], [20, 40]])
    assert table_error(grid, {(1, 16): 10, (4, 16): 1})["points"] == 1
    assert table_error(grid, {(4, 16): 1}) == {"points": 0}


def test_the_shipped_profile_says_how_it_was_made() -> None:
    profile = load_profile(SHIPPED)
    assert profile.source == "public-table"
    assert profile.rows == []
    text = json.dumps([profile.software, profile.error])
    for word in ("MIT", "CASYS Lab at KAIST", "no row is reproduced", "off the grid", "not judged"):
        assert word in text
    assert profile.device["name"] == load_hardware("rtx pro 6000").device_name


def test_the_shipped_grid_of_mixed_steps_stands_at_the_counts_of_the_import() -> None:
    mixed = load_profile(SHIPPED).fit.mixed
    assert isinstance(mixed, MixedGrid)
    assert {key: getattr(mixed, key) for key in MIXED} == MIXED


BOUNDS = {
    "decode": (1.5, 4),
    "prefill": (3, 20),
    "mixed": (3.5, 15),
    "dense": (2.5, 8),
    "head": (0.5, 2),
}
"""Median and p95 in percent, on rows that no fit has seen."""


@pytest.fixture(scope="module")
def again() -> Profile:
    return import_surface(KERNELS)


@needs_run
@pytest.mark.parametrize("table", BOUNDS)
def test_held_out_errors(again: Profile, table: str) -> None:
    found, (median, p95) = again.error[table], BOUNDS[table]
    assert found["points"] >= 19
    assert found["median_percent"] < median
    assert found["p95_percent"] < p95
    assert load_profile(SHIPPED).error[table] == pytest.approx(found, abs=0.02)


@needs_run
def test_the_shipped_profile_is_what_the_import_makes(again: Profile, tmp_path: Path) -> None:
    path = tmp_path / "again.json"
    path.write_text(to_json(again))
    ours, theirs = load_profile(SHIPPED).fit, load_profile(str(path)).fit
    for name in ("dense", "head", "prefill", "decode_v2", "mixed"):
        tables = getattr(ours, name).us, getattr(theirs, name).us
        assert np.array(tables[0]) == pytest.approx(np.array(tables[1]), rel=1e-3, abs=0.02)


@needs_run
def test_the_shipped_profile_reproduces_no_measured_rows() -> None:
    rows, ours = read_bundle(KERNELS)[0].fit, load_profile(SHIPPED).fit
    published = equal = 0
    for name in ("dense", "head", "prefill", "decode_v2", "mixed"):
        measured = reader(getattr(rows, name))
        for point, us in points(getattr(ours, name)):
            published += 1
            equal += us == round(measured(point) or 0.0, 2)
    assert equal < 0.05 * published


@needs_run
@long
def test_rows_off_the_grid_judge_the_rows_on_it() -> None:
    profile, beside = read_bundle(KERNELS)
    assert len(beside) == 10_721
    assert profile.error["mixed"]["points"] == 10_512
    assert profile.error["mixed"]["median_percent"] < 1.5
    assert profile.error["decode"]["median_percent"] < 0.6


# -- a real run ------------------------------------------------------------------------------------


def statistics(seconds: Any) -> list[float]:
    return [float(np.mean(seconds)), *map(float, np.percentile(seconds, [50, 90, 99]))]


def measured() -> dict[str, list[float]]:
    rows = [json.loads(line) for line in (RUN / "measured.jsonl").read_text().splitlines()]
    trace = [json.loads(line) for line in (RUN / "trace.jsonl").read_text().splitlines()[1:]]
    lengths = {row["id"]: row["output_length"] for row in trace}
    tpot = [(row["e2e_s"] - row["ttft_s"]) / (lengths[row["id"]] - 1) for row in rows]
    return {
        "ttft": statistics([row["ttft_s"] for row in rows]),
        "tpot": statistics(tpot),
        "e2el": statistics([row["e2e_s"] for row in rows]),
    }


@needs_run
def test_a_real_run_with_the_default_profile() -> None:
    """Nothing is fitted to the run; the bounds are what the replay reaches, rounded up."""
    settings = {
        "engine": "vllm-v1",
        "model": "llama-3.1-8b",
        "hardware": "RTX PRO 6000",
        "max_num_seqs": 128,
        "max_num_batched_tokens": 2048,
        "num_gpu_blocks_override": 34_000,
    }
    result = simulate(RUN / "trace.jsonl", settings)
    assert SHIPPED in result.summary["meta"]["cost"]["source"]
    frame, real = result.requests_frame(), measured()
    for metric, bound in (("ttft", 4.8), ("tpot", 1.4), ("e2el", 0.7)):
        ours = np.array(statistics(frame[f"{metric}_s"]))
        assert np.abs(ours / real[metric] - 1).max() * 100 < bound

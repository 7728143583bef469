"""Reduced versions of the published experiments, and how their figures are shown."""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import mean

import pytest
from rich.console import Console

from kvsim import experiments
from kvsim.cli import main
from kvsim.cli.experiments import _victims, _watermarks
from kvsim.experiments import (
    CUTS,
    ORDER,
    TAXES,
    WATERMARKS,
    Run,
    cuts,
    group,
    ordered,
    published_of,
    setting_of,
)
from kvsim.workload.spec import load_workload, make_trace


def test_preemptions_fall_with_the_watermark_and_then_stay_level() -> None:
    """190 of the 450 requests: one wave of the 128 clients, and half of another."""
    runs = list(experiments.run_watermarks(1, requests=190))
    assert {run.outcome for run in runs} == {"finished"}
    counts = {run.setting: run.preemptions for run in runs}
    assert list(counts) == list(WATERMARKS)
    assert counts["off"] > 1.5 * counts["0.02"] > 1.5 * counts["0.05"] > 1.5 * counts["0.10"] > 0
    assert abs(counts["0.10"] - counts["0.15"]) < (counts["off"] - counts["0.10"]) / 10


@pytest.mark.skipif(not os.environ.get("KVSIM_WHOLE"), reason="set KVSIM_WHOLE=1 for 40 runs")
def test_every_watermark_is_within_20_percent_of_the_published_count() -> None:
    groups = group(list(experiments.run_watermarks(8, jobs=None)))
    counts = {name: mean(run.preemptions for run in runs) for name, runs in groups.items()}
    for name, published in WATERMARKS.items():
        assert abs(counts[name] / published - 1) < 0.2, counts
    assert abs(counts["0.15"] / counts["0.10"] - 1) < 0.1


def test_victims_waste_in_the_published_order() -> None:
    groups = group(list(experiments.run_victims(1)))
    assert list(groups) == [setting_of(blocks, victim) for blocks in TAXES for victim in ORDER]
    assert all(run.outcome == "finished" for runs in groups.values() for run in runs)
    for blocks in CUTS:
        assert ordered(groups, blocks) == 1, blocks
        assert 0 < cuts(groups, blocks)[0] < 1
    taxes = [groups[setting_of(blocks, "tail")][0].tax for blocks in TAXES]
    assert taxes == sorted(taxes)
    assert taxes[0] == 0 < taxes[1]


def test_what_is_not_wasted_is_the_work_itself() -> None:
    """Every token but a request's last is computed once, and again if it was lost."""
    rows = make_trace(load_workload("victims"), 0).rows[:40]
    once = sum(row.input_length + row.output_length - 1 for row in rows)
    runs = list(experiments.run_victims(1, requests=40))
    assert max(run.wasted_tokens for run in runs) > once
    for run in runs:
        assert run.computed_tokens - run.wasted_tokens == once


def made(setting: str, seed: int, wasted: int) -> Run:
    return Run(setting, seed, 100 + seed, 9, wasted, 1000, 50.0, "finished")


def text(*tables: object) -> str:
    console = Console(width=160, no_color=True)
    with console.capture() as shown:
        for table in tables:
            console.print(table)
    return shown.get()


def test_the_tables_show_published_measured_and_deviation() -> None:
    runs = [made(name, seed, 10) for seed in (0, 2) for name in WATERMARKS]
    shown = text(_watermarks(group(runs)))
    row = next(line for line in shown.splitlines() if line.strip().startswith("0.02"))
    assert " ".join(row.split()) == "0.02 400 101 ± 1 -75% 9 ± 0 1.0 ± 0.0 50 ± 0"
    waste = {"least-computed": 200, "tail": 400, "random": 500, "most-computed": 900}
    runs = [made(setting_of(b, v), 0, waste[v] * (b < 2800)) for b in TAXES for v in ORDER]
    shown = text(*_victims(group(runs)))
    rows = [line.split() for line in shown.splitlines()]
    assert ["2,800", "0.0", "0.0", "+0.0"] in rows
    assert ["1,600", "32.2", "40.0", "+7.8", "59", "50"] in rows
    assert ["800", "200", "400", "500", "900", "1", "of", "1"] in rows


def test_ties_are_not_in_order() -> None:
    runs = [made(setting_of(800, victim), 0, 7) for victim in ORDER]
    assert ordered(group(runs), 800) == 0


def test_the_command_writes_every_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [made(name, 0, 10) for name in WATERMARKS]
    monkeypatch.setattr(experiments, "run_watermarks", lambda seeds, jobs, progress: iter(runs))
    with pytest.raises(SystemExit) as stop:
        main(["experiment", "watermark", "--seeds", "1", "--out", str(tmp_path)])
    assert stop.value.code == 0
    written = json.loads((tmp_path / "watermark.json").read_text())
    assert [run["setting"] for run in written["runs"]] == list(WATERMARKS)
    assert written["runs"][0]["recompute_tax"] == 0.01
    assert "1,065" in capsys.readouterr().out


def test_published_figures_stand_beside_their_own_configurations_only() -> None:
    found = published_of("watermark", ["watermark-0.02", "mine"])
    assert found is not None and found.values["watermark-0.02"] == 400
    assert published_of("watermark", ["mine"]) is None
    assert published_of(None, ["watermark-0.02"]) is None


def test_an_unknown_experiment_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["experiment", "victim"])
    assert stop.value.code == 2
    assert "no 'victim'; did you mean 'victims'" in capsys.readouterr().err

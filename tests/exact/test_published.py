"""The published experiments, through `kvsim compare`: reduced always, whole on request."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from marks import long, whole
from places import ROOT

from kvsim.cli import main
from kvsim.workload.spec import load_workload, make_trace

PAGE = ROOT / "docs" / "results" / "published-experiments.md"
WATERMARKS = [f"watermark-{share}" for share in ("off", "0.02", "0.05", "0.10", "0.15")]
VICTIMS = [f"victims-{victim}" for victim in ("least-computed", "tail", "random", "most-computed")]
"""From the least to the most tokens computed again, as published."""


def compare(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """What `kvsim compare` says of every run, by figure; all runs finish."""
    with pytest.raises(SystemExit) as stop:
        main(["compare", *arguments, "--jobs", "1", "--json"])
    captured = capsys.readouterr()
    assert stop.value.code == 0, captured.err
    record = json.loads(captured.out)
    assert record["unfinished"] == []
    return {key: figure["runs"] for key, figure in record["figures"].items()}


def wasted_in_order(figures: dict[str, Any]) -> bool:
    seeds = zip(*(figures["recomputed_tokens"][name]["values"] for name in VICTIMS), strict=True)
    return all(list(wasted) == sorted(set(wasted)) for wasted in seeds)


@long
def test_preemptions_fall_with_the_watermark_and_then_stay_level(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """190 of the 450 requests: one wave of the 128 clients, and half of another."""
    runs = compare(capsys, *WATERMARKS, "--seeds", "2", "--num-prompts", "190")["num_preemptions"]
    off, low, middle, high, highest = (runs[name]["mean"] for name in WATERMARKS)
    assert off > 1.5 * low > 1.5 * middle > 1.5 * high > 0
    assert abs(high - highest) < (off - high) / 10


@long
def test_victims_waste_in_the_published_order(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*VICTIMS, "--seeds", "2", "--num-gpu-blocks-override"]
    assert wasted_in_order(compare(capsys, *arguments, "800"))
    assert "recompute_tax" not in compare(capsys, *arguments, "2800", "--num-prompts", "150")


def test_what_is_not_wasted_is_the_work_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """Every token but a request's last is computed once, and again if it was lost."""
    figures = compare(capsys, *VICTIMS, "--seeds", "2", "--num-prompts", "40")
    for seed in (0, 1):
        rows = make_trace(load_workload("victims"), seed).rows[:40]
        once = sum(row.input_length + row.output_length - 1 for row in rows)
        for name in VICTIMS:
            wasted = figures["recomputed_tokens"][name]["values"][seed]
            tax = figures["recompute_tax"][name]["values"][seed]
            assert tax == pytest.approx(wasted / (wasted + once)), (name, seed)


@whole
def test_the_page_has_the_counts_by_watermark(capsys: pytest.CaptureFixture[str]) -> None:
    rows = re.findall(r"^\| (off|0\.\d+) \| ([\d,]+) \| (.+?) \|", PAGE.read_text(), re.MULTILINE)
    runs = compare(capsys, *WATERMARKS, "--seeds", "8")["num_preemptions"]
    assert [f"watermark-{share}" for share, *_ in rows] == WATERMARKS
    for share, published, measured in rows:
        found = runs[f"watermark-{share}"]
        assert f"{found['mean']:,.0f} ± {found['std']:.0f}" == measured
        assert abs(found["mean"] / int(published.replace(",", "")) - 1) < 0.2


@whole
@pytest.mark.parametrize("blocks", [1600, 800, 400])
def test_the_page_has_the_recompute_taxes(blocks: int, capsys: pytest.CaptureFixture[str]) -> None:
    row = re.search(rf"^\| {blocks:,} \| ([\d.]+) % \| (.+?) % \|", PAGE.read_text(), re.MULTILINE)
    assert row is not None
    published, measured = row.groups()
    arguments = ["--num-gpu-blocks-override", str(blocks), "--seeds", "8"]
    figures = compare(capsys, *VICTIMS, *arguments)
    assert wasted_in_order(figures)
    found = figures["recompute_tax"]["victims-tail"]
    assert f"{100 * found['mean']:.1f} ± {100 * found['std']:.1f}" == measured
    assert abs(100 * found["mean"] - float(published)) < 4

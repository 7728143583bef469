"""Calibrations that are kept: what they say of themselves is what their rows say."""

import json
from pathlib import Path

import pytest
from kvsim_kernels.fit import make_profile, to_json
from places import ROOT

from kvsim.cost import make_cost
from kvsim.cost.profile import load_profile
from kvsim.machine import load_hardware, load_model
from kvsim.settings.config import make_config

CPU = ROOT / "configs" / "hardware" / "cpu-small.json"
H200 = ROOT / "docs" / "results" / "h200" / "llama-3.1-8b.json"


def test_it_prices_its_own_model_as_measured() -> None:
    config = make_config(
        {
            "model": "small",
            "hardware": "cpu",
            "dtype": "float32",
            "cost": {"model": "table", "profile": "cpu-small"},
        }
    )
    cost = make_cost(config, load_model("small"), load_hardware("cpu"))
    assert cost.kind == "measured"
    assert cost.describe()["scaled"] == {}


@pytest.mark.parametrize("path", [CPU, H200], ids=lambda path: path.stem)
def test_its_figures_follow_from_its_own_rows(path: Path) -> None:
    text = path.read_text()
    document = json.loads(text)
    software = dict(document["software"])
    header = document | {"git": software.pop("git"), "software": software}
    rows = [
        {**{key: value for key, value in row.items() if key != "rounds_us"}, "us": us, "round": i}
        for row in document["rows"]
        for i, us in enumerate(row.get("rounds_us", [row["us"]]))
    ]
    assert to_json(make_profile(header, rows)) == text


def test_it_was_trusted_when_it_was_made() -> None:
    error = load_profile("cpu-small").error
    assert error["trusted"], error["why"]
    assert error["step"]["points"] >= 30

"""The shipped example of a calibration: what it says of itself is what its rows say."""

import json

from kvsim_kernels.fit import make_profile, to_json
from places import ROOT

from kvsim.config import make_config
from kvsim.cost import make_cost
from kvsim.cost.profile import load_profile
from kvsim.hardware import load_hardware
from kvsim.models import load_model

PATH = ROOT / "configs" / "hardware" / "cpu-small.json"


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


def test_its_figures_follow_from_its_own_rows() -> None:
    text = PATH.read_text()
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

"""Choosing a cost model by name, and calling any constructor with a user's arguments."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from plans import plan
from unit.cost.test_table import PROFILE

from kvsim.cost import COSTS, Cost, RooflineCost, TableCost, make_cost
from kvsim.cost.profile import load_profile
from kvsim.cost.table import profile_for
from kvsim.errors import ConfigError
from kvsim.machine import load_hardware, load_model
from kvsim.settings.config import make_config
from kvsim.settings.library import construct, names


def made(**cost: Any) -> Cost:
    config = make_config({"cost": cost})
    return make_cost(config, load_model("tiny"), load_hardware("l40"))


def test_roofline_is_the_default_where_no_profile_is_shipped() -> None:
    assert isinstance(made(), RooflineCost)
    assert isinstance(made(compute_efficiency=0.5), RooflineCost)


@pytest.mark.parametrize("gpu", ["a100", "h100", "h200", "rtx pro 6000"])
def test_every_gpu_with_public_tables_has_a_default_profile(gpu: str) -> None:
    cost = make_cost(make_config({}), load_model("llama-3-8b"), load_hardware(gpu))
    assert isinstance(cost, TableCost)
    assert cost.kind == "estimated"
    assert cost.source.startswith("public-table")


def test_another_gpu_of_the_same_chip_takes_no_profile() -> None:
    """The A100 with 40 GB has slower memory than the measured one."""
    model, config = load_model("llama-3-8b"), make_config({})
    slow, fast = load_hardware("a100-40gb"), load_hardware("a100")
    assert profile_for(model, slow, config) is None
    step = plan(decode_seqs=16, context_tokens=16 * 1024)
    assert make_cost(config, model, slow).step_ns(step) > make_cost(config, model, fast).step_ns(
        step
    )


def chosen(model: str, **settings: Any) -> Cost:
    config = make_config(settings)
    return make_cost(config, load_model(model), load_hardware("h200-sxm"))


def test_a_shipped_profile_of_the_hardware_is_the_default() -> None:
    exact = chosen("llama-3-8b")
    assert isinstance(exact, TableCost)
    assert (
        chosen("llama-3-8b", cost={"model": "table", "decode_kernel": "v2"}).source == exact.source
    )
    assert exact.kind in ("measured", "estimated")
    scaled = chosen("llama-3-70b", tensor_parallel_size=4)
    assert isinstance(scaled, TableCost)
    assert scaled.kind == "scaled"
    assert scaled.source.endswith(" to llama-3-70b, tensor_parallel_size 4")


@pytest.mark.parametrize(
    "cost",
    [{"model": "roofline"}, {"compute_efficiency": 0.5}, {"model": "constant"}],
)
def test_whatever_is_said_about_the_cost_is_before_a_shipped_profile(cost: dict[str, Any]) -> None:
    assert chosen("llama-3-8b", cost=cost).kind == cost.get("model", "roofline")


def test_the_link_says_nothing_about_the_cost_and_a_profile_means_a_table() -> None:
    assert isinstance(chosen("llama-3-8b", cost={"link": {"layout": "cross"}}), TableCost)
    assert isinstance(made(profile="h200-sxm-llama-3-8b-public"), TableCost)


def test_a_measured_profile_is_before_others_unless_it_needs_scaling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ship(name: str, source: str, device: str = "NVIDIA H200", **model: Any) -> None:
        made_with = {**PROFILE["model"], **model}
        profile = {**PROFILE, "device": {"name": device}, "source": source, "model": made_with}
        Path(f"h200-sxm-{name}.json").write_text(json.dumps(profile))

    def best() -> str | None:
        return profile_for(load_model("tiny"), load_hardware("h200-sxm"), make_config({}))

    monkeypatch.chdir(tmp_path)
    found = lambda kind: sorted(path.name for path in tmp_path.glob("*.json"))  # noqa: E731
    monkeypatch.setattr("kvsim.cost.table.names", found)
    assert best() is None
    ship("a-scaled", "measured", layers=3)
    assert best() == "h200-sxm-a-scaled.json"
    ship("a-slower", "measured", "NVIDIA H100 80GB HBM3")
    assert best() == "h200-sxm-a-scaled.json"
    ship("b-public", "public-table", "h200-sxm")
    assert best() == "h200-sxm-b-public.json"
    ship("c-measured", "measured")
    assert best() == "h200-sxm-c-measured.json"


@pytest.mark.parametrize("name", names("profiles"))
def test_the_name_of_a_shipped_profile_begins_with_its_hardware(name: str) -> None:
    device = load_profile(name).device["name"]
    gpus = [load_hardware(each) for each in names("hardware")]
    (gpu,) = [each for each in gpus if device in (each.name, *each.device_names)]
    assert name.startswith(f"{gpu.name}-")


def test_arguments_reach_the_constructor_and_the_link_is_skipped() -> None:
    cost = made(model="constant", step_us=7, link={"layout": "cross"})
    assert cost.step_ns(plan()) == 7000


@pytest.mark.parametrize("name", ["constant", "roofline"])
def test_cost_models_describe_themselves(name: str) -> None:
    cost = made(model=name)
    assert isinstance(cost, Cost)
    assert cost.describe()["kind"] == cost.kind == name
    assert cost.describe()["source"] == cost.source


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        (
            {"model": "constant", "step_ms": 6},
            r"cost: constant takes no 'step_ms'; did you mean 'step_us'\? it takes step_us,"
            " prefill_token_us, decode_seq_us, context_token_ns$",
        ),
        ({"model": "constant", "step_us": "6"}, r"cost: constant: step_us: expected `float`"),
        ({"model": "constant", "step_us": -6}, r"cost: constant: step_us: expected a whole"),
        ({"model": "constant", "context_token_ns": 4.5}, r"context_token_ns: expected `int`"),
        (
            {"model": "rofline"},
            r"cost: unknown 'rofline'; did you mean 'roofline'\? choose from const",
        ),
        (
            {"model": 3},
            r"cost: model: expected a name of constant, roofline, table, uncertain, got 3",
        ),
        ({"model": "table"}, r"cost: table needs 'profile'"),
        ({"model": "table", "profile": "none"}, r"no profile named 'none'"),
        ({"hardware": "h200-sxm"}, r"cost: roofline takes no 'hardware'"),
        ({"compute_efficiency": 2}, r"cost: roofline: compute_efficiency: 2"),
        ({"model": "no_such_module:Cost"}, r"cost: cannot import 'no_such_module'"),
        ({"model": "kvsim.cost:Nothing"}, r"cost: module 'kvsim.cost' has no 'Nothing'"),
        ({"model": "kvsim.cost:"}, r"cost: module 'kvsim.cost' has no ''"),
        (
            {"model": "kvsim.core.plan:Moved"},
            r"cost: kvsim.core.plan:Moved is not a cost model; give it step_ns",
        ),
    ],
)
def test_mistakes_are_answered_in_one_line(cost: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        made(**cost)
    assert "\n" not in str(caught.value)


OUTSIDER = """
class Cost:
    kind = "constant"
    source = "an outsider's"

    def __init__(self, model, every_step_ns: int = 1):
        self.layers, self.ns = model.num_hidden_layers, every_step_ns

    def step_ns(self, plan):
        return self.ns * self.layers

    def describe(self):
        return {}
"""


@pytest.fixture
def outsider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "outsiders_cost.py").write_text(OUTSIDER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "outsiders_cost", raising=False)
    return "outsiders_cost:Cost"


def test_an_outsiders_class_is_given_what_it_names(outsider: str) -> None:
    assert made(model=outsider, every_step_ns=5).step_ns(plan()) == 10


def test_an_outsiders_signature_is_its_schema(outsider: str) -> None:
    with pytest.raises(ConfigError, match=r"takes no 'every_step'; did you mean 'every_step_ns'"):
        made(model=outsider, every_step=5)
    with pytest.raises(ConfigError, match=r"every_step_ns: expected `int`, got `str`"):
        made(model=outsider, every_step_ns="5")


def test_an_outsiders_broken_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_cost.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot import 'broken_cost': ZeroDivisionError"):
        made(model="broken_cost:Cost")


class Policy:
    """A constructor with a type that only type checkers see."""

    def __init__(self, batch: "Batch", share: float, mode: str = "a") -> None:  # type: ignore[name-defined]  # noqa: F821
        if share > 1:
            raise ValueError(f"share: {share} is above 1")
        self.values = (batch, share, mode)


def test_construct_passes_only_what_the_constructor_names() -> None:
    policy = construct("engine", {"p": Policy}, "p", {"share": 1}, batch=3, unused=4)
    assert policy.values == (3, 1.0, "a")


def test_construct_names_what_is_missing_or_refused() -> None:
    with pytest.raises(ConfigError, match="engine: p needs 'share'"):
        construct("engine", {"p": Policy}, "p", {}, batch=3)
    with pytest.raises(ConfigError, match=r"engine: p: share: 2\.0 is above 1"):
        construct("engine", {"p": Policy}, "p", {"share": 2}, batch=3)
    with pytest.raises(ConfigError, match="engine: p takes no 'batch'"):
        construct("engine", {"p": Policy}, "p", {"share": 1, "batch": 1}, batch=3)
    with pytest.raises(ConfigError, match=r"engine: builtins:dict (does not say|takes no)"):
        construct("engine", {}, "builtins:dict", {"share": 1})


def test_every_cost_is_in_the_table() -> None:
    assert set(COSTS) == {"constant", "roofline", "table", "uncertain"}

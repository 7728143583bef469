"""A factor on steps with prompts, and what labels say of public runs."""

from itertools import starmap
from typing import Any

import numpy as np
import pytest
from plans import plan

from kvsim.cost import Cost, make_cost
from kvsim.cost.explain import ByStep, Explains, Terms, Work
from kvsim.cost.sustained import PUBLIC
from kvsim.errors import ConfigError
from kvsim.machine import load_hardware, load_model
from kvsim.settings.config import make_config

PROMPT = plan(chunks=[(1900, 0)], samples=1)
DECODES = plan(decode_seqs=96, context_tokens=96 * 2000, samples=96)


def cost_of(hardware: str, seed: int = 0, **cost: Any) -> Cost:
    config = make_config({"hardware": hardware, "model": "llama-3-8b", "seed": seed, "cost": cost})
    return make_cost(config, load_model(config.model_name), load_hardware(hardware))


FACTORS = pytest.mark.parametrize("factor", [1.5, 2])


@FACTORS
@pytest.mark.parametrize("cost", [{"model": "roofline"}, {"profile": "h100-sxm-llama-3-8b-public"}])
def test_only_steps_with_prompts_take_longer(cost: dict[str, Any], factor: float) -> None:
    one, other = cost_of("h100-sxm", **cost), cost_of("h100-sxm", **cost, sustained=factor)
    assert other.step_ns(PROMPT) == round(factor * one.step_ns(PROMPT))
    assert other.step_ns(DECODES) == one.step_ns(DECODES)
    assert f"sustained factor: {factor} on steps with prompts" in other.source
    assert other.describe()["sustained"] == factor
    assert one.describe()["sustained"] == 1


@FACTORS
def test_its_parts_take_longer_too(factor: float) -> None:
    """So the ledger does not put the factor down to attention of prompts."""
    work = Work(*(np.array([count, 0]) for count in (1900, 1)), *np.array([[96, 96]] * 4))
    parts = [cost_of("h100-sxm", sustained=each) for each in (1, factor)]
    assert all(isinstance(each, Explains) for each in parts)
    one, other = (each.explain(work) for each in parts if isinstance(each, Explains))
    for name in Terms._fields:
        np.testing.assert_allclose(other[name], one[name] * [factor, 1])
    assert one["dense"][0] > one["dense"][1] > 0


@pytest.mark.parametrize("model", ["constant", "roofline", "table"])
def test_many_steps_are_explained_as_each_alone(model: str) -> None:
    cost = cost_of("h100-sxm", model=model, **({} if model == "constant" else {"sustained": 1.5}))
    assert isinstance(cost, ByStep)
    steps = [(1900, 1, 0, 0, 1, 0, 0), (300, 2, 96, 192_000, 98, 3, 0), (0, 0, 7, 900, 28, 0, 21)]
    found = cost.explain(Work(*np.array(steps).T))
    for place, terms in enumerate(starmap(cost.terms, steps)):
        assert tuple(found[name][place] for name in Terms._fields) == terms


@pytest.mark.parametrize("model", ["roofline", "table"])
def test_terms_of_a_subclass_are_asked_step_by_step(model: str) -> None:
    cost = cost_of("h100-sxm", model=model)
    assert isinstance(cost, ByStep)
    own = type("Own", (type(cost),), {"terms": lambda self, *counts: (float(sum(counts)),) * 5})
    cost.__class__ = own
    found = cost.explain(Work(*np.array([(1, 2, 3, 4, 5, 6, 7), (0, 0, 1, 9, 1, 0, 0)]).T))
    assert found["dense"].tolist() == [28, 11]


def test_labels_carry_the_error_of_public_runs() -> None:
    assert "public runs took 1.08 to 1.78 times as long" in cost_of("h100-sxm").source
    assert "public runs took 1.49 times as long" in cost_of("h200-sxm", model="roofline").source
    assert "public runs" not in cost_of("l4").source
    for missed in PUBLIC.values():
        assert 1 < missed.least <= missed.most
        assert missed.runs


def test_uncertain_costs_draw_it() -> None:
    profile = "h100-sxm-llama-3-8b-public"
    drawn = {
        cost_of("h100-sxm", seed, model="uncertain", profile=profile).describe()["sustained"]
        for seed in range(40)
    }
    assert len(drawn) > 35
    assert 1 <= min(drawn) < 1.15
    assert 1.65 < max(drawn) <= 1.78


@pytest.mark.parametrize("factor", [0, -1, float("inf"), float("nan")])
def test_what_is_no_factor_is_refused(factor: float) -> None:
    with pytest.raises(ConfigError, match=r"sustained: .* is not a factor"):
        cost_of("h100-sxm", model="roofline", sustained=factor)

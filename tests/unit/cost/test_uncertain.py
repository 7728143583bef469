"""Kernel times that are as wrong as their profile says they may be."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from plans import plan

from kvsim.cost import make_cost
from kvsim.cost.profile import load_profile
from kvsim.cost.table import draw_factors, multiplied, uncertain
from kvsim.errors import ConfigError
from kvsim.machine import load_hardware, load_model
from kvsim.settings.config import RunConfig, make_config

NAME = "h200-sxm-llama-3-8b-public"
PROFILE = load_profile(NAME)
STEP = plan(decode_seqs=32, context_tokens=32 * 700, samples=32)


def priced(seed: int, **cost: object) -> RunConfig:
    table = {"model": "uncertain", "profile": NAME, **cost}
    return make_config({"hardware": "h200-sxm", "block_size": 16, "seed": seed, "cost": table})


def cost_of(config: RunConfig):  # type: ignore[no-untyped-def]
    return make_cost(config, load_model(config.model_name), load_hardware(config.hardware_name))


def test_factors_scatter_as_the_profile_says() -> None:
    drawn = [draw_factors(PROFILE, seed) for seed in range(600)]
    assert set(drawn[0]) == {"dense", "head", "prefill", "decode_v2"}
    for key, region in (("dense", "gemm_layer_sum"), ("decode_v2", "decode")):
        errors = 100 * (1 / np.array([factors[key] for factors in drawn]) - 1)
        stated = PROFILE.error[region]
        assert np.mean(errors) == pytest.approx(stated["bias_percent"], abs=0.5)
        inside = np.abs(errors - stated["bias_percent"]) <= stated["p95_percent"]
        assert np.mean(inside) == pytest.approx(0.95, abs=0.03)


def test_a_seed_is_one_machine_whatever_the_policy() -> None:
    assert draw_factors(PROFILE, 3) == draw_factors(PROFILE, 3) != draw_factors(PROFILE, 4)
    errors = {key: value for key, value in PROFILE.error.items() if key != "prefill"}
    fewer = msgspec.structs.replace(PROFILE, error=errors)
    without = {key: f for key, f in draw_factors(PROFILE, 3).items() if key != "prefill"}
    assert draw_factors(fewer, 3) == without


def test_tables_are_multiplied_and_nothing_else_is() -> None:
    fit = multiplied(PROFILE.fit, {"dense": 2.0, "decode_v2": 0.5})
    assert fit.dense.us == [2 * us for us in PROFILE.fit.dense.us]
    assert fit.dense.x == PROFILE.fit.dense.x
    assert fit.decode_v2.us[1][1] == PROFILE.fit.decode_v2.us[1][1] / 2
    assert fit.prefill is PROFILE.fit.prefill


def test_the_cost_model_prices_with_the_drawn_tables() -> None:
    times = {seed: cost_of(priced(seed)).step_ns(STEP) for seed in range(5)}
    assert len(set(times.values())) == 5
    assert times[2] == cost_of(priced(2)).step_ns(STEP)
    table = cost_of(priced(0, model="table")).step_ns(STEP)
    assert all(0.7 < ns / table < 1.4 for ns in times.values())
    described = cost_of(priced(2)).describe()
    assert described["error_factors"] == draw_factors(PROFILE, 2)
    assert described["without_error"] == []
    assert described["source"].endswith("within its held-out errors")


def test_a_profile_without_errors_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(PROFILE, error={"how": "none"})))
    with pytest.raises(ConfigError, match="records no errors"):
        cost_of(priced(0, profile=str(path)))


def test_only_what_a_profile_prices_can_be_uncertain() -> None:
    table = make_config({"cost": {"model": "table", "profile": NAME}})
    assert uncertain(table).cost == {"model": "uncertain", "profile": NAME}
    assert uncertain(make_config({"hardware": "h200-sxm"})).cost["model"] == "uncertain"
    for cost in ({"model": "constant"}, {"model": "roofline"}, {"model": "table"}):
        with pytest.raises(ConfigError, match="--cost-uncertainty"):
            uncertain(make_config({"cost": cost}))

"""Pure decode steps."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples
from plans import lengths_plan, plan
from unit.cost.test_table import H100, PROFILE

from kvsim.cost import ConstantCost, RooflineCost, TableCost
from kvsim.machine import load_hardware, load_model
from kvsim.settings.config import make_config


def roofline() -> RooflineCost:
    return RooflineCost(load_model("llama-3-8b"), load_hardware("h100-sxm"), make_config({}))


def shared_roofline() -> RooflineCost:
    config = make_config({"tensor_parallel_size": 2})
    return RooflineCost(load_model("llama-3-8b"), load_hardware("a100-sxm-80gb"), config)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], TableCost]]:
    """By name: a table of round numbers, the same with a floor for every step, a shipped one."""
    folder = tmp_path_factory.mktemp("profiles")
    eager = copy.deepcopy(PROFILE)
    eager["engine"]["graph"] = False
    eager["fit"] |= {"launch_floor_us": 150.0, "step": [90.123, 1.037, 0.71]}
    for name, profile in (("round", PROFILE), ("eager", eager)):
        (folder / f"{name}.json").write_text(json.dumps(profile))

    def made(model: str, profile: str) -> Callable[[], TableCost]:
        return lambda: TableCost(load_model(model), H100, make_config({}), profile)

    return {
        "round": made("tiny", str(folder / "round.json")),
        "eager": made("tiny", str(folder / "eager.json")),
        "public": made("llama-3-8b", "h200-sxm-llama-3-8b-public"),
    }


COSTS: list[Any] = [ConstantCost, roofline, shared_roofline, "round", "eager", "public"]


@given(lengths=st.lists(st.integers(1, 70_000), max_size=60))
def test_a_plan_knows_its_longest_decodes(lengths: list[int]) -> None:
    assert lengths_plan([], lengths).longest(9) == sorted(lengths, reverse=True)[:9]


@pytest.mark.parametrize("make", COSTS, ids=lambda make: getattr(make, "__name__", make))
@settings(max_examples=examples(40))
@given(seqs=st.integers(1, 300), length=st.integers(1, 9000))
def test_the_short_way_of_a_pure_step_is_the_general_formula(
    tables: dict[str, Any], make: Any, seqs: int, length: int
) -> None:
    """Copies are no part of a pure step, and add up: one less than one is none."""
    cost: Any = (tables[make] if isinstance(make, str) else make)()
    ns = [
        cost.step_ns(
            plan(
                decode_seqs=seqs,
                context_tokens=seqs * length,
                samples=seqs,
                copied_blocks=copies,
            )
        )
        for copies in range(3)
    ]
    assert ns[0] == pytest.approx(2 * ns[1] - ns[2], abs=3)

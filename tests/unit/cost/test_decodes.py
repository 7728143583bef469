"""Pure decode steps without a plan: the same times, to the bit, and the same counts."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import core_plan, plan
from unit.cost.test_table import H100, PROFILE

from kvsim.config import make_config
from kvsim.cost import ConstantCost, PricesDecodes, RooflineCost, TableCost
from kvsim.hardware import load_hardware
from kvsim.models import load_model


def roofline() -> RooflineCost:
    return RooflineCost(load_model("llama-3-8b"), load_hardware("h100-sxm"), make_config({}))


def shared_roofline() -> RooflineCost:
    config = make_config({"tensor_parallel_size": 2})
    return RooflineCost(load_model("llama-3-8b"), load_hardware("a100-sxm-80gb"), config)


def windows() -> RooflineCost:
    return RooflineCost(load_model("gemma-3-27b"), load_hardware("h100-sxm"), make_config({}))


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
        "uneven": made("llama-3.1-8b", "rtx-pro-6000-server-llama-3.1-8b-public"),
    }


COSTS: list[Any] = [ConstantCost, roofline, shared_roofline, "round", "eager", "public"]


@pytest.mark.parametrize("make", COSTS, ids=lambda make: getattr(make, "__name__", make))
@settings(max_examples=40)
@given(
    seqs=st.one_of(st.integers(1, 40), st.integers(1, 700)),
    length=st.integers(1, 70_000),
    steps=st.integers(0, 120),
    within_ns=st.none() | st.integers(0, 10**9),
)
def test_a_run_is_its_steps_to_the_bit(
    tables: dict[str, Any], make: Any, seqs: int, length: int, steps: int, within_ns: int | None
) -> None:
    make = tables[make] if isinstance(make, str) else make
    by_plan, by_step, by_run = make(), make(), make()
    wanted: list[int] = []
    for step in range(steps):
        context = seqs * (length + step)
        pure = plan(decode_seqs=seqs, context_tokens=context, samples=seqs)
        wanted.append(by_plan.step_ns(pure))
        assert by_step.decode_ns(seqs, context) == wanted[-1]
        if within_ns is not None and sum(wanted) >= within_ns:
            break
    assert by_run.decode_run_ns(seqs, seqs * length, steps, within_ns) == wanted
    assert all(type(ns) is int for ns in wanted)
    assert by_run.describe() == by_step.describe() == by_plan.describe()


@pytest.mark.parametrize(
    "make", [*COSTS, windows, "uneven"], ids=lambda make: getattr(make, "__name__", make)
)
@settings(max_examples=40)
@given(
    chunks=st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 70_000)), max_size=5),
    lengths=st.lists(st.integers(1, 70_000), max_size=60),
)
def test_steps_of_the_core_cost_what_others_do(
    tables: dict[str, Any], make: Any, chunks: list[tuple[int, int]], lengths: list[int]
) -> None:
    cost: Any = (tables[make] if isinstance(make, str) else make)()
    other = plan(chunks, len(lengths), sum(lengths), len(chunks) + len(lengths))
    other.single_lengths = lengths
    step = core_plan(chunks, lengths)
    assert cost.step_ns(step) == cost.step_ns(other)
    assert step.longest(9) == sorted(lengths, reverse=True)[:9]


@pytest.mark.parametrize("make", COSTS, ids=lambda make: getattr(make, "__name__", make))
@settings(max_examples=40)
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


def test_every_shipped_cost_model_prices_decodes(tables: dict[str, Any]) -> None:
    for cost in (ConstantCost(), roofline(), tables["public"]()):
        assert isinstance(cost, PricesDecodes)

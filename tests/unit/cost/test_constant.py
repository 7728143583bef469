"""The linear model: exact integers."""

from typing import Any

import pytest
from hypothesis import given
from plans import decode, plan, plans

from kvsim.core.plan import Plan
from kvsim.cost import ConstantCost


def test_defaults() -> None:
    cost = ConstantCost()
    assert cost.step_ns(plan()) == 6_000_000
    assert cost.step_ns(plan(chunks=[(512, 0)])) == 6_000_000 + 40_000 * 512
    assert cost.step_ns(decode(16, 100)) == 6_000_000 + 16 * 20_000 + 43 * 1600
    mixed = plan(chunks=[(100, 7), (28, 0)], decode_seqs=3, context_tokens=90, samples=5)
    assert cost.step_ns(mixed) == 6_000_000 + 3 * 20_000 + 43 * 90 + 40_000 * 128


@given(plans())
def test_parts_add_up_exactly(step: Plan) -> None:
    cost = ConstantCost()
    prompts = plan(chunks=step.chunks)
    decodes = plan(decode_seqs=step.decode_seqs, context_tokens=step.context_tokens)
    nothing = cost.step_ns(plan())
    assert cost.step_ns(step) == cost.step_ns(prompts) + cost.step_ns(decodes) - nothing


def test_coefficients_are_arguments() -> None:
    cost = ConstantCost(step_us=0.5, prefill_token_us=0, decode_seq_us=0.001, context_token_ns=2)
    assert cost.step_ns(plan(chunks=[(9, 9)], decode_seqs=7, context_tokens=11)) == 500 + 7 + 22
    assert cost.kind == "constant"
    assert cost.source == (
        "constant: 0.5 us + 0 us per prompt token + 0.001 us per decoding sequence"
        " + 2 ns per token of its context"
    )
    assert cost.describe()["decode_seq_ns"] == 1


@pytest.mark.parametrize(
    "args",
    [
        {"step_us": -1},
        {"step_us": 0.00001},
        {"step_us": float("inf")},
        {"prefill_token_us": float("nan")},
        {"context_token_ns": -1},
    ],
)
def test_times_are_whole_nanoseconds_of_at_least_0(args: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(args))}: expected a whole number"):
        ConstantCost(**args)

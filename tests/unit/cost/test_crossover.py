"""Swap against recompute: the break-even bandwidth is one, and the estimates of others are near."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.cost.crossover import LAYOUTS, ModelCrossings, crossings
from kvsim.errors import ConfigError
from kvsim.machine import load_hardware, load_model
from kvsim.settings.config import make_config

H200 = load_hardware("h200-sxm")
LENGTHS = [512, 2048, 8192, 32768]


def priced(model: str, tokens: list[int], **settings: Any) -> ModelCrossings:
    return crossings(load_model(model), H200, make_config(settings), tokens, list(LAYOUTS))


@given(
    st.sampled_from(["llama-3-8b", "llama-2-7b", "qwen2.5-0.5b"]),
    st.integers(1, 60_000),
    st.sampled_from([0.0, 0.5, 3.0, 10.0]),
    st.sampled_from([1, 16, 256]),
)
def test_at_the_break_even_bandwidth_both_cost_the_same(
    model: str, tokens: int, overhead_us: float, block_size: int
) -> None:
    def at(bandwidth_gb_s: float) -> Any:
        link = {"bandwidth_gb_s": bandwidth_gb_s, "copy_overhead_us": overhead_us}
        cost = {"model": "roofline", "link": link}
        return priced(model, [tokens], cost=cost, block_size=block_size).crossings[0]

    for layout, even in at(50.0).break_even_gb_s.items():
        if even is None:
            fastest = at(1e9)
            assert fastest.swap_ns[layout] >= fastest.recompute_ns - 1
        else:
            there = at(even)
            assert there.swap_ns[layout] == pytest.approx(there.recompute_ns, rel=1e-6, abs=2)


def test_one_copy_a_block_is_never_dearer_than_many() -> None:
    for model in ("llama-3-8b", "llama-2-7b", "llama-3-70b"):
        for crossing in priced(model, LENGTHS).crossings:
            assert crossing.swap_ns["cross"] <= crossing.swap_ns["layer"]


ESTIMATES = {
    "llama-3-8b": (128, 2.0, 2.6, [18.9, 19.6, 22.5, 34.2], 13),
    "llama-2-7b": (512, 8.0, 10.5, [17.5, 18.2, 21.2, 32.9], 57),
    "llama-3-70b": (320, 5.0, 6.6, [184, 187, 202, 261], 3.5),
}
"""KiB a token, MiB a block, us a token out of the GPU at 50 GB/s, us a token to recompute at
`LENGTHS` by 2 P / 750 TFLOP/s + 2 H D n L / 550 TFLOP/s, and the break-even GB/s at 2,048: a
calculation on paper that leaves out launches, the logits and the host."""


@pytest.mark.parametrize("model", ESTIMATES)
def test_an_estimate_on_paper_is_near(model: str) -> None:
    kib, mib, out_us, recompute_us, even = ESTIMATES[model]
    found = priced(model, LENGTHS)
    assert found.token_bytes == kib * 1024
    assert found.block_bytes == mib * 2**20
    for crossing, us in zip(found.crossings, recompute_us, strict=True):
        swap_us = crossing.swap_ns["cross"] / 2e3 / crossing.tokens
        assert swap_us == pytest.approx(out_us, abs=0.05)
        spread = 0.2 if crossing.tokens == 512 else 0.1
        assert crossing.recompute_ns / 1e3 / crossing.tokens == pytest.approx(us, rel=spread)
    assert found.crossings[1].break_even_gb_s["cross"] == pytest.approx(even, rel=0.07)


def test_many_small_copies_lose_where_one_large_copy_wins() -> None:
    """64 pieces of 32 KiB at 3 us each: 24 us a token, out and in."""
    crossing = priced("llama-3-8b", [2048]).crossings[0]
    assert crossing.swap_ns["layer"] == 2048 // 16 * 64 * 3000 * 2
    assert crossing.swap_ns["cross"] < crossing.recompute_ns < crossing.swap_ns["layer"]
    assert crossing.break_even_gb_s["layer"] is None


def test_recompute_is_labelled_with_its_source() -> None:
    assert priced("llama-3-8b", [16], cost={"model": "roofline"}).kind == "roofline"
    assert priced("llama-3-70b", [16]).kind == "scaled"


def test_impossible_links_are_refused() -> None:
    with pytest.raises(ConfigError, match="bandwidth_gb_s: -1"):
        priced("tiny", [16], cost={"link": {"bandwidth_gb_s": -1.0}})

"""Swap copies: granularity against bandwidth."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.errors import ConfigError
from kvsim.machine import (
    LinkTimes,
    TransferTimes,
    block_bytes,
    load_hardware,
    load_model,
    make_link,
)
from kvsim.settings.config import make_config


def link(**args: Any) -> LinkTimes:
    model, config = load_model("llama-3-8b"), make_config({"cost": {"link": args}})
    return make_link(model, load_hardware("h100-sxm"), config, block_bytes(model, config))


def test_small_pieces_cost_their_overhead() -> None:
    """64 pieces of 32 KiB at 3 us each; at 50 GB/s the bytes alone would take 42 us."""
    assert link(copy_overhead_us=3, bandwidth_gb_s=50).transfer_ns(1) == 192_000


def test_one_piece_costs_its_bytes() -> None:
    times = link(layout="cross", copy_overhead_us=3, bandwidth_gb_s=50)
    assert times.transfer_ns(1) == round(2_097_152 / 50)
    assert times.transfer_ns(100) == round(100 * 2_097_152 / 50)


def test_large_pieces_cost_their_bytes_in_any_layout() -> None:
    slow = {"copy_overhead_us": 3, "bandwidth_gb_s": 1}
    assert link(layout="layer", **slow).transfer_ns(7) == link(layout="cross", **slow).transfer_ns(
        7
    )


def test_defaults_are_the_layer_layout_on_the_hardware_link() -> None:
    hardware = load_hardware("h100-sxm")
    described = link().describe()
    assert described["layout"] == "layer"
    assert described["pieces_per_block"] == 64
    assert described["bandwidth_gb_s"] == hardware.link_bandwidth_gb_s
    assert described["copy_overhead_us"] == hardware.copy_overhead_us


def test_fixed_time_of_a_block() -> None:
    times = link(block_us=30)
    assert (times.transfer_ns(0), times.transfer_ns(1), times.transfer_ns(9)) == (
        0,
        30_000,
        270_000,
    )
    assert times.describe() == {"block_us": 30}


@given(
    st.integers(0, 10**5),
    st.integers(0, 10**5),
    st.sampled_from(["layer", "cross"]),
    st.floats(0, 100),
    st.floats(0.1, 100),
)
def test_transfers_grow_with_blocks_and_add_up(
    a: int, b: int, layout: str, overhead: float, bandwidth: float
) -> None:
    times = link(layout=layout, copy_overhead_us=overhead, bandwidth_gb_s=bandwidth)
    both = times.transfer_ns(a + b)
    assert both >= max(times.transfer_ns(a), times.transfer_ns(b))
    assert both == pytest.approx(times.transfer_ns(a) + times.transfer_ns(b), abs=2, rel=1e-12)
    assert both >= (a + b) * 2_097_152 / bandwidth * (1 - 1e-9) - 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"layuot": "cross"}, r"cost\.link takes no 'layuot'; did you mean 'layout'\?"),
        ({"layout": "row"}, r"cost\.link: layout: invalid enum value 'row'"),
        ({"bandwidth_gb_s": 0}, r"cost\.link: bandwidth_gb_s: 0"),
        ({"copy_overhead_us": -1}, r"cost\.link: copy_overhead_us: -1"),
        ({"block_us": 9_007_199_254_740_993}, "not a time; use microseconds from 0 to 1e[+]09"),
        ({"bandwidth_gb_s": 1e-12}, r"bandwidth_gb_s: 1e-12 is less than a byte in a second"),
        ({"block_us": 30, "layout": "cross"}, "leave out the other settings"),
        ({"block_us": "30"}, "block_us: expected `float.*`, got `str`"),
        ({"model": "tiny"}, "takes no 'model'"),
    ],
)
def test_bad_arguments_are_named(args: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        link(**args)


def test_the_link_is_a_table() -> None:
    config = make_config({"cost": {"link": 3}})
    with pytest.raises(ConfigError, match=r"cost\.link: expected a table"):
        make_link(load_model("tiny"), load_hardware("h100-sxm"), config, 1024)


MOONCAKE_MS = (0.54, 0.61, 0.92, 1.50, 2.51, 4.75, 8.84, 16.43, 31.65)
"""Transfers of prompts of 128, 256, ... 32,768 tokens of Qwen3-8B (144 KiB a token) from an H800 to
another, with 8 ConnectX-7 over RoCE: github.com/kvcache-ai/Mooncake,
`performance/vllm/vllm-v1-pd-performance.md`."""


def test_transfers_between_engines_take_as_long_as_measured() -> None:
    times = TransferTimes()
    for doublings, measured_ms in enumerate(MOONCAKE_MS):
        took_ms = times.transfer_ns(128 * 2**doublings * 144 * 1024) / 1e6
        assert took_ms == pytest.approx(measured_ms, rel=0.1)

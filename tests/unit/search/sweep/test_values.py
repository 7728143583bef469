"""Values of settings: lists, ranges, laws, and what is wrong with bad ones."""

import math
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.errors import ConfigError
from kvsim.search.grid import Axis, parse_axis, parse_law, whole
from kvsim.settings.config import RunConfig


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("watermark=0,0.01", (0, 0.01)),
        ("preemption_mode=recompute,swap", ("recompute", "swap")),
        ("enable_prefix_caching=true,false", (True, False)),
        ("request_rate=1,inf", (1, math.inf)),
        ("cost.model=constant", ("constant",)),
        ("vllm_version=0.9,0.10", ("0.9", "0.10")),
        ('vllm_version="0.9",0.10', ("0.9", "0.10")),
        ("watermark=lin(0,0.1,3)", (0.0, 0.05, 0.1)),
        ("request_rate=log(1,64,7)", (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)),
        ("num_gpu_blocks_override=lin(100,200,3)", (100, 150, 200)),
        ("max_num_seqs=log(1,4,6)", (1, 2, 3, 4)),
    ],
)
def test_axes(text, values):
    axis = parse_axis("--grid", text)
    assert axis == Axis(text.partition("=")[0], values)
    assert list(map(type, axis.values)) == list(map(type, values))


@given(st.integers(2, 50), st.floats(0.001, 10), st.floats(1.5, 1000))
def test_a_logarithmic_range_has_even_ratios_and_its_own_ends(number, first, factor):
    values = parse_axis("--grid", f"request_rate=log({first},{first * factor},{number})").values
    assert values[0] == pytest.approx(first, rel=1e-3)
    assert values[-1] == pytest.approx(first * factor, rel=1e-3)
    ratios = [b / a for a, b in pairwise(values)]
    assert ratios == pytest.approx([factor ** (1 / (number - 1))] * len(ratios), rel=2e-3)


@pytest.mark.parametrize(
    ("text", "low", "high", "kind"),
    [
        ("watermark=uniform(0.1,0.2)", 0.1, 0.2, float),
        ("request_rate=loguniform(1,100)", 1, 100, float),
        ("max_num_seqs=uniform(4,9)", 4, 9, int),
    ],
)
def test_laws_stay_within_their_ends_and_repeat(text, low, high, kind):
    law = parse_law("--random", text)
    drawn = [law.draw(random) for random in [Random(7)] for _ in range(200)]
    assert all(low <= value <= high and isinstance(value, kind) for value in drawn)
    assert len(set(drawn)) > 3
    assert drawn == [law.draw(random) for random in [Random(7)] for _ in range(200)]


def test_a_choice_takes_each_value():
    law = parse_law("--random", "preemption_mode=choice(recompute,swap)")
    assert {law.draw(random) for random in [Random(1)] for _ in range(50)} == {"recompute", "swap"}


def test_a_release_is_drawn_as_it_is_written():
    law = parse_law("--random", "vllm_version=choice(0.10, 0.9.2)")
    assert {law.draw(random) for random in [Random(1)] for _ in range(50)} == {"0.10", "0.9.2"}


def test_whole_numbers_are_known_by_the_settings_types():
    found = {key for key in RunConfig.__struct_fields__ if whole(key)}
    assert {"num_gpu_blocks_override", "max_num_seqs", "block_size", "seed", "n"} <= found
    assert not found & {"watermark", "request_rate", "gpu_memory_utilization", "engine", "cost"}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("watermrk=0", "watermark"),
        ("watermark", "watermark=0,0.01"),
        ("watermark=", "no values"),
        ("watermark=0,,1", "empty"),
        ("watermark=0,0", "twice"),
        ("watermark=log(0,1,3)", "begin above 0"),
        ("watermark=lin(1,0,3)", "not below"),
        ("watermark=lin(0,1)", "FIRST,LAST,N"),
        ("watermark=lin(0,1,2.5)", "whole N"),
        ("watermark=lin(0,1,1)", "1 values"),
        ("watermark=lin(0,x,3)", "numbers"),
        ("watermark=lin(0,inf,3)", "finite"),
        ("watermark=uniform(0,1)", "lin(FIRST,LAST,N)"),
        ("cost=3", "cost.KEY"),
        ("watermark.x=3", "write watermark=VALUES"),
    ],
)
def test_bad_axes_are_refused_by_name(text, word):
    with pytest.raises(ConfigError) as caught:
        parse_axis("--grid", text)
    assert str(caught.value).startswith(f"--grid {text}:")
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("watermark=0,1", "uniform(A,B)"),
        ("watermark=uniform(1,0)", "lower one first"),
        ("watermark=uniform(1)", "two ends"),
        ("request_rate=loguniform(0,1)", "begin above 0"),
    ],
)
def test_bad_laws_are_refused_by_name(text, word):
    with pytest.raises(ConfigError, match=r"--random") as caught:
        parse_law("--random", text)
    assert word in str(caught.value)

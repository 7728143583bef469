"""What is tried first, and what is refused."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.errors import ConfigError
from kvsim.search.size import KNOBS, Bounds, make_knob
from kvsim.search.size_verdict import written
from kvsim.workload.spec import Workload, make_trace

LOAD = make_trace(Workload("random", requests=20, input_len=60, output_len=40), 3)
BASE = {"max_model_len": 256, "num_gpu_blocks_override": 400, "request_rate": 8.0}


def knob(name, low=None, high=None, **settings):
    base = {key: value for key, value in (BASE | settings).items() if value is not None}
    return make_knob(name, LOAD, base, Bounds(low, high))


@pytest.mark.parametrize("name", KNOBS)
def test_a_ladder_ascends_within_its_bounds_on_values_that_can_be_told_apart(name):
    blocks = None if name == "gpu_memory_utilization" else 400
    each = knob(name, num_gpu_blocks_override=blocks)
    assert all(a < b for a, b in pairwise(each.ladder))
    assert len(each.ladder) >= (3 if each.grows else 5)
    for value in each.ladder:
        assert each.low <= value <= each.high
        assert each.snap(value) == value
        assert type(each.snap(value)) is type(value)


def test_blocks_go_from_the_fewest_that_start_to_what_the_base_has():
    each = knob("num_gpu_blocks")
    assert (each.key, each.ladder[0], each.ladder[-1]) == ("num_gpu_blocks_override", 16, 400)
    assert knob("num_gpu_blocks", num_gpu_blocks_override=None).high > 10_000


@pytest.mark.parametrize("name", KNOBS)
def test_each_replica_of_a_fleet_has_the_settings_of_a_run(name):
    blocks = None if name == "gpu_memory_utilization" else 400
    fleet = {"replicas": 2, "router": "random"}
    alone = knob(name, num_gpu_blocks_override=blocks)
    assert knob(name, num_gpu_blocks_override=blocks, **fleet).ladder == alone.ladder


@pytest.mark.parametrize(
    ("name", "first"), [("kv_offloading_size", 0), ("max_num_batched_tokens", 64)]
)
def test_a_ladder_from_0_has_values_of_the_setting(name, first):
    each = knob(name, low=0, high=512)
    assert each.ladder == (first, 512)
    assert list(map(type, each.ladder)) == [type(each.snap(first))] * 2


@pytest.mark.parametrize("name", KNOBS)
def test_values_that_differ_are_written_differently(name):
    each = knob(name, num_gpu_blocks_override=None if name == "gpu_memory_utilization" else 400)
    values = {*each.ladder, *map(each.snap, (1.05, 1.46, 2.34, 23.4))}
    assert len({written(each, value) for value in values}) == len(values)


def test_a_rate_starts_at_that_of_the_base():
    assert 8.0 in knob("request_rate").ladder


@given(st.sampled_from(sorted(KNOBS)), st.data())
def test_a_value_between_is_between_or_there_is_none(name, data):
    each = knob(name, num_gpu_blocks_override=None if "util" in name else 400)
    low, high = data.draw(
        st.tuples(st.sampled_from(each.ladder), st.sampled_from(each.ladder)).filter(
            lambda pair: pair[0] < pair[1]
        )
    )
    for _ in range(40):
        middle = each.between(low, high)
        if middle is None:
            break
        assert low < middle < high
        assert each.snap(middle) == middle
        low = middle
    else:
        raise AssertionError("halving never ends")
    assert each.snap((low + high) / 2) in (low, high)


@pytest.mark.parametrize(
    ("name", "bounds", "settings", "word"),
    [
        ("num_blocks", (None, None), {}, "'num_gpu_blocks'"),
        ("num_gpu_blocks", (500, 400), {}, "nothing between"),
        ("num_gpu_blocks", (-1, None), {}, "--from"),
        ("gpu_memory_utilization", (None, None), {}, "num_gpu_blocks_override"),
        (
            *("gpu_memory_utilization", (None, None)),
            {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1 << 30},
            "beside kv_cache_memory_bytes",
        ),
        ("watermark", (None, float("nan")), {}, "--to"),
        ("watermark", (None, 3), {}, "--to: watermark"),
        ("request_rate", (0, 2), {}, "--from: request_rate"),
        ("replicas", (0, 2), {}, "--from: replicas"),
        ("max_num_seqs", (0.4, 2), {}, "--from: max_num_seqs"),
    ],
)
def test_bad_searches_are_refused(name, bounds, settings, word):
    with pytest.raises(ConfigError) as caught:
        knob(name, *bounds, **settings)
    assert word in str(caught.value)

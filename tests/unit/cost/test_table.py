"""Profiles: strict loading, raw-linear interpolation against numpy, counted extrapolation."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import decode, plan

from kvsim.cost import TableCost
from kvsim.cost.profile import load_profile
from kvsim.errors import ConfigError
from kvsim.machine import load_hardware, load_model
from kvsim.settings.config import make_config

H100 = load_hardware("h100-sxm")
PROFILE: dict[str, Any] = {
    "schema": "kvsim.profile/1",
    "source": "measured",
    "created": "2026-01-01",
    "device": {"name": "test bench"},
    "model": {
        "name": "tiny",
        "layers": 2,
        "hidden": 64,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "ffn": 128,
        "vocab": 512,
        "dtype": "float16",
        "kv_dtype": "float16",
    },
    "engine": {"block_size": 16, "kv_layout": "layer"},
    "fit": {
        "dense": {"tokens": [1, 8, 64, 512], "us": [10, 12, 30, 200]},
        "head": {"samples": [1, 64], "us": [5, 20]},
        "prefill": {
            "q": [16, 128, 512],
            "ctx": [0, 1024],
            "us": [[1, 3], [4, 12], [20, 60]],
            "tile": 16,
        },
        "decode_v2": {
            "n": [1, 8, 32],
            "ctx": [16, 256, 2048],
            "us": [[2, 3, 10], [3, 6, 30], [5, 20]],
        },
        "step": [100, 1, 0],
    },
}

MIXED: dict[str, Any] = {
    "q": [16, 32],
    "ctx": [0, 64],
    "n": [1, 8],
    "kv": [16, 256],
    "us": [[[[1, 2], [3, 4]], [[5, 6], [7, 8]]], [[[9, 10], [11, 12]], [[13, 14], [15, 20]]]],
}
"""Attention of a launch for a chunk and decodes."""


@pytest.fixture
def profile() -> dict[str, Any]:
    return copy.deepcopy(PROFILE)


def save(folder: Path, profile: dict[str, Any]) -> str:
    path = folder / "bench.json"
    path.write_text(json.dumps(profile))
    return str(path)


def table(folder: Path, profile: dict[str, Any], **keys: Any) -> TableCost:
    return TableCost(load_model("tiny"), H100, make_config(keys), save(folder, profile))


@pytest.fixture(scope="module")
def cost(tmp_path_factory: pytest.TempPathFactory) -> TableCost:
    return table(tmp_path_factory.mktemp("profile"), PROFILE)


def test_grid_points_are_returned_as_measured(cost: TableCost) -> None:
    assert cost.step_ns(decode(8, 256)) == (100 + 12 + 2 * 6) * 1000
    assert cost.step_ns(plan(chunks=[(512, 1024)], samples=64)) == (100 + 200 + 120 + 20) * 1000
    both = plan(chunks=[(16, 0), (16, 1024)], decode_seqs=32, context_tokens=32 * 16)
    assert cost.step_ns(both) == (100 + 30 + 2 * (5 + 1 + 3)) * 1000


def test_chunks_cost_what_the_next_tile_costs(cost: TableCost) -> None:
    attention = [cost.step_ns(plan(chunks=[(q, 0)])) - dense_ns(q) for q in (113, 120, 128)]
    assert attention == [(100 + 2 * 4) * 1000] * 3


def dense_ns(tokens: float) -> int:
    dense = PROFILE["fit"]["dense"]
    return round(float(np.interp(tokens, dense["tokens"], dense["us"])) * 1000)


@given(st.integers(1, 32), st.integers(16, 256))
def test_decode_is_bilinear_in_raw_counts(cost: TableCost, seqs: int, context: int) -> None:
    fit = PROFILE["fit"]["decode_v2"]
    column = [np.interp(context, fit["ctx"][: len(row)], row) for row in fit["us"]]
    attention = float(np.interp(seqs, fit["n"], column))
    expected = 100_000 + dense_ns(seqs) + 2 * attention * 1000
    assert cost.step_ns(decode(seqs, context)) == pytest.approx(expected, abs=2)


@given(st.integers(16, 512), st.integers(0, 1024))
def test_prefill_is_bilinear_in_raw_counts(cost: TableCost, new: int, context: int) -> None:
    fit = PROFILE["fit"]["prefill"]
    column = [np.interp(context, fit["ctx"], row) for row in fit["us"]]
    attention = float(np.interp((new + 15) // 16 * 16, fit["q"], column))
    expected = 100_000 + dense_ns(new) + 2 * attention * 1000
    assert cost.step_ns(plan(chunks=[(new, context)])) == pytest.approx(expected, abs=2)


def test_chunks_and_decodes_in_one_launch(tmp_path: Path, profile: dict[str, Any]) -> None:
    profile["fit"]["mixed"] = MIXED
    cost = table(tmp_path, profile)

    def attention_us(chunks: list[tuple[int, int]], seqs: int, context: int) -> float:
        tokens = seqs + sum(new for new, _ in chunks)
        step = plan(chunks=chunks, decode_seqs=seqs, context_tokens=seqs * context)
        return (cost.step_ns(step) - 100_000 - dense_ns(tokens)) / 2000

    assert attention_us([(32, 64)], 8, 256) == pytest.approx(20, abs=0.01)
    assert attention_us([(16, 32)], 1, 136) == pytest.approx(3.5, abs=0.01)
    # The second chunk adds what it takes beyond the smallest one.
    assert attention_us([(32, 64), (16, 64)], 8, 256) == pytest.approx(20 + 8 - 4, abs=0.01)
    assert counted(cost)[1] == 0
    attention_us([(33, 0)], 8, 256)
    assert counted(cost)[1] == 1
    apart = plan(chunks=[(16, 0)]), decode(8, 256)
    assert [cost.step_ns(step) for step in apart] == [
        table(tmp_path, PROFILE).step_ns(step) for step in apart
    ]


def test_past_the_last_point_the_slope_continues_and_is_counted(
    tmp_path: Path, profile: dict[str, Any]
) -> None:
    cost = table(tmp_path, profile)
    inside = cost.step_ns(decode(8, 2048))
    assert counted(cost) == (1, 0, inside, 0)
    outside = cost.step_ns(decode(8, 2048 + 1792))
    assert outside - inside == 2 * (30 - 6) * 1000
    assert counted(cost) == (2, 1, inside + outside, outside)


def counted(cost: TableCost) -> tuple[int, ...]:
    found = cost.describe()
    keys = "priced_steps", "extrapolated_steps", "priced_ns", "extrapolated_ns"
    return tuple(found[key] for key in keys)


@pytest.mark.parametrize(
    ("step", "outside"),
    [
        (decode(1, 16), False),
        (decode(1, 15), True),
        (decode(32, 256), False),
        (decode(32, 257), True),  # the row of 32 sequences was measured up to 256
        (decode(33, 16), True),
        (plan(chunks=[(512, 1024)]), False),
        (plan(chunks=[(512, 1025)]), True),
        (plan(chunks=[(513, 0)]), True),
        (plan(samples=64), False),
        (plan(samples=65), True),
    ],
)
def test_what_counts_as_outside(cost: TableCost, step: Any, outside: bool) -> None:
    before = counted(cost)[1]
    cost.step_ns(step)
    assert counted(cost)[1] - before == outside


def test_a_chunk_beyond_the_longest_is_priced_in_pieces(cost: TableCost) -> None:
    """1,040 tokens behind 512: 512 behind 512, 512 behind 1,024, 16 behind 1,536."""
    pieces_us = 40 + 60 + (1 + 2 * 1536 / 1024)
    dense_us = 200 + (1040 - 512) * 170 / 448
    before = counted(cost)[1]
    found = cost.step_ns(plan(chunks=[(1040, 512)]))
    assert found == pytest.approx((100 + dense_us + 2 * pieces_us) * 1000, abs=2)
    assert counted(cost)[1] == before + 1


def test_a_falling_end_is_not_continued_downwards(tmp_path: Path, profile: dict[str, Any]) -> None:
    profile["fit"]["head"]["us"] = [5, 3]
    cost = table(tmp_path, profile)
    assert cost.step_ns(plan(samples=640)) == cost.step_ns(plan(samples=64)) == (100 + 3) * 1000


def test_step_coefficients_floor_and_copies(tmp_path: Path, profile: dict[str, Any]) -> None:
    profile["fit"] |= {"step": [100, 2, 7], "launch_floor_us": 1000, "copied_block_us": 3}
    cost = table(tmp_path, profile)
    step = decode(8, 256)
    assert cost.step_ns(step) == (100 + 2 * (12 + 2 * 6) + 7 * 8) * 1000
    step.copies = [(0, 1)] * 4
    assert cost.step_ns(step) == (100 + 2 * (12 + 2 * 6 + 4 * 3) + 7 * 8) * 1000
    assert cost.step_ns(plan(chunks=[(16, 0)])) == 1_000_000
    profile["engine"]["graph"] = False
    assert table(tmp_path, profile).step_ns(decode(8, 256)) == 1_000_000


def test_the_decode_kernel_is_chosen(tmp_path: Path, profile: dict[str, Any]) -> None:
    grid = profile["fit"]["decode_v2"]
    profile["fit"]["decode_v1"] = {**grid, "us": [[4 * us for us in row] for row in grid["us"]]}
    path, model = save(tmp_path, profile), load_model("tiny")
    v1 = TableCost(model, H100, make_config({}), path, decode_kernel="v1")
    v2 = TableCost(model, H100, make_config({}), path)
    assert v1.step_ns(decode(8, 256)) - v2.step_ns(decode(8, 256)) == 3 * 2 * 6 * 1000


def test_a_kernel_that_was_not_measured(tmp_path: Path, profile: dict[str, Any]) -> None:
    path = save(tmp_path, profile)
    with pytest.raises(ValueError, match="has no decode_v1"):
        TableCost(load_model("tiny"), H100, make_config({}), path, decode_kernel="v1")


@pytest.mark.parametrize(
    ("source", "kind"),
    [("measured", "measured"), ("scaled", "scaled"), ("public-table", "estimated")],
)
def test_results_are_labelled_with_the_source(
    tmp_path: Path, profile: dict[str, Any], source: str, kind: str
) -> None:
    profile["source"] = source
    cost = table(tmp_path, profile)
    assert cost.kind == kind
    assert cost.source.startswith(f"{source}: test bench x tiny (")
    assert cost.describe()["kind"] == kind


@pytest.mark.parametrize("keys", [{}, {"dtype": "float32"}])
@pytest.mark.parametrize(
    ("error", "why"),
    [
        ({"trusted": False, "why": ["the clock drifted", "whole steps are 40 % off"]},
         "not trusted: the clock drifted; whole steps are 40 % off"),
        ({"trusted": False}, "not trusted: no reason is given"),
        ({"trusted": "no", "why": "x"}, "not trusted: no reason is given"),
    ],
)  # fmt: skip
def test_a_profile_that_its_own_checks_do_not_bear_out_is_an_estimate_and_says_why(
    tmp_path: Path, profile: dict[str, Any], keys: dict[str, Any], error: Any, why: str
) -> None:
    """Scaled, too."""
    profile["error"] = error
    cost = table(tmp_path, profile, **keys)
    assert cost.kind == "estimated"
    assert why in cost.source
    assert cost.describe()["source"] == cost.source
    profile["error"] = {"trusted": True, "why": []}
    assert table(tmp_path, profile, **keys).kind != "estimated"


@pytest.mark.parametrize(("source", "kind"), [("scaled", "scaled"), ("public-table", "estimated")])
def test_a_profile_that_was_not_measured_may_have_another_block_size(
    tmp_path: Path, profile: dict[str, Any], source: str, kind: str
) -> None:
    profile["source"] = source
    assert table(tmp_path, profile, block_size=32).kind == kind


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (["schema"], "kvsim.profile/2", r"schema: invalid enum value 'kvsim.profile/2'"),
        (["source"], "guessed", "source: invalid enum value"),
        (["fit", "dense", "us"], [1, 2], r"fit\.dense: 2 times for 4 points"),
        (["fit", "dense", "us"], [1, 2, 3, -4], r"fit\.dense\.us\[3\]: expected `float` >= 0"),
        (["fit", "dense", "tokens"], [1, 8, 8, 512], r"fit\.dense: points must increase"),
        (["fit", "head"], {"samples": [1], "us": [1]}, r"fit\.head: a line needs at least 2"),
        (["fit", "head"], {"rows": [1], "us": [1]}, r"fit\.head: object"),
        (["fit", "prefill", "us"], [[1, 3]], r"fit\.prefill: 1 rows of times for 3 points"),
        (["fit", "decode_v2", "us", 2], [5], r"fit\.decode_v2: a row of 1 times for 3 contexts"),
        (["fit", "decode_v2", "n"], [1, 32, 8], r"fit\.decode_v2: points must increase"),
        (["fit", "mixed"], {**MIXED, "us": []}, r"fit\.mixed: 0 entries for 2 points of q"),
        (["fit", "mixed"], {**MIXED, "kv": [1, 2, 3]}, r"fit\.mixed: 2 entries for 3 points of kv"),
        (["fit", "mixed"], {**MIXED, "n": [2, 1]}, r"fit\.mixed: n: points must increase"),
        (["fit", "mixed"], {"q": [1, 2]}, r"fit\.mixed: object missing required field"),
        (["fit", "prefill", "tile"], 0, r"fit\.prefill\.tile: expected `int` >= 1"),
        (["model", "layers"], "2", r"model\.layers: expected `int`, got `str`"),
        (["fits"], {}, r"unknown key 'fits'; did you mean 'fit'"),
    ],
)
def test_strict_loading(
    tmp_path: Path, profile: dict[str, Any], path: list[Any], value: Any, words: str
) -> None:
    *parents, key = path
    inner: Any = profile
    for parent in parents:
        inner = inner[parent]
    inner[key] = value
    with pytest.raises(ConfigError, match=rf"bench\.json: {words}") as caught:
        load_profile(save(tmp_path, profile))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["model", "fit", "device", "created"])
def test_missing_keys_are_named(tmp_path: Path, profile: dict[str, Any], key: str) -> None:
    del profile[key]
    with pytest.raises(ConfigError, match=f"missing required field `{key}`"):
        load_profile(save(tmp_path, profile))


def test_not_a_number_is_refused(tmp_path: Path, profile: dict[str, Any]) -> None:
    profile["fit"]["step"] = [float("nan"), 1, 0]
    with pytest.raises(ConfigError, match="NaN is not a number of JSON"):
        load_profile(save(tmp_path, profile))

"""A profile carried over to other geometries: exact where it must be, errors against real tables.

The tables are public measurements of an H200 that the shipped profile was not made from: other
head counts, head sizes, a KV cache of fp8, tensor parallelism of 2 and 4.
"""

import copy
import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from marks import long
from msgspec.structs import replace
from plans import decode, plan
from shared import SHARED, needs_shared
from unit.cost.test_table import H100, MIXED, PROFILE

from kvsim.cost import TableCost
from kvsim.cost.calibrate.aiconfigurator import import_profile
from kvsim.cost.profile import Grid, Interpolation, Profile, load_profile, to_json
from kvsim.cost.scaling import scaled
from kvsim.errors import ConfigError
from kvsim.machine import Model, load_hardware, load_model
from kvsim.settings.config import RunConfig, make_config

H200 = load_hardware("h200-sxm")
PUBLIC = "h200-sxm-llama-3-8b-public"
LLAMA = load_model("llama-3-8b")
TABLES = SHARED / "kernel-tables" / "h200"
TINY = load_model("tiny")


@pytest.fixture
def profile() -> dict[str, Any]:
    return copy.deepcopy(PROFILE)


def table(folder: Path, profile: dict[str, Any], model: Model = TINY, **keys: Any) -> TableCost:
    path = folder / "bench.json"
    path.write_text(json.dumps(profile))
    return TableCost(model, H100, make_config(keys), str(path))


# -- labels ----------------------------------------------------------------------------------------


def test_what_was_measured_is_not_scaled(tmp_path: Path, profile: dict[str, Any]) -> None:
    cost = table(tmp_path, profile)
    assert (cost.kind, cost.describe()["scaled"]) == ("measured", {})
    renamed = replace(TINY, name="another name")
    assert table(tmp_path, profile, renamed).kind == "measured"


@pytest.mark.parametrize(
    ("keys", "change"),
    [
        ({"block_size": 32}, "block_size 32"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size 2"),
        ({"dtype": "float32"}, "dtype float32, kv_cache_dtype float32"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8"),
    ],
)
def test_a_scaled_profile_says_what_changed(
    tmp_path: Path, profile: dict[str, Any], keys: dict[str, Any], change: str
) -> None:
    cost = table(tmp_path, profile, **keys)
    assert cost.kind == "scaled"
    assert cost.source == (
        f"scaled from measured: test bench x tiny ({tmp_path / 'bench.json'}) to {change}"
    )
    described = cost.describe()
    assert [f"{key} {each['run']}" for key, each in described["scaled"].items()] == (
        change.split(", ")
    )


def test_public_tables_scaled_are_scaled_but_estimated_at_any_block_size() -> None:
    exact = TableCost(LLAMA, H200, make_config({"block_size": 32}), PUBLIC)
    other = TableCost(load_model("llama-3-70b"), H200, make_config({}), PUBLIC)
    assert (exact.kind, other.kind) == ("estimated", "scaled")
    assert other.source == (
        f"scaled from public-table: h200-sxm x llama-3-8b ({PUBLIC}) to llama-3-70b"
    )
    assert other.describe()["scaled"]["hidden_size"] == {"profile": 4096, "run": 8192}


def test_impossible_parallelism_is_refused(tmp_path: Path, profile: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size: 3 GPUs cannot share"):
        table(tmp_path, profile, tensor_parallel_size=3)


# -- block sizes -----------------------------------------------------------------------------------


def test_every_block_size_that_was_measured_answers_exactly(
    tmp_path: Path, profile: dict[str, Any]
) -> None:
    slower = copy.deepcopy(profile["fit"])
    slower["decode_v2"]["us"] = [[3 * us for us in row] for row in slower["decode_v2"]["us"]]
    profile["others"] = {"32": slower}
    at_16, at_32 = table(tmp_path, profile), table(tmp_path, profile, block_size=32)
    assert (at_16.kind, at_32.kind) == ("measured", "measured")
    assert at_32.step_ns(decode(8, 256)) - at_16.step_ns(decode(8, 256)) == 2 * 2 * 6 * 1000
    at_64 = table(tmp_path, profile, block_size=64)
    assert at_64.kind == "scaled"
    assert at_64.step_ns(decode(8, 256)) == at_16.step_ns(decode(8, 256))
    both = table(tmp_path, profile, block_size=32, kv_cache_dtype="fp8")
    assert both.describe()["scaled"].keys() == {"kv_cache_dtype"}
    assert both.step_ns(decode(8, 512)) == at_32.step_ns(decode(8, 256))


def test_fits_of_other_block_sizes_are_checked(tmp_path: Path, profile: dict[str, Any]) -> None:
    profile["others"] = {"32": copy.deepcopy(profile["fit"])}
    profile["others"]["32"]["head"]["samples"] = [2, 1]
    with pytest.raises(ConfigError, match=r"others\.32\.head: points must increase"):
        table(tmp_path, profile)
    profile["others"] = {"x": profile["fit"]}
    with pytest.raises(
        ConfigError, match=r"bench\.json: expected `str` matching .* in `\$\.others`"
    ):
        table(tmp_path, profile)


# -- rules -----------------------------------------------------------------------------------------


def tiny_profile(folder: Path, profile: dict[str, Any]) -> Profile:
    path = folder / "bench.json"
    path.write_text(json.dumps(profile))
    return load_profile(str(path))


def test_the_same_geometry_changes_nothing(tmp_path: Path, profile: dict[str, Any]) -> None:
    profile["fit"]["mixed"] = MIXED
    profile["fit"]["copied_block_us"] = 3
    made = tiny_profile(tmp_path, profile)
    assert scaled(made, TINY, make_config({}), H100).fit == made.fit


@given(st.integers(2, 32), st.integers(32, 4000))
def test_attention_is_looked_up_at_equal_work(n: int, ctx: int) -> None:
    """Half the KV heads: twice the sequences; half the bytes: twice the context."""
    made = load_profile(PUBLIC)
    run = make_config({"tensor_parallel_size": 2, "kv_cache_dtype": "fp8"})
    fit = scaled(made, LLAMA, run, H200).fit
    old, new = made.fit.decode_v2, fit.decode_v2
    assert at(new, 2 * n, 2 * ctx) == pytest.approx(at(old, n, ctx))
    side = 2**0.5
    q = 4 * n
    assert at(fit.prefill, q * side, ctx * side) == pytest.approx(at(made.fit.prefill, q, ctx))


def test_fewer_work_items_than_measured_read_as_one_shorter_sequence() -> None:
    made = load_profile(PUBLIC)
    fit = scaled(made, LLAMA, make_config({"tensor_parallel_size": 4}), H200).fit
    for n in (1, 2):
        assert at(fit.decode_v2, n, 8192) == pytest.approx(at(made.fit.decode_v2, 1, 8192 * n / 4))


def at(grid: Any, x: float, y: float) -> float:
    assert isinstance(grid, Grid)
    return Interpolation().between(grid.x, grid.ctx, grid.us, x, y)


def test_all_reduces_are_taken_off_before_they_are_put_on(
    tmp_path: Path, profile: dict[str, Any]
) -> None:
    profile["fit"]["dense"] = {"tokens": [1, 512], "us": [500, 900]}
    profile["model"]["tp"] = 2
    made = tiny_profile(tmp_path, profile)
    there = scaled(made, TINY, make_config({}), H100)
    back = scaled(there, TINY, make_config({"tensor_parallel_size": 2}), H100)
    assert back.fit.dense.us == pytest.approx(made.fit.dense.us)
    assert there.fit.dense.us[0] < 500


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 300), st.integers(1, 8000))
def test_more_gpus_are_faster_but_not_that_many_times(tp: int, n: int, ctx: int) -> None:
    alone, shared = (step_ns_of(LLAMA, gpus, decode(n, ctx)) for gpus in (1, tp))
    assert shared >= alone / tp


COSTS: dict[Any, TableCost] = {}


def step_ns_of(model: Model, tp: int, step: Any) -> int:
    if (model.name, tp) not in COSTS:
        config = make_config({"tensor_parallel_size": tp})
        COSTS[model.name, tp] = TableCost(model, H200, config, PUBLIC)
    return COSTS[model.name, tp].step_ns(step)


# -- errors against measured tables ----------------------------------------------------------------


class Case(NamedTuple):
    """Heads of one GPU, and the bounds of the errors in percent: median and p95."""

    heads: int
    kv_heads: int
    head_dim: int
    kv_dtype: str
    decode: tuple[float, float]
    prefill: tuple[float, float]


CASES = {
    "tp 2": Case(16, 4, 128, "bf16", (2.2, 9.4), (3.8, 8.1)),
    "tp 4": Case(8, 2, 128, "bf16", (3.2, 11.1), (10.3, 20.8)),
    "tp 8": Case(4, 1, 128, "bf16", (5.4, 20.1), (9.1, 20.4)),
    "twice the query heads": Case(64, 8, 128, "bf16", (1.7, 9.1), (4.7, 11.3)),
    "40 query heads": Case(40, 8, 128, "bf16", (1.7, 8.8), (4.8, 9.3)),
    "half the head size": Case(32, 8, 64, "bf16", (7.0, 21.7), (12.7, 22.2)),
    "fp8": Case(32, 8, 128, "fp8", (19.4, 28.6), (15.9, 19.6)),
}


def target(case: Case) -> tuple[Model, RunConfig]:
    model = replace(
        LLAMA,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
        head_dim=case.head_dim,
    )
    return model, make_config({"kv_cache_dtype": "fp8" if case.kv_dtype == "fp8" else "auto"})


def rows(name: str, case: Case) -> Iterator[tuple[int, int, float]]:
    """(sequences, length, us) of the heads of a case."""
    heads = [str(case.heads), str(case.kv_heads), str(case.head_dim), case.kv_dtype]
    with (TABLES / name).open(newline="") as file:
        for row in csv.reader(file):
            if row[:4] == heads:
                yield int(row[4]), int(row[5]), float(row[6])


def percent(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """Median and p95 of |ours / measured - 1|."""
    ours, measured = np.array(pairs).T
    median, p95 = np.percentile(np.abs(ours / measured - 1) * 100, [50, 95])
    return float(median), float(p95)


def figures(case: Case) -> tuple[tuple[float, float], tuple[float, float]]:
    model, config = target(case)
    fit = scaled(load_profile(PUBLIC), model, config, H200).fit
    decodes = [
        (at(fit.decode_v2, n, ctx), us)
        for n, ctx, us in rows("decode.csv", case)
        if n <= 512 and ctx >= 16
    ]
    prefills = [
        (at(fit.prefill, q, 0), us)
        for n, q, us in rows("prefill.csv", case)
        if n == 1 and 16 <= q <= fit.prefill.x[-1]
    ]
    assert len(decodes) > 90 and len(prefills) > 8
    return percent(decodes), percent(prefills)


@needs_shared("kernel-tables")
@pytest.mark.parametrize("name", CASES)
def test_attention_against_measured_tables(name: str) -> None:
    case = CASES[name]
    for found, bounds in zip(figures(case), (case.decode, case.prefill), strict=True):
        assert all(value <= bound for value, bound in zip(found, bounds, strict=True))


@needs_shared("kernel-tables")
def test_dividing_by_the_gpus_would_be_far_off() -> None:
    """What the rule of equal work items is there for."""
    alone = load_profile(PUBLIC).fit.decode_v2
    pairs = [(at(alone, n, ctx) / 4, us) for n, ctx, us in rows("decode.csv", CASES["tp 4"])]
    assert percent(pairs)[0] > 35


STEPS = [decode(n, ctx) for n in (1, 8, 64, 256) for ctx in (128, 1024, 4096)]
STEPS += [plan(chunks=[(q, 0)]) for q in (256, 512, 2048, 8192)]
for step in STEPS:
    step.samples = max(step.decode_seqs, 1)


@needs_shared("kernel-tables")
@pytest.mark.parametrize(
    ("model", "tp", "median", "most"),
    [
        ("llama-3-8b", 2, 1.5, 3.4),
        pytest.param("llama-3-70b", 1, 4.4, 7.9, marks=long),
        pytest.param("llama-3-8b", 4, 1.0, 12.4, marks=long),
        pytest.param("llama-3-70b", 4, 2.7, 7.0, marks=long),
        pytest.param("qwen3-32b", 2, 1.1, 2.5, marks=long),
    ],
)
def test_steps_against_profiles_made_from_the_tables(
    tmp_path: Path, model: str, tp: int, median: float, most: float
) -> None:
    """Scaled from Llama-3-8B on one GPU, against the tables' own figures for the geometry."""
    path = tmp_path / "own.json"
    path.write_text(to_json(import_profile(TABLES, model, "h200-sxm", tp)))
    config = make_config({"tensor_parallel_size": tp})
    own = TableCost(load_model(model), H200, config, str(path))
    assert own.kind == "estimated"
    pairs = [(step_ns_of(load_model(model), tp, step), own.step_ns(step)) for step in STEPS]
    errors = sorted(abs(ours / theirs - 1) * 100 for ours, theirs in pairs)
    assert errors[len(errors) // 2] <= median
    assert errors[-1] <= most

"""Rows of known laws become a profile that states those laws, and prices like `TableCost`."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvsim_kernels.calibrate import main
from kvsim_kernels.fit import joined, make_profile, to_json
from kvsim_kernels.grid import Limits, Sample, lengths
from kvsim_kernels.prices import Prices, Setting
from kvsim_kernels.rows import Row, RowsError, RowStore
from places import ROOT
from plans import lengths_plan
from unit.cost.calibrate.sweeps import (
    ALONE_NS,
    CPU,
    CUDA,
    EXPERTS,
    INSITU,
    LARGE,
    SEVERAL,
    SHARE_NS,
    STEP,
    all_reduce,
    header,
    law,
    measured,
    padded,
)

from kvsim.cost import make_cost
from kvsim.cost.profile import load_profile
from kvsim.machine import AllReduce, load_hardware, load_model
from kvsim.settings.config import make_config

BOTH = pytest.mark.parametrize("limits", [CPU, CUDA], ids=["cpu", "cuda"])


def make(limits: Limits, rows: list[Row] | None = None) -> dict[str, Any]:
    return make_profile(header(limits), measured(limits) if rows is None else rows)


@BOTH
def test_known_laws_are_recovered(limits: Limits) -> None:
    profile = make(limits)
    fit = profile["fit"]
    assert fit["step"] == pytest.approx(STEP, rel=1e-3)
    for i, n in enumerate(fit["decode_v2"]["n"]):
        for ctx, us in zip(fit["decode_v2"]["ctx"], fit["decode_v2"]["us"][i], strict=False):
            sample = Sample("decode_v2", "insitu", "fit", {"n": n, "ctx": ctx})
            assert us == pytest.approx(law(sample, limits), rel=1e-3)
    for kernel, line in profile["error"]["insitu"].items():
        assert line["map"] == pytest.approx(INSITU[kernel], rel=1e-3)
    slope, tail = INSITU["decode_v2"][1], fit["tail"]
    assert tail["used"]
    assert tail["alone_ns"] == pytest.approx(ALONE_NS * slope, rel=1e-2)
    assert tail["share_ns"] == pytest.approx(SHARE_NS * slope, rel=1e-2)
    unequal = profile["error"]["insitu"]["decode_v2"]["unequal_over_equal"]
    assert unequal == pytest.approx(1, abs=1e-3)
    assert fit["swap"]["layer"]["d2h"] == pytest.approx([8, 20], rel=1e-3)
    assert fit["copied_block_us"] == 0.5
    assert fit["launch_floor_us"] == (100 if limits.cuda else 0)


@BOTH
def test_a_profile_without_error_says_so(limits: Limits) -> None:
    error = make(limits)["error"]
    assert error["trusted"] and error["why"] == []
    for part in ("step", "decode_v2", "prefill", "dense", "head"):
        assert error[part]["points"] > 2
        assert error[part]["max_percent"] < 0.1
    assert error["anchor_drift_percent"] == 0
    assert error["odd_cells"] == []
    halves = [f for key, f in error["decode_v2"].items() if key.startswith(("n ", "ctx "))]
    assert len(halves) == 4
    assert sum(f["points"] for f in halves) == 2 * error["decode_v2"]["points"]


def test_counts_between_captured_sizes_cost_the_next_one() -> None:
    prices = Prices(make(CUDA)["fit"], Setting.of(header(CUDA)))
    for tokens in range(1, 70):
        assert prices.dense(tokens) == pytest.approx(300 + 20 * padded(tokens, CUDA.capture_sizes))


def test_the_same_rows_make_the_same_bytes_in_any_order() -> None:
    rows = measured(CPU, rounds=2)
    shuffled = random.Random(0).sample(rows, len(rows))
    assert to_json(make(CPU, rows)) == to_json(make(CPU, shuffled))


def test_the_least_of_several_rounds_counts() -> None:
    rows = measured(CPU, rounds=3)
    disturbed = [
        row | {"us": 3 * row["us"]}
        if row.get("round", 0) == 1 and row["method"] != "insitu"
        else row
        for row in rows
    ]
    assert make(CPU, disturbed)["fit"] == make(CPU)["fit"]


@BOTH
def test_the_simulator_prices_as_the_judge_does(limits: Limits, tmp_path: Path) -> None:
    rows = measured(limits)
    profile = make(limits, [disturb(row) for row in rows])
    path = tmp_path / "made.json"
    path.write_text(to_json(profile))
    config = make_config(
        {"dtype": "float32", "cost": {"model": "table", "profile": str(path)}, "model": "small"}
    )
    cost = make_cost(config, load_model("small"), load_hardware("h200-sxm"))
    assert cost.kind == "measured"
    prices = Prices(profile["fit"], Setting.of(header(limits)))
    steps = [row["shape"] for row in rows if row["kernel"] == "step"]
    assert len(steps) > 50
    for shape in steps:
        decodes = lengths(shape, limits.max_seq_len).tolist() if shape["n"] else []
        plan = lengths_plan([(q, ctx) for q, ctx in shape["chunks"]], decodes)
        assert cost.step_ns(plan) == pytest.approx(1000 * prices.step(shape), rel=1e-9, abs=1)


def test_uneven_batches_are_met_where_they_were_measured() -> None:
    error = make(CPU)["error"]["uneven"]
    assert error["points"] > 20
    assert error["p95_percent"] < 0.5 < 5 < error["even"]["p95_percent"]


def test_a_kernel_without_a_tail_is_not_given_one() -> None:
    """Batches of any lengths take what even ones do."""

    def even(row: Row) -> Row:
        shape = row["shape"]
        if not row["kernel"].startswith("decode") or not {"long", "seed"} & shape.keys():
            return row
        same = {"n": shape["n"], "ctx": float(lengths(shape, CPU.max_seq_len).mean())}
        us = 4 + 0.5 * same["n"] + 0.01 * same["n"] * same["ctx"]
        return row | {"us": us}

    tail = make(CPU, [even(row) for row in measured(CPU)])["fit"]["tail"]
    assert not tail["used"]
    assert tail["alone_ns"] == pytest.approx(tail["share_ns"], rel=1e-3)


def test_experts_and_all_reduces_are_measured(tmp_path: Path) -> None:
    profile = make(SEVERAL)
    assert profile["terms"]["all-reduce"] == "measured between 2 GPUs"
    for part in ("experts", "all_reduce", "step"):
        assert profile["error"][part]["points"] > 4
        assert profile["error"][part]["median_percent"] < 1, part
    path, model = tmp_path / "made.json", tmp_path / "mixture.toml"
    path.write_text(to_json(profile))
    found = load_profile(str(path)).fit.all_reduce
    assert isinstance(found, AllReduce)
    for moved_bytes in (2048, LARGE // 2, 2 * LARGE, 5 * LARGE):
        assert found.us(moved_bytes, 2) == pytest.approx(all_reduce(moved_bytes), rel=0.02)
    shipped = (ROOT / "configs" / "models" / "small.toml").read_text()
    keys = "".join(f"{key} = {value}\n" for key, value in vars(EXPERTS).items())
    model.write_text(f"{shipped}\n[experts]\n{keys}")
    settings = {"dtype": "float32", "model": str(model)}
    settings |= {"cost": {"model": "table", "profile": str(path)}}

    def cost(**changes: Any) -> Any:
        config = make_config(settings | changes)
        return make_cost(config, load_model(str(model)), load_hardware("h200-sxm"))

    assert cost().kind == "measured"
    assert "all-reduce" not in cost().source
    assert "all-reduce: measured between 2 GPUs" in cost(tensor_parallel_size=2).source
    assert "all-reduce: figures of h200-sxm" in cost(tensor_parallel_size=4).source
    prices = Prices(profile["fit"], Setting.of(header(SEVERAL)))
    for n in (1, 5, 24):
        step = lengths_plan([], [100] * n)
        told = 1000 * prices.step({"n": n, "ctx": 100, "chunks": []})
        assert cost().step_ns(step) == pytest.approx(told, rel=1e-3)


def disturb(row: Row) -> Row:
    """The same time for the same row, up to a tenth off."""
    noise = random.Random(json.dumps(row["shape"], sort_keys=True)).uniform(0.95, 1.05)
    return row | {"us": row["us"] * noise}


def slow_steps(row: Row) -> Row:
    held = row["kernel"] == "step" and row["split"] == "held_out"
    return row | {"us": row["us"] * (2.0 if row["shape"].get("n", 0) % 2 else 1.0)} if held else row


def drift(row: Row) -> Row:
    return row | {"us": row["us"] * 1.2} if row["split"] == "end" else row


def one_cell(row: Row) -> Row:
    odd = row["split"] == "fit" and row["shape"] == {"n": 4, "ctx": 256}
    return row | {"us": row["us"] * 3} if odd and row["method"] == "alone" else row


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (slow_steps, "step p95_percent 50 is above 20"),
        (drift, "anchors drifted by 20 %"),
        (one_cell, "cells stand out: decode_v2: n 4, ctx 256"),
    ],
)
def test_what_a_bad_calibration_is_told(change: Callable[[Row], Row], words: str) -> None:
    error = make(CPU, [change(row) for row in measured(CPU)])["error"]
    assert not error["trusted"]
    assert words in error["why"]


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (lambda row: row["kernel"] == "dense", "0 points of tokens"),
        (lambda row: row["kernel"] == "step", "0 whole steps"),
        (lambda row: row["shape"] == {"q": 32, "ctx": 128}, "the grid has a hole at q 32"),
        (
            lambda row: row["kernel"] == "decode_v2" and row["shape"].get("n", 1) > 1,
            "1 points of n",
        ),
    ],
)
def test_rows_that_are_missing_are_named(missing: Callable[[Row], bool], words: str) -> None:
    with pytest.raises(RowsError, match=words):
        make(CPU, [row for row in measured(CPU) if not missing(row)])


def test_profiles_of_several_block_sizes_are_one_file(tmp_path: Path) -> None:
    wide = Limits(False, 256, 24, 1024, 24 * 1024 // 32, 32)
    slow = [r | {"us": 2 * r["us"]} for r in measured(wide)]
    bad = [drift(row) for row in slow]
    profiles = [make(CPU), make_profile(header(wide), slow), make_profile(header(wide), bad)]
    path = tmp_path / "both.json"
    path.write_text(to_json(joined(profiles[:2])))
    loaded = load_profile(str(path))
    assert loaded.engine.block_size == 16
    one, other = loaded.fit_at(16), loaded.fit_at(32)
    assert one is not None and other is not None
    assert other.dense.us == pytest.approx([2 * us for us in one.dense.us])
    assert loaded.error["trusted"]
    assert joined([profiles[0], profiles[2]])["error"]["why"] == [
        "block_size 32: anchors drifted by 20 %"
    ]


def test_reached_bandwidth_is_what_must_be_read_over_the_time() -> None:
    reached = make(CUDA)["ceilings"]["achieved"]["decode_v2 n 64 ctx 1024"]
    read_bytes = 64 * 1024 * 2 * 2 * 64 * 4
    us = 4 + 0.5 * 64 + 0.01 * 64 * 1024
    assert reached["gb_s"] == pytest.approx(read_bytes / us / 1e3, rel=1e-3)
    copied = 2 * (512 << 20) / 100 / 1e3
    assert reached["of_copy_percent"] == pytest.approx(100 * reached["gb_s"] / copied, rel=1e-2)


def test_a_clock_that_makes_gathering_cheap_is_noticed() -> None:
    rows = measured(CUDA)
    assert make(CUDA, rows)["error"]["gather_over_decode_v2"] == pytest.approx(5, rel=1e-2)
    quick = [r | {"us": r["us"] / 4} if r["kernel"] == "decode_gather" else r for r in rows]
    assert make(CUDA, quick)["error"]["why"] == ["gathering takes only 1.25 times decode_v2"]


def test_a_profile_is_written_behind_a_link_and_never_in_place_of_a_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = RowStore(tmp_path / "rows.jsonl", header(CPU))
    for row in measured(CPU):
        store.append(row)
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    (tmp_path / "there").mkdir()
    link.symlink_to("there/profile.json")
    os.mkfifo(pipe)
    for out, code in ((link, 0), (pipe, 2)):
        with pytest.raises(SystemExit) as stop:
            main(["--fit", str(tmp_path / "rows.jsonl"), "--out", str(out)])
        assert stop.value.code == code
    assert link.is_symlink() and pipe.is_fifo()
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["profile.json"]
    assert capsys.readouterr().err == f"kvsim: {pipe}: is no regular file; give another --out\n"

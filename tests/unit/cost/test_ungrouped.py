"""Decodes beside prompts on FlashAttention-2: the law, against measured mixed launches."""

import csv
from itertools import pairwise
from statistics import median

import numpy as np
import pytest
from plans import plan
from shared import SHARED, needs_shared

from kvsim.cost import make_cost
from kvsim.cost.explain import Work
from kvsim.cost.profile import DecodeGrid, load_profile
from kvsim.cost.ungrouped import IN_CACHE, beside_prompts
from kvsim.machine import load_hardware, load_model
from kvsim.settings.config import make_config

GRID = DecodeGrid([1, 64], [128, 65536], [[10, 100], [20, 2000]])
ROW_BYTES = 512


def test_nothing_changes_without_groups() -> None:
    assert beside_prompts(GRID, 1, ROW_BYTES, 40) == GRID


def test_within_the_cache_and_far_beyond_it() -> None:
    found = beside_prompts(GRID, 4, ROW_BYTES, 40)
    assert found.us[0][0] == pytest.approx(10 * (1 + 3 * IN_CACHE))
    assert 3.9 < found.us[1][1] / GRID.us[1][1] < 4


def test_a_smaller_cache_never_makes_it_shorter() -> None:
    times = [beside_prompts(GRID, 8, ROW_BYTES, mib).us[1][1] for mib in (1, 10, 100, 1000)]
    assert all(a >= b for a, b in pairwise(times))


@needs_shared("groundtruth")
@pytest.mark.parametrize(
    ("run", "tp", "group", "l2_mib", "before", "after"),
    [
        ("rtxpro6000-llama-3.1-8b", 1, 4, 128, 28, 14),
        ("rtxpro6000-qwen3-32b", 2, 8, 128, 52, 11),
        ("rtx4090-llama-3.1-8b", 1, 4, 72, 40, 14),
    ],
)
def test_measured_mixed_launches(
    run: str, tp: int, group: int, l2_mib: float, before: float, after: float
) -> None:
    """Median errors of launches of 8 decodes and more beside 256 tokens and more, in percent."""
    path = SHARED / "groundtruth" / run / "kernels" / f"tp{tp}" / "attention.csv"
    with path.open() as file:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    keys = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    times = {tuple(row[key] for key in keys): row["time_us"] for row in rows}
    even, law = [], []
    for (chunk, context, n, kv), us in times.items():
        alone, prompt = times.get((0, 0, n, kv)), times.get((chunk, context, 0, 0))
        if chunk >= 256 and context <= 2048 and n >= 8 and alone and prompt:
            grid = DecodeGrid([n, n + 1], [kv, kv + 1], [[alone, alone], [alone, alone]])
            longer = beside_prompts(grid, group, ROW_BYTES, l2_mib).us[0][0]
            even.append(abs((prompt + alone) / us - 1))
            law.append(abs((prompt + longer) / us - 1))
    assert len(law) > 1900
    assert 100 * median(even) > before
    assert 100 * median(law) < after


def test_steps_of_an_a100_with_prompts_take_longer_and_explain_it() -> None:
    config = make_config({"hardware": "a100-80gb", "model": "qwen3-14b", "vllm_version": "0.11.0"})
    cost = make_cost(config, load_model("qwen3-14b"), load_hardware("a100-80gb"))
    prompt = cost.step_ns(plan(chunks=[(1900, 0)], samples=1))
    alone = cost.step_ns(plan(decode_seqs=96, context_tokens=96 * 2000, samples=96))
    both = cost.step_ns(
        plan(chunks=[(1900, 0)], decode_seqs=96, context_tokens=96 * 2000, samples=97)
    )
    assert both > prompt + alone
    assert "decodes beside prompts: FlashAttention-2" in cost.source
    one = np.array([1])
    work = Work(1900 * one, one, 96 * one, 96 * 2000 * one, 97 * one, 0 * one)
    beside = cost.explain(work)["attention_decode"][0]  # type: ignore[attr-defined]
    plain = cost.explain(work.without_prompts())["attention_decode"][0]  # type: ignore[attr-defined]
    assert 3 < beside / plain < 5


def test_only_a_profile_with_the_cache_has_the_term() -> None:
    assert load_profile("a100-sxm-80gb-llama-3-8b-public").fit.l2_mib == 40
    assert not load_profile("h100-sxm-llama-3-8b-public").fit.l2_mib

"""Uneven decode batches: the term equals its twin, is constant while nothing changes, and costs the
same in every way of stepping."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace
from plans import lengths_plan

from kvsim.cost import TableCost
from kvsim.cost.profile import Tail, load_profile, to_json
from kvsim.cost.tail import Uneven
from kvsim.errors import ConfigError
from kvsim.machine import load_hardware, load_model
from kvsim.run.simulation import simulate
from kvsim.settings.config import make_config

PUBLIC = "rtx-pro-6000-server-llama-3.1-8b-public"
TAIL = Tail(alone_ns=21.0, share_ns=4.0, unsplit_seqs=2, tile=64, used=True)
LENGTHS = st.lists(st.integers(1, 5000), min_size=2, max_size=40)


def launch_us(lengths: Sequence[float]) -> float:
    """The time of a launch: while k sequences are left, a token of each takes the longer of what
    one alone takes and of what k share."""
    left = sorted(lengths, reverse=True)
    phases = zip(left, [*left[1:], 0], range(1, len(left) + 1), strict=True)
    ns = sum((a - b) * max(TAIL.alone_ns, k * TAIL.share_ns) for a, b, k in phases)
    return ns / 1000


def tiles(new: int, context: int) -> list[int]:
    return [context + new - done for done in range(0, new, TAIL.tile)]


def longest(lengths: Sequence[int]) -> list[int]:
    return sorted(lengths, reverse=True)[: Uneven(TAIL).longest]


@given(LENGTHS)
def test_a_decode_launch_equals_its_twin(lengths: list[int]) -> None:
    even = [sum(lengths) / len(lengths)] * len(lengths)
    further = Uneven(TAIL).decode_us(len(lengths), sum(lengths), longest(lengths))
    assert further == pytest.approx(launch_us(lengths) - launch_us(even), abs=1e-6)
    assert further >= -1e-9


@given(LENGTHS, st.lists(st.tuples(st.integers(1, 2048), st.integers(0, 5000)), min_size=1))
def test_a_launch_with_prompts_equals_its_twin(
    lengths: list[int], chunks: list[tuple[int, int]]
) -> None:
    chunks = chunks[:3]
    prompts = [length for chunk in chunks for length in tiles(*chunk)]
    even = [sum(lengths) / len(lengths)] * len(lengths)
    expected = launch_us([*lengths, *prompts]) - launch_us([*even, *prompts])
    further = Uneven(TAIL).mixed_us(chunks, len(lengths), sum(lengths), longest(lengths))
    assert further == pytest.approx(expected, abs=1e-6)


@given(LENGTHS, st.integers(1, 10_000))
def test_it_stays_what_it_is_while_all_grow(lengths: list[int], steps: int) -> None:
    uneven, later = Uneven(TAIL), [length + steps for length in lengths]
    now, then = (uneven.decode_us(len(each), sum(each), longest(each)) for each in (lengths, later))
    assert now == then


def test_even_batches_and_split_launches_take_nothing_longer() -> None:
    uneven = Uneven(Tail(21.0, 4.0, 30, 64, True))
    assert uneven.decode_us(29, 29 * 100 + 900, [1000, 100, 100, 100, 100, 100]) == 0
    assert uneven.decode_us(30, 30 * 100, [100] * 6) == 0
    assert uneven.decode_us(30, 30 * 100 + 900, [1000, 100, 100, 100, 100, 100]) > 0


def test_at_most_16_lengths_matter() -> None:
    assert Uneven(Tail(100.0, 1.0, 1, 64, True)).longest == 16
    assert Uneven(Tail(100.0, 0.0, 1, 64, True)).longest == 16
    assert Uneven(Tail(1.0, 4.0, 1, 64, True)).longest == 1


# -- in a cost model -------------------------------------------------------------------------------


def public(**args: Any) -> TableCost:
    model, hardware = load_model("llama-3.1-8b"), load_hardware("rtx pro 6000")
    return TableCost(model, hardware, make_config({"dtype": "bfloat16"}), PUBLIC, **args)


def with_lengths(lengths: list[int], chunks: Sequence[tuple[int, int]] = ()) -> Any:
    made = lengths_plan(chunks, lengths)
    made.samples = len(lengths)
    return made


def test_uneven_batches_take_longer_by_the_launch_of_each_layer() -> None:
    cost, tail = public(), Tail(21.846, 2.668, 38, 64, True)
    lengths = [4000, 3000, *[500] * 62]
    longest = sorted(lengths, reverse=True)[: Uneven(tail).longest]
    further = Uneven(tail).decode_us(64, sum(lengths), longest)
    even = public(uneven=False).step_ns(with_lengths(lengths))
    assert cost.step_ns(with_lengths(lengths)) == even + round(32 * further * 1000)
    assert further > 20


def test_it_is_declared_labelled_and_switched_off() -> None:
    cost, without = public(), public(uneven=False)
    assert "uneven batches: derived from the tables of even ones" in cost.source
    assert "uneven batches" not in without.source
    assert (cost.describe()["uneven"], without.describe()["uneven"]) == (True, False)


def test_a_profile_without_the_term_is_not_asked_for_it() -> None:
    settings = {"cost": {"profile": "h200-sxm-llama-3-8b-public", "uneven": True}}
    with pytest.raises(ConfigError, match=r"uneven: profile h200\S+ has no term of uneven batches"):
        simulate("traces/chat.jsonl", settings)


TRACE = sorted(
    [(0, 900, 700), (5, 40, 300), (10, 1200, 40)] + [(9 * i, 60 + i, 90) for i in range(60)]
)
"""Milliseconds, prompt and output: some are much longer than the others."""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = [{"arrival_s": ms / 1000, "input_length": p, "output_length": o} for ms, p, o in TRACE]
    path.write_text("\n".join(json.dumps(row) for row in [{"kvsim_trace": 1}, *rows]) + "\n")
    return path


SETTINGS = {
    "model": "llama-3.1-8b",
    "hardware": "rtx pro 6000",
    "num_gpu_blocks_override": 900,
    "max_model_len": 8192,
}


OLD = {**SETTINGS, "engine": "vllm-0.6.3"}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_uneven_batches_take_a_run_longer(trace: Path, asynchronous: bool) -> None:
    settings = {**OLD, "disable_async_output_proc": not asynchronous}
    run = simulate(trace, settings)
    assert run.meta["cost"]["uneven"]
    even = simulate(trace, {**settings, "cost": {"profile": PUBLIC, "uneven": False}})
    assert even.steps["end_ns"][-1] < run.steps["end_ns"][-1]


def test_decodes_beside_prompts_are_priced_by_their_lengths_in_any_launch(
    trace: Path, tmp_path: Path
) -> None:
    """Kernels that serve prompts and decodes one by one, as those of a calibration do."""
    path, profile = tmp_path / "apart.json", load_profile(PUBLIC)
    path.write_text(to_json(replace(profile, fit=replace(profile.fit, mixed=UNSET))))
    settings = {**OLD, "cost": {"profile": str(path), "uneven": True}}
    run = simulate(trace, settings)
    even = simulate(trace, {**SETTINGS, "cost": {"profile": str(path), "uneven": False}})
    assert isinstance(profile.fit.tail, Tail)
    uneven = Uneven(profile.fit.tail)
    step = lengths_plan([(100, 0)], [6100, *[100] * 59])
    model, gpu = load_model("llama-3.1-8b"), load_hardware("rtx pro 6000")
    one, other = (
        TableCost(model, gpu, make_config(SETTINGS), str(path), uneven=priced).step_ns(step)
        for priced in (True, False)
    )
    longer_us = 32 * uneven.decode_us(60, 60 * 200, [6100, *[100] * 20])
    assert longer_us > 100
    assert one - other == pytest.approx(1000 * longer_us * profile.fit.step[1], abs=2)
    assert even.steps["end_ns"][-1] < run.steps["end_ns"][-1]


def test_the_time_is_booked_as_attention_of_decodes(trace: Path) -> None:
    """What is left of a step without prompts is no host time."""
    steps = simulate(trace, SETTINGS).steps
    decodes = (steps["prefill_tokens"] == 0) & (steps["decode_seqs"] > 40)
    assert decodes.sum() > 5
    assert set(steps["host_ns"][decodes]) == {300_000}

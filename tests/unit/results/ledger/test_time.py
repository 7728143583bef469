"""Where the time of requests went: sums, a dull twin, and small cases with every number explained.

The engine of `worlds.config`: a step takes 10 ms and 1 ms more for each prompt token.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples
from small_engines import ENGINES, PRICES, engine, make_trace, rows
from twins.ledger import LedgerTwin, assert_same
from worlds import MS, config, trace

import kvsim
from kvsim.results.ledger import KERNELS, TIME_PARTS
from kvsim.results.ledger.account import part_ns


def parts(result: kvsim.Result, place: int) -> dict[str, float]:
    """The parts of one request in ms, without those of no time."""
    found = {name: int(result.requests[name][place]) / MS for name in TIME_PARTS}
    return {name.removesuffix("_ns"): ms for name, ms in found.items() if ms}


def check(result: kvsim.Result) -> None:
    """What holds of every ledger."""
    requests, steps = result.requests, result.steps
    total = sum(requests[name] for name in TIME_PARTS)
    ended = requests["finish_ns"] >= 0
    lives = requests["finish_ns"] - requests["arrival_ns"]
    assert (total[ended] == lives[ended]).all()
    assert all((requests[name] >= 0).all() for name in TIME_PARTS)
    whole = sum(steps[name] for name in (*KERNELS, "transfer_ns", "link_wait_ns"))
    assert (whole == steps["end_ns"] - steps["start_ns"]).all()
    never = requests["num_preemptions"] == 0
    for name in ("preempted_waiting_ns", "recompute_ns", "swap_out_ns", "swapped_waiting_ns"):
        assert not requests[name][never].any()


@pytest.mark.parametrize("name", ENGINES)
@settings(max_examples=examples(12))
@given(drawn=rows)
def test_every_moment_of_every_request_is_where_the_twin_puts_it(
    name: str, drawn: list[tuple[int, int, int, int]]
) -> None:
    sent, table, twin = make_trace(drawn), engine(name), LedgerTwin()
    result = kvsim.simulate(sent, table, watcher=twin)
    check(result)
    in_flight = 2 if name in ("v1 async", "v1 greedy") else 1
    assert_same(result, sent, twin.hand_out(result, in_flight, PRICES))


def test_a_request_that_comes_during_a_step_waits_for_its_end() -> None:
    """r1 comes at 1, r0's prompt ends at 15. r1's prompt, 20 ms, delays r0's second token."""
    result = kvsim.simulate(trace((0, 5, 2), (1, 10, 1)), config())
    assert parts(result, 0) == {"own_prefill": 5, "interference": 20, "host_overhead": 20}
    assert parts(result, 1) == {"waiting_step": 14, "own_prefill": 10, "host_overhead": 10}


@pytest.mark.parametrize(
    ("reason", "settings"),
    [
        ("waiting_slots", {"max_num_seqs": 1}),
        ("waiting_blocks", {"num_gpu_blocks_override": 4, "max_model_len": 16}),
        ("waiting_watermark", {"num_gpu_blocks_override": 10, "watermark": 0.6}),
    ],
)
def test_the_reason_of_the_head_of_the_queue_is_what_it_waits_for(reason, settings) -> None:
    """r0's prompt takes 18 ms and two decodes 10 each; r1 is refused through both of those."""
    table = config(**{"max_model_len": 40, **settings})
    result = kvsim.simulate(trace((0, 8, 3), (1, 12, 1)), table)
    waits = {"waiting_step": 17, reason: 20}
    assert parts(result, 1) == {**waits, "own_prefill": 12, "host_overhead": 10}


def test_who_does_not_fit_the_token_budget_is_behind_prefills_of_others() -> None:
    table = config(max_num_batched_tokens=12, max_model_len=12)
    result = kvsim.simulate(trace((0, 8, 1), (0, 8, 1)), table)
    assert parts(result, 1) == {"waiting_prefills": 18, "own_prefill": 8, "host_overhead": 10}


def test_in_a_mixed_step_what_the_prompt_adds_is_interference() -> None:
    """5 ms a step, 1 ms a prompt token, 2 ms a decode. r0: prompt until 9, decode until 16; then
    with the 10 tokens of r1 until 33; decode until 40."""
    table = config(
        enable_chunked_prefill=True,
        max_num_batched_tokens=32,
        cost={"step_us": 5_000, "decode_seq_us": 2_000},
    )
    result = kvsim.simulate(trace((0, 4, 4), (10, 10, 1)), table)
    assert parts(result, 0) == {
        "own_prefill": 4,
        "own_decode": 6,
        "interference": 10,
        "host_overhead": 20,
    }
    assert parts(result, 1) == {"waiting_step": 6, "own_prefill": 12, "host_overhead": 5}


def test_a_preempted_request_waits_and_computes_again() -> None:
    """r1 loses its blocks at 26 and gets them back when r0 ends, at 56. It computes 9 tokens."""
    result = kvsim.simulate(
        trace((0, 8, 4), (0, 8, 4)), config(num_gpu_blocks_override=5, max_model_len=20)
    )
    assert parts(result, 0) == {"own_prefill": 16, "host_overhead": 40}
    assert parts(result, 1) == {
        "own_prefill": 16,
        "preempted_waiting": 30,
        "recompute": 9,
        "host_overhead": 40,
    }


def test_a_swapped_request_is_copied_and_waits_and_others_stand_still() -> None:
    """As above; 2 blocks at 0.5 ms go out at 26 and come back at 57."""
    result = kvsim.simulate(
        trace((0, 8, 4), (0, 8, 4)),
        config(
            num_gpu_blocks_override=5,
            max_model_len=20,
            num_cpu_blocks_override=4,
            preemption_mode="swap",
        ),
    )
    assert parts(result, 0) == {"own_prefill": 16, "swap_stall": 1, "host_overhead": 40}
    assert parts(result, 1) == {
        "own_prefill": 16,
        "swap_out": 1,
        "swapped_waiting": 30,
        "swap_in": 1,
        "host_overhead": 40,
    }


def test_with_two_steps_in_flight_who_is_scheduled_waits_for_the_one_before() -> None:
    """r0's prompt runs until 14, its decode until 24, composed at 0. r1 comes at 1, is scheduled
    at 14 for the step from 24 to 40: 10 ms, and its 6 prompt tokens."""
    table = config(engine="vllm-v1", num_gpu_blocks_override=20)
    del table["disable_async_output_proc"]
    result = kvsim.simulate(trace((0, 4, 3), (1, 6, 2)), table)
    assert int(result.requests["first_scheduled_ns"][1]) == 14 * MS
    assert parts(result, 0) == {"own_prefill": 4, "interference": 6, "host_overhead": 30}
    assert parts(result, 1) == {"waiting_step": 23, "own_prefill": 6, "host_overhead": 20}


def test_a_request_that_never_ends_has_a_ledger_until_the_run_does() -> None:
    """r1 is swapped out for ever (tests/exact/test_tiny.py says why)."""
    table = config(
        num_gpu_blocks_override=10,
        max_model_len=40,
        num_cpu_blocks_override=10,
        preemption_mode="swap",
        watermark=0.4,
    )
    result = kvsim.simulate(trace((0, 4, 20), (0, 20, 12)), table)
    assert result.meta["outcome"]["kind"] == "deadlock"
    assert sum(parts(result, 1).values()) == int(result.steps["end_ns"][-1]) / MS


def test_a_request_that_was_never_sent_has_none() -> None:
    """The engine stops at 26, before r2 comes."""
    table = config(
        num_gpu_blocks_override=5,
        max_model_len=20,
        num_cpu_blocks_override=1,
        preemption_mode="swap",
    )
    result = kvsim.simulate(trace((0, 8, 4), (0, 8, 4), (500, 4, 1)), table)
    assert parts(result, 2) == {}
    assert result.requests["arrival_ns"][2] == -1
    assert sum(parts(result, 0).values()) == 26


@given(
    st.lists(
        st.tuples(st.integers(0, 10**12), st.integers(1, 5_000), st.integers(0, 5_000)),
        min_size=1,
        max_size=5,
    )
)
def test_drafts_that_are_accepted_take_their_share_of_what_verifying_adds(
    steps: list[tuple[int, int, int]],
) -> None:
    """Rounded down, as whole numbers have it; the rest is of those that are rejected."""
    shares = [(ns, drafts, min(accepted, drafts)) for ns, drafts, accepted in steps]
    verifying, drafts, accepted = (np.array(column) for column in zip(*shares, strict=True))
    taken = [ns * some // every for ns, every, some in shares]
    assert part_ns(verifying, accepted, drafts).tolist() == taken

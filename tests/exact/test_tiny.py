"""The newcomer's tests: a handful of requests, and every number explained.

The engine of `worlds.config`: a step takes 10 ms and 1 ms more for each prompt token.
"""

import pytest
from small_engines import engine
from worlds import MS, config, hashed, trace

import kvsim


def times(result: kvsim.Result, name: str) -> list[float]:
    return [int(each) / MS for each in result.requests[name]]


def test_one_request() -> None:
    """5 prompt tokens: 10 + 5 ms to the first token, then two decodes of 10 ms."""
    result = kvsim.simulate(trace((100, 5, 3)), config())
    assert times(result, "first_scheduled_ns") == [100]
    assert times(result, "first_token_ns") == [115]
    assert times(result, "finish_ns") == [135]
    assert list(result.steps["used_blocks"]) == [2, 2, 2]  # 5, 6 and 7 tokens in blocks of 4
    assert list(result.steps["empty_slots"]) == [3, 2, 1]
    assert result.token_gaps_ns == {10 * MS: 2}


def test_a_request_that_is_turned_away_makes_a_step_without_duration() -> None:
    """At 100 there is nothing else to do, so the queues of that moment are noted, and no time."""
    result = kvsim.simulate(trace((100, 50, 3)), {"engine": "vllm-v1", "max_model_len": 40})
    assert result.requests["status"] == ["rejected"]
    assert [int(each) / MS for each in result.steps["start_ns"]] == [100]
    assert [int(each) / MS for each in result.steps["end_ns"]] == [100]
    assert list(result.steps["finished"]) == [1]


def test_prompts_go_before_decodes() -> None:
    """r1 arrives while r0's prompt runs (until 15): its prompt delays r0's second token."""
    result = kvsim.simulate(trace((0, 5, 2), (1, 10, 1)), config())
    assert times(result, "first_token_ns") == [15, 35]
    assert times(result, "finish_ns") == [45, 35]


def test_arrivals_at_the_end_of_a_step_are_seen_by_the_next() -> None:
    """r1 arrives at 15, exactly when r0's prompt ends."""
    result = kvsim.simulate(trace((0, 5, 2), (15, 10, 1)), config())
    assert times(result, "first_scheduled_ns") == [0, 15]


def test_the_tail_is_preempted_and_computes_its_tokens_again() -> None:
    """Two requests of 8 tokens fill 4 of 5 blocks; both want to grow.

    r0 takes the free block; the engine wants one for r1, too, finds none, and preempts the tail:
    r1 itself. It holds 8 tokens and one generated, so it computes 9 tokens when r0 has ended.
    """
    result = kvsim.simulate(
        trace((0, 8, 4), (0, 8, 4)), config(num_gpu_blocks_override=5, max_model_len=20)
    )
    assert list(result.requests["num_preemptions"]) == [0, 1]
    assert list(result.requests["recomputed_tokens"]) == [0, 8]
    # 10 + 16 ms for both prompts, then three decodes of r0; r1 again: 10 + 9 ms, two decodes.
    assert times(result, "finish_ns") == [56, 56 + 19 + 20]
    assert times(result, "first_token_ns") == [26, 26]


def test_swapping_keeps_the_tokens_and_takes_the_link() -> None:
    """As above with swap: 2 blocks of r1 go out and come back at 0.5 ms each."""
    result = kvsim.simulate(
        trace((0, 8, 4), (0, 8, 4)),
        config(
            num_gpu_blocks_override=5,
            max_model_len=20,
            num_cpu_blocks_override=4,
            preemption_mode="swap",
        ),
    )
    assert list(result.requests["swapped_out_blocks"]) == [0, 2]
    assert list(result.requests["swapped_in_blocks"]) == [0, 2]
    assert list(result.requests["recomputed_tokens"]) == [0, 0]
    assert times(result, "finish_ns") == [57, 57 + 1 + 30]
    assert int(result.steps["transfer_ns"].sum()) == 2 * MS


def test_a_known_prefix_is_not_computed_again() -> None:
    """r1 shares two blocks (8 tokens) with r0, which computed them before: 12 - 8 are left."""
    shared = hashed(4, (0, 12, 1, [1, 2, 3]), (50, 12, 1, [1, 2, 9]))
    result = kvsim.simulate(shared, config(enable_prefix_caching=True))
    assert list(result.requests["num_cached_tokens"]) == [0, 8]
    assert times(result, "first_token_ns") == [22, 50 + 14]


def test_the_last_token_of_a_known_prompt_is_computed() -> None:
    """r1 repeats r0; its last block does not count, so that a token comes out."""
    shared = hashed(4, (0, 12, 1, [1, 2, 3]), (50, 12, 1, [1, 2, 3]))
    result = kvsim.simulate(shared, config(enable_prefix_caching=True))
    assert list(result.requests["num_cached_tokens"]) == [0, 8]


def test_before_paging_two_requests_fill_the_pool() -> None:
    """Each reserves 20 tokens = 5 blocks of 12; the third waits for the first to end."""
    result = kvsim.simulate(
        trace((0, 4, 2), (0, 4, 9), (0, 4, 2)),
        config(num_gpu_blocks_override=12, max_model_len=20, block_manager="contiguous"),
    )
    assert list(result.steps["used_blocks"][:2]) == [10, 10]
    assert set(result.steps["stranded_blocks"]) == {2}
    assert times(result, "first_scheduled_ns") == [0, 0, 28]


def test_reservations_of_one_block_each() -> None:
    """Two of them are all that fit, and each is free again for the next request."""
    result = kvsim.simulate(
        trace((0, 2, 2), (0, 2, 2), (0, 2, 2)),
        config(num_gpu_blocks_override=2, max_model_len=4, block_manager="contiguous"),
    )
    assert list(result.steps["used_blocks"]) == [2, 2, 1, 1]
    assert set(result.steps["stranded_blocks"]) == {0}


def test_requests_the_engine_cannot_serve_are_counted() -> None:
    """A prompt above max_model_len is ignored when it reaches the head of the queue."""
    result = kvsim.simulate(trace((0, 65, 1), (0, 4, 1)), config())
    assert result.requests["status"] == ["rejected", "completed"]
    assert result.requests["reason"] == ["too-long", ""]


@pytest.mark.parametrize("name", ["0.6.3 swap", "0.6.3 chunked swap", "0.3.3 swap"])
def test_copies_take_their_time_where_steps_take_none(name: str) -> None:
    nothing = dict.fromkeys(("step_us", "prefill_token_us", "decode_seq_us", "context_token_ns"), 0)
    cost = {"model": "constant", **nothing, "link": {"block_us": 500}}
    crowd = trace(*((0, 9 + place, 20) for place in range(6)))
    steps = kvsim.simulate(crowd, engine(name, cost=cost)).steps
    copied = steps["swap_out_blocks"] + steps["swap_in_blocks"]
    assert copied.any() and list(steps["transfer_ns"]) == list(500_000 * copied)
    assert list(steps["end_ns"] - steps["start_ns"]) == list(steps["transfer_ns"])
    assert list(steps["start_ns"][1:]) == list(steps["end_ns"][:-1])


def test_a_full_cpu_pool_ends_the_engine_and_the_run_says_so() -> None:
    result = kvsim.simulate(
        trace((0, 8, 4), (0, 8, 4), (500, 4, 1)),
        config(
            num_gpu_blocks_override=5,
            max_model_len=20,
            num_cpu_blocks_override=1,
            preemption_mode="swap",
        ),
    )
    outcome = result.meta["outcome"]
    assert outcome["kind"] == "swap-space-exhausted"
    assert outcome["request"] == "r1"
    assert "--swap-space" in outcome["remedy"]
    assert result.requests["status"] == ["rejected"] * 3


def test_a_request_that_kills_the_engine_can_be_refused_instead() -> None:
    """The run above once more, with r1 turned away at arrival."""
    result = kvsim.simulate(
        trace((0, 8, 4), (0, 8, 4), (500, 4, 1)),
        config(
            num_gpu_blocks_override=5,
            max_model_len=20,
            num_cpu_blocks_override=1,
            preemption_mode="swap",
            on_engine_error="reject",
        ),
    )
    assert result.meta["outcome"]["kind"] == "finished"
    assert [error["request"] for error in result.meta["engine_errors"]] == ["r1"]
    assert result.requests["status"] == ["completed", "rejected", "completed"]
    assert result.requests["reason"][1] == "swap-space-exhausted"


def test_a_swapped_request_between_total_and_watermark_waits_for_ever() -> None:
    """r1 goes out with 6 full blocks. It needs 7 of 10 to come back; the watermark keeps 4."""
    result = kvsim.simulate(
        trace((0, 4, 20), (0, 20, 12)),
        config(
            num_gpu_blocks_override=10,
            max_model_len=40,
            num_cpu_blocks_override=10,
            preemption_mode="swap",
            watermark=0.4,
        ),
    )
    outcome = result.meta["outcome"]
    assert (outcome["kind"], outcome["request"]) == ("deadlock", "r1")
    assert "--watermark" in outcome["remedy"]
    assert result.requests["status"] == ["completed", "rejected"]
    assert result.requests["reason"] == ["", "deadlock"]


def test_closed_loop_keeps_one_request_in_flight() -> None:
    result = kvsim.simulate(trace((0, 5, 1), (0, 5, 1), (0, 5, 1)), config(max_concurrency=1))
    assert times(result, "arrival_ns") == [0, 15, 30]
    assert times(result, "client_queue_ns") == [0, 15, 30]


def test_samples_share_the_prompt_and_part_at_the_first_token() -> None:
    """n = 2, 6 prompt tokens: two blocks shared; the half-full one is copied for one sample."""
    result = kvsim.simulate(trace((0, 6, 3)), config(n=2))
    assert list(result.steps["used_blocks"]) == [2, 3, 3]
    assert list(result.steps["copied_blocks"]) == [0, 1, 0]
    assert list(result.requests["output_tokens"]) == [6]

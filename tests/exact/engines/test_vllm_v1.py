"""What the scheduler of vLLM V1 says of its decisions: refusals, blocked heads, repeated work."""

from typing import Any

import pytest
from worlds import Steps, arrive, batch_of, v1

from kvsim.core.batch import Batch
from kvsim.core.request import Request
from kvsim.core.schema import BLOCKED
from kvsim.engines.vllm_v1.scheduler import VllmV1, VllmV1Async
from kvsim.run.simulation import simulate
from kvsim.workload import ParentContent, Row, Trace


class OneText:
    """Every request has the same tokens."""

    def keys(self, first: int, last: int, block_size: int) -> range:
        return range(first, last)

    def sample(self, index: int) -> "OneText":
        return self


def engine(*lengths: tuple[int, int], caching: bool = False, **knobs: Any) -> tuple[VllmV1, Batch]:
    """Requests (input length, output length) before 8 usable blocks of 4 tokens."""
    scheduler, blocks = v1(caching=caching, **{"max_num_seqs": 4, **knobs})
    batch = batch_of(blocks, scheduler, [output for _, output in lengths])
    for index, (length, _) in enumerate(lengths):
        arrive(scheduler, batch, Request(index, f"r{index}", length, OneText()))
    return scheduler, batch


def step(scheduler: VllmV1, batch: Batch, number: int) -> None:
    for time in range(number):
        scheduler.settle(batch, scheduler.compose(batch, time), time + 1)
        batch.audit()


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({}, ""),
        ({"max_num_seqs": 1}, "slots"),
        ({"max_num_batched_tokens": 16}, "tokens"),
        ({"max_num_batched_tokens": 20, "enable_chunked_prefill": False}, "tokens"),
        ({"watermark": 0.2}, "watermark"),
    ],
)
def test_why_the_second_of_two_requests_is_refused(knobs: dict[str, Any], reason: str) -> None:
    """Both have 16 tokens: 4 of the 8 blocks."""
    scheduler, batch = engine((16, 1), (16, 1), **knobs)
    plan = scheduler.compose(batch, 0)
    assert BLOCKED[plan.blocked] == reason
    assert [request.blocked_steps for request in batch.waiting] == ([1] if reason else [])


def test_a_chunk_is_admitted_only_if_the_whole_prompt_would_fit() -> None:
    lengths, budget = ((16, 9), (20, 1)), 20
    scheduler, batch = engine(*lengths, max_num_batched_tokens=budget)
    assert BLOCKED[scheduler.compose(batch, 0).blocked] == "blocks"
    scheduler, batch = engine(
        *lengths, max_num_batched_tokens=budget, scheduler_reserve_full_isl=False
    )
    assert [p.scheduled for p in scheduler.compose(batch, 0).prefills] == [16, 4]


def test_what_a_preemption_throws_away_and_a_hit_saves_again() -> None:
    """Both prompts fill 4 blocks; r1 loses its own when r0 takes a ninth one, and waits for r0."""
    scheduler, batch = engine((16, 2), (16, 2))
    _, second = batch.waiting
    step(scheduler, batch, 3)
    assert second.num_preemptions == 1
    assert (second.lost_tokens, second.recomputed_tokens, second.recached_tokens) == (16, 16, 0)
    scheduler, batch = engine((16, 2), (16, 2), caching=True)
    first, second = batch.waiting
    step(scheduler, batch, 3)
    # They share 3 blocks from the first step on; the fourth is r1's own, the last token computed.
    assert (first.cached_tokens, second.cached_tokens) == (0, 12)
    assert second.num_preemptions == 0
    assert batch.blocks.lookups == (6, 3)


def test_a_decode_ahead_of_its_token_counts_the_placeholder() -> None:
    scheduler, blocks = v1(VllmV1Async)
    batch = batch_of(blocks, scheduler, [3])
    steps = Steps(scheduler, batch)
    arrive(scheduler, batch, Request(0, "r0", 5))
    first, second = steps.compose(0), steps.compose(0)
    assert (first.chunks, first.samples) == ([(5, 0)], 1)
    assert (second.decode_seqs, second.context_tokens) == (1, 6)
    steps.settle(1)
    assert steps.compose(1).computes
    steps.settle(2)
    assert not steps.compose(2).computes  # its third and last token is on its way
    steps.settle(3)
    assert [request.output_tokens for request in batch.ended] == [3]


def test_a_prompt_that_leaves_no_room_is_turned_away_with_a_reason() -> None:
    _, batch = engine((100, 1))
    assert [request.reason for request in batch.ended] == ["too-long"]
    assert not len(batch)


def test_a_token_budget_below_the_number_of_sequences_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        v1(max_model_len=8, max_num_batched_tokens=7)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_block_that_fills_lets_in_who_looks_for_it(asynchronous: bool) -> None:
    """The prompt of r1, as large as the pool, is what r0 is about to say: r1 has to find as many
    blocks as are free whenever the last one of r0 has just become full."""
    let_in = 0
    for keep in (20, 40):
        for arrival_ms in range(10, 250, 20):
            rows = [
                Row(0, "r0", 1, 0, 8, 34),
                Row(1, "r1", 2, arrival_ms * 1_000_000, 42, 2, ParentContent(0, keep)),
            ]
            trace = Trace("made", "native", "", rows)
            settings = {
                "model": "tiny",
                "engine": "vllm-v1",
                "async_scheduling": asynchronous,
                "block_size": 4,
                "num_gpu_blocks_override": 12,
                "max_model_len": 44,
                "cost": {"model": "constant", "step_us": 10_000, "prefill_token_us": 0}
                | {"decode_seq_us": 0, "context_token_ns": 0},
            }
            requests = simulate(trace, settings).requests
            begins, ends = requests["first_scheduled_ns"], requests["finish_ns"]
            let_in += requests["blocked_steps"][1] > 0 and begins[1] < ends[0]
    # With a step in flight, a block is known to be full when the next one has been opened.
    assert let_in == 0 if asynchronous else let_in > 3


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_head_whose_hits_are_evicted_is_refused_for_another_reason(asynchronous: bool) -> None:
    """Where prompts are not cut: too few blocks first, then too many tokens."""
    rows = [Row(0, "evicted", 2, 0, 152, 1)]
    for i in range(1, 31):
        rows.append(Row(i, f"r{i}", i + 2, 500_000_000, 2 if i <= 20 else 37 - i, 30))
    rows.append(Row(31, "head", 33, 525_000_000, 156, 2, ParentContent(0, 152)))
    cost = {"step_us": 10_000, "prefill_token_us": 0, "decode_seq_us": 0, "context_token_ns": 0}
    settings = {
        "model": "tiny",
        "max_model_len": 160,
        "max_num_batched_tokens": 160,
        "enable_chunked_prefill": False,
        "async_scheduling": asynchronous,
        "num_gpu_blocks_override": 41,
        "cost": {"model": "constant", **cost},
    }
    trace = Trace("made", "native", "", rows)
    blocked = [BLOCKED[why] for why in simulate(trace, settings).steps["blocked"]]
    assert "blocks tokens" in " ".join(blocked)


def test_an_adaptive_threshold_shares_the_budget_among_all_requests() -> None:
    """`long_prefill_token_threshold_adaptive`: at most 20 // 2 tokens of a prompt in a step."""
    scheduler, batch = engine(
        (14, 1),
        (14, 1),
        max_num_batched_tokens=20,
        long_prefill_token_threshold=2,
        long_prefill_token_threshold_adaptive=True,
    )
    assert [each.scheduled for each in scheduler.compose(batch, 0).prefills] == [10, 10]

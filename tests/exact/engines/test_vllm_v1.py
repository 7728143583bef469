"""What the scheduler of vLLM V1 says of its decisions: refusals, blocked heads, repeated work."""

from typing import Any

import pytest
from worlds import batch_of

from kvsim.engine.batch import Batch
from kvsim.engine.request import Request
from kvsim.engines.vllm_v1 import VllmV1, VllmV1Async
from kvsim.engines.vllm_v1_blocks import VllmV1PrefixTables, VllmV1Tables
from kvsim.schema import BLOCKED


class OneText:
    """Every request has the same tokens."""

    def keys(self, first: int, last: int, block_size: int) -> range:
        return range(first, last)

    def sample(self, index: int) -> "OneText":
        return self


def engine(*lengths: tuple[int, int], caching: bool = False, **knobs: Any) -> tuple[VllmV1, Batch]:
    """Requests (input length, output length) before 8 usable blocks of 4 tokens."""
    settings = {"max_model_len": 100, "max_num_seqs": 4, "max_num_batched_tokens": 64, **knobs}
    scheduler = VllmV1(num_gpu_blocks=9, **settings)
    tables = (VllmV1PrefixTables if caching else VllmV1Tables)(4, 9)
    batch = batch_of(tables, scheduler, [output for _, output in lengths])
    for index, (length, _) in enumerate(lengths):
        scheduler.arrive(batch, Request(index, f"r{index}", length, OneText()))
    return scheduler, batch


def steps(scheduler: VllmV1, batch: Batch, number: int) -> None:
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
    steps(scheduler, batch, 3)
    assert second.num_preemptions == 1
    assert (second.lost_tokens, second.recomputed_tokens, second.recached_tokens) == (16, 16, 0)
    scheduler, batch = engine((16, 2), (16, 2), caching=True)
    first, second = batch.waiting
    steps(scheduler, batch, 3)
    # They share 3 blocks from the first step on; the fourth is r1's own, the last token computed.
    assert (first.cached_tokens, second.cached_tokens) == (0, 12)
    assert second.num_preemptions == 0
    assert batch.blocks.lookups == (6, 3)


def test_a_decode_ahead_of_its_token_counts_the_placeholder() -> None:
    scheduler = VllmV1Async(
        num_gpu_blocks=9, max_model_len=100, max_num_seqs=4, max_num_batched_tokens=64
    )
    batch = batch_of(VllmV1Tables(4, 9), scheduler, [3])
    scheduler.arrive(batch, Request(0, "r0", 5))
    first, second = scheduler.compose(batch, 0), scheduler.compose(batch, 0)
    assert (first.chunks, first.samples) == ([(5, 0)], 1)
    assert (second.decode_seqs, second.context_tokens) == (1, 6)
    scheduler.settle(batch, first, 1)
    third = scheduler.compose(batch, 1)
    scheduler.settle(batch, second, 2)
    assert not scheduler.compose(batch, 2).computes  # its third and last token is on its way
    scheduler.settle(batch, third, 3)
    assert [request.output_tokens for request in batch.ended] == [3]


def test_a_prompt_that_leaves_no_room_is_turned_away_with_a_reason() -> None:
    _, batch = engine((100, 1))
    assert [request.reason for request in batch.ended] == ["too-long"]
    assert not len(batch)


def test_a_token_budget_below_the_number_of_sequences_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        VllmV1(num_gpu_blocks=9, max_model_len=8, max_num_seqs=8, max_num_batched_tokens=7)

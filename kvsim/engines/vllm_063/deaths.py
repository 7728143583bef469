"""Places where vLLM 0.6.3.post1 raises while it schedules, and the remedy for each."""

from __future__ import annotations

from kvsim.core.request import Request
from kvsim.errors import EngineStopped


def swapped_in_waiting(request: Request) -> EngineStopped:
    """Returns the outcome if a request swapped out by priority reaches the head of the queue."""
    return EngineStopped(
        kind="swapped-request-in-waiting-queue",
        request_id=request.id,
        explanation=(
            f"request {request.id} was preempted for a better priority and swapped out, but the"
            " engine put it on the waiting queue, where it must not be swapped"
        ),
        remedy="use --preemption-mode recompute together with --scheduling-policy priority",
        rule="AssertionError @ core/scheduler.py:883",
    )


def recompute_of_many(
    request: Request, rule: str = "AssertionError @ core/scheduler.py:1505"
) -> EngineStopped:
    """Returns the outcome if a request with several running samples is to be recomputed. `rule` is
    where the engine raises."""
    return EngineStopped(
        kind="recompute-of-parallel-samples",
        request_id=request.id,
        explanation=(
            f"request {request.id} has several running samples, and the engine can recompute"
            " only single sequences"
        ),
        remedy="leave --preemption-mode to the engine, or use swap",
        rule=rule,
    )


def prefill_of_many(request: Request) -> EngineStopped:
    """Returns the outcome if a request that once had several samples is prefilled again."""
    return EngineStopped(
        kind="prefill-of-parallel-samples",
        request_id=request.id,
        explanation=(
            f"request {request.id} was down to one of its samples, was preempted by recompute and"
            " admitted again; the engine asserts that a prompt belongs to a single sequence"
        ),
        remedy="use --preemption-mode swap, or a larger pool",
        rule="AssertionError @ core/scheduler.py:1277",
    )


def stopped_but_not_ended(request: Request) -> EngineStopped:
    """Returns the outcome if asynchronous processing stops a request that nothing ends."""
    return EngineStopped(
        kind="stopped-but-not-ended",
        request_id=request.id,
        explanation=(
            f"request {request.id} is longer than max_model_len and was stopped before its prompt"
            " was complete; the engine expects it to have ended by the next step"
        ),
        remedy="raise --max-model-len, or leave out requests that are longer",
        rule="AssertionError @ core/scheduler.py:541",
    )


def chunk_of_part_blocks(request: Request) -> EngineStopped:
    """Returns the outcome if chunks cannot end on block boundaries, as prefix caching demands."""
    return EngineStopped(
        kind="chunk-of-part-blocks",
        request_id=request.id,
        explanation=(
            "with chunked prefill and prefix caching, the engine refuses the first chunk unless"
            " max_num_batched_tokens is a multiple of block_size"
        ),
        remedy="make --max-num-batched-tokens a multiple of --block-size",
        rule="ValueError @ core/scheduler.py, _get_num_new_tokens",
    )

"""How the real engine dies: outcomes of runs that come to an assertion of vLLM V1."""

from __future__ import annotations

from kvsim.core.request import Request
from kvsim.errors import EngineStopped


def batch_too_large(request: Request) -> EngineStopped:
    """The outcome if preempted requests make the batch larger than the running ones."""
    return EngineStopped(
        kind="engine-error",
        request_id=request.id,
        explanation=(
            f"request {request.id} was preempted by a request of better priority after the step had"
            " scheduled it, and stayed in the batch"
        ),
        remedy="use --scheduling-policy fcfs, or a release from 0.10.2 on",
        rule="AssertionError @ v1/core/sched/scheduler.py",
    )


def padding_cut(request: Request, spec: int, most: int) -> EngineStopped:
    """The outcome if a padded decode does not fit the prompt threshold."""
    return EngineStopped(
        kind="engine-error",
        request_id=request.id,
        explanation=(
            f"request {request.id} was padded to {1 + spec} tokens, and"
            f" long_prefill_token_threshold cut it to {most}"
        ),
        remedy=f"set --long-prefill-token-threshold to 0, or to {1 + spec} at least",
        rule="AssertionError @ v1/core/sched/scheduler.py",
    )

"""Where vLLM 0.33.0 raises while it keeps KV cache groups, and the remedy."""

from __future__ import annotations

from kvsim.engine.request import Request
from kvsim.errors import EngineStopped


def state_of_drafts(request: Request) -> EngineStopped:
    """Returns the outcome if a state is to be kept whose last tokens are drafts without a key."""
    return EngineStopped(
        kind="state-of-drafts",
        request_id=request.id,
        explanation=(
            f"request {request.id}: a step with drafts passes over a whole block of a group with"
            " states, and the engine looks for the key of tokens that are not known yet"
        ),
        remedy="draft fewer tokens than a block holds (num_speculative_tokens)",
        rule="AssertionError @ v1/core/block_pool.py, _get_partial_block_hash",
    )

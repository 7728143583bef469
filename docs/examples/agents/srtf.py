"""Shortest remaining first as a tie-break among victims: vLLM PR #36980.

    PYTHONPATH=docs/examples/agents kvsim run --workload agentx --model qwen3-30b-a3b-2507 \
        --hardware h200 --block-size 64 --victim srtf:most_remaining

Of running requests of the worst priority, the one with the most tokens still to generate gives way.
What remains is `max_tokens` minus what was generated, as the client announced it (`max_new_tokens`
of a trace); where it did not, all may grow equally far, and the one with the fewest tokens so far
has most room left.
"""

from collections.abc import Sequence

from kvsim.core.blocks import BlockManager
from kvsim.core.request import Request

UNSAID = 1 << 30


def most_remaining(candidates: Sequence[Request], blocks: BlockManager) -> Request:
    """The victim; of equals, the one that came last."""

    def rank(request: Request) -> tuple[int, int, int]:
        most = request.max_new_tokens or UNSAID - request.input_length
        return request.priority, most - request.output_tokens, request.arrival_ns

    return max(candidates, key=rank)

"""A cost model of one's own: a decode step is as slow as its longest sequence.

    PYTHONPATH=docs/examples kvsim run --trace traces/chat.jsonl --engine vllm-v1 \
        --set cost.model=slow_tail:SlowTail

The mean ITL is 17.1 ms.
"""

from typing import Any

from kvsim.core.plan import Plan


class SlowTail:
    """5 ms, 40 us for each prompt token, and 2 us for each token of the longest context."""

    kind = "constant"
    source = "slow_tail: 5 ms + 40 us per prompt token + 2 us per token of the longest context"

    def step_ns(self, plan: Plan) -> int:
        """Nanoseconds of a step."""
        prompt_tokens = sum(tokens for tokens, _ in plan.chunks)
        longest = max(plan.lengths(), default=0)
        return 5_000_000 + 40_000 * prompt_tokens + 2_000 * longest

    def describe(self) -> dict[str, Any]:
        """For the provenance of a result."""
        return {"kind": self.kind, "source": self.source}

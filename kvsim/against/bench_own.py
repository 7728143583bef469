"""Policies such as users write, which change nothing: what it costs to ask them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsim.core.batch import Batch
from kvsim.core.blocks import BlockManager
from kvsim.core.plan import Plan
from kvsim.core.request import Request
from kvsim.engines.vllm_v1.scheduler import VllmV1Async


class Scheduler(VllmV1Async):
    """Is asked at each step, and does what vLLM does."""

    def compose(self, batch: Batch, now_ns: int) -> Plan:
        """The plan of vLLM."""
        plan: Plan = super().compose(batch, now_ns)
        return plan

    def settle(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        """Hand out tokens as vLLM does."""
        super().settle(batch, plan, now_ns)


def victim(candidates: Sequence[Request], blocks: BlockManager) -> Request:
    """The tail of the running queue, as in vLLM."""
    return candidates[-1]


class Price:
    """The constant times of the workloads (`kvsim.against.bench_workloads`)."""

    kind = "constant"
    source = "6 ms + 40 us per prompt token + 20 us per decode + 43 ns per token of context"

    def step_ns(self, plan: Plan) -> int:
        """Nanoseconds of a step."""
        prompt_tokens = sum(tokens for tokens, _ in plan.chunks)
        decodes_ns = 20_000 * len(plan.decodes) + 43 * plan.context_tokens
        return 6_000_000 + 40_000 * prompt_tokens + decodes_ns

    def describe(self) -> dict[str, Any]:
        """For the provenance of a result."""
        return {"kind": self.kind, "source": self.source}

"""Retain, Pin and release by an orchestrator: vLLM RFC #51428, SGLang #27574.

    PYTHONPATH=docs/examples/agents kvsim run --workload agentx --model qwen3-30b-a3b-2507 \
        --hardware h200 --block-size 64 --set block_manager_args.eviction=programmatic:Programmatic

Retain is a relative priority, for a bounded time; what has less goes first. Pin is a lease with an
expiry and a budget. Both may be clipped or refused. Prefetch, Demote and Share move KV, which this
order cannot, so they are refused and counted. Hints: `x_retain`, `x_pin`, `x_release`,
`x_prefetch`.
"""

from typing import Any

from kvsim.policies.sessions import SessionOrder, Use

RETAIN_NS = 60_000_000_000
"""How long a priority counts (chosen; the RFC leaves it to the hint)."""


class Programmatic(SessionOrder):
    """Least priority first."""

    most_pinned = 0.5

    def leaves(self, use: Use) -> None:
        hints = use.request.extra
        if "pin" in hints:
            self.pin(use, hints["pin"])
        for wish in ("prefetch", "demote", "share"):
            if wish in hints:
                self.refuse(f"no {wish} in the engine")

    def worth(self, use: Use) -> Any:
        hints = {} if use.request is None else use.request.extra
        if "release" in hints:
            return -1
        if self.pinned(use):
            return float("inf")
        return hints.get("retain", 0) if self.now_ns - use.ended_ns < RETAIN_NS else 0

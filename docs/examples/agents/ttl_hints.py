"""TTL retention by hint: vLLM RFC #52113, "Session-Aware KV Cache Hints for Agentic Workloads".

    PYTHONPATH=docs/examples/agents kvsim run --workload agentx --model qwen3-30b-a3b-2507 \
        --hardware h200 --block-size 64 --set block_manager_args.eviction=ttl_hints:TtlHints

The RFC has three classes of free blocks: A, of no session, goes first; B, of a session whose TTL is
over, second; C, whose TTL runs, last. "TTL is deliberately soft": C is broken when nothing else is
left. A released branch is of no session any more. Hints: `x_ttl_s`, `x_release`, `x_prefetch`.
"""

from typing import Any

from kvsim.policies.sessions import SessionOrder, Use


class TtlHints(SessionOrder):
    """Classes A, B and C."""

    def leaves(self, use: Use) -> None:
        hints = use.request.extra
        if "ttl_s" in hints:
            self.pin(use, hints["ttl_s"])
        if "prefetch" in hints:
            self.refuse("no prefetch in the engine")

    def worth(self, use: Use) -> Any:
        request = use.request
        if request is None or request.session is None or "release" in request.extra:
            return 0
        return 2 if self.pinned(use) else 1


class Bounded(TtlHints):
    """The same, with pins for half of the pool at most: against clients that pin everything."""

    most_pinned = 0.5

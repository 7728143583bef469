"""Continuum (CacheTTL), arXiv 2511.02230: a TTL weighed for each tool call, programs in order.

    PYTHONPATH=docs/examples/agents kvsim run --workload agentx --model qwen3-30b-a3b-2507 \
        --hardware h200 --block-size 64 --engine continuum:ProgramsInOrder \
        --set block_manager_args.eviction=continuum:CacheTtl

After a tool call the KV is kept for the time t that maximises P(tool returns within t) x benefit -
cost(t). The benefit is computing it again and queueing again; P comes from what this tool took so
far. Our reading of the rest: cost is t times the share of the pool, times the running programs that
it holds up; a new tool is taken to be exponential, as in the paper. Programs are first come, first
served.
"""

from collections import defaultdict, deque
from math import exp
from typing import Any

from kvsim.core.batch import Batch
from kvsim.engines import VllmV1Async
from kvsim.policies.sessions import SessionOrder, Use

PREFILL_TOKENS_PER_S = 15_000
"""What an engine computes of a long prompt (chosen; the paper profiles its engine)."""
CANDIDATES_S = (0, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)
FEW = 20
"""Calls of a tool below which its pauses are taken to be exponential, of 1 s in the mean."""


class CacheTtl(SessionOrder):
    """Pins by tool; what is not pinned by last use."""

    def __init__(self) -> None:
        super().__init__()
        self._took_s: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=500))
        self._left: dict[str, Use] = {}
        self._queued_s, self._left_before = 0.0, 0

    def leaves(self, use: Use) -> None:
        request = use.request
        before = self._left.get(request.session)
        if before is not None and before.request is not request:
            pause_s = (request.arrival_ns - before.request.finish_ns) / 1e9
            self._took_s[before.request.extra.get("tool")].append(pause_s)
        self._left[request.session] = use
        waited_s = (request.first_scheduled_ns - request.arrival_ns) / 1e9
        self._left_before += 1
        self._queued_s += (waited_s - self._queued_s) / self._left_before
        if "tool" in request.extra and (ttl_s := self._ttl_s(use)):
            self.pin(use, ttl_s)

    def _ttl_s(self, use: Use) -> float:
        request = use.request
        took = self._took_s[request.extra["tool"]]
        benefit_s = request.length / PREFILL_TOKENS_PER_S + self._queued_s
        held_up = request.length / self.pool_tokens * max(1, len(self._batch.running))

        def gain(ttl_s: float) -> float:
            back = sum(each <= ttl_s for each in took) / len(took) if took else 0
            chance = back if len(took) >= FEW else 1 - exp(-ttl_s)
            return chance * benefit_s - ttl_s * held_up

        return max(CANDIDATES_S, key=gain)

    def worth(self, use: Use) -> Any:
        return 1 if self.pinned(use) else 0


class ProgramsInOrder(VllmV1Async):
    """The session that came first is admitted first."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._came_ns: dict[str, int] = {}

    def before_admissions(self, batch: Batch, now_ns: int) -> None:
        came = self._came_ns
        for request in batch.waiting:
            came.setdefault(request.session or request.id, request.arrival_ns)
        batch.waiting = sorted(batch.waiting, key=lambda each: came[each.session or each.id])

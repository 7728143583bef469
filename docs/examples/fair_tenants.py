"""Fairness among tenants by virtual token counters.

Sheng et al., "Fairness in serving large language models", OSDI 2024, Algorithm 2.

    PYTHONPATH=docs/examples kvsim run --trace docs/examples/tenants.jsonl \
        --engine fair_tenants:Fair --max-num-seqs 8

The trace says whose each request is (`x_tenant`). Three quarters are those of one tenant, long
ones; the other one waits no longer for them, and the mean TTFT falls from 5.62 s to 4.78 s.
"""

from collections import Counter, defaultdict, deque
from typing import Any

from kvsim.core.batch import Batch
from kvsim.core.plan import Plan
from kvsim.core.request import Request
from kvsim.engines import VllmV1Async


class Fair(VllmV1Async):
    """Next is a request of the tenant that was served least: tokens, those of outputs twice."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.served: Counter[str] = Counter()

    def arrive(self, batch: Batch, request: Request) -> None:
        tenant, waiting = request.extra["tenant"], {each.extra["tenant"] for each in batch.waiting}
        if waiting and tenant not in waiting:  # Who was away has saved nothing up.
            least = min(self.served[each] for each in waiting)
            self.served[tenant] = max(self.served[tenant], least)
        super().arrive(batch, request)

    def before_admissions(self, batch: Batch, now_ns: int) -> None:
        counters, queues, order = self.served.copy(), defaultdict(deque), []
        for request in batch.waiting:
            queues[request.extra["tenant"]].append(request)
        while queues:
            tenant = min(queues, key=lambda each: counters[each])
            order.append(queues[tenant].popleft())
            counters[tenant] += order[-1].input_length
            if not queues[tenant]:
                del queues[tenant]
        batch.waiting = order

    def after_step(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        for chunk in plan.prefills:
            self.served[chunk.request.extra["tenant"]] += chunk.scheduled
        for request, _, samples in plan.entries:
            self.served[request.extra["tenant"]] += 2 * samples

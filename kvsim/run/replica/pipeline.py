"""Simulated time of a pipeline: its stages work on several steps at once, each on one at a time.

```
stage 0   step 0 │ step 1 │ step 2 │ step 3 ...
stage 1          │ step 0 │ step 1 │ step 2 ...
```
A stage begins with a step when its host's part is over, the activations have arrived, and those of
the step before have left. The first stage also waits for the tokens of the step that was composed
as many calls before as there are stages: its requests may be in this step again. Steps that compute
nothing take a place in the queue of the engine, and are over with the step before them. Source:
vLLM 0.33.0, `v1/engine/core.py` `step_with_batch_queue`, `v1/worker/gpu_worker.py` `execute_model`,
`v1/worker/gpu/pp_utils.py` `get_prev_sampled_outputs`.
"""

from __future__ import annotations

from collections import deque

import simpy

from kvsim.core.batch import Batch
from kvsim.core.host import Receiver, SimulatedTime
from kvsim.core.plan import Plan
from kvsim.core.schema import STAGE_COLUMNS
from kvsim.cost import checked_prices
from kvsim.cost.estimates import StagedCost
from kvsim.run.replica.events import Link


class PipelineTime(SimulatedTime):
    """Simulated time of an engine whose GPUs are the stages of a pipeline."""

    def __init__(
        self, env: simpy.Environment, cost: StagedCost, link: Link, inbox: Receiver
    ) -> None:
        super().__init__(env, checked_prices(cost).step_ns, link, inbox)
        self.gauged, self.records_empty = STAGE_COLUMNS, False
        self._cost = cost
        self._free_ns = [0] * cost.number
        """When each stage has computed its last step."""
        self._sent_ns = [0] * cost.number
        """When each stage has sent the activations of that step; the last one sends none."""
        self._known_ns = deque([0] * cost.number, cost.number)
        """When the tokens of the last calls are known; 0 where there are none."""
        self._over_ns = 0
        """When the last step that computes anything is over."""
        self._gauges = (0, 0)

    def composes(self, batch: Batch) -> bool:
        """Whether any request is in progress; if not, the pipeline is drained."""
        return len(batch) > 0

    def takes_time(self, plan: Plan, in_flight: int) -> bool:
        """Whether a step takes a place in the queue: also an empty one, while others compute."""
        return not plan.empty or self._over_ns > self.now_ns

    def goes_on(self, batch: Batch, plan: Plan) -> bool:
        return plan.computes or (len(batch) > 0 and self._over_ns > self.now_ns)

    def step_ns(self, plan: Plan) -> int:
        return super().step_ns(plan) if plan.computes else 0

    def gauges(self) -> tuple[int, ...]:
        return self._gauges

    def runs(self, plan: Plan, now_ns: int, after_ns: int, lasts_ns: int) -> tuple[int, int, int]:
        free, sent = self._free_ns, self._sent_ns
        begin_ns = max(now_ns, free[0])
        arrive_ns = self._known_ns[0]
        if not plan.computes:
            end_ns = max(begin_ns, after_ns)
            self._known_ns.append(0)
            self._gauges = 0, end_ns - begin_ns
            return begin_ns, end_ns, free[0]
        host_ns, stages_ns, send_ns = self._cost.passage(plan, lasts_ns)
        for stage, stage_ns in enumerate(stages_ns):
            ready_ns = max(now_ns, free[stage]) + host_ns
            free[stage] = max(ready_ns, arrive_ns, sent[stage]) + stage_ns
            arrive_ns = sent[stage] = free[stage] + send_ns
        self._over_ns = end_ns = sent[-1] = free[-1]
        self._known_ns.append(end_ns if plan.samples else 0)
        sends_ns = send_ns * (len(stages_ns) - 1)
        self._gauges = sends_ns, end_ns - begin_ns - lasts_ns - sends_ns
        return begin_ns, end_ns, free[0]

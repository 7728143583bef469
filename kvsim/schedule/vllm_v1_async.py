"""vLLM V1 0.33.0 with asynchronous scheduling, its default (`v1/core/sched/async_scheduler.py`).

Two steps are in flight: step i + 1 is composed while step i computes, before its tokens are known.
A request counts a *placeholder* for each token that was sampled and is not known yet, so it can
take on the next one. A request that is preempted meanwhile still gets the token of the step in
flight, and may end with it in the waiting queue.
"""

from __future__ import annotations

from kvsim.batch.batch import Batch
from kvsim.plan import Plan
from kvsim.request import WAITING
from kvsim.schedule.vllm_v1 import VllmV1
from kvsim.schedule.vllm_v1_outputs import process_token


class VllmV1Async(VllmV1):
    """The same scheduler, one step ahead of what it knows."""

    in_flight = 2
    ahead = True

    def compose(self, batch: Batch, now_ns: int) -> Plan:
        plan = super().compose(batch, now_ns)
        for request, _, samples in plan.entries:
            request.sequences[0].placeholders += samples
        return plan

    def settle(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        batch.now_ns = now_ns
        batch.publish(plan)
        ended = False
        for request, _, samples in plan.entries:
            request.sequences[0].placeholders -= samples
        left = batch.settle_together(plan, self)
        for request, _, samples in (*left, *plan.entries):
            if not samples:
                continue
            sequence = request.sequences[0]
            preempted = sequence.state == WAITING
            if not (preempted or batch.blocks.publish_at.computed):
                # What the step has computed is all that was known before its token.
                batch.blocks.publish(sequence, sequence.length)
            if process_token(batch, request, self.max_model_len):
                ended = True
                if preempted:
                    batch.waiting.remove(request)
        if ended:
            batch.remove_ended()

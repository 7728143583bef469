"""vLLM V1 0.33.0 with asynchronous scheduling, its default (`v1/core/sched/async_scheduler.py`).

Two steps are in flight: step i + 1 is composed while step i computes, before its tokens are known.
A request counts a *placeholder* for each token that was sampled and is not known yet, so it can
take on the next one. A request that is preempted meanwhile still gets the token of the step in
flight, and may end with it in the waiting queue.
"""

from __future__ import annotations

from kvsim.plan import Plan
from kvsim.request import WAITING
from kvsim.schedule.batch import Batch
from kvsim.schedule.groups import remove_ended
from kvsim.schedule.vllm_v1 import VllmV1
from kvsim.schedule.vllm_v1_outputs import process_token


class VllmV1Async(VllmV1):
    """The same scheduler, one step ahead of what it knows."""

    in_flight = 2

    def compose(self, batch: Batch, now_ns: int) -> Plan:
        plan = super().compose(batch, now_ns)
        for request, _, samples in plan.entries:
            request.sequences[0].placeholders += samples
        return plan

    def settle(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        batch.now_ns = now_ns
        ended = False
        for request, _, samples in plan.entries:
            if not samples:
                continue
            sequence = request.sequences[0]
            sequence.placeholders -= 1
            preempted = sequence.state == WAITING
            if not preempted:
                # What the step has computed is all that was known before its token.
                batch.blocks.publish(sequence, sequence.length)
            if process_token(batch, request, self.max_model_len):
                ended = True
                if preempted:
                    batch.waiting.remove(request)
        if ended:
            remove_ended(batch)

"""vLLM 0.6.3.post1 with asynchronous output processing, its default on CUDA (n = 1 only).

The stop test of a step runs while the next one computes, so a finished request takes part in one
more decode step and holds its blocks for one step longer (`engine/llm_engine.py`,
`_process_model_outputs`).
"""

from __future__ import annotations

from kvsim.batch.batch import Batch
from kvsim.batch.pace import Moves
from kvsim.plan import Plan
from kvsim.request import SWAPPED, Request
from kvsim.schedule import vllm063_deaths as deaths
from kvsim.schedule.vllm063 import Vllm063
from kvsim.schedule.vllm063_outputs import computed, in_batch_order, stops


class Vllm063Async(Vllm063):
    """The same scheduler, whose stop test lags one step."""

    lingers = True

    def _start(self) -> None:
        self._pending: dict[Request, None] = {}
        """Requests that got a token in the last step and were not tested yet, in batch order."""

    def overlap(self, batch: Batch, now_ns: int) -> None:
        batch.now_ns = now_ns
        self._process_pending(batch)

    def settle(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        batch.now_ns = now_ns
        batch.publish(plan)
        for request, tokens, samples in in_batch_order(batch, plan, self):
            if request.finish_ns < 0:
                computed(request, tokens)
                if samples:
                    batch.token(request.sequences[0])
                    self._pending[request] = None
        if not len(batch):
            self._process_pending(batch)

    def undisturbed(self, batch: Moves) -> bool:
        if batch.aside or not super().undisturbed(batch):
            return False
        # They all go on, so the test that is pending tells nothing.
        self._pending.clear()
        return True

    def last_tokens(self, batch: Moves, requests: list[Request]) -> None:
        self._pending.update(dict.fromkeys(requests))
        if any(batch.length(request) > self.max_model_len for request in requests):
            # They are left out of the next step; see `_stopped`.
            batch.dissolve()

    def _process_pending(self, batch: Batch) -> None:
        pending, self._pending = self._pending, {}
        ended = [self._process(batch, request) for request in pending]
        if any(ended):
            batch.remove_ended()
            for request in batch.aside:
                if request.finish_ns < 0:
                    batch.lose(request)
            batch.aside.clear()

    def _process(self, batch: Batch, request: Request) -> bool:
        """Test one request; answers whether it ended."""
        if batch.has_more(request):
            return False
        batch.look_at(request)
        sequence = request.sequences[0]
        if sequence.state > SWAPPED or not stops(sequence, self.max_model_len):
            return False
        batch.complete(request)
        return True

    def _begin_running(self, batch: Batch) -> None:
        if batch.aside:
            raise deaths.stopped_but_not_ended(batch.aside[0])

    def _stopped(self, batch: Batch, request: Request) -> bool:
        if request.sequences[0].length <= self.max_model_len:
            return False
        batch.aside.append(request)
        return True

    def _ended_meanwhile(self, batch: Batch, victim: Request) -> bool:
        if victim not in self._pending:
            return False
        del self._pending[victim]
        return self._process(batch, victim)

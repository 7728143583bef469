"""vLLM 0.6.3.post1 with asynchronous output processing, its default on CUDA (n = 1 only).

The stop test of a step runs while the next one computes, so a finished request takes part in one
more decode step and holds its blocks for one step longer (`engine/llm_engine.py`,
`_process_model_outputs`).
"""

from __future__ import annotations

from kvsim.plan import Plan
from kvsim.request import SWAPPED, Request
from kvsim.schedule import vllm063_deaths as deaths
from kvsim.schedule.batch import Batch
from kvsim.schedule.groups import remove_ended
from kvsim.schedule.vllm063 import Vllm063
from kvsim.schedule.vllm063_outputs import computed, stops


class Vllm063Async(Vllm063):
    """The same scheduler, whose stop test lags one step."""

    def _start(self) -> None:
        self._pending: dict[Request, None] = {}
        """Requests that got a token in the last step and were not tested yet, in batch order."""

    def overlap(self, batch: Batch, now_ns: int) -> None:
        batch.now_ns = now_ns
        self._process_pending(batch)

    def settle(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        batch.now_ns = now_ns
        for request, tokens, samples in plan.entries:
            if request.finish_ns < 0:
                computed(request, tokens)
                if samples:
                    batch.token(request.sequences[0])
                    self._pending[request] = None
        if not len(batch):
            self._process_pending(batch)

    def _process_pending(self, batch: Batch) -> None:
        pending, self._pending = self._pending, {}
        ended = [self._process(batch, request) for request in pending]
        if any(ended):
            remove_ended(batch)
            for request in batch.aside:
                if request.finish_ns < 0:
                    batch.lose(request)
            batch.aside.clear()

    def _process(self, batch: Batch, request: Request) -> bool:
        """Test one request; answers whether it ended."""
        sequence = request.sequences[0]
        if sequence.state > SWAPPED or not stops(sequence, self.max_model_len):
            return False
        batch.end_sequence(sequence)
        batch.finish(request)
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

"""Steps without prompts between those with them (vLLM 0.33.0 `v1/core/sched/scheduler.py`,
`prefill_schedule_interval` of an engine by itself).

```
interval 3   prompts │ decodes │ decodes │ prompts │ decodes │ ...
```
"""

from __future__ import annotations

from mypy_extensions import i64

from kvsim.core.batch import Batch
from kvsim.core.plan import Plan
from kvsim.core.request import Request


class Cadence:
    """Says in which steps prompts wait, so that decodes are by themselves."""

    interval: i64
    holds: bool
    """Whether prompts wait in the step that is being composed."""
    carries: bool
    """Whether it computes a part of a prompt."""
    _last: i64
    """Number of the last step that did."""
    _full: bool
    """Whether the last step that took prompts could not take all who waited."""
    _passed: dict[Request, None]
    """Waiting requests that were passed over, for another reason than want of room."""

    def __init__(self, interval: int) -> None:
        """`interval`: steps from one with prompts to the next."""
        self.interval, self._last = interval, -interval
        self.holds = self.carries = self._full = False
        self._passed = {}

    def begin(self, batch: Batch, step: i64) -> None:
        """The step of this number is about to be composed."""
        self.carries = False
        early: bool = step - self._last < self.interval
        self.holds = (
            early and not self._full and any(not request.mid_prompt for request in batch.running)
        )

    def end(self, batch: Batch, plan: Plan, step: i64) -> None:
        """A step is composed, and this is the number of the last one that computes anything."""
        if self.interval == 1:
            return
        if not (self.holds or plan.preempted):
            queues = (batch.waiting, batch.holding)
            self._full = any(self._waits(batch, each) for queue in queues for each in queue)
        if self.carries:
            self._last = step

    def _waits(self, batch: Batch, request: Request) -> bool:
        return request not in self._passed and request.options.grammar_ready_ns <= batch.now_ns

    def passed(self, request: Request) -> None:
        """A waiting request was passed over."""
        if self.interval > 1:
            self._passed[request] = None

    def left(self, request: Request) -> None:
        """A request does not wait any longer."""
        self._passed.pop(request, None)

"""Why waiting requests are passed over, so that those behind them may be admitted: their adapter
has no place, or it is not a step for prompts.

```
interval 3   prompts │ decodes │ decodes │ prompts │ decodes │ ...
```

Source: vLLM 0.33.0 `v1/core/sched/scheduler.py`, `max_loras`, and `prefill_schedule_interval` of an
engine by itself.
"""

from __future__ import annotations

from collections.abc import Iterable

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
        # Where nobody decodes, prompts hold nobody up.
        self.holds = (
            early and not self._full and any(not request.mid_prompt for request in batch.running)
        )

    def end(self, batch: Batch, plan: Plan, step: i64) -> None:
        """A step is composed, and this is the number of the last one that computes anything."""
        if self.interval == 1:
            return
        # Where prompts were held, or somebody was preempted, it was not tried who fits.
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
        if self._passed:
            self._passed.pop(request, None)


class AdapterSlots:
    """The adapters of one scheduling call."""

    def __init__(self, max_loras: int | None) -> None:
        """None: there is no limit."""
        self._most = max_loras
        self._used: set[str] = set()
        self.refuses = False
        """Whether a request was passed over in this scheduling call."""
        self._passed: set[Request] = set()
        """Requests that were passed over at least once."""

    def begin(self, running: Iterable[Request]) -> None:
        """Admissions begin beside these running requests."""
        self.refuses = False
        if self._most is not None:
            self._used = {request.options.lora for request in running} - {""}

    def admits(self, request: Request) -> bool:
        """Whether the adapter of a waiting request has a place."""
        lora = request.options.lora
        used = self._used
        if self._most is None or not lora or lora in used or len(used) < self._most:
            return True
        self.refuses = True
        self._passed.add(request)
        return False

    def remarks(self) -> list[str]:
        """What a reader of a result should know of the limit, one line each."""
        if not self._passed:
            return []
        return [
            f"max_loras: {len(self._passed):,} requests were passed over, because"
            f" {self._most} other adapters ran already; requests behind them may go first"
        ]

    def admitted(self, request: Request) -> None:
        """A request was admitted."""
        if self._most is not None and request.options.lora:
            self._used.add(request.options.lora)

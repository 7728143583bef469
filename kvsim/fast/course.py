"""What short cuts have to do with: the parts of a run, and the step that is being worked out."""

from __future__ import annotations

from collections.abc import Callable

from kvsim.cost import PricesDecodes, PricesLongest, longest_asked
from kvsim.engine.batch import Batch
from kvsim.engine.plan import Plan
from kvsim.engine.request import Request
from kvsim.engine.scheduler import Scheduler
from kvsim.fast.cohort import Cohort
from kvsim.fast.known import Terms
from kvsim.records.recorder import Recorder

MOST_STEPS = 10_000
"""Steps in a row, so that somebody who watches the clock sees it move."""


class Course:
    """The parts of a run, and what all kinds of steps that are worked out in numbers share."""

    def __init__(
        self,
        batch: Batch,
        cohort: Cohort,
        scheduler: Scheduler,
        terms: Terms,
        cost: PricesDecodes,
        recorder: Recorder,
        arrivals: Callable[[int], float],
        listens: bool,
    ) -> None:
        """`arrivals` lets those arrive who are sent until a time, and returns when the next one
        will be. `listens`: whether a client waits for somebody to end."""
        self.batch = batch
        self.cohort = cohort
        self.scheduler = scheduler
        self.terms = terms
        self.cost = cost
        self._asked = longest_asked(cost)
        self._longest = cost if self._asked and isinstance(cost, PricesLongest) else None
        if self._asked:
            cohort.rank()
        self.recorder = recorder
        self.arrivals = arrivals
        self.listens = listens
        self.ended: list[Request] = []
        """Who ended in the last stretch, in order."""
        self.plan = Plan()
        """The step being worked out: its sums, and who gave way."""
        self.ignored = 0
        """Waiting requests that the engine gave up in that step."""
        self.untold: list[Request] = []
        """Members that have their last token and linger, of whom the scheduler does not know yet:
        most of them end before it has to."""

    def decode_ns(self, sequences: int, context_tokens: int, step: int) -> int:
        """Nanoseconds of one decode step of the cohort, before which so many are composed."""
        cost = self._longest
        if cost is None:
            return self.cost.decode_ns(sequences, context_tokens)
        longest = self.cohort.longest(self._asked, step)
        return cost.decode_ns(sequences, context_tokens, longest)

    def decode_run_ns(self, steps: int, within_ns: int | None) -> list[int]:
        """Nanoseconds of the next decode steps, as `PricesDecodes.decode_run_ns`."""
        cost, cohort = self._longest, self.cohort
        number, context = len(cohort.requests), cohort.context_tokens
        if cost is None:
            return self.cost.decode_run_ns(number, context, steps, within_ns)
        longest = cohort.longest(self._asked, cohort.composed)
        return cost.decode_run_ns(number, context, steps, within_ns, longest)

    def count_decodes(self, number: int, context_tokens: int, step: int) -> None:
        """Put so many decodes of the cohort into the step being worked out, before which so many
        are composed."""
        plan, cost = self.plan, self._longest
        plan.together = plan.decode_seqs = plan.samples = plan.batched_tokens = number
        plan.context_tokens = context_tokens
        if cost is not None:
            plan.know_longest(self.cohort.longest(self._asked, step))

    def begin(self) -> Plan:
        """Start to compose a step by its sums."""
        self.batch.plan = plan = self.plan
        plan.chunks, plan.preempted, plan.ignored = [], [], []
        plan.blocked = plan.samples = plan.together = plan.batched_tokens = 0
        plan.decode_seqs = plan.context_tokens = 0
        plan.know_longest([])
        return plan

    def end(self, requests: list[Request]) -> None:
        """These requests have their last token: the scheduler ends them, at once or later."""
        if self.cohort.lingers:
            self.untold += requests
        else:
            self.scheduler.last_tokens(self.batch, requests)

    def farewell(self) -> int:
        """Those that linger end; returns how many."""
        self.untold = []
        return len(self.cohort.farewell())

    def ignore_head(self) -> bool:
        """Give up the head of the waiting queue, again and again as long as the engine does;
        whether it did."""
        batch, before = self.batch, self.ignored
        waiting, blocks, size = batch.waiting, batch.blocks, self.cohort.size
        while waiting:
            length = waiting[0].sequences[0].length
            reason = self.terms.turns_away(blocks, length, -(-length // size))
            if not reason:
                break
            batch.ignore(waiting.popleft(), reason)
            self.ignored += 1
        return self.ignored > before

    def take_ignored(self) -> int:
        """How many were given up in the step that is recorded now."""
        ignored, self.ignored = self.ignored, 0
        return ignored

    def decodes_fit(self) -> bool:
        """Whether there are blocks for a decode step of the cohort."""
        cohort = self.cohort
        members = cohort.requests
        if not members:
            return True
        opening = cohort.phases[cohort.composed % cohort.size]
        left = self.batch.blocks.gpu.free - len(opening)
        return left > 0 or (
            not left and (not self.terms.spare or next(reversed(members)) in opening)
        )

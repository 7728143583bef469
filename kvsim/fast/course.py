"""What short cuts work with: the parts of a run, and the step being computed."""

from __future__ import annotations

from collections.abc import Callable
from sys import maxsize

from kvsim.cost import PricesDecodes, PricesLongest, longest_asked
from kvsim.engine.batch import Batch
from kvsim.engine.plan import Plan
from kvsim.engine.request import Request
from kvsim.engine.scheduler import Scheduler
from kvsim.fast.cohort import Cohort
from kvsim.fast.known import Terms
from kvsim.records.recorder import Recorder


class Course:
    """The parts of a run, and what all kinds of repeated steps share."""

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
        """`arrivals` takes in all requests sent up to a time, and returns when the next one is
        sent. `listens` says whether a client waits for a request to end."""
        self.batch = batch
        self.cohort = cohort
        self.scheduler = scheduler
        self.terms = terms
        self.cost = cost
        self._asked = longest_asked(cost)
        self._longest = cost if self._asked and isinstance(cost, PricesLongest) else None
        if self._asked:
            cohort.rank()
        cohort.most = terms.seqs_per_step or maxsize
        self.recorder = recorder
        self.arrivals = arrivals
        self.listens = listens
        self.ended: list[Request] = []
        """Requests that ended during the last series of steps, in order."""
        self.plan = Plan()
        """The step being computed: its sums and its victims."""
        self.plan.know_longest([])
        self.ignored = 0
        """Number of waiting requests that the engine gave up in that step."""
        self.untold: list[Request] = []
        """Lingering members that have their last token, and of which the scheduler has not been
        told. Most of them end before it needs to know."""

    def decode_ns(self, sequences: int, context_tokens: int, step: int) -> int:
        """Returns the nanoseconds of one decode step of the cohort, the one after `step` composed
        ones."""
        cost = self._longest
        if cost is None:
            return self.cost.decode_ns(sequences, context_tokens)
        longest = self.cohort.longest(self._asked, step)
        return cost.decode_ns(sequences, context_tokens, longest)

    def decode_run_ns(self, steps: int, within_ns: int | None) -> list[int]:
        """Returns the nanoseconds of the next decode steps (`PricesDecodes.decode_run_ns`)."""
        cost, cohort = self._longest, self.cohort
        number, context = len(cohort.requests), cohort.context_tokens
        if cost is None:
            return self.cost.decode_run_ns(number, context, steps, within_ns)
        longest = cohort.longest(self._asked, cohort.composed)
        return cost.decode_run_ns(number, context, steps, within_ns, longest)

    def count_decodes(self, number: int, context_tokens: int, step: int) -> None:
        """Adds `number` decodes of the cohort to the step being computed, the one after `step`
        composed ones."""
        plan, cost = self.plan, self._longest
        plan.together = plan.decode_seqs = plan.samples = plan.batched_tokens = number
        plan.context_tokens = context_tokens
        if cost is not None:
            plan.know_longest(self.cohort.longest(self._asked, step))

    def begin(self) -> Plan:
        """Starts to compose a step that is described by its sums."""
        self.batch.plan = plan = self.plan
        plan.chunks, plan.preempted, plan.ignored = [], [], []
        plan.blocked = plan.samples = plan.together = plan.batched_tokens = 0
        plan.decode_seqs = plan.context_tokens = 0
        if self._longest is not None:
            plan.know_longest([])
        return plan

    def end(self, requests: list[Request]) -> None:
        """Lets the scheduler end requests that have their last token, now or later."""
        if self.cohort.lingers:
            self.untold += requests
        else:
            self.scheduler.last_tokens(self.batch, requests)

    def farewell(self) -> int:
        """Ends the lingering members. Returns how many there were."""
        self.untold = []
        return len(self.cohort.farewell())

    def ignore_head(self) -> bool:
        """Gives up the head of the waiting queue repeatedly, as long as the engine would. Returns
        whether it gave up any."""
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
        """Returns the number of requests given up in the step being recorded, and resets it."""
        ignored, self.ignored = self.ignored, 0
        return ignored

    def decodes_fit(self) -> bool:
        """Whether there are enough blocks for a decode step of the cohort."""
        cohort = self.cohort
        members = cohort.requests
        if not members:
            return True
        opening = cohort.phases[cohort.composed % cohort.size]
        left = self.batch.blocks.gpu.free - len(opening)
        return left > 0 or (
            not left and (not self.terms.spare or next(reversed(members)) in opening)
        )

"""Decode steps of an engine that composes a step while the one before computes.

```
 step i      ├─ computes ─┤
 step i + 1  composed ....├─ computes ─┤        composed C = S + 1 where a step is composed:
 step i + 2               composed ....├─ ...   a member whose last token is in step i sits out
                          └ step i is settled: its tokens exist, who has its last one ends
```
"""

from __future__ import annotations

from sys import maxsize

from kvsim.engine.plan import Flight, Plan
from kvsim.fast.course import MOST_STEPS, Course
from kvsim.fast.prompts import asked_tokens
from kvsim.schema import completed_row, step_row


class Ahead:
    """Takes decode steps where one step is under way whenever the next one is composed."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self.why_not = ""
        """Why there is no such step next."""

    def take(self, flight: Flight, now_ns: int, cut_ns: float) -> tuple[int, Flight]:
        """Take decode steps from `now_ns` on, with `flight` under way.

        Returns how many, and the step that is under way then. The others are settled, the last of
        them at `Batch.now_ns`; who ended is in `Course.ended`. Each is composed before `cut_ns`.
        """
        course, batch, cohort = self._course, self._course.batch, self._course.cohort
        scheduler, steps, number, context = course.scheduler, 0, 0, 0
        plan, start_ns, end_ns, _, row = flight
        batch.now_ns, course.ended = now_ns, []
        cohort.recruit()
        while (blocked := self._goes_on()) >= 0:
            decodes, context = len(cohort.requests) - len(cohort.sitting), cohort.context_tokens
            composed = self._compose(decodes, context, blocked)
            batch.now_ns = end_ns
            if not steps:
                scheduler.settle(batch, plan, end_ns)
            elif ended := cohort.book(number):
                scheduler.last_tokens(batch, ended)
            row = completed_row(row, start_ns, end_ns, finished=len(batch.ended))
            course.recorder.packed(row)
            steps += 1
            number, row, start_ns = decodes, composed, end_ns
            end_ns += course.cost.decode_ns(decodes, context)
            if batch.ended:
                course.ended += batch.ended
                batch.ended = []
                if course.listens:
                    break
            if start_ns >= cut_ns or steps >= MOST_STEPS:
                break
        if not steps:
            return 0, flight
        batch.busy_until_ns = end_ns
        plan = Plan()
        plan.run_together(number, cohort.members)
        plan.decode_seqs = plan.batched_tokens = plan.samples = number
        plan.context_tokens = context
        cohort.flying.append(plan)
        return steps, Flight(plan, start_ns, end_ns, (0, 0), row)

    def _compose(self, decodes: int, context_tokens: int, blocked: int) -> bytes:
        """Compose a step of so many members; returns its row, but for times and who finishes."""
        batch, cohort = self._course.batch, self._course.cohort
        cohort.grow(decodes)
        cohort.compose(decodes)
        if blocked:
            batch.waiting[0].blocked_steps += 1
        return step_row(
            decode_seqs=decodes,
            context_tokens=context_tokens,
            batched_tokens=decodes,
            waiting=len(batch.waiting),
            running=len(cohort.requests),
            census=batch.blocks.census(),
            blocked=blocked,
        )

    def _goes_on(self) -> int:
        """Why nobody is admitted to the next step (index into `kvsim.schema.BLOCKED`), or 0 where
        nobody waits; -1: it is not a decode step of the cohort (`why_not`)."""
        batch, cohort, terms = self._course.batch, self._course.cohort, self._course.terms
        if batch.others:
            self.why_not = "a prompt is under way"
            return -1
        cohort.seat()
        blocks = batch.blocks
        number = len(cohort.requests) - len(cohort.sitting)
        free = blocks.gpu.free - len(cohort.phases[cohort.composed % cohort.size])
        if not number or free <= 0:
            self.why_not = "blocks run short" if number else "nobody decodes"
            return -1
        cohort.given = 0
        if not batch.waiting:
            return 0
        length = batch.waiting[0].sequences[0].length
        need = -(-length // cohort.size)
        if blocks.needs_keys:
            # Hits would save blocks, but neither slots nor budget that there are not.
            free, need = maxsize, 0
        asked = asked_tokens(terms, length, number)
        self.why_not = "somebody is admitted"
        return terms.refusal(blocks, free, need, asked, number, len(cohort.requests)) or -1

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

from kvsim.batch.cruise import MOST_STEPS, Course, Cruise
from kvsim.batch.intake import asked_tokens
from kvsim.plan import Flight, Plan
from kvsim.recorder import pack


class Ahead(Cruise):
    """`Cruise`, where one step is under way whenever the next one is composed."""

    def run_ahead(
        self, course: Course, flight: Flight, now_ns: int, cut_ns: float
    ) -> Flight | None:
        """Take decode steps from `now_ns` on, with `flight` under way; None: there are none.

        Answers the step that is under way then. The others are settled, the last of them at
        `self.now_ns`; who ended is in `self.left`. Each is composed before `cut_ns`.
        """
        recorder, pace, steps = course.recorder, course.pace, 0
        plan, start_ns, end_ns, _, before = flight
        self.now_ns, self.left, number = now_ns, [], 0
        self._recruit(pace)
        while not self.behind and (blocked := self._goes_on(course)) >= 0:
            decodes, context = len(self._members) - len(self._sitting), self._context_tokens
            self._grow(pace, decodes)
            self._compose(decodes)
            if blocked:
                self.waiting[0].blocked_steps += 1
            composed = (
                0, 0, 0, decodes, context, decodes, 0, 0, 0, 0, 0, 0, 0,
                len(self.waiting), len(self._members), 0, *self.blocks.census(), blocked,
            )  # fmt: skip
            self.now_ns = end_ns
            if not steps:
                pace.settle(self, plan, end_ns)
            elif ended := self._settle(pace, number):
                pace.last_tokens(self, ended)
            recorder.packed(pack(start_ns, end_ns, 0, 0, *before, len(self.ended)))
            steps += 1
            number, before, start_ns = decodes, composed, end_ns
            end_ns += course.decode_ns(decodes, context)
            if self.ended:
                self.left += self.ended
                self.ended = []
                if course.heard:
                    break
            if start_ns >= cut_ns or steps >= MOST_STEPS:
                break
        if not steps:
            return None
        self.stretches += 1
        self.stretched_steps += steps
        self.busy_until_ns = end_ns
        plan = Plan()
        plan.together = plan.decode_seqs = plan.batched_tokens = plan.samples = number
        plan.context_tokens = context
        self._flying.append(plan)
        return Flight(plan, start_ns, end_ns, (0, 0), before)

    def _goes_on(self, course: Course) -> int:
        """Why nobody is admitted to the next step (index into `recorder.BLOCKED`), or 0 where
        nobody waits; -1: it is not a decode step of the cohort."""
        self._seat()
        blocks, terms = self.blocks, course.terms
        number = len(self._members) - len(self._sitting)
        free = blocks.gpu.free - len(self._phases[self._composed % self._size])
        if not number or free <= 0:
            return -1
        self._given = 0
        if not self.waiting:
            return 0
        length = self.waiting[0].sequences[0].length
        need = -(-length // self._size)
        if blocks.needs_keys:
            # Hits would save blocks, but neither slots nor budget that there are not.
            free, need = maxsize, 0
        asked = asked_tokens(terms, length, number)
        seqs = len(self._members)
        return course.pace.refusal(blocks, free, need, asked, number, seqs) or -1

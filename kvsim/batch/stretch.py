"""Stretches: many steps of an engine in a row, of which the event loop hears only the end.

```
 waiting  ─┬─ refused ──► decode steps (`cruise`): the same decision until somebody ends or comes
           └─ admitted ─► a step that takes prompts on ──► its members join the cohort
 blocks lack ───────────► a step in which the tail gives way
 none of these ─────────► the scheduler composes the next step in full
```

Most steps of most engines are of three kinds, and their rules are a few whole numbers, which a
scheduler states as its `Terms`. What is left of such a step is arithmetic on counts of blocks and
tokens; requests are touched when they are admitted, when they give way and when they end.
Whatever the terms do not cover ends the stretch: the step is composed as if there were none.
"""

from __future__ import annotations

from kvsim.batch.ahead import Ahead
from kvsim.batch.cruise import MOST_STEPS, Course
from kvsim.batch.intake import Intake, asked_tokens
from kvsim.batch.pace import Terms


class Stretches(Intake, Ahead):
    """`Intake`, `Ahead`, and which kind of step comes next."""

    def stretch(self, course: Course, now_ns: int, next_ns: float, horizon_ns: float) -> bool:
        """Take steps from `now_ns` on, until something is to be done outside; False: none is.

        The next one arrives at `next_ns`. No step but the first starts at `horizon_ns` or later.
        The last one ends at `self.now_ns`; who ended meanwhile is in `self.left`.
        """
        self.now_ns = now_ns
        if not self._may_begin(course):
            return False
        first = self.stretched_steps
        self.left = []
        while steps := self._steps(course, min(next_ns, horizon_ns)):
            self.stretched_steps += steps
            if self.ended:
                self.left += self.ended
                self.ended = []
                if course.heard:
                    break
            if self.now_ns >= horizon_ns or self.stretched_steps - first >= MOST_STEPS:
                break
            if self.lingering and not self._may_part(course):
                break
            if not (self._members or self.waiting or self.behind) and next_ns < horizon_ns:
                self.now_ns = max(self.now_ns, int(next_ns))
            if next_ns <= self.now_ns:
                next_ns = course.arrivals(self.now_ns)
                if self.ended:
                    break  # They were turned away.
        if self._untold:
            course.pace.last_tokens(self, self._untold)
            self._untold = []
        if self.stretched_steps == first:
            return False
        self.busy_until_ns = max(self.busy_until_ns, self.now_ns)
        self.stretches += 1
        return True

    def _may_begin(self, course: Course) -> bool:
        if self._flying or self._sitting or not self._may_part(course):
            return False
        pace = course.pace
        self._counts_composed = pace.counts_composed
        self._recruit(pace)
        if self._one_behind(course.terms) and pace.undisturbed(self):
            self._untold = list(self.lingering)
            return True
        return False

    def _may_part(self, course: Course) -> bool:
        """Whether those that linger, if any, end as the next step begins, and no client waits for
        that. (Who is longer than `max_model_len` sits that step out in vLLM 0.6.3.)"""
        longest = course.terms.longest
        return not self.lingering or (
            not course.heard and all(self.length(request) <= longest for request in self.lingering)
        )

    def _one_behind(self, terms: Terms) -> bool:
        """Whether nobody runs beside the cohort but, where steps are mixed, in its prompt."""
        if not self.behind:
            return True
        sequence = self.behind[0].sequences[0]
        if len(self.behind) > 1 or not (terms.mixes and sequence.prompt_stage):
            return False
        # The last token alone counts as a decode in vLLM V1.
        return not terms.by_chunk or sequence.computed < sequence.length - 1

    def _steps(self, course: Course, cut_ns: float) -> int:
        """Take the next step, and where it is a decode step, those that are the same; answers how
        many, 0 where the scheduler has to compose."""
        pace, terms, waiting = course.pace, course.terms, self.waiting
        if self.behind and not self._one_behind(terms):
            self._recruit(pace)
            if not self._one_behind(terms):
                return 0
        if waiting and waiting[0].sequences[0].length > terms.longest:
            if course.heard or terms.chunked or not self._decodes_fit(terms):
                return 0
            self._turn_away(course)
        blocks, blocked, need = self.blocks, 0, 0
        free = blocks.gpu.free
        left = free - len(self._phases[self._composed % self._size])
        if left < 0 and terms.blocked and self._members:
            return self._one_decode(course, 0)  # Nobody is admitted beside one who gives way.
        if waiting and not self.behind:
            length, seqs = waiting[0].sequences[0].length, len(self._members)
            need = -(-length // self._size)
            if terms.mixes:
                asked = asked_tokens(terms, length, seqs)
                blocked = pace.refusal(blocks, left, need, asked, seqs, seqs)
            else:
                blocked = pace.refusal(blocks, free, need, length, 0, seqs)
        if self.behind or (waiting and not blocked):
            if terms.mixes and left <= 0 and not self._decodes_fit(terms):
                return self._one_decode(course, blocked)
            return self._prefills(course) if self._ordinary(course, left) else 0
        if not self._members:
            return self._no_step(course, blocked) if self._turned_away else 0
        if left <= 0 or self.lingering or self._turned_away:
            return self._one_decode(course, blocked)
        floor = pace.refuses_from(blocked, need) if blocked else 0
        return self._decodes(course, blocked, floor, cut_ns)

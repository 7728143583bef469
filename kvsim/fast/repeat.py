"""Repetition: takes many steps in a row, of which the event loop sees only the end.

```
 waiting  ─┬─ refused ──► decode steps (`decodes`): the same decision until somebody ends or comes
           └─ admitted ─► a step that takes prompts on (`prompts`) ──► they join the cohort
 blocks lack ───────────► a step in which the tail gives way
 none of these ─────────► the scheduler composes the next step
```

Most steps of the engines listed in `kvsim.fast.known` are of three kinds, and a few whole numbers
describe their rules: their `Terms`. Such a step reduces to arithmetic on counts of blocks and
tokens. Requests are touched only when they are admitted, preempted or finished. Anything that the
terms do not cover ends the series, and the scheduler composes the next step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvsim.engine.batch import Endings
from kvsim.engine.loop import Progress
from kvsim.engine.plan import Flight
from kvsim.engine.request import Request
from kvsim.fast.course import Course
from kvsim.fast.decodes import Decodes
from kvsim.fast.intake import Intake
from kvsim.fast.prompts import Prompts
from kvsim.fast.series import Series


class Repeat:
    """Takes steps without calling the scheduler, where its terms cover them."""

    def __init__(
        self, course: Course, endings: Endings, upcoming: Callable[[], tuple[float, float]]
    ) -> None:
        """`upcoming` returns two times in nanoseconds, infinite for never: when the next request
        with a fixed arrival time comes, and when the next other event is due."""
        self._course = course
        self._upcoming = upcoming
        self._decodes = Decodes(course)
        self._intake = Intake(course)
        self._prompts = Prompts(course, self._intake, endings)
        self.stretches = 0
        self.repeated_steps = 0
        """Number of steps taken here, and of the series they came in."""
        self.composed_because: dict[str, int] = {}
        """Why the scheduler had to compose a step → how often."""
        self._why_not = ""

    @property
    def ended(self) -> list[Request]:
        """The requests that ended in the last series, in order."""
        return self._course.ended

    def repeat(self, flying: deque[Flight], now_ns: int, progress: Progress) -> bool:
        """Takes steps from `now_ns` to `Batch.now_ns`. Returns whether it took any."""
        steps = self._stretch(now_ns, progress) if self._may_begin() else 0
        if steps:
            self.stretches += 1
            self.repeated_steps += steps
        else:
            why_not = self._why_not
            self.composed_because[why_not] = self.composed_because.get(why_not, 0) + 1
        return steps > 0

    def _stretch(self, now_ns: int, progress: Progress) -> int:
        """Takes steps until the loop or the scheduler has to act. Returns how many.

        Only the first step may start at or after the time of the next outside event.
        """
        next_ns, horizon_ns = self._upcoming()
        course, batch, cohort = self._course, self._course.batch, self._course.cohort
        batch.now_ns, series = now_ns, Series(batch, progress, course.listens)
        course.ended = series.ended
        while taken := self._steps(min(next_ns, horizon_ns)):
            if series.count(taken) or batch.now_ns >= horizon_ns:
                break
            if cohort.lingering and not self._may_part():
                break
            if not (cohort.requests or batch.waiting or batch.others) and next_ns < horizon_ns:
                batch.now_ns = max(batch.now_ns, int(next_ns))
            if next_ns <= batch.now_ns:
                next_ns = course.arrivals(batch.now_ns)
                if batch.ended:
                    break  # They were turned away.
        if course.untold:
            course.scheduler.last_tokens(batch, course.untold)
            course.untold = []
        if series.steps:
            batch.busy_until_ns = max(batch.busy_until_ns, batch.now_ns)
        return series.close()

    def _may_begin(self) -> bool:
        course, cohort = self._course, self._course.cohort
        if course.batch.swapped:
            self._why_not = "requests are swapped out"
            return False
        if cohort.flying or cohort.sitting or not self._may_part():
            self._why_not = "a request is about to end"
            return False
        cohort.recruit()
        if not self._intake.one_prompt():
            self._why_not = "several prompts are under way"
            return False
        if not course.terms.undisturbed(course.batch):
            self._why_not = "a request is kept aside"
            return False
        course.untold = list(cohort.lingering)
        return True

    def _may_part(self) -> bool:
        """Whether all lingering requests end when the next step begins, and no client waits for
        that. (A request longer than `max_model_len` sits that step out in vLLM 0.6.3.)"""
        course, lingering = self._course, self._course.cohort.lingering
        return not lingering or (
            not course.listens
            and all(each.sequences[0].length <= course.terms.longest for each in lingering)
        )

    def _steps(self, cut_ns: float) -> int:
        """Takes the next step and, if it is a decode step, the equal ones that follow. Returns how
        many; 0 if the scheduler has to compose."""
        course, batch = self._course, self._course.batch
        cohort, terms = course.cohort, course.terms
        waiting, blocks, number = batch.waiting, batch.blocks, len(cohort.requests)
        if batch.others and not self._intake.one_prompt():
            cohort.recruit()
            number = len(cohort.requests)
            if not self._intake.one_prompt():
                self._why_not = "several prompts are under way"
                return 0
        fills = cohort.publishes(cohort.composed)
        if waiting and waiting[0].sequences[0].length > terms.longest:
            if course.listens or terms.chunked or not course.decodes_fit():
                self._why_not = "a request is given up, or too long for a step"
                return 0
            course.ignore_head()
        blocked = need = 0
        free = blocks.gpu.free
        left = free - len(cohort.phases[cohort.composed % cohort.size])
        self._why_not = "blocks run short"
        if left < 0 and terms.after_preemption and number:
            return self._decodes.take_one(0)  # Nobody is admitted beside one who gives way.
        prompt_goes_on = self._intake.unfinished is not None
        if waiting and not prompt_goes_on:
            used = number if terms.mixes else 0
            _, _, _, asked, need = terms.ask(blocks, waiting[0].sequences[0], used, number)
            room = left if terms.mixes else free
            seqs = 0 if terms.seqs_per_step else number
            blocked = terms.refusal(blocks, room, need, asked, used, seqs)
        if blocked and fills and terms.mixes:
            self._why_not = "a block fills that others may hit"
            return 0
        if prompt_goes_on or (waiting and not blocked):
            if terms.mixes and left <= 0 and not course.decodes_fit():
                return self._decodes.take_one(blocked)
            return self._prompts.take() if self._prompts.are_simple(left) else 0
        if not number:
            self._why_not = "nothing can run"
            return self._prompts.give_up(blocked) if course.ignored else 0
        counts = fills and (blocked or blocks.label_moves)
        if counts or left <= 0 or cohort.lingering or course.ignored:
            return self._decodes.take_one(blocked)
        floor = terms.least_free(blocked, need) if blocked else 0
        return self._decodes.take(blocked, floor, cut_ns)

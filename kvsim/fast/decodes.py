"""Decode steps of a cohort: series of equal steps, and single steps with an event.

```
 steps      ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ┤      the same decision again, not taken anew: what is left of a
            └── one record ─────┘      step is its price, its end and the blocks that it opens
 cut by     somebody ends, somebody comes, a block that may lack

 one step   ─ ▼ ─                      the tail gives way to those before it, as long as they lack
                                       blocks; or who has ended parts (`Scheduler.lingers`)
```
"""

from __future__ import annotations

from functools import partial
from heapq import heappop
from itertools import accumulate
from math import inf
from operator import sub

from kvsim.engine.request import Request
from kvsim.fast.course import Course
from kvsim.fast.known import Terms
from kvsim.schema import decode_row

LONG_STEPS = 8
"""Number of steps from which pricing all of them at once is faster than one by one."""


class Decodes:
    """Takes the decode steps of a cohort."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._batch = course.batch
        self._cohort = course.cohort

    # -- many that are alike ---------------------------------------------------------------------

    def take(self, blocked: int, floor_blocks: int, cut_ns: float) -> int:
        """Takes decode steps from now on. Returns how many; 0 if blocks may run short.

        The series ends with the first step that ends at `cut_ns` or later, or that produces some
        request's last token. `blocked` is the reason why the head of the waiting queue is refused.
        It holds while each step begins with at least `floor_blocks` free blocks; where steps are
        mixed, while each leaves that many.
        """
        batch, cohort, course = self._batch, self._cohort, self._course
        start_ns, first, number = batch.now_ns, cohort.composed, len(cohort.requests)
        due = self.steps_to_end(blocked)
        used, cached, blank, cpu, empty, stranded = batch.blocks.census()
        ends_ns, opened = self.times(start_ns, floor_blocks, cut_ns, due)
        steps = len(ends_ns)
        if not steps:
            return 0
        ended = cohort.due(first + steps) if steps == due else []
        finished = 0 if cohort.lingers else len(ended)
        row = decode_row(
            start_ns, 0, number, cohort.context_tokens, number, 0, 0, len(batch.waiting),
            batch.num_running, used, cached, blank, cpu, empty, stranded, blocked, finished,
        )  # fmt: skip
        course.recorder.decodes(row, ends_ns, opened, batch.blocks.evictions(opened))
        self._taken(ends_ns, opened)
        if blocked:
            batch.waiting[0].blocked_steps += steps
        if ended:
            cohort.part(ended)
            course.end(ended)
        return steps

    def times(
        self, now_ns: int, floor_blocks: int, cut_ns: float, steps: int
    ) -> tuple[list[int], list[int]]:
        """Returns when each of the next decode steps ends, and the number of blocks that each
        opens. The first step begins now. There are at most `steps`, and every step after the first
        is composed before `cut_ns`.

        Returns None if blocks may run short, or fewer than `floor_blocks` are free (see `take`).
        """
        if steps >= LONG_STEPS:
            ends_ns, opened = self._long(now_ns, floor_blocks, cut_ns, steps)
            if ends_ns:
                return ends_ns, opened
        return self._short(now_ns, floor_blocks, cut_ns, steps)

    def steps_to_end(self, blocked: int) -> int:
        """Returns the number of steps until a request may get its last token. If requests wait, or
        if the order of moves matters, it also stops where a block fills that others may hit."""
        cohort = self._cohort
        ends, composed = cohort.next_ends, cohort.composed
        while ends and ends[0] <= composed:
            heappop(ends)
        due = ends[0] - composed
        if cohort.awaited and (blocked or self._batch.blocks.label_moves):
            later = (step for step in range(1, due) if cohort.publishes(composed + step))
            due = next(later, due)
        return due

    def _short(
        self, now_ns: int, floor_blocks: int, cut_ns: float, steps: int
    ) -> tuple[list[int], list[int]]:
        """Computes `times` step by step."""
        cohort, course = self._cohort, self._course
        phases, size, free = cohort.phases, cohort.size, self._batch.blocks.gpu.free
        number, context = len(cohort.requests), cohort.context_tokens
        decode_ns, mixes, ahead = course.decode_ns, course.terms.mixes, cohort.ahead
        ends_ns: list[int] = []
        opened: list[int] = []
        for step in range(cohort.composed, cohort.composed + steps):
            opening = len(phases[step % size])
            left = free - opening
            if left <= 0 or (left if mixes else free) < floor_blocks:
                break
            free, start_ns = left, now_ns
            now_ns += decode_ns(number, context, step)
            context += number
            ends_ns.append(now_ns)
            opened.append(opening)
            # When the next one is composed.
            if (start_ns if ahead else now_ns) >= cut_ns:
                break
        return ends_ns, opened

    def _long(
        self, start_ns: int, floor_blocks: int, cut_ns: float, steps: int
    ) -> tuple[list[int], list[int]]:
        """Computes `times` for all steps at once that surely find blocks. Returns nothing if there
        are few."""
        cohort, course = self._cohort, self._course
        number, size = len(cohort.requests), cohort.size
        last_ns, within = cohort.token_ns - cohort.composed_ns, None
        if cut_ns < inf:
            within = int(cut_ns) - start_ns
            if last_ns:
                # About as many as there is time for.
                steps = min(steps, within // last_ns + 2)
        # They open at most `number * steps / size + number` blocks.
        spare = self._batch.blocks.gpu.free - floor_blocks - number
        steps = min(steps, (spare * size - 1) // number)
        if steps < LONG_STEPS:
            return [], []
        times = course.decode_run_ns(steps, within)
        place = cohort.composed % size
        cycle = [len(members) for members in cohort.phases[place:] + cohort.phases[:place]]
        opened = cycle * (len(times) // size + 1)
        return list(accumulate(times, initial=start_ns))[1:], opened[: len(times)]

    def _taken(self, ends_ns: list[int], opened: list[int]) -> None:
        """Books steps that ended at these times and opened these numbers of blocks."""
        batch, cohort = self._batch, self._cohort
        number, steps, start_ns = len(cohort.requests), len(ends_ns), batch.now_ns
        batch.now_ns = ends_ns[0]
        cohort.count_gaps(number, cohort.composed)
        if steps > 1:
            batch.token_gaps_ns.add_each(map(sub, ends_ns[1:], ends_ns), number)
            start_ns = ends_ns[-2]
        batch.blocks.open_together(sum(opened), steps * number)
        batch.tokens += steps * number
        cohort.context_tokens += steps * number
        cohort.composed += steps
        cohort.settled = cohort.composed
        cohort.settled_then = cohort.composed - 1
        cohort.composed_ns = start_ns
        if cohort.awaited:
            cohort.publish_all(cohort.composed - steps, cohort.composed, 0)
        batch.now_ns = cohort.token_ns = ends_ns[-1]
        cohort.together_steps += steps

    # -- one by itself ---------------------------------------------------------------------------

    def take_one(self, blocked: int) -> int:
        """Takes one decode step in which the tail is preempted as long as a request lacks a block.
        Returns 0 if the step is not that simple."""
        batch, cohort, course, terms = self._batch, self._cohort, self._course, self._course.terms
        start_ns, blocks = batch.now_ns, batch.blocks
        short = not course.decodes_fit()
        lone = terms.requeue is None or len(cohort.requests) < 2
        if short and (lone or cohort.lingering or cohort.visits()):
            return 0
        plan = course.begin()
        head = batch.waiting[0] if blocked else None
        if short:
            leave = cohort.part_with if blocks.needs_keys else cohort.leave
            cohort.make_room(partial(self.give_way, terms), terms.spare, leave)
        if plan.preempted and terms.mixes:
            blocked = terms.after_preemption
        elif head is not None:
            head.blocked_steps += 1
        number, context = len(cohort.requests), cohort.context_tokens
        step_ns = course.decode_ns(number, context, cohort.composed)
        cohort.take_part(number, cohort.given if short else 0)
        blocks.composed()
        booked = number - course.farewell() if cohort.lingering else number
        waiting, running = len(batch.waiting), booked + len(batch.others)
        used, cached, blank, cpu, empty, stranded = blocks.census()
        batch.now_ns = end_ns = start_ns + step_ns
        if blocks.publish_at.computed:
            cohort.publish(cohort.composed - 1, cohort.settled)
        ended = cohort.book(booked)
        if ended:
            course.end(ended)
        row = decode_row(
            start_ns, end_ns, number, context, number, len(plan.preempted), course.take_ignored(),
            waiting, running, used, cached, blank, cpu, empty, stranded, blocked, len(batch.ended),
        )  # fmt: skip
        course.recorder.packed(row)
        return 1

    def give_way(self, terms: Terms, victim: Request) -> None:
        """Frees the blocks of a running request and puts it back into the waiting queue."""
        assert terms.requeue is not None
        self._batch.preempt(victim)
        terms.requeue(self._batch.waiting, victim)

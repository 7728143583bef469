"""Repeated steps of an asynchronous engine, which composes a step while the one before computes.

```
 step i      ├─ computes ─┤
 step i + 1  composed ....├─ computes ─┤        composed C = S + 1 where a step is composed:
 step i + 2               composed ....├─ ...   a member whose last token is in step i sits out
                          └ step i is settled: its tokens exist, who has its last one ends
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import sub
from typing import Any, NamedTuple

from kvsim.engine.loop import Progress
from kvsim.engine.plan import NOTHING_MOVED, Flight, Plan
from kvsim.engine.request import Request
from kvsim.fast.course import Course
from kvsim.fast.decodes import Decodes
from kvsim.fast.intake import Chunk, Intake
from kvsim.fast.series import Series
from kvsim.schema import completed_row, decode_row, finished_row, prompt_row


class Step(NamedTuple):
    """A step in flight, or a series of equal steps, of which the last one is in flight."""

    decodes: int
    """Number of members of the cohort that take part."""
    context_tokens: int
    end_ns: int
    row: bytes
    """The row of the step without its finished requests; for a series, the row that
    `Recorder.decodes` takes."""
    blocked: int
    """Why the head of the waiting queue was refused; 0 if it was not."""
    chunks: Sequence[Chunk]
    """Chunks of prompts in the step."""
    sampling: Sequence[Request]
    """The requests among them that get a token."""
    waiting: int
    """In a series: the number of requests in the waiting queue."""
    ends_ns: Sequence[int]
    """In a series: when each step ends."""
    opened: Sequence[int]
    """In a series: the number of blocks that each step opens."""


_step: Callable[[tuple[Any, ...]], Step] = partial(tuple.__new__, Step)
"""Makes a step from its fields in order, in a quarter of the time that calling the class takes."""


class Ahead:
    """Takes steps while another step is in flight, as asynchronous scheduling does."""

    def __init__(self, course: Course, intake: Intake, decodes: Decodes) -> None:
        self._course = course
        self._batch = course.batch
        self._cohort = course.cohort
        self._intake = intake
        self._decodes = decodes
        self._start_ns = self._end_ns = 0
        """When the step in flight starts."""
        self._short = False
        """Whether blocks run short, so that a request must be preempted for the next step."""
        self.why_not = ""
        """Why the next step cannot be taken here."""

    def take(
        self,
        flight: Flight,
        now_ns: int,
        upcoming: Callable[[], tuple[float, float]],
        progress: Progress,
    ) -> tuple[int, Flight]:
        """Takes steps from `now_ns` on, starting with `flight` in flight.

        Returns the number of steps taken and the step that is in flight afterwards. All others are
        settled, the last of them at `Batch.now_ns`; `Course.ended` lists the requests that ended.
        Each step is composed before the next outside event, and takes in every request that has
        arrived by then.
        """
        course, batch, cohort = self._course, self._batch, self._cohort
        next_ns, horizon_ns = upcoming()
        cut_ns, series = min(next_ns, horizon_ns), Series(batch, progress, course.listens)
        self._start_ns, self._end_ns = flight.start_ns, flight.end_ns
        step: Step | None = None
        batch.now_ns, course.ended = now_ns, series.ended
        while True:
            if cohort.composed in cohort.ends:
                cohort.seat()
            if batch.others:
                cohort.recruit()
            number = len(cohort.requests) - len(cohort.sitting)
            alike = None
            if step is not None and number and not (batch.others or cohort.sitting):
                alike = self._take_alike(step, number, cut_ns)
            if alike is not None:
                step, taken = alike, len(alike.ends_ns)
            elif self._goes_on(number):
                step, taken = self._take_one(step, flight, number), 1
            else:
                break
            if series.count(taken):
                break
            start_ns = self._start_ns
            if start_ns >= cut_ns:
                if start_ns >= horizon_ns:
                    break
                next_ns = course.arrivals(start_ns)
                cut_ns = min(next_ns, horizon_ns)
                if batch.ended:
                    break  # They were turned away.
        if step is None:
            return 0, flight
        batch.busy_until_ns = self._end_ns
        return series.close(), self._handed_over(step)

    def _take_one(self, step: Step | None, flight: Flight, number: int) -> Step:
        """Composes the next step, with `number` decodes unless blocks run short, and settles the
        one in flight: `step`, or `flight` if it is None. Returns the composed step."""
        course, batch, end_ns = self._course, self._batch, self._end_ns
        plan = flight.plan if step is None else None
        if self._short and step is not None:
            flight = self._handed_over(step)  # Who gives way leaves it.
            plan = flight.plan
        batch.busy_until_ns = end_ns
        following = self._compose_short() if self._short else self._compose(number)
        if step is not None and plan is None:
            self._settle(step)
        else:
            assert plan is not None
            batch.now_ns = end_ns
            course.scheduler.settle(batch, plan, end_ns)
            ended = len(batch.ended)
            row = completed_row(flight.row, self._start_ns, end_ns, finished=ended)
            course.recorder.packed(row)
        self._start_ns, self._end_ns = end_ns, following.end_ns
        return following

    # -- before a step ---------------------------------------------------------------------------

    def _goes_on(self, number: int) -> bool:
        """Whether the next step, with `number` decodes, can be computed here. If not, `why_not`
        says why."""
        batch, cohort = self._batch, self._cohort
        left = batch.blocks.gpu.free - len(cohort.phases[cohort.composed % cohort.size])
        self._short = left < 0
        if self._short:
            self.why_not = "blocks run short"
            # One of several can always go on.
            return number > 1 and not batch.others and self._course.terms.requeue is not None
        if batch.others:
            return self._prompt_goes_on(left, number)
        self.why_not = "nobody decodes"
        return number > 0

    def _prompt_goes_on(self, left: int, number: int) -> bool:
        """Whether at most one prompt runs beside `number` decodes, and `left` blocks are enough for
        it."""
        if not self._intake.one_prompt():
            self.why_not = "several prompts are under way"
            return False
        if not self._intake.fits(left, number):
            self.why_not = "blocks run short"
            return False
        self.why_not = "no tokens are left for a prompt"
        return number < self._course.terms.max_num_batched_tokens

    # -- a step ----------------------------------------------------------------------------------

    def _compose(self, decodes: int) -> Step:
        """Composes the next step, of `decodes` decodes and the prompts that fit beside them."""
        batch, cohort = self._batch, self._cohort
        context = cohort.context_tokens
        if decodes:
            cohort.take_part(decodes)
        if batch.others or batch.waiting:
            return self._compose_prompts(decodes, context)
        return self._decode_step(decodes, context, 0)

    def _compose_short(self) -> Step:
        """Composes a step for which requests at the tail are preempted. It admits nobody."""
        course, cohort, terms = self._course, self._cohort, self._course.terms
        plan = course.begin()
        give_way = partial(self._decodes.give_way, terms)
        cohort.make_room(give_way, terms.spare, cohort.part_with)
        decodes, context = len(cohort.requests) - len(cohort.sitting), cohort.context_tokens
        cohort.take_part(decodes, cohort.given)
        return self._decode_step(decodes, context, terms.after_preemption, len(plan.preempted))

    def _compose_prompts(self, decodes: int, context: int) -> Step:
        """Adds the chunks of prompts, if any, to a step of `decodes` decodes."""
        course, intake, batch = self._course, self._intake, self._batch
        plan = course.begin()
        course.count_decodes(decodes, context, self._cohort.composed - 1)
        running = len(batch.others) + len(self._cohort.requests)
        chunks = intake.continued() if batch.others else []
        if batch.waiting:
            admitted = intake.admit(running, sure=False)
            running += len(admitted)
            chunks += admitted
        if not chunks:
            return self._decode_step(decodes, context, plan.blocked)
        computed = intake.run(chunks)
        start_ns = self._end_ns
        end_ns = start_ns + course.cost.step_ns(plan)
        used, cached, blank, cpu, empty, stranded = batch.blocks.census()
        row = prompt_row(
            start_ns, end_ns, len(chunks), computed, intake.cached_tokens, decodes, context,
            plan.batched_tokens, 0, len(batch.waiting), running,
            used, cached, blank, cpu, empty, stranded, plan.blocked, 0,
        )  # fmt: skip
        sampling = self._sampling(chunks, apart=not decodes)
        return _step((decodes, context, end_ns, row, plan.blocked, chunks, sampling, 0, (), ()))

    def _decode_step(self, decodes: int, context: int, blocked: int, preempted: int = 0) -> Step:
        """Composes a step of `decodes` decodes, which already have their slots, and no prompts."""
        step = self._cohort.composed - 1
        end_ns = self._end_ns + self._course.decode_ns(decodes, context, step)
        waiting = len(self._batch.waiting)
        row = self._row(self._end_ns, end_ns, decodes, context, blocked, waiting, preempted)
        return _step((decodes, context, end_ns, row, blocked, (), (), 0, (), ()))

    def _row(
        self,
        start_ns: int,
        end_ns: int,
        decodes: int,
        context_tokens: int,
        blocked: int,
        waiting: int,
        preempted: int = 0,
    ) -> bytes:
        """Returns the row of a step of decodes alone."""
        running = len(self._batch.others) + len(self._cohort.requests)
        used, cached, blank, cpu, empty, stranded = self._batch.blocks.census()
        return decode_row(
            start_ns, end_ns, decodes, context_tokens, decodes, preempted, 0, waiting, running,
            used, cached, blank, cpu, empty, stranded, blocked, 0,
        )  # fmt: skip

    def _sampling(self, chunks: Sequence[Chunk], apart: bool) -> list[Request]:
        """Counts chunks of prompts as computed from now on. Returns the requests that get a token.
        Those whose prompt is complete decode from the next step on. `apart` says whether no member
        of the cohort gets a token in the same step."""
        cohort, others = self._cohort, self._batch.others
        sampling = []
        others.clear()
        for request, tokens, _ in chunks:
            sequence = request.sequences[0]
            sequence.computed += tokens
            if sequence.computed == sequence.length:
                sequence.placeholders += 1
                sampling.append(request)
                if not others and cohort.take_in(request, sequence, apart):
                    continue
            others.append(request)
        return sampling

    def _settle(self, step: Step) -> None:
        """Settles the step in flight: its tokens now exist."""
        batch, course = self._batch, self._course
        decodes, _, _, row, _, _, sampling, _, ends_ns, opened = step
        batch.now_ns = self._end_ns
        if decodes and (ended := self._cohort.book(decodes)):
            course.scheduler.last_tokens(batch, ended)
        if sampling:
            over = False
            for request in sampling:
                if batch.token(request.sequences[0], 1):
                    batch.complete(request)
                    over = True
            if over:
                batch.remove_ended()
        if batch.ended:
            row = finished_row(row, len(batch.ended))
        if ends_ns:
            course.recorder.decodes(row, ends_ns, opened)
        else:
            course.recorder.packed(row)

    # -- many that are alike ---------------------------------------------------------------------

    def _take_alike(self, step: Step, number: int, cut_ns: float) -> Step | None:
        """Composes the next series of equal decode steps, all of them before `cut_ns`. Settles
        `step` and all of the series except its last step. Returns None if the next step is not an
        ordinary decode step of the whole cohort: its `number` members are all that run."""
        batch, cohort, blocked, floor = self._batch, self._cohort, 0, 0
        context = cohort.context_tokens
        if batch.waiting:
            # Who comes where nobody was refused is admitted, as a rule.
            blocked, floor = self._refusal() if step.blocked else (0, 0)
            if not blocked or cohort.publishes(cohort.composed):
                return None
        due = self._decodes.steps_to_end(blocked)
        start_ns, first, settled = self._end_ns, cohort.composed, cohort.settled
        ends_ns, opened = self._decodes.times(start_ns, floor, cut_ns, due)
        steps, waiting = len(ends_ns), len(batch.waiting)
        if not steps:
            return None
        self._settle(step)
        row = self._row(start_ns, 0, number, context, blocked, waiting)
        if steps > 1:
            batch.now_ns = ends_ns[0]
            cohort.count_gaps(number, first)
            if steps > 2:
                batch.token_gaps_ns.add_each(map(sub, ends_ns[1:-1], ends_ns), number)
            batch.tokens += (steps - 1) * number
            settled = first + steps - 2
        if cohort.awaited:
            cohort.publish_all(first, first + steps, 1)
        batch.blocks.open_together(sum(opened), steps * number)
        cohort.context_tokens += steps * number
        cohort.composed += steps
        cohort.settled, cohort.settled_then = cohort.composed - 1, settled
        cohort.together_steps += steps
        times_ns = (self._start_ns, start_ns, *ends_ns[-3:])
        cohort.composed_ns, self._start_ns, self._end_ns = times_ns[-3:]
        batch.now_ns = cohort.token_ns = self._start_ns
        if blocked:
            batch.waiting[0].blocked_steps += steps
        context += (steps - 1) * number
        end_ns = self._end_ns
        return _step((number, context, end_ns, row, blocked, (), (), waiting, ends_ns, opened))

    def _refusal(self) -> tuple[int, int]:
        """Returns why the head of the waiting queue is refused beside the cohort (0 if it is not),
        and the number of free blocks down to which this reason holds."""
        batch, cohort, terms = self._batch, self._cohort, self._course.terms
        number, blocks = len(cohort.requests), batch.blocks
        left = blocks.gpu.free - len(cohort.phases[cohort.composed % cohort.size])
        head = batch.waiting[0].sequences[0]
        _, _, _, asked, need = terms.ask(blocks, head, number, number)
        blocked = terms.refusal(blocks, left, need, asked, number, number)
        return blocked, terms.least_free(blocked, need) if blocked else 0

    # --------------------------------------------------------------------------------------------

    def _handed_over(self, step: Step) -> Flight:
        """Records the earlier steps of a series and returns the step in flight in the form that the
        scheduler settles."""
        cohort, plan, row = self._cohort, Plan(), step.row
        if step.ends_ns:
            if len(step.ends_ns) > 1:
                self._course.recorder.decodes(row, step.ends_ns[:-1], step.opened[:-1])
            # As `Recorder.decodes` works it out: no block has changed hands since it was composed.
            row = self._row(0, 0, step.decodes, step.context_tokens, step.blocked, step.waiting)
        if step.decodes:
            plan.run_together(step.decodes, cohort.members, cohort.lengths)
            cohort.flying.append(plan)
        plan.decode_seqs, plan.context_tokens = step.decodes, step.context_tokens
        plan.samples = step.decodes + len(step.sampling)
        plan.singles = [
            (request, tokens, request in step.sampling) for request, tokens, _ in step.chunks
        ]
        plan.batched_tokens = step.decodes + sum([charged for _, _, charged in step.chunks])
        return Flight(plan, self._start_ns, self._end_ns, NOTHING_MOVED, row)

"""Steps of an engine that composes a step while the one before computes.

```
 step i      ├─ computes ─┤
 step i + 1  composed ....├─ computes ─┤        composed C = S + 1 where a step is composed:
 step i + 2               composed ....├─ ...   a member whose last token is in step i sits out
                          └ step i is settled: its tokens exist, who has its last one ends
```
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import sub
from typing import NamedTuple

from kvsim.engine.loop import Progress
from kvsim.engine.plan import Flight, Plan
from kvsim.engine.request import Request
from kvsim.fast.course import MOST_STEPS, Course
from kvsim.fast.decodes import Decodes
from kvsim.fast.intake import Chunk, Intake
from kvsim.schema import completed_row, step_row

FEW_STEPS = 3
"""Fewer steps that are alike are taken one by one."""

_NONE: tuple[list[int], list[int], int] = ([], [], 0)


class Step(NamedTuple):
    """A step that is under way."""

    decodes: int
    """Members of the cohort that take part."""
    context_tokens: int
    chunks: list[Chunk]
    """Prompts in it."""
    sampling: list[Request]
    """Those of them that get a token."""
    row: bytes
    """Its row, but for times and who finishes."""
    computing_ns: int


class Ahead:
    """Takes steps where one step is under way whenever the next one is composed."""

    def __init__(self, course: Course, intake: Intake, decodes: Decodes) -> None:
        self._course = course
        self._intake = intake
        self._decodes = decodes
        self._start_ns = self._end_ns = 0
        """Of the step that is under way."""
        self._short = False
        """Whether somebody has to give way for the next step."""
        self.why_not = ""
        """Why there is no such step next."""

    def take(
        self,
        flight: Flight,
        now_ns: int,
        upcoming: Callable[[], tuple[float, float]],
        progress: Progress,
    ) -> tuple[int, Flight]:
        """Take steps from `now_ns` on, with `flight` under way.

        Returns how many, and the step that is under way then. The others are settled, the last of
        them at `Batch.now_ns`; who ended is in `Course.ended`. Each is composed before the next
        event of somebody else, and with all that have arrived by then.
        """
        course, batch = self._course, self._course.batch
        next_ns, horizon_ns = upcoming()
        steps, idle, tokens = 0, progress.idle_steps, batch.tokens
        self._start_ns, self._end_ns = flight.start_ns, flight.end_ns
        step: Step | None = None
        batch.now_ns, course.ended = now_ns, []
        while self._goes_on():
            alike = _NONE
            # The next steps take about as long as the one before.
            soon_ns = 4 * self._end_ns - 3 * self._start_ns
            if soon_ns < next_ns and soon_ns < horizon_ns and step is not None:
                alike = self._alike(min(next_ns, horizon_ns))
            if step is not None and alike[0]:
                steps += len(alike[0])
                step = self._take_alike(step, *alike)
            else:
                steps, step = steps + 1, self._take_one(step, flight)
            idle = 0 if batch.tokens != tokens or batch.ended else idle + 1
            tokens, start_ns = batch.tokens, self._start_ns
            if batch.ended:
                course.ended += batch.ended
                batch.ended = []
                if course.listens:
                    break
            if start_ns >= horizon_ns or steps >= MOST_STEPS or idle >= progress.patience_steps:
                break
            if next_ns <= start_ns:
                next_ns = course.arrivals(start_ns)
                if batch.ended:
                    break  # They were turned away.
        if step is None:
            return 0, flight
        batch.busy_until_ns = self._end_ns
        progress.steps, progress.idle_steps = progress.steps + steps, idle
        return steps, Flight(self._plan(step), self._start_ns, self._end_ns, (0, 0), step.row)

    def _take_one(self, step: Step | None, flight: Flight) -> Step:
        """Compose the next step, and settle the one under way: `step`, or else `flight`; returns
        the next one."""
        course, batch = self._course, self._course.batch
        plan, row = (flight.plan, flight.row) if step is None else (None, step.row)
        if self._short and step is not None:
            plan = self._plan(step)  # Who gives way leaves it.
        following = self._compose()
        batch.now_ns = end_ns = self._end_ns
        if plan is not None:
            course.scheduler.settle(batch, plan, end_ns)
        elif step is not None:
            self._settle(step)
        ended = len(batch.ended)
        course.recorder.packed(completed_row(row, self._start_ns, end_ns, finished=ended))
        self._start_ns, self._end_ns = end_ns, end_ns + following.computing_ns
        return following

    # -- before a step ---------------------------------------------------------------------------

    def _goes_on(self) -> bool:
        """Whether the next step can be worked out here; if not, `why_not` says why."""
        course, batch, cohort = self._course, self._course.batch, self._course.cohort
        cohort.seat()
        others = batch.others
        if others:
            cohort.recruit()
        number = len(cohort.requests) - len(cohort.sitting)
        left = batch.blocks.gpu.free - len(cohort.phases[cohort.composed % cohort.size])
        self.why_not = "blocks run short"
        self._short = left < 0
        if self._short:
            # One of several can always go on.
            return number > 1 and not others and course.terms.requeue is not None
        if others:
            if not self._intake.one_prompt():
                self.why_not = "several prompts are under way"
                return False
            if not self._intake.fits(left, number):
                return False
            self.why_not = "no tokens are left for a prompt"
            return number < course.terms.max_num_batched_tokens
        self.why_not = "nobody decodes"
        return number > 0

    # -- a step ----------------------------------------------------------------------------------

    def _compose(self) -> Step:
        """Compose the next step."""
        course, cohort = self._course, self._course.cohort
        batch = course.batch
        batch.busy_until_ns = self._end_ns
        if self._short:
            return self._compose_short()
        decodes, context = len(cohort.requests) - len(cohort.sitting), cohort.context_tokens
        if decodes:
            cohort.given = 0
            cohort.grow(decodes)
            cohort.compose(decodes)
        if batch.others or batch.waiting:
            return self._compose_prompts(decodes, context)
        row = self._row(decodes, context, 0)
        return Step(
            decodes, context, [], [], row, course.decode_ns(decodes, context, cohort.composed - 1)
        )

    def _compose_short(self) -> Step:
        """Compose a step for which the tail gives way; nobody is admitted to it."""
        course, cohort, terms = self._course, self._course.cohort, self._course.terms
        plan = course.begin()
        give_way = partial(self._decodes.give_way, terms)
        cohort.make_room(give_way, terms.spare, cohort.part_with)
        decodes, context = len(cohort.requests) - len(cohort.sitting), cohort.context_tokens
        cohort.grow(decodes)
        cohort.compose(decodes)
        row = self._row(decodes, context, terms.after_preemption, preempted=len(plan.preempted))
        return Step(
            decodes, context, [], [], row, course.decode_ns(decodes, context, cohort.composed - 1)
        )

    def _compose_prompts(self, decodes: int, context: int) -> Step:
        """Compose the rest of a step with so many decodes: chunks of prompts, if it has any."""
        course, intake, cohort = self._course, self._intake, self._course.cohort
        batch, plan = course.batch, course.begin()
        course.count_decodes(decodes, context, cohort.composed - 1)
        running = batch.num_running
        chunks = intake.continued() if batch.others else []
        if batch.waiting:
            admitted = intake.admit(running, sure=False)
            batch.others.extend([request for request, _, _ in admitted])
            running += len(admitted)
            chunks += admitted
        if not chunks:
            row = self._row(decodes, context, plan.blocked)
            return Step(
                decodes,
                context,
                [],
                [],
                row,
                course.decode_ns(decodes, context, cohort.composed - 1),
            )
        computed, cached = intake.run(chunks), intake.cached_tokens
        sampling, computing_ns = self._book(chunks), course.cost.step_ns(plan)
        row = step_row(
            prefill_seqs=len(chunks),
            prefill_tokens=computed,
            cached_tokens=cached,
            decode_seqs=decodes,
            context_tokens=context,
            batched_tokens=plan.batched_tokens,
            waiting=len(batch.waiting),
            running=running,
            census=batch.blocks.census(),
            blocked=plan.blocked,
        )
        return Step(decodes, context, chunks, sampling, row, computing_ns)

    def _book(self, chunks: list[Chunk]) -> list[Request]:
        """Chunks of prompts count as computed from now on; returns who gets a token."""
        sampling = []
        for request, tokens, _ in chunks:
            sequence = request.sequences[0]
            sequence.computed += tokens
            if sequence.computed == sequence.length:
                sequence.placeholders += 1
                sampling.append(request)
        return sampling

    def _settle(self, step: Step) -> None:
        """The tokens of a step exist."""
        batch, cohort = self._course.batch, self._course.cohort
        for request in step.sampling:
            batch.landed(request.sequences[0])
        if step.decodes and (ended := cohort.book(step.decodes)):
            self._course.scheduler.last_tokens(batch, ended)
        over = False
        for request in step.sampling:
            if batch.token(request.sequences[0]):
                batch.complete(request)
                over = True
        if over:
            batch.remove_ended()

    # -- many that are alike ---------------------------------------------------------------------

    def _alike(self, cut_ns: float) -> tuple[list[int], list[int], int]:
        """The next decode steps, where there are some that are all composed alike before `cut_ns`:
        when they end, the blocks that they open, and why nobody is admitted; empty: none are."""
        course, batch, cohort = self._course, self._course.batch, self._course.cohort
        terms, blocks, end_ns, blocked, floor = course.terms, batch.blocks, self._end_ns, 0, 0
        if batch.others or cohort.sitting:
            return _NONE
        due = self._decodes.steps_to_end(0)
        if due < FEW_STEPS:
            return _NONE
        if batch.waiting:
            number = len(cohort.requests)
            left = blocks.gpu.free - len(cohort.phases[cohort.composed % cohort.size])
            head = batch.waiting[0].sequences[0]
            _, _, _, asked, need = terms.ask(blocks, head, number, number)
            blocked = terms.refusal(blocks, left, need, asked, number, number)
            if not blocked or cohort.publishes(cohort.composed):
                return _NONE
            due, floor = self._decodes.steps_to_end(blocked), terms.least_free(blocked, need)
        ends_ns, opened = self._decodes.times(end_ns, floor, cut_ns, due)
        return (ends_ns, opened, blocked) if len(ends_ns) >= FEW_STEPS else _NONE

    def _take_alike(self, step: Step, ends_ns: list[int], opened: list[int], blocked: int) -> Step:
        """Compose these steps, and settle all but the last, and the step under way before; returns
        the last."""
        course, batch, cohort = self._course, self._course.batch, self._course.cohort
        first, number, steps = cohort.composed, len(cohort.requests), len(ends_ns)
        batch.now_ns = self._end_ns
        self._settle(step)
        course.recorder.packed(completed_row(step.row, self._start_ns, self._end_ns))
        row = self._row(number, cohort.context_tokens, blocked, self._end_ns)
        course.recorder.decodes(row, ends_ns[:-1], opened[:-1])
        batch.now_ns = ends_ns[0]
        cohort.count_gaps(number, first)
        batch.token_gaps_ns.add_each(map(sub, ends_ns[1:-1], ends_ns), number)
        if cohort.awaited:
            cohort.publish_all(first, first + steps, 1)
        batch.blocks.open_together(sum(opened), steps * number)
        batch.tokens += (steps - 1) * number
        cohort.context_tokens += steps * number
        cohort.composed += steps
        cohort.settled, cohort.settled_then = cohort.composed - 1, cohort.composed - 2
        cohort.together_steps += steps
        self._start_ns, self._end_ns = ends_ns[-2:]
        batch.now_ns = cohort.token_ns = self._start_ns
        cohort.composed_ns = ends_ns[-3]
        if blocked:
            batch.waiting[0].blocked_steps += steps
        context = cohort.context_tokens - number
        return Step(number, context, [], [], self._row(number, context, blocked), 0)

    def _row(
        self, decodes: int, context_tokens: int, blocked: int, start_ns: int = 0, preempted: int = 0
    ) -> bytes:
        """A step without prompts."""
        batch = self._course.batch
        return step_row(
            start_ns=start_ns,
            decode_seqs=decodes,
            context_tokens=context_tokens,
            batched_tokens=decodes,
            preempted_recompute=preempted,
            waiting=len(batch.waiting),
            running=batch.num_running,
            census=batch.blocks.census(),
            blocked=blocked,
        )

    # --------------------------------------------------------------------------------------------

    def _plan(self, step: Step) -> Plan:
        """The plan of the step that is under way when the scheduler takes over."""
        cohort, plan = self._course.cohort, Plan()
        if step.decodes:
            plan.run_together(step.decodes, cohort.members, cohort.lengths)
            cohort.flying.append(plan)
        plan.decode_seqs, plan.context_tokens = step.decodes, step.context_tokens
        plan.samples = step.decodes + len(step.sampling)
        plan.singles = [
            (request, tokens, request in step.sampling) for request, tokens, _ in step.chunks
        ]
        plan.batched_tokens = step.decodes + sum([charged for _, _, charged in step.chunks])
        return plan

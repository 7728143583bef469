"""Repeated steps with prompts (`kvsim.fast.intake`), beside the decodes of a cohort or instead of
them, for an engine that settles each step before it composes the next."""

from __future__ import annotations

from sys import maxsize

from kvsim.engine.batch import Endings
from kvsim.engine.request import Request
from kvsim.fast.course import Course
from kvsim.fast.intake import Chunk, Intake
from kvsim.schema import prompt_row, step_row


class Prompts:
    """Takes steps with prompts."""

    def __init__(self, course: Course, intake: Intake, endings: Endings) -> None:
        self._course = course
        self._intake = intake
        self._batch = course.batch
        self._cohort = course.cohort
        self._endings = endings

    def take(self) -> int:
        """Takes one step with chunks of prompts, and with the decodes where steps are mixed.
        Returns 1."""
        batch, cohort, course, intake = self._batch, self._cohort, self._course, self._intake
        terms, blocks, start_ns = course.terms, batch.blocks, batch.now_ns
        number = len(cohort.requests) if terms.mixes else 0
        plan = course.begin()
        if number:
            course.count_decodes(number, cohort.context_tokens, cohort.composed)
            cohort.take_part(number)
        running = len(cohort.requests) + len(batch.others)
        unfinished = intake.unfinished is not None
        continued = intake.continued() if unfinished else []
        beside = 0 if terms.seqs_per_step else running
        admitted = intake.admit(beside, not unfinished) if batch.waiting else []
        running_order = continued + admitted if admitted else continued
        batch_order = admitted + continued if terms.prompts_first else running_order
        prefill_tokens = intake.run(batch_order)
        blocks.composed()
        if cohort.lingering:
            running -= course.farewell()
        running += len(admitted) - intake.cut
        waiting, batched = len(batch.waiting), plan.batched_tokens
        used, cached, blank, cpu, empty, stranded = blocks.census()
        batch.now_ns = end_ns = start_ns + course.cost.step_ns(plan)
        ended = cohort.book(len(cohort.requests)) if number else []
        through = self._sampled(running_order)
        if terms.prompts_first and continued and len(through) > 1:
            # Those admitted are before them in the batch, and behind them in the running queue.
            through.sort(key=lambda request: request is continued[0][0])
        if through or ended:
            course.end(through + ended if terms.prompts_first else ended + through)
        row = prompt_row(
            start_ns, end_ns, len(plan.chunks), prefill_tokens, intake.cached_tokens, number,
            plan.context_tokens, batched, course.take_ignored(), waiting, running,
            used, cached, blank, cpu, empty, stranded, plan.blocked, len(batch.ended),
        )  # fmt: skip
        course.recorder.packed(row)
        return 1

    def are_simple(self, left: int) -> bool:
        """Whether the next step with prompts can be taken here, given `left` free blocks for
        prompts.

        It cannot if a waiting request may be given up in the middle of the step, or if the
        unfinished prompt may lack a block.
        """
        batch, terms = self._batch, self._course.terms
        unfinished, waiting = self._intake.unfinished, batch.waiting
        longest, room = terms.longest, terms.max_num_batched_tokens
        if len(waiting) > 1 and longest < maxsize and (self._course.listens or terms.chunked):
            for request in waiting:
                length = request.sequences[0].length
                if length > longest:
                    return False
                if room < 0:
                    break  # It is looked at, though no tokens are left for it.
                room -= length
        if unfinished is None:
            return True
        if unfinished.sequences[0].length > longest:
            return False
        decodes = len(self._cohort.requests) if terms.by_chunk else 0
        return self._intake.fits(left, decodes)

    def give_up(self, blocked: int) -> int:
        """Takes a step in which requests are given up and none runs. Returns 1."""
        batch, course = self._batch, self._course
        if blocked:
            batch.waiting[0].blocked_steps += 1
        start_ns, waiting = batch.now_ns, len(batch.waiting)
        census = batch.blocks.census()
        batch.now_ns = end_ns = start_ns + course.cost.step_ns(course.begin())
        row = step_row(
            start_ns=start_ns,
            end_ns=end_ns,
            ignored=course.take_ignored(),
            waiting=waiting,
            census=census,
            blocked=blocked,
            finished=len(batch.ended),
        )
        course.recorder.packed(row)
        return 1

    def _sampled(self, chunks: list[Chunk]) -> list[Request]:
        """Books the computed chunks of a step, in running order. A request with a complete prompt
        gets a token and joins the cohort.

        Returns the requests whose first token is also their last one.
        """
        batch, cohort, left = self._batch, self._cohort, self._endings.left
        others, together = batch.others, batch.now_ns == cohort.token_ns
        blocks, publishes, cut = batch.blocks, batch.blocks.publish_at.computed, self._intake.cut
        ended = []
        for request, tokens, _ in chunks:
            sequence = request.sequences[0]
            sequence.computed += tokens
            if publishes:
                blocks.publish(sequence, sequence.computed)
            if others and others[0] is request:
                others.popleft()
            samples = sequence.computed == sequence.length
            if samples:
                sequence.prompt_stage = False
                batch.add_token(sequence)
                more = left(sequence)
                if more <= 0:
                    ended.append(request)
                    if not cohort.lingers:
                        continue
                elif len(cohort.requests) < cohort.most and not (others and cohort.lingers):
                    cohort.join(request, sequence, more, not together)
                    continue
            elif cut:
                continue
            others.append(request)
        return ended

"""Steps that take prompts on, beside the decodes of a cohort or instead of them.

```
 waiting   a  b  c  d          admitted in order until one is refused: a, b, c
 step      ▓▓▓▓▓▓ ▓▓▓ ▓▓░░     c gets what is left of the token budget, and goes on in the next step
 then      a and b have a token, and join the cohort; c is one of `Batch.others`
```
"""

from __future__ import annotations

from sys import maxsize

from kvsim.engine.batch import Endings
from kvsim.engine.request import RUNNING, Request
from kvsim.fast.course import Course
from kvsim.fast.known import Terms
from kvsim.schema import step_row

Chunk = tuple[Request, int]
"""A request, and the tokens of it that a step takes on."""

_NO_HITS: list[int] = []


class Prompts:
    """Takes steps with prompts."""

    def __init__(self, course: Course, endings: Endings) -> None:
        self._course = course
        self._batch = course.batch
        self._cohort = course.cohort
        self._endings = endings

    def take(self) -> int:
        """Take one step with chunks of prompts, and the decodes if they are mixed; returns 1."""
        batch, cohort, course, terms = self._batch, self._cohort, self._course, self._course.terms
        blocks, start_ns = batch.blocks, batch.now_ns
        number = len(cohort.requests) if terms.mixes else 0
        plan = course.begin()
        if number:
            opening = len(cohort.phases[cohort.composed % cohort.size])
            blocks.open_together(opening, number)
            plan.together = plan.decode_seqs = plan.samples = number
            plan.context_tokens = cohort.context_tokens
            cohort.compose(number)
        plan.batched_tokens = number
        running = len(cohort.requests) + len(batch.others)
        continued = self._continued() if batch.others else []
        admitted = self._admit(running) if batch.waiting else []
        running_order = continued + admitted if admitted else continued
        batch_order = admitted + continued if terms.prompts_first else running_order
        prefill_tokens = self._run(batch_order)
        if cohort.lingering:
            running -= course.farewell()
        waiting, batched = len(batch.waiting), plan.batched_tokens
        census = blocks.census()
        batch.now_ns = end_ns = start_ns + course.cost.step_ns(plan)
        ended = cohort.book(len(cohort.requests)) if number else []
        through = self._sampled(running_order)
        if terms.prompts_first and continued and len(through) > 1:
            # Those admitted are before them in the batch, and behind them in the running queue.
            through.sort(key=lambda request: request is continued[0][0])
        if through or ended:
            course.end(through + ended if terms.prompts_first else ended + through)
        row = step_row(
            start_ns=start_ns,
            end_ns=end_ns,
            prefill_seqs=len(plan.chunks),
            prefill_tokens=prefill_tokens,
            cached_tokens=batched - number - prefill_tokens,
            decode_seqs=number,
            context_tokens=plan.context_tokens,
            batched_tokens=batched,
            ignored=course.take_ignored(),
            waiting=waiting,
            running=running + len(admitted),
            census=census,
            blocked=plan.blocked,
            finished=len(batch.ended),
        )
        course.recorder.packed(row)
        return 1

    def are_simple(self, left: int) -> bool:
        """Whether the next step with prompts can be taken here, with `left` blocks for prompts.

        It cannot where a waiting request may have to be given up in the middle of the step, or the
        prompt under way may lack a block.
        """
        batch, terms = self._batch, self._course.terms
        others, waiting = batch.others, batch.waiting
        longest, room = terms.longest, terms.max_num_batched_tokens
        if len(waiting) > 1 and longest < maxsize and (self._course.listens or terms.chunked):
            for request in waiting:
                length = request.sequences[0].length
                if length > longest:
                    return False
                if room < 0:
                    break  # It is looked at, though no tokens are left for it.
                room -= length
        if not others:
            return True
        sequence = others[0].sequences[0]
        if sequence.length > longest:
            return False
        if left > terms.max_num_batched_tokens // self._cohort.size + 1:
            return True
        if not terms.by_chunk:
            return batch.blocks.growth_need(sequence) <= left
        room = terms.max_num_batched_tokens - len(self._cohort.requests)
        upto = sequence.computed + min(sequence.length - sequence.computed, room)
        return batch.blocks.need(sequence, upto, []) <= left

    def give_up(self, blocked: int) -> int:
        """A step in which requests were given up and nothing runs; returns 1."""
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

    def _continued(self) -> list[Chunk]:
        """Go on with the prompt that is under way."""
        batch, terms, plan = self._batch, self._course.terms, self._course.plan
        request = batch.others[0]
        sequence = request.sequences[0]
        computed = sequence.computed
        tokens = min(sequence.length - computed, terms.max_num_batched_tokens - plan.batched_tokens)
        if not tokens:
            return []
        if terms.by_chunk:
            batch.blocks.extend(sequence, computed + tokens)
        plan.batched_tokens += tokens
        return [(request, tokens)]

    def _admit(self, running: int) -> list[Chunk]:
        """Admit from the head of the waiting queue until one is refused, beside `running` ones.

        Where no prompt is under way, the first is known to be admissible.
        """
        batch, course = self._batch, self._course
        terms, plan = course.terms, course.plan
        blocks, waiting, others = batch.blocks, batch.waiting, batch.others
        refusal, chunked, size = terms.refusal, terms.chunked, self._cohort.size
        longest, by_chunk = terms.longest, terms.by_chunk
        tokens, admitted = plan.batched_tokens, list[Chunk]()
        while waiting:
            request = waiting[0]
            sequence = request.sequences[0]
            length = sequence.length
            if length > longest and not chunked and course.ignore_head():
                continue
            asked = asked_tokens(terms, length, tokens) if chunked else length
            if admitted or others:
                seqs = running + len(admitted)
                need = -(-length // size)
                plan.blocked = refusal(blocks, blocks.gpu.free, need, asked, tokens, seqs)
                if plan.blocked:
                    request.blocked_steps += 1
                    break
            waiting.popleft()
            if by_chunk:
                blocks.hold(sequence, asked, _NO_HITS)
            else:
                blocks.allocate(sequence)
            sequence.state = RUNNING
            if request.first_scheduled_ns < 0:
                request.first_scheduled_ns = batch.now_ns
            else:
                batch.scheduled(request)
            admitted.append((request, asked))
            tokens += asked
        plan.batched_tokens = tokens
        return admitted

    def _run(self, chunks: list[Chunk]) -> int:
        """Put chunks into the plan; returns how many of their tokens are computed."""
        batch, plan, keyed = self._batch, self._course.plan, self._batch.blocks.needs_keys
        computed = 0
        for request, tokens in chunks:
            sequence = request.sequences[0]
            before = sequence.computed
            cached, samples = 0, before + tokens == sequence.length
            if keyed or request.num_preemptions:
                cached, samples = batch.take_on(request, sequence, tokens)
            plan.chunks.append((tokens - cached, before + cached))
            plan.samples += samples
            computed += tokens - cached
        return computed

    def _sampled(self, chunks: list[Chunk]) -> list[Request]:
        """The chunks of a step, in running order, are computed: who is through its prompt has a
        token, and joins the cohort.

        Returns who has its last token with the first.
        """
        batch, cohort, left = self._batch, self._cohort, self._endings.left
        others, together = batch.others, batch.now_ns == cohort.token_ns
        ended = []
        for request, tokens in chunks:
            sequence = request.sequences[0]
            sequence.computed += tokens
            if others and others[0] is request:
                others.popleft()
            samples = sequence.computed == sequence.length
            if samples:
                sequence.prompt_stage = False
                batch.add_token(sequence)
                more = left(sequence)
                if more > 0 and not (others and cohort.lingers):
                    cohort.join(request, sequence, more, not together)
                    continue
                if more <= 0:
                    ended.append(request)
            if not samples or cohort.lingers:
                others.append(request)
        return ended


def asked_tokens(terms: Terms, length: int, tokens: int) -> int:
    """What a waiting request asks for in a step that has `tokens` tokens: more than is left if that
    is nothing."""
    left = terms.max_num_batched_tokens - tokens
    return left if terms.chunked and 0 < left < length else length

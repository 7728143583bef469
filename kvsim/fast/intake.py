"""Prompts in a repeated step: which of them continue, and which requests are admitted.

```
 waiting   a  b  c  d          admitted in order until one is refused: a, b, c
 step      ▓▓▓▓▓▓ ▓▓▓ ▓▓░░     c gets what is left of the token budget, and goes on in the next step
 then      a and b have a token, and join the cohort; c is one of `Batch.others`
```
"""

from __future__ import annotations

from kvsim.engine.request import RUNNING, WAITING, Request
from kvsim.fast.course import Course

Chunk = tuple[Request, int, int]
"""A request, the number of its tokens that a step takes on, and the part of these that is charged
to `max_num_batched_tokens`."""


class Intake:
    """Adds chunks of prompts to the step of a course."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._batch = course.batch
        self._shares = course.terms.by_chunk and course.batch.blocks.needs_keys
        """Whether admitted requests share their blocks at once."""
        self.cut = False
        """Whether the request admitted last stays in the waiting queue, because its prompt goes on
        in the next step."""
        self.cached_tokens = 0
        """Number of tokens in the chunks run last that prefix hits saved from computation."""

    def one_prompt(self) -> bool:
        """Whether no request runs beside the cohort except, where steps are mixed, one in its
        prompt. Those behind a full cohort do not run."""
        others, terms, cohort = self._batch.others, self._course.terms, self._course.cohort
        if not others or len(cohort.requests) == cohort.most:
            return True
        sequence = others[0].sequences[0]
        if len(others) > 1 or not (terms.mixes and sequence.prompt_stage):
            return False
        # The last token alone counts as a decode in vLLM V1.
        return not terms.by_chunk or sequence.computed < sequence.length - 1

    @property
    def unfinished(self) -> Request | None:
        """The request whose prompt goes on beside the decodes, if there is one."""
        others = self._batch.others
        return others[0] if others and self._course.terms.mixes else None

    def fits(self, left: int, decodes: int) -> bool:
        """Whether `left` blocks are enough for the unfinished prompt beside `decodes` decodes."""
        batch, terms = self._batch, self._course.terms
        blocks, sequence = batch.blocks, batch.others[0].sequences[0]
        if left > terms.max_num_batched_tokens // blocks.block_size + 1:
            return True
        if not terms.by_chunk:
            return blocks.growth_need(sequence) <= left
        room = terms.max_num_batched_tokens - decodes
        upto = sequence.computed + min(sequence.length - sequence.computed, room)
        return blocks.need(sequence, upto, []) <= left

    def continued(self) -> list[Chunk]:
        """Continues the unfinished prompt and returns its chunk."""
        batch, terms, plan = self._batch, self._course.terms, self._course.plan
        request = batch.others[0]
        sequence, blocks = request.sequences[0], batch.blocks
        computed = sequence.computed
        tokens = min(sequence.length - computed, terms.max_num_batched_tokens - plan.batched_tokens)
        if not tokens:
            return []
        if terms.by_chunk:
            blocks.extend(sequence, computed + tokens)
            if self._shares:
                blocks.publish(sequence, computed + tokens)
        plan.batched_tokens += tokens
        return [(request, tokens, tokens)]

    def admit(self, running: int, sure: bool) -> list[Chunk]:
        """Admits requests from the head of the waiting queue until one is refused, beside `running`
        running ones. Returns their chunks.

        With `sure`, the first request is known to be admissible.
        """
        batch, course = self._batch, self._course
        terms, plan = course.terms, course.plan
        blocks, waiting = batch.blocks, batch.waiting
        ask, refusal, longest = terms.ask, terms.refusal, terms.longest
        most, self.cut = terms.max_num_batched_tokens, False
        gives_up, by_chunk, shares = not terms.chunked, terms.by_chunk, self._shares
        late = batch.busy_until_ns > batch.now_ns
        charged, admitted = plan.batched_tokens, list[Chunk]()
        while waiting:
            request = waiting[0]
            sequence = request.sequences[0]
            if gives_up and sequence.length > longest and course.ignore_head():
                continue
            hits, saved, tokens, asked, need = ask(blocks, sequence, charged, running)
            if not sure:
                blocked = refusal(blocks, blocks.gpu.free, need, asked, charged, running)
                if blocked:
                    plan.blocked = blocked
                    request.blocked_steps += 1
                    break
            sure = False
            if tokens > most - charged:
                tokens, self.cut = most - charged, True
            else:
                waiting.popleft()
            upto = saved + tokens
            if sequence.state == WAITING:
                if by_chunk:
                    blocks.hold(sequence, upto, hits)
                else:
                    blocks.allocate(sequence)
                if shares:
                    blocks.publish(sequence, upto)
                sequence.state = RUNNING
                if request.first_scheduled_ns < 0 and not late:
                    request.first_scheduled_ns = batch.now_ns
                else:
                    batch.scheduled(request)
            admitted.append((request, upto, tokens))
            charged += tokens
            running += 1
            if self.cut:
                break
        plan.batched_tokens = charged
        return admitted

    def run(self, chunks: list[Chunk]) -> int:
        """Puts chunks into the plan. Returns the number of tokens that they compute."""
        batch, plan, now_ns = self._batch, self._course.plan, self._batch.now_ns
        computed = found = 0
        for request, tokens, _ in chunks:
            sequence = request.sequences[0]
            before = sequence.computed
            cached, samples = 0, before + tokens == sequence.length
            if sequence.seen or request.num_preemptions:
                cached, samples = batch.take_on(request, sequence, tokens)
            else:
                sequence.access_ns = now_ns
            plan.chunks.append((tokens - cached, before + cached))
            plan.samples += samples
            computed += tokens - cached
            found += cached
        self.cached_tokens = found
        return computed

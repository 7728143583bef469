"""Steps that take prompts on, beside the decodes of a cohort or instead of them.

```
 waiting   a  b  c  d          admitted in order until one is refused: a, b, c
 step      ▓▓▓▓▓▓ ▓▓▓ ▓▓░░     c gets what is left of the token budget, and goes on in the next step
 then      a and b have a token, and join the cohort; c is behind it
```
"""

from __future__ import annotations

from sys import maxsize

from kvsim.batch.cruise import Course, Cruise
from kvsim.batch.pace import Pace, Terms
from kvsim.recorder import pack
from kvsim.request import RUNNING, Request

Chunk = tuple[Request, int, bool]
"""A request, the tokens of it that a step takes on, and whether one is sampled."""

_NO_HITS: list[int] = []


class Intake(Cruise):
    """`Cruise`, and steps with prompts."""

    def _prefills(self, course: Course) -> int:
        """One step with chunks of prompts, and the decodes if they are mixed."""
        terms, blocks, start_ns = course.terms, self.blocks, self.now_ns
        number = len(self._members) if terms.mixes else 0
        plan = self._begin(start_ns)
        if number:
            opening = len(self._phases[self._composed % self._size])
            blocks.open_together(opening, number)
            plan.together = plan.decode_seqs = plan.samples = number
            plan.context_tokens = self._context_tokens
            self._compose(number)
        plan.batched_tokens = number
        running = len(self._members) + len(self.behind)
        chunks = self._continued(terms) if self.behind else []
        cached, admitted = self._admit(course, running, chunks) if self.waiting else (0, 0)
        if self.lingering:
            running -= self._farewell()
        waiting, batched, census = len(self.waiting), plan.batched_tokens, blocks.census()
        self.now_ns = end_ns = start_ns + course.step_ns(plan)
        ended = self._settle(course.pace, len(self._members)) if number else []
        through = self._sampled(course.pace, chunks)
        if through or ended:
            both = through + ended if terms.prompts_first else ended + through
            self._tell(course.pace, both)
        course.recorder.packed(pack(
            start_ns, end_ns, 0, 0, len(chunks), batched - number - cached, cached, number,
            plan.context_tokens, batched, 0, 0, 0, 0, 0, 0, self._gave_up(),
            waiting, running + admitted, 0, *census, plan.blocked, len(self.ended),
        ))  # fmt: skip
        return 1

    def _ordinary(self, course: Course, left: int) -> bool:
        """Whether nobody who may come into the next step can be turned away to the surprise of a
        client, or preempt itself: `left` blocks are there for prompts."""
        terms, behind, waiting = course.terms, self.behind, self.waiting
        longest, room = terms.longest, terms.max_num_batched_tokens
        if len(waiting) > 1 and longest < maxsize and (course.heard or terms.chunked):
            for request in waiting:
                length = request.sequences[0].length
                if length > longest:
                    return False
                room -= length
                if room < 0:
                    break
        if not behind:
            return True
        sequence = behind[0].sequences[0]
        if sequence.length > longest:
            return False
        if left > terms.max_num_batched_tokens // self._size + 1:
            return True
        if not terms.by_chunk:
            return self.blocks.growth_need(sequence) <= left
        room = terms.max_num_batched_tokens - len(self._members)
        upto = sequence.computed + min(sequence.length - sequence.computed, room)
        return self.blocks.need(sequence, upto, []) <= left

    def _continued(self, terms: Terms) -> list[Chunk]:
        """Go on with the prompt that is under way."""
        plan, request = self.plan, self.behind[0]
        sequence = request.sequences[0]
        computed = sequence.computed
        tokens = min(sequence.length - computed, terms.max_num_batched_tokens - plan.batched_tokens)
        if not tokens:
            return []
        if terms.by_chunk:
            self.blocks.extend(sequence, computed + tokens)
        _, samples = self._take_on(request, sequence, tokens)
        plan.chunks.append((tokens, computed))
        plan.samples += samples
        plan.batched_tokens += tokens
        return [(request, tokens, samples)]

    def _admit(self, course: Course, running: int, chunks: list[Chunk]) -> tuple[int, int]:
        """Admit from the head of the waiting queue until one is refused, beside `running` ones.

        Where no prompt is under way, the first is known to be admissible. Answers cached tokens,
        and how many were admitted.
        """
        terms, plan, blocks, waiting = course.terms, self.plan, self.blocks, self.waiting
        refusal, chunked, size = course.pace.refusal, terms.chunked, self._size
        longest, by_chunk, keyed = terms.longest, terms.by_chunk, blocks.needs_keys
        tokens, seqs, cached_tokens = plan.batched_tokens, running, 0
        while waiting:
            request = waiting[0]
            sequence = request.sequences[0]
            length = sequence.length
            if length > longest and not chunked and self._turn_away(course):
                continue
            asked = asked_tokens(terms, length, tokens) if chunked else length
            if seqs > running or self.behind:
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
            if request.first_scheduled_ns < 0 and not keyed:
                # As the general case has it, for most requests.
                request.first_scheduled_ns = self.now_ns
                cached, samples = 0, asked == length
            else:
                self._scheduled(request)
                cached, samples = self._take_on(request, sequence, asked)
            plan.chunks.append((asked - cached, cached))
            plan.samples += samples
            chunks.append((request, asked, samples))
            cached_tokens += cached
            tokens += asked
            seqs += 1
        plan.batched_tokens = tokens
        return cached_tokens, seqs - running

    def _sampled(self, pace: Pace, chunks: list[Chunk]) -> list[Request]:
        """The chunks of a step are computed: who is through its prompt joins the cohort.

        Answers who has got its last token with the first.
        """
        behind = self.behind
        ended = []
        for request, tokens, samples in chunks:
            sequence = request.sequences[0]
            sequence.computed += tokens
            if behind and behind[0] is request:
                behind.popleft()
            if samples:
                sequence.prompt_stage = False
                self.token(sequence)
                more = pace.decodes(request)
                if more and not (behind and pace.lingers):
                    self._join(request, sequence, more, self.now_ns != self._token_ns)
                    continue
                if not more:
                    ended.append(request)
            if not samples or pace.lingers:
                behind.append(request)
        return ended

    def _turn_away(self, course: Course) -> bool:
        """Give the head of the waiting queue up, as long as the engine does; whether it did."""
        waiting, blocks, size, before = self.waiting, self.blocks, self._size, self._turned_away
        while waiting:
            length = waiting[0].sequences[0].length
            reason = course.pace.turns_away(blocks, length, -(-length // size))
            if not reason:
                break
            self.ignore(waiting.popleft(), reason)
            self._turned_away += 1
        return self._turned_away > before

    def _no_step(self, course: Course, blocked: int) -> int:
        """Requests were turned away, and nothing runs."""
        if blocked:
            self.waiting[0].blocked_steps += 1
        start_ns, waiting, census = self.now_ns, len(self.waiting), self.blocks.census()
        self.now_ns = end_ns = start_ns + course.step_ns(self._begin(start_ns))
        course.recorder.packed(pack(
            start_ns, end_ns, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, self._gave_up(),
            waiting, 0, 0, *census, blocked, len(self.ended),
        ))  # fmt: skip
        return 1


def asked_tokens(terms: Terms, length: int, tokens: int) -> int:
    """What a waiting request asks for in a step that has `tokens` tokens: more than is left if that
    is nothing."""
    left = terms.max_num_batched_tokens - tokens
    return left if terms.chunked and 0 < left < length else length

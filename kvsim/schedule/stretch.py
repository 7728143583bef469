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

from kvsim.blocks.tables import Tables
from kvsim.recorder import pack
from kvsim.request import RUNNING, Request
from kvsim.schedule.cruise import Course, Cruise
from kvsim.schedule.pace import Pace, Sprinter, Terms

MOST_STEPS = 10_000
"""Of a stretch, so that somebody who watches the clock sees it move."""

Chunk = tuple[Request, int, bool]
"""A request, the tokens of it that a step takes on, and whether one is sampled."""


class Stretches(Cruise):
    """`Cruise`, and the steps between."""

    def __init__(self, blocks: Tables) -> None:
        super().__init__(blocks)
        self.left: list[Request] = []
        """Who ended in the last stretch, in order."""
        self._untold: list[Request] = []
        """Who has got its last token, lingers, and may part before the scheduler has to know."""
        self._turned_away = 0
        """Waiting requests that the engine gave up in the step being composed."""
        self.stretches = 0
        self.stretched_steps = 0
        """Steps that were taken in stretches."""

    def shortcuts(self) -> dict[str, int]:
        stretched = {"stretches": self.stretches, "stretched_steps": self.stretched_steps}
        return {**super().shortcuts(), **stretched}

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

    def _tell(self, pace: Sprinter, ended: list[Request]) -> None:
        if pace.lingers:
            self._untold += ended
        else:
            pace.last_tokens(self, ended)

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
        pace, terms = course.pace, course.terms
        blocked = floor = 0
        if self.behind:
            self._recruit(pace)
            if not self._one_behind(terms):
                return 0
        if self.waiting and self.waiting[0].sequences[0].length > terms.longest:
            if course.heard or terms.chunked or not self._decodes_fit(terms):
                return 0
            self._turn_away(course)
        if self.waiting and not self.behind:
            length = self.waiting[0].sequences[0].length
            blocks, seqs, need = self.blocks, len(self._members), -(-length // self._size)
            free, tokens, asked = blocks.gpu.free, 0, length
            if terms.mixes:
                free, tokens = free - len(self._phases[self._composed % self._size]), seqs
                asked = _asked(terms, length, tokens)
            blocked = pace.refusal(blocks, free, need, asked, tokens, seqs)
            if blocked:
                floor = pace.refuses_from(blocked, need)
        if self.behind or (self.waiting and not blocked):
            if terms.mixes and not self._decodes_fit(terms):
                return self._one_decode(course, blocked)
            return self._prefills(course) if self._ordinary(course) else 0
        if not self._members:
            return self._no_step(course, blocked) if self._turned_away else 0
        alike = not (self.lingering or self._turned_away)
        steps = self._decodes(course, blocked, floor, cut_ns) if alike else 0
        return steps or self._one_decode(course, blocked)

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
        self.now_ns = end_ns = start_ns + course.step_ns(self.begin(start_ns))
        course.recorder.packed(pack(
            start_ns, end_ns, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, self._gave_up(),
            waiting, 0, 0, *census, blocked, len(self.ended),
        ))  # fmt: skip
        return 1

    def _gave_up(self) -> int:
        """How many were turned away in the step that is recorded now."""
        number, self._turned_away = self._turned_away, 0
        return number

    # -- a step that takes prompts on ------------------------------------------------------------

    def _prefills(self, course: Course) -> int:
        """One step with chunks of prompts, and the decodes if they are mixed."""
        terms, blocks, start_ns = course.terms, self.blocks, self.now_ns
        number = len(self._members) if terms.mixes else 0
        plan = self.begin(start_ns)
        if number:
            opening = len(self._phases[self._composed % self._size])
            blocks.open_together(opening, number)
            plan.together = plan.decode_seqs = plan.samples = number
            plan.context_tokens = self._context_tokens
            self._compose(number)
        plan.batched_tokens = number
        running = len(self._members) + len(self.behind)
        chunks = self._continued(terms) if self.behind else []
        cached, admitted = self._admit(course, running, chunks)
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

    def _decodes_fit(self, terms: Terms) -> bool:
        """Whether there are blocks for a step of the cohort."""
        if not self._members:
            return True
        opening = self._phases[self._composed % self._size]
        left = self.blocks.gpu.free - len(opening)
        return left > 0 or (
            not left and (not terms.spare or next(reversed(self._members)) in opening)
        )

    def _ordinary(self, course: Course) -> bool:
        """Whether nobody who may come into the next step can be turned away to the surprise of a
        client, or preempt itself."""
        terms, blocks = course.terms, self.blocks
        longest, room = terms.longest, terms.max_num_batched_tokens
        if len(self.waiting) > 1 and (course.heard or terms.chunked):
            for request in self.waiting:
                length = request.sequences[0].length
                if length > longest:
                    return False
                room -= length
                if room < 0:
                    break
        if not self.behind:
            return True
        sequence, number = self.behind[0].sequences[0], len(self._members)
        left = blocks.gpu.free - len(self._phases[self._composed % self._size])
        if sequence.length > longest:
            return False
        if not terms.by_chunk:
            return blocks.growth_need(sequence) <= left
        tokens = min(sequence.length - sequence.computed, terms.max_num_batched_tokens - number)
        return blocks.need(sequence, sequence.computed + tokens, []) <= left

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
        tokens, seqs, cached_tokens = plan.batched_tokens, running, 0
        while waiting:
            request = waiting[0]
            sequence = request.sequences[0]
            length = sequence.length
            if length > terms.longest and not chunked and self._turn_away(course):
                continue
            asked = _asked(terms, length, tokens) if chunked else length
            if seqs > running or self.behind:
                need = -(-length // size)
                plan.blocked = refusal(blocks, blocks.gpu.free, need, asked, tokens, seqs)
                if plan.blocked:
                    request.blocked_steps += 1
                    break
            waiting.popleft()
            if terms.by_chunk:
                blocks.hold(sequence, asked, [])
            else:
                blocks.allocate(sequence)
            sequence.state = RUNNING
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
                    self._join(request, sequence, more)
                    continue
                if not more:
                    ended.append(request)
            if not samples or pace.lingers:
                behind.append(request)
        return ended

    # -- a decode step by itself -----------------------------------------------------------------

    def _one_decode(self, course: Course, blocked: int) -> int:
        """One decode step, in which the tail gives way as long as somebody lacks a block; 0: it is
        not that simple."""
        terms, requeue, start_ns = course.terms, course.terms.requeue, self.now_ns
        short = not self._decodes_fit(terms)
        if short and (requeue is None or len(self._members) < 2 or self.lingering):
            return 0
        plan = self.begin(start_ns)
        head = self.waiting[0] if blocked else None

        def give_way(victim: Request) -> None:
            assert requeue is not None
            self.preempt(victim)
            requeue(self.waiting, victim)

        self._make_room(give_way, terms.spare)
        if plan.preempted and terms.mixes:
            blocked = terms.blocked
        elif head is not None:
            head.blocked_steps += 1
        number, context = len(self._members), self._context_tokens
        self._grow(course.pace, number)
        self._compose(number)
        running = number - self._farewell() if self.lingering else number
        waiting, census = len(self.waiting), self.blocks.census()
        self.now_ns = end_ns = start_ns + course.decode_ns(number, context)
        ended = self._settle(course.pace, running)
        if ended:
            self._tell(course.pace, ended)
        course.recorder.packed(pack(
            start_ns, end_ns, 0, 0, 0, 0, 0, number, context, number, len(plan.preempted),
            0, 0, 0, 0, 0, self._gave_up(), waiting, running, 0, *census, blocked, len(self.ended),
        ))  # fmt: skip
        return 1

    def _farewell(self) -> int:
        """Those that linger end as the step begins, having taken part in it if it is one of the
        cohort; answers how many."""
        parting = self.lingering
        for request in parting:
            _, joined, last, filled, known = self._members.pop(request)
            steps = self._composed - joined
            del self._phases[(joined - filled) % self._size][request]
            self._context_tokens -= known + steps
            sequence = request.sequences[0]
            sequence.length += last - joined
            sequence.computed += last - joined
            sequence.filled = filled + steps
            sequence.last_token_ns = self._token_ns
            request.output_tokens += last - joined
            self.blocks.recount(sequence)
            self.complete(request)
        self.lingering = []
        self._untold = []
        return len(parting)


def _asked(terms: Terms, length: int, tokens: int) -> int:
    """What a waiting request asks for in a step that has `tokens` tokens: more than is left if that
    is nothing."""
    left = terms.max_num_batched_tokens - tokens
    return left if terms.chunked and 0 < left < length else length

"""Decode steps of a cohort: many that are alike, and one in which something happens.

```
 steps      ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ┤      the same decision again, not taken anew: what is left of a
            └── one record ─────┘      step is its price, its end and the blocks that it opens
 cut by     somebody ends, somebody comes, a block that may lack

 one step   ─ ▼ ─                      the tail gives way to those before it, as long as they lack
                                       blocks; or who has ended parts (`Pace.lingers`)
```
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from heapq import heappop
from itertools import accumulate
from math import inf
from operator import sub
from typing import NamedTuple

from kvsim.batch.lockstep import Lockstep
from kvsim.batch.pace import Pace, Sprinter, Terms
from kvsim.blocks.tables import Tables
from kvsim.plan import Plan
from kvsim.recorder import Recorder, pack
from kvsim.request import Request

LONG_STEPS = 8
"""From so many steps on, asking for all their prices at once is faster than one by one."""


MOST_STEPS = 10_000
"""Of a stretch, so that somebody who watches the clock sees it move."""


class Course(NamedTuple):
    """What steps that are taken many at a time have to do with."""

    pace: Sprinter
    terms: Terms
    step_ns: Callable[[Plan], int]
    """Price of a step from its sums; its entries are not listed."""
    decode_ns: Callable[[int, int], int]
    """The same of a pure decode step, and of several (`kvsim.cost.decodes.PricesDecodes`)."""
    decode_run_ns: Callable[[int, int, int, int | None], list[int]]
    recorder: Recorder
    arrivals: Callable[[int], float]
    """Lets those arrive who are sent until a time; answers when the next one will be."""
    heard: bool
    """Whether a client waits for somebody to end."""


class Cruise(Lockstep):
    """`Lockstep`, and steps of which the event loop does not hear: here decode steps."""

    def __init__(self, blocks: Tables) -> None:
        super().__init__(blocks)
        self.left: list[Request] = []
        """Who ended in the last stretch, in order."""
        self.stretches = 0
        self.stretched_steps = 0
        """Steps that were taken in stretches."""
        self._sums = Plan()
        """The step being composed: its sums, and who gave way."""
        self._turned_away = 0
        """Waiting requests that the engine gave up in the step being composed."""
        self._untold: list[Request] = []
        """Who has got its last token, lingers, and may part before the scheduler has to know."""

    def shortcuts(self) -> dict[str, int]:
        stretched = {"stretches": self.stretches, "stretched_steps": self.stretched_steps}
        return {**super().shortcuts(), **stretched}

    # -- many that are alike ---------------------------------------------------------------------

    def _decodes(self, course: Course, blocked: int, floor_blocks: int, cut_ns: float) -> int:
        """Take pure decode steps from now on; answers how many, 0 where a block may lack.

        The last one is the first that ends at `cut_ns` or later, or at whose end somebody has got
        its last token. `blocked`: why the head of the waiting queue is refused, as long as each
        step begins with `floor_blocks` free blocks (where steps are mixed: has them left).
        """
        start_ns, first, number = self.now_ns, self._composed, len(self._members)
        due = self._steps_to_end()
        census = self.blocks.census()
        ends_ns: list[int] = []
        if due >= LONG_STEPS:
            ends_ns, opened = self._long(course, floor_blocks, cut_ns, due)
        if not ends_ns:
            free = census[1] + census[2]
            ends_ns, opened = self._short(course, free, floor_blocks, cut_ns, due)
        steps = len(ends_ns)
        if not steps:
            return 0
        ended = self._due(first + steps) if steps == due else []
        finished = 0 if course.pace.lingers else len(ended)
        row = pack(
            start_ns, 0, 0, 0, 0, 0, 0, number, self._context_tokens, number, 0, 0, 0, 0, 0, 0, 0,
            len(self.waiting), number, 0, *census, blocked, finished,
        )  # fmt: skip
        course.recorder.decodes(row, ends_ns, opened)
        self._taken(ends_ns, opened)
        if blocked:
            self.waiting[0].blocked_steps += steps
        if ended:
            self._part(course.pace, ended)
            self._tell(course.pace, ended)
        return steps

    def _short(
        self, course: Course, free: int, floor_blocks: int, cut_ns: float, steps: int
    ) -> tuple[list[int], list[int]]:
        """When steps end and how many blocks they open, step by step."""
        phases, size, now_ns, number = self._phases, self._size, self.now_ns, len(self._members)
        context, decode_ns, mixes = self._context_tokens, course.decode_ns, course.terms.mixes
        ends_ns: list[int] = []
        opened: list[int] = []
        for step in range(self._composed, self._composed + steps):
            opening = len(phases[step % size])
            left = free - opening
            if left <= 0 or (left if mixes else free) < floor_blocks:
                break
            free = left
            now_ns += decode_ns(number, context)
            context += number
            ends_ns.append(now_ns)
            opened.append(opening)
            if now_ns >= cut_ns:
                break
        return ends_ns, opened

    def _long(
        self, course: Course, floor_blocks: int, cut_ns: float, steps: int
    ) -> tuple[list[int], list[int]]:
        """The same all at once; none where there are few steps, or blocks may lack."""
        number, size, start_ns = len(self._members), self._size, self.now_ns
        last_ns, within = self._token_ns - self._composed_ns, None
        if cut_ns < inf:
            within = int(cut_ns) - start_ns
            if last_ns:
                # About as many as there is time for.
                steps = min(steps, within // last_ns + 2)
        most = number + number * steps // size
        if steps < LONG_STEPS or most + floor_blocks >= self.blocks.gpu.free:
            return [], []
        times = course.decode_run_ns(number, self._context_tokens, steps, within)
        place = self._composed % size
        cycle = [len(members) for members in self._phases[place:] + self._phases[:place]]
        opened = cycle * (len(times) // size + 1)
        return list(accumulate(times, initial=start_ns))[1:], opened[: len(times)]

    def _taken(self, ends_ns: list[int], opened: list[int]) -> None:
        """Steps were taken, which ended then and opened so many blocks."""
        number, steps, start_ns = len(self._members), len(ends_ns), self.now_ns
        self.now_ns = ends_ns[0]
        self._count_gaps(number, self._composed)
        if steps > 1:
            self.token_gaps_ns.add_each(map(sub, ends_ns[1:], ends_ns), number)
            start_ns = ends_ns[-2]
        self.blocks.open_together(sum(opened), steps * number)
        self._context_tokens += steps * number
        self._composed += steps
        self._settled = self._composed
        self._composed_ns = start_ns
        self.now_ns = self._token_ns = ends_ns[-1]
        self.together_steps += steps

    def _steps_to_end(self) -> int:
        """Steps until somebody may have got its last token."""
        ends = self._next_ends
        while ends and ends[0] <= self._composed:
            heappop(ends)
        return ends[0] - self._composed

    # -- one by itself ---------------------------------------------------------------------------

    def _one_decode(self, course: Course, blocked: int) -> int:
        """One decode step, in which the tail gives way as long as somebody lacks a block; 0: it is
        not that simple."""
        terms, start_ns = course.terms, self.now_ns
        short = not self._decodes_fit(terms)
        if short and (terms.requeue is None or len(self._members) < 2 or self.lingering):
            return 0
        plan = self._begin(start_ns)
        head = self.waiting[0] if blocked else None
        self._given = 0
        if short:
            self._make_room(partial(self._give_way, terms), terms.spare, self._leave)
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

    def _give_way(self, terms: Terms, victim: Request) -> None:
        assert terms.requeue is not None
        self.preempt(victim)
        terms.requeue(self.waiting, victim)

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
            self.complete(request)
        self.lingering = []
        self._untold = []
        return len(parting)

    def _decodes_fit(self, terms: Terms) -> bool:
        """Whether there are blocks for a step of the cohort."""
        if not self._members:
            return True
        opening = self._phases[self._composed % self._size]
        left = self.blocks.gpu.free - len(opening)
        return left > 0 or (
            not left and (not terms.spare or next(reversed(self._members)) in opening)
        )

    def _begin(self, start_ns: int) -> Plan:
        """Start to compose a step by its sums."""
        self.now_ns = start_ns
        self.plan = plan = self._sums
        plan.chunks, plan.preempted, plan.ignored = [], [], []
        plan.blocked = plan.samples = plan.together = plan.batched_tokens = 0
        plan.decode_seqs = plan.context_tokens = 0
        return plan

    def _tell(self, pace: Pace, ended: list[Request]) -> None:
        """Tell the scheduler who has got its last token, or note it down."""
        if pace.lingers:
            self._untold += ended
        else:
            pace.last_tokens(self, ended)

    def _gave_up(self) -> int:
        """How many were turned away in the step that is recorded now."""
        number, self._turned_away = self._turned_away, 0
        return number

"""Pure decode steps of a cohort in a row: what is left of a step is its price, its row, a few sums.

```
 steps      ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ■      the same decision again, not taken anew
 cut by     somebody ends, somebody comes, a block that may lack
```
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop
from typing import TYPE_CHECKING, NamedTuple

from kvsim.plan import Plan
from kvsim.recorder import STEP_COLUMNS, Recorder, pack
from kvsim.request import Request
from kvsim.schedule.lockstep import Lockstep
from kvsim.schedule.pace import Sprinter, Terms

if TYPE_CHECKING:
    import numpy as np

LONG_STEPS = 48
"""From so many steps on, columns of numbers are faster than steps one by one."""


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
    """`Lockstep`, and many pure decode steps at a time."""

    def _decodes(self, course: Course, blocked: int, floor_blocks: int, cut_ns: float) -> int:
        """Take pure decode steps from now on; answers how many, 0 where a block may lack.

        The last one is the first that ends at `cut_ns` or later, or at whose end somebody has got
        its last token. `blocked`: why the head of the waiting queue is refused, as long as each
        step begins with `floor_blocks` free blocks (where steps are mixed: has them left).
        """
        first = self._composed
        steps = self._steps_to_end()
        ended: list[Request] = []
        if steps >= LONG_STEPS:
            lasts_ns = LONG_STEPS * (self._token_ns - self._composed_ns)
            roomy = len(self._members) * LONG_STEPS < self.blocks.gpu.free * self._size
            if roomy and self.now_ns + lasts_ns < cut_ns:
                ended = self._long(course, blocked, floor_blocks, cut_ns, steps)
        if self._composed == first:
            ended = self._short(course, blocked, floor_blocks, cut_ns, steps)
        steps = self._composed - first
        if steps and blocked:
            self.waiting[0].blocked_steps += steps
        if ended:
            self._part(course.pace, ended)
            self._tell(course.pace, ended)
        return steps

    def _tell(self, pace: Sprinter, ended: list[Request]) -> None:
        """Tell the scheduler who has got its last token."""
        pace.last_tokens(self, ended)

    def _short(
        self, course: Course, blocked: int, floor_blocks: int, cut_ns: float, steps: int
    ) -> list[Request]:
        """Step by step; answers who has got its last token."""
        phases, size, now_ns = self._phases, self._size, self.now_ns
        used, cached, blank, cpu_used, empty, stranded = self.blocks.census()
        free = cached + blank
        waiting, number = len(self.waiting), len(self._members)
        step, context, decode_ns = self._composed, self._context_tokens, course.decode_ns
        gaps, newcomers, rows = self.token_gaps_ns, self._newcomers, bytearray()
        first, taken, start_ns, finished = step, 0, now_ns, 0
        ended: list[Request] = []
        mixes, stop = course.terms.mixes, step + steps
        while step < stop:
            opening = len(phases[step % size])
            left = free - opening
            if left <= 0 or (left if mixes else free) < floor_blocks:
                break
            start_ns = now_ns
            now_ns += decode_ns(number, context)
            free = left
            taken += opening
            blank -= opening
            if blank < 0:
                cached += blank
                blank = 0
            empty += opening * size - number
            if step in newcomers:
                self.now_ns = now_ns
                self._count_gaps(number, step)
            else:
                gap = now_ns - self._token_ns
                gaps[gap] = gaps.get(gap, 0) + number
            self._token_ns = now_ns
            step += 1
            if step == stop:
                ended = self._due(step)
                finished = 0 if course.pace.lingers else len(ended)
            rows += pack(
                start_ns, now_ns, 0, 0, 0, 0, 0, number, context, number, 0, 0, 0, 0, 0, 0, 0,
                waiting, number, 0, used + taken, cached, blank, cpu_used, empty, stranded,
                blocked, finished,
            )  # fmt: skip
            context += number
            if now_ns >= cut_ns:
                break
        self.now_ns = now_ns
        if step > first:
            course.recorder.extend_packed(rows)
            self._taken(step - first, taken, start_ns)
        return ended

    def _long(
        self, course: Course, blocked: int, floor_blocks: int, cut_ns: float, steps: int
    ) -> list[Request]:
        """All at once, column by column; none where blocks may lack soon."""
        import numpy as np

        number, now_ns, size = len(self._members), self.now_ns, self._size
        used, cached, blank, cpu_used, empty, stranded = self.blocks.census()
        opening = self._openings(steps)
        left = cached + blank - np.cumsum(opening)
        fits = (left > 0) & (left + (0 if course.terms.mixes else opening) >= floor_blocks)
        if not fits.all():
            steps = int(np.argmin(fits))
            if steps < LONG_STEPS:
                return []
        within = None if cut_ns == float("inf") else int(cut_ns) - now_ns
        times = course.decode_run_ns(number, self._context_tokens, steps, within)
        steps = len(times)
        taken = np.cumsum(opening[:steps])
        tokens = number * np.arange(1, steps + 1)
        end_ns = now_ns + np.cumsum(np.array(times, dtype=np.int64))
        columns: dict[str, int | np.ndarray] = {
            "start_ns": end_ns - times,
            "end_ns": end_ns,
            "decode_seqs": number,
            "context_tokens": self._context_tokens - number + tokens,
            "batched_tokens": number,
            "waiting": len(self.waiting),
            "running": number,
            "used_blocks": used + taken,
            "cached_blocks": cached - np.maximum(taken - blank, 0),
            "free_blocks": np.maximum(blank - taken, 0),
            "cpu_used_blocks": cpu_used,
            "empty_slots": empty + size * taken - tokens,
            "stranded_blocks": stranded,
            "blocked": blocked,
        }
        rows = np.zeros((steps, len(STEP_COLUMNS)), dtype=np.int64)
        for name, column in columns.items():
            rows[:, STEP_COLUMNS.index(name)] = column
        ended = self._due(self._composed + steps)
        if not course.pace.lingers:
            rows[-1, STEP_COLUMNS.index("finished")] = len(ended)
        course.recorder.extend(rows)
        self._count_all_gaps(times, number)
        self.now_ns = self._token_ns = int(end_ns[-1])
        self._taken(steps, int(taken[-1]), int(end_ns[-1]) - times[-1])
        return ended

    def _count_all_gaps(self, times: list[int], number: int) -> None:
        """Book the gaps of steps in a row, which only in the first are not the steps' times."""
        self.now_ns += times[0]
        self._count_gaps(number, self._composed)
        gaps = self.token_gaps_ns
        for gap in times[1:]:
            gaps[gap] = gaps.get(gap, 0) + number

    def _openings(self, steps: int) -> np.ndarray:
        """How many members open a block in each of the next steps."""
        import numpy as np

        counts = np.array([len(members) for members in self._phases])
        return np.resize(np.roll(counts, -(self._composed % self._size)), steps)

    def _taken(self, steps: int, blocks: int, start_ns: int) -> None:
        """So many steps were taken, which opened so many blocks; the last began at `start_ns`."""
        tokens = steps * len(self._members)
        self.blocks.open_together(blocks, tokens)
        self._context_tokens += tokens
        self._composed += steps
        self._settled = self._composed
        self._composed_ns = start_ns
        self.together_steps += steps

    def _steps_to_end(self) -> int:
        """Steps until somebody may have got its last token."""
        ends = self._next_ends
        while ends and ends[0] <= self._composed:
            heappop(ends)
        return ends[0] - self._composed

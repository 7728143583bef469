"""Stretches: many steps of a cohort in a row, of which the event loop hears only the end.

```
            composed in full            composed in full
                  │                            │
 steps            ■ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ■      ■        ─ the same decision again, not taken anew
                  └──── stretch ────────┘
 cut by           somebody ends, the next event of the simulation, a block that may lack
```

Between two events most steps repeat the decision of the step before: one token for everybody. A
scheduler that promises this (`outlook`) is not asked again until something happens. What is left
of a step is its price, its row and a few sums.
"""

from __future__ import annotations

from heapq import heappop
from typing import TYPE_CHECKING

from kvsim.blocks.tables import COUNTED, Tables
from kvsim.recorder import STEP_COLUMNS, Recorder, pack
from kvsim.schedule.lockstep import Lockstep
from kvsim.schedule.pace import DecodePrices, Outlook, Pace

if TYPE_CHECKING:
    import numpy as np

LONG_STEPS = 48
"""From so many steps on, columns of numbers are faster than steps one by one."""


class Stretches(Lockstep):
    """`Lockstep`, several steps at a time where nothing can come between."""

    def __init__(self, blocks: Tables) -> None:
        super().__init__(blocks)
        self.stretches = 0
        self.stretched_steps = 0
        """Steps of the cohort that were taken in stretches."""

    def shortcuts(self) -> dict[str, int]:
        stretched = {"stretches": self.stretches, "stretched_steps": self.stretched_steps}
        return {**super().shortcuts(), **stretched}

    def stretch(
        self,
        pace: Pace,
        outlook: Outlook,
        now_ns: int,
        horizon_ns: float,
        prices: DecodePrices,
        recorder: Recorder,
    ) -> int:
        """Take steps from `now_ns` on; answers how many. The last one ends at `self.now_ns`.

        No step but the first starts at `horizon_ns` or later, and none follows one in which
        somebody ends. Call `landed` when its end has come.
        """
        self.now_ns = now_ns
        first = self._composed
        steps = self._steps_to_end()
        lasts_ns = LONG_STEPS * (self._token_ns - self._composed_ns)
        roomy = len(self._members) * LONG_STEPS < self.blocks.gpu.free * self._size
        if steps >= LONG_STEPS and roomy and prices.run and now_ns + lasts_ns < horizon_ns:
            self._long(pace, outlook, horizon_ns, steps, prices, recorder)
        if self._composed == first:
            self._short(pace, outlook, horizon_ns, prices, recorder)
        steps = self._composed - first
        if steps:
            self.busy_until_ns = self.now_ns
            self.stretches += 1
            self.stretched_steps += steps
            self.together_steps += steps
            if outlook.blocked:
                self.waiting[0].blocked_steps += steps
        return steps

    def _short(
        self,
        pace: Pace,
        outlook: Outlook,
        horizon_ns: float,
        prices: DecodePrices,
        recorder: Recorder,
    ) -> None:
        """Step by step, up to the next at whose end somebody may have got its last token."""
        blocks, phases, size, now_ns = self.blocks, self._phases, self._size, self.now_ns
        used, cached, blank, cpu_used, empty, stranded = blocks.census()
        free = cached + blank
        waiting, swapped, number = len(self.waiting), len(self.swapped), len(self._members)
        blocked, floor = outlook
        step, context, price = self._composed, self._context_tokens, prices.step
        gaps, newcomers, rows = self.token_gaps_ns, self._newcomers, bytearray()
        first, taken, start_ns, finished = step, 0, now_ns, 0
        stop = step + self._steps_to_end()
        while step < stop:
            opening = len(phases[step % size])
            if opening >= free or free < floor:
                break
            start_ns = now_ns
            now_ns += price(number, context)
            free -= opening
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
            if step == stop and not pace.lingers:
                finished = self._ending(step)
            rows += pack(
                start_ns, now_ns, 0, 0, 0, 0, 0, number, context, number, 0, 0, 0, 0, 0, 0, 0,
                waiting, number, swapped, used + taken, cached, blank, cpu_used, empty, stranded,
                blocked, finished,
            )  # fmt: skip
            context += number
            if now_ns >= horizon_ns:
                break
        self.now_ns = now_ns
        recorder.extend_packed(rows)
        self._taken(step - first, taken, start_ns)

    def _long(
        self,
        pace: Pace,
        outlook: Outlook,
        horizon_ns: float,
        steps: int,
        prices: DecodePrices,
        recorder: Recorder,
    ) -> None:
        """All at once, column by column; none where blocks may lack soon."""
        import numpy as np

        number, now_ns, size = len(self._members), self.now_ns, self._size
        used, cached, blank, cpu_used, empty, stranded = self.blocks.census()
        opening = self._openings(steps)
        free = cached + blank - (np.cumsum(opening) - opening)
        fits = (opening < free) & (free >= outlook.floor_blocks)
        if not fits.all():
            steps = int(np.argmin(fits))
            if steps < LONG_STEPS:
                return
        assert prices.run is not None
        within = None if horizon_ns == float("inf") else int(horizon_ns) - now_ns
        times = prices.run(number, self._context_tokens, steps, within)
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
            "swapped": len(self.swapped),
            "used_blocks": used + taken,
            "cached_blocks": cached - np.maximum(taken - blank, 0),
            "free_blocks": np.maximum(blank - taken, 0),
            "cpu_used_blocks": cpu_used,
            "empty_slots": empty + size * taken - tokens,
            "stranded_blocks": stranded,
            "blocked": outlook.blocked,
        }
        rows = np.zeros((steps, len(STEP_COLUMNS)), dtype=np.int64)
        for name, column in columns.items():
            rows[:, STEP_COLUMNS.index(name)] = column
        last = self._composed + steps
        if last in self._ends and not pace.lingers:
            rows[-1, STEP_COLUMNS.index("finished")] = self._ending(last)
        recorder.extend(rows)
        self._count_all_gaps(times, number)
        self.now_ns = self._token_ns = int(end_ns[-1])
        self._taken(steps, int(taken[-1]), int(end_ns[-1]) - times[-1])

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
        if steps:
            number = len(self._members)
            self.blocks.gpu.take_many(blocks)
            self.blocks.open_together(blocks, steps * number)
            self._context_tokens += steps * number
            self._composed += steps
            self._settled = self._composed
            self._composed_ns = start_ns

    def _steps_to_end(self) -> int:
        """Steps until somebody may have got its last token."""
        ends = self._next_ends
        while ends and ends[0] <= self._composed:
            heappop(ends)
        return ends[0] - self._composed

    def landed(self, pace: Pace) -> None:
        """The time of a stretch has passed: tell who has got its last token."""
        if self.lingering:
            self.lingering = []
        if self._settled in self._ends:
            self._tell_ends(pace)

    def all_together(self, pace: Pace) -> bool:
        if self.blocks.lockstep != COUNTED or self._flying or self.lingering:
            return False
        self._recruit(pace)
        return bool(self._members) and not (self.behind or self._sitting)

    def _ending(self, step: int) -> int:
        """How many have got their last token when `step` steps are settled."""
        members = self._members
        return sum([r in members and members[r].last == step for r in self._ends[step]])

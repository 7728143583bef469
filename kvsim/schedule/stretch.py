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

from collections.abc import Callable

from kvsim.blocks.tables import COUNTED, Tables
from kvsim.recorder import Recorder
from kvsim.schedule.lockstep import Lockstep
from kvsim.schedule.pace import Outlook, Pace

Price = Callable[[int, int], int]
"""Nanoseconds of a pure decode step, from its sequences and the sum of their lengths."""


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
        price: Price,
        recorder: Recorder,
    ) -> int:
        """Take steps from `now_ns` on; answers how many. The last one ends at `self.now_ns`.

        No step but the first starts at `horizon_ns` or later, and none follows one in which
        somebody ends. Call `landed` when its end has come.
        """
        blocks, phases, size = self.blocks, self._phases, self._size
        used, cached, blank, cpu_used, empty, stranded = blocks.census()
        free = cached + blank
        waiting, swapped, number = len(self.waiting), len(self.swapped), len(self._members)
        blocked, floor = outlook
        step, context, record = self._composed, self._context_tokens, recorder.step
        first, taken, start_ns = step, 0, now_ns
        self.now_ns = now_ns
        while True:
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
            self.now_ns = now_ns
            self._count_gaps(number, step)
            self._token_ns = now_ns
            step += 1
            ends = step in self._ends and self._ending(step)
            record(
                (start_ns, now_ns, 0, 0, 0, 0, 0, number, context, number, 0, 0, 0, 0, 0, 0, 0,
                 waiting, number, swapped, used + taken, cached, blank, cpu_used, empty, stranded,
                 blocked,
                 0 if pace.lingers else ends)
            )  # fmt: skip
            context += number
            if ends or now_ns >= horizon_ns:
                break
        if step > first:
            blocks.gpu.take_many(taken)
            blocks.open_together(taken, (step - first) * number)
            self._context_tokens = context
            self._composed = self._settled = step
            self._composed_ns, self.busy_until_ns = start_ns, now_ns
            self._stretched(step - first, blocked)
        return step - first

    def _stretched(self, steps: int, blocked: int) -> None:
        self.stretches += 1
        self.stretched_steps += steps
        self.together_steps += steps
        if blocked:
            self.waiting[0].blocked_steps += steps

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

"""Chooses the short cuts of a run, and says why the others are not used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvsim.cost import Cost, PricesDecodes, checked_prices, declares_sums
from kvsim.engine.batch import Batch, Endings
from kvsim.engine.scheduler import Scheduler
from kvsim.fast.cohort import Cohort
from kvsim.fast.course import Course
from kvsim.fast.known import Terms, fits_cohort, terms_of
from kvsim.fast.repeat import Repeat
from kvsim.records.recorder import Recorder


class Shortcuts:
    """The cohort of a batch and the repetition of its steps, where they make the same decisions."""

    def __init__(
        self,
        batch: Batch,
        scheduler: Scheduler,
        cost: Cost,
        endings: Endings,
        asked: str = "",
        stepwise: str = "",
    ) -> None:
        """`asked` gives the reason, if any, why each step and each request must be handled on its
        own; `stepwise`, why each step must be."""
        self._batch, self._scheduler, self._cost = batch, scheduler, cost
        self._endings = endings
        self._cohort: Cohort | None = None
        self._repeat: Repeat | None = None
        self._why_not = asked or fits_cohort(scheduler, batch.blocks)
        """Why no step is repeated."""
        if not self._why_not:
            self._cohort = Cohort(batch, scheduler, endings)
            batch.look_together(self._cohort)
        self._why_not = self._why_not or stepwise

    def repetition(
        self,
        recorder: Recorder,
        arrivals: Callable[[int], float],
        upcoming: Callable[[], tuple[float, float]],
        listens: bool,
    ) -> Repeat | None:
        """Returns the repetition of a run, or None if no step can be repeated. See `Course` and
        `Repeat` for the arguments."""
        scheduler, cost, batch = self._scheduler, self._cost, self._batch
        terms = None if self._cohort is None else terms_of(scheduler, batch.blocks)
        if isinstance(terms, str):
            self._why_not = terms
        if self._why_not:
            return None
        priced = checked_prices(cost)
        if not (declares_sums(cost) and isinstance(priced, PricesDecodes)):
            self._why_not = "the cost model declares no sums"
            return None
        assert self._cohort is not None and isinstance(terms, Terms)
        course = Course(batch, self._cohort, scheduler, terms, priced, recorder, arrivals, listens)
        self._repeat = Repeat(course, self._endings, upcoming)
        return self._repeat

    def describe(self, steps: int) -> dict[str, Any]:
        """Returns how many steps of a run were repeated, and why the others were not."""
        cohort, repeat = self._cohort, self._repeat
        table: dict[str, Any] = {
            "repeated_steps": 0,
            "stretches": 0,
            "together_steps": 0 if cohort is None else cohort.together_steps,
            "dissolutions": 0 if cohort is None else cohort.dissolutions,
        }
        if repeat is None:
            return {**table, "composed_because": {self._why_not: steps}}
        return {
            **table,
            "repeated_steps": repeat.repeated_steps,
            "stretches": repeat.stretches,
            "composed_because": dict(sorted(repeat.composed_because.items())),
        }

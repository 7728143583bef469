"""Changes the step times of a run, whatever prices them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from kvsim.cost import Cost
from kvsim.run.assembly import Parts, assemble
from kvsim.settings.config import RunConfig

if TYPE_CHECKING:
    from kvsim.core.plan import Plan


class Change(NamedTuple):
    """A change of step times."""

    prompts: float = 1.0
    """Factor on the time of steps that compute prompt tokens; `decodes` is the factor on all
    others."""
    decodes: float = 1.0
    step_ns: float = 0.0
    """Nanoseconds added to every step."""
    start_ns: float = 0.0
    """Nanoseconds added to the first step."""


class Slowed:
    """A cost model whose times are changed."""

    def __init__(self, cost: Cost, change: Change) -> None:
        self._cost, self._change = cost, change
        self._start_ns = change.start_ns

    @property
    def kind(self) -> str:
        """The kind of the changed cost model."""
        return self._cost.kind

    @property
    def source(self) -> str:
        """The source of the changed cost model, and the change."""
        return f"{self._cost.source}, changed by {self._change}"

    def step_ns(self, plan: Plan) -> int:
        """Nanoseconds of a step."""
        factor = self._change.prompts if plan.chunks else self._change.decodes
        start_ns, self._start_ns = self._start_ns, 0.0
        return round(self._cost.step_ns(plan) * factor + self._change.step_ns + start_ns)

    def describe(self) -> dict[str, Any]:
        """The description of the changed cost model, and the change."""
        return {**self._cost.describe(), "source": self.source, "change": self._change._asdict()}


def with_change(change: Change) -> Callable[[RunConfig], Parts]:
    """Returns the factory of a run's objects, for `simulate`, with changed step times."""

    def parts_of(config: RunConfig) -> Parts:
        parts = assemble(config)
        return parts._replace(cost=Slowed(parts.cost, change))

    return parts_of

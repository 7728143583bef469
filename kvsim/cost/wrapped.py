"""A cost model around another one: what a step takes is that model's price, and something more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvsim.cost.explain import Explains

if TYPE_CHECKING:
    from kvsim.core.plan import Plan
    from kvsim.cost import Cost


class Wrapped:
    """Prices steps as another cost model does, and explains them if that one does."""

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        if isinstance(cost, Explains):
            self.explain = cost.explain

    @property
    def kind(self) -> str:
        """That of the cost model; `estimated` where it measured or scaled steps, because what is
        added to them was not measured."""
        kind = self._cost.kind
        return "estimated" if kind in ("measured", "scaled") else kind

    @property
    def source(self) -> str:
        """That of the cost model."""
        return self._cost.source

    def step_ns(self, plan: Plan) -> int:
        """Nanoseconds of a step in the cost model."""
        return self._cost.step_ns(plan)

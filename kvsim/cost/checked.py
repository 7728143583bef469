"""Checks what a user's own cost model returns."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

from kvsim.errors import ConfigError

if TYPE_CHECKING:
    from kvsim.core.plan import Plan
    from kvsim.cost import Cost


class Checked:
    """The prices of a cost model. Raises `ConfigError` for those that are not whole nanoseconds, at
    least 0."""

    def __init__(self, cost: Cost) -> None:
        self._cost = cost

    def step_ns(self, plan: Plan) -> int:
        """`Cost.step_ns`."""
        return self._whole_ns(self._cost.step_ns(plan))

    @property
    def _name(self) -> str:
        kind = type(self._cost)
        return f"cost: {kind.__module__}:{kind.__qualname__}"

    def _whole_ns(self, ns: Any) -> int:
        try:
            whole = index(ns)
        except TypeError:
            whole = -1
        if whole < 0:
            raise ConfigError(
                f"{self._name} priced a step at {ns!r}; return whole nanoseconds, 0 or more"
            )
        return whole

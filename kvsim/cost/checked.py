"""Checks what a user's own cost model returns."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

from kvsim.errors import ConfigError

if TYPE_CHECKING:
    from kvsim.cost import Cost
    from kvsim.engine.plan import Plan


class Checked:
    """The prices of a cost model. Raises `ConfigError` for those that are not whole nanoseconds, at
    least 0."""

    longest_decodes = 0

    def __init__(self, cost: Cost, longest_decodes: int) -> None:
        self._cost: Any = cost
        self.longest_decodes = longest_decodes

    def step_ns(self, plan: Plan) -> int:
        """`Cost.step_ns`."""
        return self._whole_ns(self._cost.step_ns(plan))

    def decode_ns(self, *sums: Any) -> int:
        """`PricesLongest.decode_ns`."""
        return self._whole_ns(self._cost.decode_ns(*sums))

    def decode_run_ns(
        self, sequences: int, context_tokens: int, steps: int, *more: Any
    ) -> list[int]:
        """`PricesLongest.decode_run_ns`. Raises `ConfigError` for more prices than steps, too."""
        times = self._cost.decode_run_ns(sequences, context_tokens, steps, *more)
        if len(times) > steps:
            raise ConfigError(
                f"{self._name} priced {len(times)} steps where {steps} were asked for"
            )
        return [self._whole_ns(ns) for ns in times]

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

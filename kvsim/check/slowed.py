"""Another cost model's times, changed by a factor or by a constant: to try out a correction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvsim.assembly import Parts, assemble
from kvsim.config import RunConfig
from kvsim.cost import Cost, PricesDecodes, PricesLongest, declares_sums, longest_asked
from kvsim.cost.decodes import cut

if TYPE_CHECKING:
    from kvsim.engine.plan import Plan


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
    """A cost model whose times are changed. It needs every plan in full."""

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


class SlowedSums(Slowed):
    """A changed cost model that prices steps from sums (`kvsim.cost.decodes`)."""

    def __init__(self, cost: Cost, change: Change) -> None:
        super().__init__(cost, change)
        assert isinstance(cost, PricesDecodes)
        self._sums: PricesDecodes = cost

    def decode_ns(self, sequences: int, context_tokens: int) -> int:
        """Nanoseconds of a pure decode step."""
        return self._decode(self._sums.decode_ns(sequences, context_tokens))

    def decode_run_ns(
        self, sequences: int, context_tokens: int, steps: int, within_ns: int | None = None
    ) -> list[int]:
        """Nanoseconds of pure decode steps in a row."""
        times = self._sums.decode_run_ns(sequences, context_tokens, steps)
        return cut([self._decode(ns) for ns in times], within_ns)

    def _decode(self, ns: int) -> int:
        return round(ns * self._change.decodes + self._change.step_ns)


class SlowedLongest(SlowedSums):
    """A changed cost model that also prices the longest sequences."""

    def __init__(self, cost: Cost, change: Change) -> None:
        super().__init__(cost, change)
        assert isinstance(cost, PricesLongest)
        self._by_length: PricesLongest = cost

    @property
    def longest_decodes(self) -> int:
        """The number of lengths that the changed cost model reads."""
        return self._by_length.longest_decodes

    def decode_ns(self, sequences: int, context_tokens: int, longest: Sequence[int] = ()) -> int:
        """Nanoseconds of a pure decode step."""
        return self._decode(self._by_length.decode_ns(sequences, context_tokens, longest))

    def decode_run_ns(
        self,
        sequences: int,
        context_tokens: int,
        steps: int,
        within_ns: int | None = None,
        longest: Sequence[int] = (),
    ) -> list[int]:
        """Nanoseconds of pure decode steps in a row."""
        times = self._by_length.decode_run_ns(sequences, context_tokens, steps, longest=longest)
        return cut([self._decode(ns) for ns in times], within_ns)


def with_change(change: Change) -> Callable[[RunConfig, bool], Parts]:
    """Returns the factory of a run's objects, for `simulate`, with changed step times."""

    def parts_of(config: RunConfig, named: bool) -> Parts:
        parts = assemble(config, named)
        kind = SlowedSums if declares_sums(parts.cost) else Slowed
        if declares_sums(parts.cost) and longest_asked(parts.cost):
            kind = SlowedLongest
        return parts._replace(cost=kind(parts.cost, change))

    return parts_of

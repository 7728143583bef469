"""Prices of steps from sums, without the list of their sequences.

A pure decode step lets every sequence of the batch produce one token. It has no prompt chunk, no
copy, and one row of logits for each sequence. Hundreds of such steps may follow each other between
two events of a replica, so a cost model may price a whole series at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from kvsim.engine.plan import Plan


@runtime_checkable
class PricesDecodes(Protocol):
    """A cost model that also prices steps from sums; any other is shown every step in full.

    Such a model reads only the sums of a plan and its `chunks`. So the plans that `step_ns`
    receives may have empty `entries`, `prefills` and `decodes`. The methods return exactly what
    `step_ns` returns for the equivalent plans, and count as such steps in `describe()`. `sequences`
    is at least 1. `context_tokens` is the sum of the sequences' lengths, including the token of the
    step, like `Plan.context_tokens`.
    """

    def step_ns(self, plan: Plan) -> int:
        """Nanoseconds of any step (`kvsim.cost.Cost`)."""
        ...

    def decode_ns(self, sequences: int, context_tokens: int) -> int:
        """Nanoseconds of one pure decode step."""
        ...

    def decode_run_ns(
        self, sequences: int, context_tokens: int, steps: int, within_ns: int | None = None
    ) -> list[int]:
        """Nanoseconds of up to `steps` consecutive pure decode steps of the same sequences.

        `context_tokens` is the sum of lengths in the first step; it grows by `sequences` with every
        step. With `within_ns`, the list ends with the first step that ends at least this long after
        the start of the first step.
        """
        ...


@runtime_checkable
class PricesLongest(PricesDecodes, Protocol):
    """A model whose prices also depend on the longest of the sequences that decode.

    Sums are not enough where a long sequence holds a step up. `step_ns` asks `Plan.longest` for
    them; the other methods are given the same, in descending order and the token of the (first)
    step included. In a series of steps, each length grows by one with every step. A class declares
    all of it by defining the three itself.
    """

    @property
    def longest_decodes(self) -> int:
        """How many lengths it reads at most; with 0 it is treated as a `PricesDecodes`."""
        ...

    def decode_ns(self, sequences: int, context_tokens: int, longest: Sequence[int] = ()) -> int:
        """Nanoseconds of one pure decode step (`PricesDecodes.decode_ns`), given the longest
        lengths."""
        ...

    def decode_run_ns(
        self,
        sequences: int,
        context_tokens: int,
        steps: int,
        within_ns: int | None = None,
        longest: Sequence[int] = (),
    ) -> list[int]:
        """Nanoseconds of consecutive pure decode steps (`PricesDecodes.decode_run_ns`), given the
        longest lengths of the first step."""
        ...


def cut(times: list[int], within_ns: int | None) -> list[int]:
    """`times` up to the first step at whose end `within_ns` have passed; all of them for None."""
    if within_ns is None:
        return times
    passed = 0
    for number, ns in enumerate(times, 1):
        passed += ns
        if passed >= within_ns:
            return times[:number]
    return times

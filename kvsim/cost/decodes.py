"""Prices of steps from sums: of pure decode steps without a plan, of others with a bare one.

A pure decode step lets every sequence of the batch produce one token and does nothing else: no
prompt chunk, no copy, a row of logits for each sequence. Between two events of a replica such steps
follow each other by the hundred, so a cost model may offer them by the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from kvsim.engine.plan import Plan


@runtime_checkable
class PricesDecodes(Protocol):
    """A cost model that may offer sums; one that does not is shown every step in full.

    One that does looks at the sums of a plan and at its `chunks`: in the plans that `step_ns` is
    shown, `entries`, `prefills` and `decodes` may be empty. Answers are those of `step_ns` for the
    equivalent plans, to the bit, and count as such in `describe()`. `sequences` is at least 1;
    `context_tokens` is the sum of their lengths, the token of the step included, as
    `Plan.context_tokens`.
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
        """Nanoseconds of up to `steps` pure decode steps in a row, of the same sequences.

        `context_tokens` is the sum of lengths in the first step; it grows by `sequences` from step
        to step. With `within_ns`, the list ends with the first step at whose end so much time has
        passed since the first began.
        """
        ...


def cut(times: list[int], within_ns: int | None) -> list[int]:
    """`times` up to the first at whose end `within_ns` have passed; all of them for None."""
    if within_ns is None:
        return times
    passed = 0
    for number, ns in enumerate(times, 1):
        passed += ns
        if passed >= within_ns:
            return times[:number]
    return times

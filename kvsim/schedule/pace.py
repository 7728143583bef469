"""What a scheduler says about requests that decode together (`kvsim.schedule.lockstep`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from kvsim.blocks.tables import Tables
from kvsim.request import Request, Sequence

GiveWay = Callable[[Request], None]
"""What a scheduler does with a victim."""


class DecodePrices(NamedTuple):
    """What pure decode steps cost, in nanoseconds (`kvsim.cost.decodes.PricesDecodes`)."""

    step: Callable[[int, int], int]
    """Of one step, from its sequences and the sum of their lengths, the token included."""
    run: Callable[[int, int, int, int | None], list[int]] | None
    """Of steps in a row: from the same and their number, up to the first that ends so many
    nanoseconds after the beginning (None: all); None: has to be asked step by step."""


class Outlook(NamedTuple):
    """What a scheduler promises: as long as nobody arrives or ends, and no block is lacking, its
    next steps are one token for each of the cohort, and nothing else."""

    blocked: int
    """Why the head of the waiting queue is refused: index into `recorder.BLOCKED`."""
    floor_blocks: int
    """The promise holds for steps that begin with so many free blocks."""


CLEAR = Outlook(0, 0)
"""Nobody waits."""


class Moves(Protocol):
    """What a scheduler may do with single requests of a batch (`kvsim.schedule.batch.Batch`)."""

    blocks: Tables

    def grow(self, request: Request) -> None:
        """Slots for the newest tokens of a running request."""
        ...

    def end_sequence(self, sequence: Sequence) -> None:
        """A sequence has all its tokens."""
        ...

    def finish(self, request: Request) -> None:
        """Every sequence of a request has ended."""
        ...

    def length(self, request: Request) -> int:
        """Known tokens of a request of one sequence."""
        ...

    def dissolve(self) -> None:
        """From now on, look at every running request one by one."""
        ...


class Pace(Protocol):
    """The rules of a scheduler that lets requests decode together."""

    ahead: bool
    """Whether it composes a step before the tokens of the step before are known."""
    counts_composed: bool
    """Whether `Sequence.computed` counts tokens from when their step is composed, or settled."""
    lingers: bool
    """Whether a request takes part in one more step after its last token."""

    def decodes(self, request: Request) -> int:
        """Tokens that a running request produces until it ends, one in each step.

        0: it is not that simple. Only the mechanism learns this, no policy.
        """
        ...

    def grow_one(self, batch: Moves, request: Request) -> None:
        """Slots for the next token of a request that `decodes`; there are blocks for it."""
        ...

    def last_tokens(self, batch: Moves, requests: list[Request]) -> None:
        """These requests, which decode together, have got their last token; in running order.

        They have left the cohort, unless the scheduler `lingers`.
        """
        ...

"""What a scheduler says about requests that decode together (`kvsim.batch.lockstep`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from kvsim.blocks.tables import Tables
from kvsim.plan import Plan
from kvsim.request import Request

GiveWay = Callable[[Request], None]
"""What a scheduler does with a victim."""


class Terms(NamedTuple):
    """How a scheduler goes about its steps as long as nothing out of the ordinary comes up:
    requests of one sequence are admitted in order, decode together, and give way from the tail.

    `kvsim.batch.stretch` takes the same steps by them as the scheduler composes.
    """

    mixes: bool
    """Whether a step takes prompts on after the decodes; if not, it does instead of them."""
    chunked: bool
    """Whether a prompt may be spread over steps, as `max_num_batched_tokens` leaves room."""
    by_chunk: bool
    """Whether a prompt then gets its blocks chunk by chunk; if not, all when it is admitted."""
    prompts_first: bool
    """Whether the tokens of prompts are booked before those of decodes, or after them."""
    max_num_batched_tokens: int
    longest: int
    """Known tokens up to which a waiting request is never turned away."""
    spare: bool
    """Whether a request whose last block has room is taken to need a free block, too."""
    requeue: Callable[[deque[Request], Request], None] | None
    """Where the tail waits, when it gave way, until it is computed again; None: another gives way,
    or in another way."""
    blocked: int
    """Where steps are mixed: why nobody is admitted in one in which somebody gave way (index into
    `recorder.BLOCKED`); 0: somebody may be."""


class Moves(Protocol):
    """What a scheduler may do with single requests of a batch (`kvsim.batch.batch.Batch`)."""

    blocks: Tables
    swapped: deque[Request]
    aside: list[Request]

    def grow(self, request: Request) -> None:
        """Slots for the newest tokens of a running request."""
        ...

    def complete(self, request: Request) -> None:
        """A request of one sequence has all its tokens."""
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
        """These requests have got their last token; in running order.

        They have left the cohort, unless the scheduler `lingers`.
        """
        ...


class Sprinter(Pace, Protocol):
    """A scheduler whose steps may be taken many at a time."""

    def terms(self, blocks: Tables) -> Terms | None:
        """The terms of its steps with these blocks; None: each step is composed by itself."""
        ...

    def settle(self, batch: Any, plan: Plan, now_ns: int) -> None:
        """The time of a step has passed, as an engine's `Scheduler` has it."""
        ...

    def undisturbed(self, batch: Moves) -> bool:
        """Whether the next step is as the terms say; then no test of a last token is pending."""
        ...

    def turns_away(self, blocks: Tables, tokens: int, need: int) -> str:
        """Why a waiting request that takes on so many tokens and needs so many blocks is given up;
        empty: it is not."""
        ...

    def refusal(
        self, blocks: Tables, free: int, need: int, asked: int, tokens: int, seqs: int
    ) -> int:
        """Why the head of the waiting queue is not admitted: index into `recorder.BLOCKED`, or 0.

        It needs `need` of `free` blocks and asks for `asked` tokens; the step has `tokens` tokens
        and the engine `seqs` running sequences without it.
        """
        ...

    def refuses_from(self, blocked: int, need: int) -> int:
        """With how many free blocks, and up to now's, the refusal is `blocked` all the same."""
        ...

"""What one engine step does: composed by a scheduler, priced by a cost model, then settled."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvsim.core.plan import NOTHING_MOVED, RECOMPUTE, SWAP, Moved
from kvsim.engine.request import Request

__all__ = ["NOTHING_MOVED", "RECOMPUTE", "SWAP", "Flight", "Moved", "Plan", "Prefill"]


class Prefill(NamedTuple):
    """The part of a request's known tokens that a step takes on."""

    request: Request
    scheduled: int
    """Tokens of the chunk, prefix hits included."""
    cached: int
    """Tokens of the chunk whose KV is already there: they are not computed."""
    computed_before: int
    """Tokens computed before the chunk."""
    samples: bool
    """Whether the chunk reaches the end of the known tokens, so that a token is produced."""
    charged: int
    """The part of `scheduled` that is charged to `max_num_batched_tokens`. Engines differ on prefix
    hits."""


class Plan:
    """One step, in batch order, with the sums that a cost model needs.

    Moves of `Batch` fill it while a scheduler composes; nothing else writes to it. Requests that
    decode together are added to the sums at once, and listed only on demand.
    """

    waits = False
    """Whether transfers of KV go with the step, so that it takes place even if it computes nothing,
    and may wait for them (`Scheduler.waits`)."""

    drafter_ns = 0
    """How much longer the step takes because drafts are made at its end."""

    __slots__ = (
        "_lengths",
        "_longest",
        "_together",
        "batched_tokens",
        "blocked",
        "chunks",
        "context_tokens",
        "copies",
        "decode_seqs",
        "draft_tokens",
        "ignored",
        "left",
        "place",
        "preempted",
        "prefills",
        "rank_tokens",
        "samples",
        "single_decodes",
        "single_lengths",
        "singles",
        "swapped_in",
        "swaps_in",
        "swaps_out",
        "together",
    )

    def __init__(self) -> None:
        self.singles: list[tuple[Request, int, bool]] = []
        """The part of `entries` whose requests are handled one by one."""
        self.single_decodes: list[Request] = []
        """The part of `decodes` whose requests are handled one by one."""
        self.single_lengths: list[int] = []
        """Lengths of the running sequences of these requests, as counted in `context_tokens`."""
        self.prefills: list[Prefill] = []
        self.together = 0
        """Number of further requests that produce one token each: the members of the cohort."""
        self.place = 0
        """Number of `singles` that come before the cohort in the batch."""
        self._together: list[Request] | Callable[[], list[Request]] = []
        self._lengths: Callable[[], list[int]] | None = None
        self._longest: list[int] | None = None
        self.left: list[tuple[int, Request]] = []
        """(place in the running order, request) of members that left the cohort while this step was
        in flight."""
        self.preempted: list[tuple[Request, str]] = []
        """Preempted requests in order, with how each was preempted (`RECOMPUTE` or `SWAP`)."""
        self.swapped_in: list[Request] = []
        self.ignored: list[Request] = []
        """Requests that the engine gave up; they never run again."""
        self.copies: list[tuple[int, int]] = []
        """Copies on write, as (source, target) GPU blocks."""
        self.swaps_out: list[tuple[int, int]] = []
        """(GPU block, CPU block) pairs that are copied before the step computes."""
        self.swaps_in: list[tuple[int, int]] = []
        """(CPU block, GPU block) pairs that are copied after `swaps_out`."""
        self.batched_tokens = 0
        """Tokens charged to `max_num_batched_tokens`."""
        self.blocked = 0
        """Why the head of the waiting queue was refused: index into `kvsim.schema.BLOCKED`."""
        self.chunks: list[tuple[int, int]] = []
        """(new tokens to compute, tokens of context before them) of each prefill."""
        self.decode_seqs = 0
        self.context_tokens = 0
        """Sum of the lengths of decoding sequences, the token of this step included."""
        self.draft_tokens = 0
        """Drafts that the step verifies behind the next tokens of decoding sequences: so many
        tokens more go through the linear layers, and get logits."""
        self.samples = 0
        """Number of positions for which logits are computed."""
        self.rank_tokens: float | None = None
        """Mean tokens of the ranks that share experts, padding included; None: all have as many as
        this one."""

    @property
    def tokens(self) -> int:
        """Tokens that the model computes, drafts included."""
        return self.decode_seqs + self.draft_tokens + sum([new for new, _ in self.chunks])

    @property
    def entries(self) -> list[tuple[Request, int, bool]]:
        """The whole batch in order, as (request, tokens that it takes on, whether it samples)."""
        if not self.together:
            return self.singles
        together = [(request, 1, True) for request in self.members()]
        return self.singles[: self.place] + together + self.singles[self.place :]

    @property
    def decodes(self) -> list[Request]:
        """The requests of `entries` that decode."""
        return self.members() + self.single_decodes if self.together else self.single_decodes

    def members(self) -> list[Request]:
        """The requests counted in `together`. Call it first while the step is composed."""
        if callable(self._together):
            self._together = self._together()
        return self._together

    def lengths(self) -> list[int]:
        """The length of each decoding sequence, including its token of this step. They add up to
        `context_tokens`. Call it while the step is priced.
        """
        return self.single_lengths + self._lengths() if self._lengths else self.single_lengths

    def longest(self, number: int) -> list[int]:
        """The `number` greatest of `lengths`, in descending order. Call it while the step is
        priced."""
        if self._longest is not None:
            return self._longest
        return sorted(self.lengths(), reverse=True)[:number]

    def run_together(
        self,
        number: int,
        members: Callable[[], list[Request]],
        lengths: Callable[[], list[int]],
    ) -> None:
        """Adds a cohort of `number` requests at this place of the batch."""
        self.together = number
        self.place = len(self.singles)
        self._together, self._lengths = members, lengths

    def know_longest(self, lengths: list[int]) -> None:
        """Stores the greatest lengths, in descending order, when nothing else will be asked for."""
        self._longest = lengths

    @property
    def copied_blocks(self) -> int:
        """Blocks copied on the GPU (copy-on-write)."""
        return len(self.copies)

    @property
    def computes(self) -> bool:
        """Whether the model runs in this step."""
        return bool(self.singles or self.together)

    @property
    def empty(self) -> bool:
        """Whether the step changed nothing at all."""
        return not (self.singles or self.together or self.ignored or self.preempted)


class Flight(NamedTuple):
    """A step in flight."""

    plan: Plan
    start_ns: int
    end_ns: int
    moved: Moved
    row: bytes
    """Its row without times and finished requests (`kvsim.schema.completed_row`)."""

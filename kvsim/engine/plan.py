"""What one engine step does: composed by a scheduler, priced by a cost model, then settled."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvsim.engine.request import Request

RECOMPUTE, SWAP = "recompute", "swap"
"""Means of preemption."""


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
    """Of `scheduled`, what is charged to `max_num_batched_tokens`: engines differ on hits."""


class Plan:
    """One step, in batch order, with the sums that a cost model needs.

    Moves of `Batch` fill it while a scheduler composes; nobody else writes to it. Requests that
    decode together are counted in the sums at once, and listed when somebody looks.
    """

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
        "ignored",
        "left",
        "place",
        "preempted",
        "prefills",
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
        """`entries` of the requests that were looked at one by one."""
        self.single_decodes: list[Request] = []
        """`decodes` among them."""
        self.single_lengths: list[int] = []
        """The lengths that count for `context_tokens`, of each running sequence of theirs."""
        self.prefills: list[Prefill] = []
        self.together = 0
        """Further requests, which produce one token each: the members of a cohort."""
        self.place = 0
        """How many of `singles` are before them in the batch."""
        self._together: list[Request] | Callable[[], list[Request]] = []
        self._lengths: Callable[[], list[int]] | None = None
        self._longest: list[int] | None = None
        self.left: list[tuple[int, Request]] = []
        """(place in the running order, request) of members that left the cohort while this step was
        under way."""
        self.preempted: list[tuple[Request, str]] = []
        """Requests that lost their blocks, with the means, in order."""
        self.swapped_in: list[Request] = []
        self.ignored: list[Request] = []
        """Requests the engine gave up without running them (further)."""
        self.copies: list[tuple[int, int]] = []
        """Copy-on-write: (source, target) GPU blocks."""
        self.swaps_out: list[tuple[int, int]] = []
        """(GPU block, CPU block) pairs copied before the step computes."""
        self.swaps_in: list[tuple[int, int]] = []
        """(CPU block, GPU block) pairs, copied next."""
        self.batched_tokens = 0
        """Tokens charged to `max_num_batched_tokens`."""
        self.blocked = 0
        """Why the head of the waiting queue was refused: index into `kvsim.schema.BLOCKED`."""
        self.chunks: list[tuple[int, int]] = []
        """(new tokens computed, tokens of context before them) of each prefill."""
        self.decode_seqs = 0
        self.context_tokens = 0
        """Sum of the lengths of decoding sequences, the token of this step included."""
        self.samples = 0
        """Rows of logits computed."""

    @property
    def entries(self) -> list[tuple[Request, int, bool]]:
        """The whole batch in its order: request, tokens it takes on, whether it samples."""
        if not self.together:
            return self.singles
        together = [(request, 1, True) for request in self.members()]
        return self.singles[: self.place] + together + self.singles[self.place :]

    @property
    def decodes(self) -> list[Request]:
        """The requests of `entries` that decode."""
        return self.members() + self.single_decodes if self.together else self.single_decodes

    def members(self) -> list[Request]:
        """The requests counted in `together`; to be asked first while the step is composed or
        priced."""
        if callable(self._together):
            self._together = self._together()
        return self._together

    def lengths(self) -> list[int]:
        """The length of each decoding sequence, the token of this step included: `context_tokens`
        is their sum. To be asked while the step is priced."""
        return self.single_lengths + self._lengths() if self._lengths else self.single_lengths

    def longest(self, number: int) -> list[int]:
        """The first of `lengths` in descending order; see there."""
        if self._longest is not None:
            return self._longest
        return sorted(self.lengths(), reverse=True)[:number]

    def run_together(
        self,
        number: int,
        members: Callable[[], list[Request]],
        lengths: Callable[[], list[int]],
    ) -> None:
        """Let a cohort of `number` requests take part, at this place of the batch."""
        self.together = number
        self.place = len(self.singles)
        self._together, self._lengths = members, lengths

    def know_longest(self, lengths: list[int]) -> None:
        """All that anybody will ask for are the longest lengths, in descending order."""
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
    """A step that is under way."""

    plan: Plan
    start_ns: int
    end_ns: int
    moved: tuple[int, int]
    """Time on the link, and waiting for it."""
    row: bytes
    """Its row, but for times and who finished (`kvsim.schema.completed_row`)."""

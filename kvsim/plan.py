"""What one engine step does: composed by a scheduler, priced by a cost model, then settled."""

from __future__ import annotations

from typing import NamedTuple

from kvsim.request import Request

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
    """One step, in batch order, with the aggregates that a cost model needs.

    Moves of `Batch` fill it while a scheduler composes; nobody else writes to it.
    """

    __slots__ = (
        "batched_tokens",
        "blocked",
        "chunks",
        "context_tokens",
        "copies",
        "decode_seqs",
        "decodes",
        "entries",
        "ignored",
        "left",
        "preempted",
        "prefills",
        "samples",
        "swapped_in",
        "swaps_in",
        "swaps_out",
        "together",
    )

    def __init__(self) -> None:
        self.entries: list[tuple[Request, int, bool]] = []
        """The whole batch in its order: request, tokens it takes on, whether it samples."""
        self.prefills: list[Prefill] = []
        self.decodes: list[Request] = []
        self.together = 0
        """Requests that produce one token each without being listed (`kvsim.batch.lockstep`)."""
        self.left: list[tuple[int, Request]] = []
        """(place in the running order, request) of those that were counted in `together` and are
        to be looked at one by one since."""
        self.preempted: list[tuple[Request, str]] = []
        """Requests that lost their blocks, with the means, in order."""
        self.swapped_in: list[Request] = []
        self.ignored: list[Request] = []
        """Requests the engine gave up without running them (further)."""
        self.copies: list[tuple[int, int]] = []
        """Copy-on-write: (source, target) GPU blocks."""
        self.swaps_out: list[tuple[int, int]] = []
        """(GPU block, CPU block) pairs copied before the step computes; likewise `swaps_in`."""
        self.swaps_in: list[tuple[int, int]] = []
        self.batched_tokens = 0
        """Tokens charged to `max_num_batched_tokens`."""
        self.blocked = 0
        """Why the head of the waiting queue was refused: index into `recorder.BLOCKED`."""
        self.chunks: list[tuple[int, int]] = []
        """(new tokens computed, tokens of context before them) of each prefill."""
        self.decode_seqs = 0
        self.context_tokens = 0
        """Sum of the lengths of decoding sequences, the token of this step included."""
        self.samples = 0
        """Rows of logits computed."""

    @property
    def copied_blocks(self) -> int:
        """Blocks copied on the GPU (copy-on-write)."""
        return len(self.copies)

    @property
    def computes(self) -> bool:
        """Whether the model runs in this step."""
        return bool(self.entries or self.together)

    @property
    def empty(self) -> bool:
        """Whether the step changed nothing at all."""
        return not (self.entries or self.together or self.ignored or self.preempted)


class Flight(NamedTuple):
    """A step that is under way."""

    plan: Plan
    start_ns: int
    end_ns: int
    moved: tuple[int, int]
    """Time on the link, and waiting for it."""
    before: tuple[int, ...]
    """The columns of its row that were known when it was composed."""

"""What the loop asks of a scheduler."""

from __future__ import annotations

from typing import Any

from mypy_extensions import i64, mypyc_attr

from kvsim.core.batch import Batch
from kvsim.core.plan import NOTHING_MOVED, Moved, Plan
from kvsim.core.request import Request


@mypyc_attr(allow_interpreted_subclasses=True)
class Scheduler:
    """Decides what each step of an engine does. Every method is called at every step."""

    max_num_seqs: i64
    max_num_batched_tokens: i64
    watermark_blocks: i64
    """Blocks that admissions leave free."""
    chunked: bool
    """Whether a prompt may be spread over steps."""
    in_flight: i64
    """Steps composed before the oldest is settled, including the new one."""

    @property
    def longest_sequence(self) -> int | None:
        """Length in tokens at which every sequence ends; None for no limit."""
        return None

    @property
    def ends_early(self) -> bool:
        """Whether it ends requests that their clients give up (`abort`); if not, they go on."""
        return False

    @property
    def lingers(self) -> bool:
        """Whether a request takes part in one more step after its last token."""
        return False

    @property
    def whole_blocks(self) -> bool:
        """Whether chunks end on block boundaries, so that the token budget must be a multiple of
        the block size."""
        return False

    @property
    def gauged(self) -> tuple[str, ...]:
        """Columns of `kvsim.core.schema.STEPS` that its steps have beyond those of every engine."""
        return ()

    def gauges(self, batch: Batch) -> tuple[int, ...]:
        """The values of `gauged` in the step composed last."""
        return ()

    def remarks(self) -> list[str]:
        """What a reader of the result should know about this run, one line each."""
        return []

    def arrive(self, batch: Batch, request: Request) -> None:
        """Accepts a new request into the waiting queue, or rejects it (`Batch.refuse`)."""
        batch.arrive(request)

    # What it returns is checked in the loop, which can say more of it than compiled code.
    def compose(self, batch: Batch, now_ns: int) -> Any:
        """Composes the next step, in the plan that `Batch.begin` returns."""
        raise NotImplementedError

    def waits(self, batch: Batch, plan: Plan, start_ns: int, next_ns: int) -> Moved:
        """How long a step that begins at `start_ns` waits for transfers before it computes. The
        next request arrives at `next_ns`. Asked only where `Plan.waits`."""
        return NOTHING_MOVED

    def overlap(self, batch: Batch, now_ns: int) -> None:
        """Work that the engine's host does while the model runs. By default there is none."""

    def settle(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        """Settles a step once its time has passed: tokens exist, requests end."""
        raise NotImplementedError

    def abort(self, batch: Batch, request: Request) -> bool:
        """Ends a request that its client gave up. Returns whether it was in progress. Asked only of
        schedulers that have `ends_early`."""
        raise NotImplementedError


def check_seqs(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    """Raises `ValueError` where not every sequence can have a token in each step."""
    if max_num_batched_tokens < max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens ({max_num_batched_tokens}) is below max_num_seqs"
            f" ({max_num_seqs}): every running sequence needs one token a step; raise it, or lower"
            " --max-num-seqs"
        )

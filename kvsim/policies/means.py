"""How a victim is preempted: its KV is freed and recomputed, or its blocks are swapped to the CPU.

| `preemption_mode` | means |
|---|---|
| (none) | recompute a request of one sequence, swap others: the rule of vLLM 0.3.3 and 0.6.3 |
| `recompute`, `swap` | always that one, as the engines' own argument says |
| `auto` | whichever takes less time now, by the prices of the run; no engine has it yet |

A rule decides nothing else, and never reads a cost model: prices come from outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kvsim.core.batch import Batch
from kvsim.core.plan import RECOMPUTE, SWAP
from kvsim.core.request import RUNNING, Request

Means = Callable[[Request, Batch], str]
"""Returns `recompute` or `swap` for a victim of a batch; nothing is changed."""


class Prices(Protocol):
    """Prices both ways to preempt a request, from the figures of a run."""

    def recompute_ns(self, tokens: int) -> int:
        """Returns the nanoseconds to compute `tokens` tokens again. Prefix hits cannot be known in
        advance."""
        ...

    def swap_ns(self, blocks: int, queued_blocks: int) -> int:
        """Returns the nanoseconds to copy blocks out and in again, after the copies that are queued
        already."""
        ...


def recompute(victim: Request, batch: Batch) -> str:
    """Frees the blocks; the tokens are computed again."""
    return RECOMPUTE


def swap(victim: Request, batch: Batch) -> str:
    """Copies the blocks to the CPU, and back when there is room."""
    return SWAP


def by_width(victim: Request, batch: Batch) -> str:
    """The engine's own rule: recompute one sequence; swap several, as they share blocks."""
    return RECOMPUTE if victim.width() == 1 else SWAP


class Cheapest:
    """Chooses the faster way; if the CPU pool is full, recompute.

    Recompute is priced by the tokens whose KV would be lost. Swap is priced by the blocks copied
    out and in, after the copies that this step has queued. A request of several samples is swapped,
    because no engine recomputes more than one running sequence.
    """

    def __init__(self, prices: Prices) -> None:
        self._prices = prices

    def __call__(self, victim: Request, batch: Batch) -> str:
        """Returns `recompute` or `swap` for a victim."""
        blocks: Any = batch.blocks
        assert batch.plan is not None
        moving = [s for s in victim.sequences if s.state == RUNNING]
        full = blocks.swap_need(moving, blocks.cpu) > blocks.cpu.free
        if full and len(moving) == 1:
            return RECOMPUTE
        if victim.width() > 1:
            return SWAP
        (sequence,) = moving
        swap_ns = self._prices.swap_ns(len(sequence.table), len(batch.plan.swaps_out))
        return SWAP if swap_ns < self._prices.recompute_ns(sequence.computed) else RECOMPUTE


MEANS: dict[str, Means] = {"recompute": recompute, "swap": swap}
"""Values of `preemption_mode` that need no prices."""


def make_means(
    mode: str | None, prices: Prices | None = None, makes_way_for_waiting: bool = False
) -> Means:
    """Returns the rule of a `preemption_mode`. None stands for the engine's own rule.

    With `makes_way_for_waiting`, victims also yield to waiting requests and then wait themselves.
    If such a victim is swapped, vLLM 0.6.3 crashes, so no choice is left. Raises `ValueError` for
    `auto` in that case or without prices, and for an unknown mode.
    """
    if mode == "auto" and makes_way_for_waiting:
        raise ValueError(
            "preemption_mode: auto cannot choose under scheduling_policy priority, where the engine"
            " dies of swapped victims; use recompute"
        )
    if mode is None:
        return by_width
    if mode == "auto" and prices is not None:
        return Cheapest(prices)
    if mode not in MEANS:
        known = ", ".join((*MEANS, "auto (with prices)"))
        raise ValueError(f"preemption_mode: unknown {mode!r}; choose from {known}")
    return MEANS[mode]

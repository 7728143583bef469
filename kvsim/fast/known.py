"""The schedulers and block managers whose rules the short cuts reproduce.

* A *cohort* (`kvsim.fast.cohort`) reproduces how running requests grow, decode and end. It serves
  schedulers and block managers that override none of that.
* *Repetition* (`kvsim.fast.repeat`) reproduces whole steps. It serves the classes in `TERMS`, by
  exact type.

All other classes decide each step themselves. A class that overrides a method that a cohort
reproduces is given each request on its own, and its decisions count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvsim.engine.batch import Batch
from kvsim.engine.request import Request, Sequence
from kvsim.engine.scheduler import Asked, Scheduler
from kvsim.engine.tables import COUNTED, NAMED, Tables
from kvsim.engines.prefix_runs import PrefixRuns
from kvsim.engines.vllm_063 import BLOCKS, WATERMARK, Vllm063, Vllm063Async
from kvsim.engines.vllm_063_blocks import PrefixCaching
from kvsim.fast.counted import COUNTED_TWINS
from kvsim.rules.means import by_width, recompute
from kvsim.rules.victims import tail

_NO_HITS: list[int] = []
_PROMPTS = {"_prompts", "_saved", "_hindrance", "_never", "turns_away", "refusal"}

FREE: dict[type[Scheduler], frozenset[str]] = {
    Vllm063Async: frozenset(_PROMPTS),
    Vllm063: frozenset(_PROMPTS),
    Scheduler: frozenset(),
}
"""Scheduler → methods that do not concern requests that decode together. A subclass may override
these and the methods in `ANYWHERE` and still be served by a cohort; all others rule it out."""

ANYWHERE = frozenset({"__init__", "arrive", "compose", "names_blocks"})

MANAGERS: tuple[type[Tables], ...] = (PrefixCaching,)
"""Block managers with block ids whose tables a cohort may leave untouched until a block is opened
or filled."""


Ask = Callable[[Tables, Sequence, int, int], Asked]
"""Returns what a waiting request asks for, given the tokens already in the step and the number of
running requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The rules of a scheduler's ordinary steps, in which requests of one sequence are admitted in
    order, decode together, and are preempted from the tail."""

    mixes: bool
    """Whether a step computes prompts after its decodes; if not, it computes prompts instead of
    decodes."""
    chunked: bool
    """Whether a prompt may be split over steps to fit `max_num_batched_tokens`."""
    by_chunk: bool
    """Whether a split prompt gets its blocks chunk by chunk; if not, it gets all of them on
    admission."""
    prompts_first: bool
    """Whether the tokens of prompts are booked before those of decodes; if not, after them."""
    max_num_batched_tokens: int
    longest: int
    """Number of known tokens up to which a waiting request is never given up."""
    spare: bool
    """Whether a request needs a free block even if its last block has room."""
    requeue: Callable[[deque[Request], Request], None] | None
    """Puts a preempted request back into the waiting queue. None if the scheduler chooses victims
    other than the tail, or swaps them."""
    after_preemption: int
    """Where steps are mixed: why a step with a preemption admits no request, as an index into
    `kvsim.schema.BLOCKED`; 0 if it may."""
    seqs_per_step: int
    """Most requests that decode in one step, where `refusal` counts only the prompts of a step.
    0 if it counts all running requests."""
    ask: Ask
    """Returns what a waiting request asks for."""
    refusal: Callable[[Tables, int, int, int, int, int], int]
    """Returns why the head of the waiting queue is not admitted (`Vllm063.refusal`)."""
    turns_away: Callable[[Tables, int, int], str]
    """Returns why a waiting request is given up (`Vllm063.turns_away`)."""
    least_free: Callable[[int, int], int]
    """Maps the reason of a refusal and the blocks needed to a number of free blocks. The reason
    stays the same while at least that many blocks are free, and no more than now."""
    undisturbed: Callable[[Batch], bool]
    """Whether these terms describe the next step."""


def fits_cohort(scheduler: Scheduler, blocks: Tables) -> str:
    """Returns why a cohort cannot serve these classes, or an empty string if it can."""
    known = next(each for each in FREE if isinstance(scheduler, each))
    free = FREE[known] | ANYWHERE
    if isinstance(scheduler, Vllm063) and scheduler.chunked:
        free = ANYWHERE  # Prompts come in while the running requests are off their queue.
    if overridden(scheduler, known) - free:
        return "the scheduler has rules of its own for running requests"
    if blocks.lockstep == COUNTED and type(blocks) in COUNTED_CLASSES:
        return ""
    if blocks.lockstep != NAMED:
        return "the block manager serves requests one by one"
    if not any(type(blocks) is each for each in MANAGERS):
        return "the block manager has rules of its own"
    return ""


def terms_of(scheduler: Scheduler, blocks: Tables) -> Terms | str:
    """Returns the terms of a scheduler over a block manager, or the reason why the scheduler must
    compose every step."""
    make = TERMS.get(type(scheduler))
    if make is None or overridden(scheduler, type(scheduler)):
        return "the scheduler is not listed as one whose steps can be repeated"
    if blocks.lockstep != COUNTED:
        return "the block manager names its blocks"
    return make(scheduler, blocks)


def _vllm_063(scheduler: Any, blocks: Tables) -> Terms | str:
    assert isinstance(scheduler, Vllm063)
    hits_save = blocks.hits_save
    if scheduler.priority:
        return "the priority policy looks at every request"
    if not blocks.grows:
        return "the block manager reserves whole sequences"
    if hits_save.charged or hits_save.blocks or (scheduler.chunked and blocks.needs_keys):
        return "prefix hits change what is admitted"
    recomputes = scheduler.victim is tail and scheduler.means in (by_width, recompute)
    room = (blocks.admission_total - scheduler.watermark_blocks) * blocks.block_size
    watermark_blocks = scheduler.watermark_blocks

    def least_free(blocked: int, need: int) -> int:
        # Blocks are looked at first; with fewer, their lack is the reason.
        return {BLOCKS: 0, WATERMARK: need}.get(blocked, need + watermark_blocks)

    def undisturbed(batch: Batch) -> bool:
        if batch.aside:
            return False
        if isinstance(scheduler, Vllm063Async):
            scheduler.skip_stop_test()
        return True

    return Terms(
        mixes=scheduler.chunked,
        chunked=scheduler.chunked,
        by_chunk=False,
        prompts_first=True,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        longest=min(scheduler.prompt_limit, room),
        spare=blocks.spare_block,
        requeue=scheduler.requeue if recomputes and not scheduler.chunked else None,
        after_preemption=0,
        seqs_per_step=0,
        ask=_ask_without_hits(scheduler, blocks),
        refusal=scheduler.refusal,
        turns_away=scheduler.turns_away,
        least_free=least_free,
        undisturbed=undisturbed,
    )


def _ask_without_hits(scheduler: Scheduler, blocks: Tables) -> Ask:
    most, size, chunked = scheduler.max_num_batched_tokens, blocks.block_size, scheduler.chunked

    def ask(blocks: Tables, sequence: Sequence, used: int, running: int) -> Asked:
        length = sequence.length
        left = most - used
        # It asks for more than is left where that is nothing.
        tokens = left if chunked and 0 < left < length else length
        return _NO_HITS, 0, tokens, tokens, -(-length // size)

    return ask


TERMS: dict[type[Scheduler], Callable[[Any, Tables], Terms | str]] = {
    Vllm063: _vllm_063,
    Vllm063Async: _vllm_063,
}
"""Schedulers, by exact type, whose ordinary steps can be repeated."""

COUNTED_CLASSES = frozenset({*COUNTED_TWINS.values(), PrefixRuns})
"""Block managers, by exact type, that count their blocks."""


def overridden(built: object, known: type) -> set[str]:
    """Returns the names of the attributes that an object overrides, compared with `known`, a class
    of which it is an instance."""
    above = known.__mro__
    own = {name for kind in type(built).__mro__ if kind not in above for name in vars(kind)}
    shadowed = {name for name in vars(built) if callable(getattr(known, name, None))}
    return ({name for name in own if hasattr(known, name)} | shadowed) - _SAYS_NOTHING


_SAYS_NOTHING = {"__module__", "__doc__", "__annotations__", "__dict__", "__weakref__"}

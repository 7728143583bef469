"""Chooses the victim when a running request needs a block and none is free, and the means: its KV
is freed and recomputed, or its blocks are swapped to the CPU.

A policy receives the *candidates* in the order of the running queue and returns one of them. The
engine decides which requests are candidates:

| engine | candidates |
|---|---|
| vLLM V1 | all running requests, the one that lacks a block and those scheduled included |
| vLLM 0.6.3, 0.3.3, nano-vllm | running requests behind the one that lacks a block; none: itself |

Without a policy, an engine follows its own rule: `tail`, or `priority` in vLLM V1 under
`scheduling_policy = "priority"`. A policy decides nothing else: neither how the victim is
preempted, nor which requests the priority policy of vLLM 0.6.3 moves aside for a waiting request of
better priority.

A policy may look at what is computed and generated so far. It must not look at the final output
length (`Request.output_length`).

| `preemption_mode` | means |
|---|---|
| (none) | recompute a request of one sequence, swap others: the rule of vLLM 0.3.3 and 0.6.3 |
| `recompute`, `swap` | always that one, as the engines' own argument says |
| `auto` | whichever takes less time now, by the prices of the run; no engine has it yet |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvsim.core.batch import Batch
from kvsim.core.blocks import BlockManager
from kvsim.core.plan import RECOMPUTE, SWAP
from kvsim.core.request import RUNNING, Request
from kvsim.errors import ConfigError
from kvsim.policies.future import Future
from kvsim.policies.named import callable_with, find_rule
from kvsim.workload.clients import random_stream

Victim = Callable[[Sequence[Request], BlockManager], Request]
"""Returns one of the candidates; there is at least one. It must not change the block tables."""


def tail(candidates: Sequence[Request], blocks: BlockManager) -> Request:
    """The last running request: the one admitted last, unless the engine reorders them."""
    return candidates[-1]


def head(candidates: Sequence[Request], blocks: BlockManager) -> Request:
    """The first request of the running queue."""
    return candidates[0]


def least_computed(candidates: Sequence[Request], blocks: BlockManager) -> Request:
    """The request with the fewest computed tokens: least work is lost (vLLM PR #53723)."""
    return min(candidates, key=_computed)


def most_computed(candidates: Sequence[Request], blocks: BlockManager) -> Request:
    """The request with the most computed tokens: a bad choice, as a bound for the others."""
    return max(candidates, key=_computed)


def priority(candidates: Sequence[Request], blocks: BlockManager) -> Request:
    """The worst request by (priority, arrival): vLLM V1's own rule under its priority policy."""
    return max(candidates, key=by_priority)


def priority_by_trace(candidates: Sequence[Request], blocks: BlockManager) -> Request:
    """The same in releases in which requests of equal priority and arrival have no order."""
    return max(candidates, key=lambda each: (*by_priority(each), each.index))


class RandomVictim:
    """A random candidate, drawn from a random stream of its own."""

    def __init__(self, *, seed: int) -> None:
        self._random = random_stream(seed, "victim")

    def __call__(self, candidates: Sequence[Request], blocks: BlockManager) -> Request:
        return candidates[int(self._random.integers(len(candidates)))]


class CostAware:
    """The request with the most blocks per token to recompute, discounted by progress: our reading
    of vLLM PR #56897.

    The candidate with the highest score B / max(1, T) · (1 − O / max(1, M)) is chosen; among
    equals, the first. B: blocks in its tables that no other request holds. T: its known tokens,
    prompt and output. O: tokens generated so far. M: the most it may generate. The proposal uses
    `max_tokens` for M. A trace has no such value, and with `ignore_eos` it would be the true output
    length. So M is what the engine assumes if a client gives none: `max_model_len` minus the
    prompt.
    """

    def __init__(self, *, max_model_len: int) -> None:
        self._max_model_len = max_model_len

    def __call__(self, candidates: Sequence[Request], blocks: BlockManager) -> Request:
        return max(candidates, key=lambda request: self._score(request, blocks))

    def _score(self, request: Request, blocks: BlockManager) -> float:
        running = request.in_state(RUNNING)
        own = sum(map(blocks.own_blocks, running))
        tokens = sum(int(s.length) for s in running)
        generated = max(int(s.length) for s in running) - int(request.input_length)
        most = max(1, self._max_model_len - int(request.input_length))
        return own / max(1, tokens) * (1 - generated / most)


VICTIMS: dict[str, Callable[..., Any]] = {
    "tail": tail,
    "head": head,
    "least-computed": least_computed,
    "most-computed": most_computed,
    "random": RandomVictim,
    "cost-aware": CostAware,
    "priority": priority,
}
"""Values of `--victim`: policies, and classes that make one from `seed` or `max_model_len`."""


def make_victim(
    name: str | None, *, seed: int, max_model_len: int, future: Future | None = None
) -> Victim | None:
    """Returns the policy called `name`; None stands for the engine's own rule.

    A user's `package.module:name` is a function of (candidates, blocks), or a class that makes one.
    Its constructor may name `seed`, `max_model_len` and `future`. Raises `ConfigError` for an
    unknown name, and during the run if a policy returns something other than a candidate.
    """
    if name is None:
        return None
    given = {"seed": seed, "max_model_len": max_model_len, "future": future or Future()}
    policy: Victim = find_rule("victim", VICTIMS, name, _guarded, **given)
    return policy


def _guarded(label: str, policy: Victim) -> Victim:
    """Wraps a user's policy and checks its choices."""
    callable_with(label, policy, "candidates", "blocks")

    def choose(candidates: Sequence[Request], blocks: BlockManager) -> Request:
        victim = policy(candidates, blocks)
        if victim not in candidates:
            raise ConfigError(
                f"{label} returned {victim!r}, which is not a candidate; return an entry of its"
                " first argument"
            )
        return victim

    return choose


def by_priority(request: Request) -> tuple[int, int]:
    """Sort key of the priority policies: smaller keys are served first."""
    return request.priority, request.arrival_ns


def _computed(request: Request) -> int:
    """Returns the tokens whose KV the request would lose. Samples share their prompt, so the
    longest counts."""
    return max(sequence.computed for sequence in request.in_state(RUNNING))


Means = Callable[[Request, Batch], str]
"""Returns `recompute` or `swap` for a victim of a batch; nothing is changed."""


class Prices(Protocol):
    """Prices both ways to preempt a request, from the figures of a run."""

    def recompute_ns(self, tokens: int) -> int:
        """Returns the nanoseconds to compute `tokens` tokens again. Prefix hits cannot be known in
        advance."""

    def swap_ns(self, blocks: int, queued_blocks: int) -> int:
        """Returns the nanoseconds to copy blocks out and in again, after the copies that are queued
        already."""


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
        moving = victim.in_state(RUNNING)
        full = blocks.swap_need(moving, blocks.cpu) > blocks.cpu.free
        # Several that do not fit are swapped all the same, and the engine dies of it.
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

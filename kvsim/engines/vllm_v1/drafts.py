"""Speculative decoding: who proposes draft tokens, and how many of them are accepted.

A step verifies the drafts of a request together with its next token, so it computes 1 + d tokens
and yields 1 to 1 + d. vLLM 0.33.0 `config/speculative.py`, `v1/core/sched/scheduler.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import NamedTuple, Protocol

from mypy_extensions import mypyc_attr
from xxhash import xxh3_64_digest

from kvsim.core.plan import Plan
from kvsim.core.request import Request


class Method(NamedTuple):
    """What a way of drafting asks of the scheduler."""

    lookahead: int = 0
    """Slots that it fills ahead of the tokens, beyond one per draft; -1: none at all."""
    slots: int = 0
    """Further input positions that it takes for each request of a step."""
    needs_next: bool = False
    """Whether the KV of its own layers depends on the token that follows, which a block of the
    prefix cache has to take into account."""


METHODS: dict[str, Method] = {
    "ngram": Method(lookahead=-1),
    "eagle": Method(needs_next=True),
    "draft_model": Method(slots=1),
    "dflash": Method(lookahead=1),
}
"""Values of the `method` of a speculative configuration; `eagle` stands for EAGLE-3 and MTP, too.
Source: vLLM 0.33.0 `config/speculative.py`, `max_num_new_slots_for_drafting`."""


class Verifier(Protocol):
    """Knows which drafts the model accepts. Your own is `package.module:Class`."""

    def accepted(self, sequence: Request, drafts: int) -> int:
        """Returns how many of `drafts` drafts behind the known tokens of a sequence the model
        accepts."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Speculation:
    """Proposes drafts, and tells which ones the model accepts. This one proposes none."""

    num_spec_tokens = 0
    lookahead = 0
    """Slots allocated ahead of the tokens of a step."""
    slots = 0
    """Input positions that a request takes from the budget beside its tokens."""
    eagle_drop = False
    """Whether a prefix hit loses its last block, because the token after it was another one."""
    lookahead_keys = False
    """Whether the key of a block covers the token after it, so that hits lose nothing."""

    def propose(self, sequence: Request) -> int:
        """Returns how many drafts follow the known tokens of a sequence. Not asked with
        asynchronous scheduling: there, a step is composed before its drafts are known, and has room
        for `num_spec_tokens` of them."""
        return 0

    def accepted(self, sequence: Request, drafts: int) -> int:
        """Returns how many of `drafts` drafts the model accepts after the known tokens."""
        return 0

    def drafter_ns(self, plan: Plan) -> int:
        """Returns how much longer a step takes because drafts are made at its end."""
        return 0


@mypyc_attr(allow_interpreted_subclasses=True)
class Drafts(Speculation):
    """Always as many drafts as configured, of which the model accepts as many as a verifier
    says."""

    def __init__(
        self,
        method: str,
        num_spec_tokens: int,
        *,
        verifier: Verifier | None = None,
        drafter: Callable[[Plan], int] | None = None,
        connector: bool = False,
        draft_slots: int | None = None,
        disable_eagle_block_drop: bool = False,
        disable_lookahead_block_hashes: bool = False,
    ) -> None:
        """`drafter` tells how long the drafts of a step take to make, in nanoseconds. `connector`:
        whether there is a KV connector. Lookahead keys would be unknown to it."""
        kind = METHODS.get(method, Method())
        self._verifier, self._drafter = verifier or Speculation(), drafter
        self.num_spec_tokens = num_spec_tokens
        self.lookahead = 0 if kind.lookahead < 0 else num_spec_tokens + kind.lookahead
        self.slots = kind.slots if draft_slots is None else draft_slots
        if kind.needs_next and not disable_eagle_block_drop:
            self.eagle_drop = connector or disable_lookahead_block_hashes
            self.lookahead_keys = not self.eagle_drop

    def propose(self, sequence: Request) -> int:
        return self.num_spec_tokens

    def accepted(self, sequence: Request, drafts: int) -> int:
        return min(drafts, self._verifier.accepted(sequence, drafts)) if drafts else 0

    def drafter_ns(self, plan: Plan) -> int:
        return 0 if self._drafter is None else self._drafter(plan)


class Rates:
    """Accepts i drafts or more with the probability `rates[i - 1]`.

    That is what `synthetic_acceptance_rates` are in vLLM 0.33.0 (`config/speculative.py`).
    """

    def __init__(self, rates: Seq[float], seed: int) -> None:
        self.rates = tuple(rates)
        self._limits = [limit for rate in rates if (limit := _limit(rate))]
        self._seed = seed

    def accepted(self, sequence: Request, drafts: int) -> int:
        drawn = xxh3_64_digest(f"{sequence.length}/{sequence.id}".encode(), self._seed)
        accepted = 0
        for limit in self._limits:
            # Bytes of equal number, the highest first, compare as the numbers do.
            if accepted == drafts or drawn > limit:
                break
            accepted += 1
        return accepted


def _limit(rate: float) -> bytes:
    """The greatest of the 2**64 draws with which a draft of this rate is accepted: draw n is, if
    (n + 1) / 2**64 is at most the rate. Empty: none is."""
    whole = 1 << 64
    least = int(rate * whole)
    # A number of this size has fewer digits as a float, so that some greater ones are equal to it.
    greater = range(least + 1, least + (1 << 12))
    most = min(whole, least + bisect_right(greater, rate, key=lambda number: number / whole))
    return (most - 1).to_bytes(8, "big") if most else b""


class Recorded:
    """Accepts as many drafts as in the recorded steps of each request.

    The steps of a request follow each other along its output. One that begins within a recorded
    step accepts what is left of that; behind the last one, the first one follows again.
    """

    def __init__(self) -> None:
        self._steps: Seq[Seq[int]] = ()
        self._ends: dict[int, list[int]] = {}

    def learn(self, steps: Seq[Seq[int]]) -> None:
        """`steps`: for each request of the trace, the drafts accepted in each of its steps."""
        self._steps = steps

    def accepted(self, sequence: Request, drafts: int) -> int:
        request = sequence.request
        ends = self._ends.get(request.index)
        if ends is None:
            ends = [*accumulate(1 + each for each in self._steps[request.index])]
            self._ends[request.index] = ends
        # The prompt yields the first token.
        place = (sequence.length - request.input_length - 1) % ends[-1]
        return min(drafts, ends[bisect_right(ends, place)] - place - 1)

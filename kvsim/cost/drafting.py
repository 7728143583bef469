"""Prices drafts: making them, which makes a step longer, and verifying them.

Verifying is priced by the cost model of the run. With d drafts of a sequence, d tokens more go
through the linear layers of a step and get logits (`Plan.draft_tokens`). Its attention reads the
same keys and values once for all of them, so it costs as much as for one token. That is an
estimate: it holds as long as attention is limited by memory. Attention of latent vectors (DeepSeek)
comes close to its arithmetic with one token, and is priced too low.

| drafts come from | time of the drafter |
|---|---|
| n-grams | none: the look-up on the host is not modelled |
| layers behind the model: EAGLE, MTP | d passes of so many layers, each with logits |
| layers that make all drafts at once: DFlash | one pass |
| another model | d passes of that model, priced by the cost model of the run for that model |

The first pass has all tokens of the step, the others one token of each sequence. A pass takes no
host time, as if all passes were one CUDA graph. All of this is an estimate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvsim.cost.explain import Explains, Wrapped, terms_of

if TYPE_CHECKING:
    from kvsim.core.plan import Plan
    from kvsim.cost import Cost


class DraftedCost(Wrapped):
    """A cost model whose steps also take the time of the drafter."""

    def __init__(self, cost: Cost, drafter: str) -> None:
        """`drafter`: where its time comes from, in words."""
        super().__init__(cost)
        self._drafter = drafter

    def step_ns(self, plan: Plan) -> int:
        """Nanoseconds of a step with its drafter."""
        return self._cost.step_ns(plan) + plan.drafter_ns

    def describe(self) -> dict[str, Any]:
        """That of the cost model, and of the drafter."""
        return {**self._cost.describe(), "kind": self.kind, "drafter": self._drafter}


class Passes:
    """Prices a drafter: `number` passes of a share of the layers that `cost` prices."""

    def __init__(self, cost: Explains, share: float, number: int) -> None:
        self._terms, self._share, self._number = terms_of(cost), share, number

    def __call__(self, plan: Plan) -> int:
        """Nanoseconds that the drafter takes at the end of a step."""
        sequences, context = plan.decode_seqs, plan.context_tokens
        for each in plan.prefills:
            if each.samples:
                sequences += 1
                context += each.computed_before + each.scheduled
        if not sequences:
            return 0
        first_ns = self._pass_ns(sequences, context, plan.tokens - sequences)
        return round(first_ns + (self._number - 1) * self._pass_ns(sequences, context, 0))

    def _pass_ns(self, sequences: int, context_tokens: int, draft_tokens: int) -> float:
        terms = self._terms(0, 0, sequences, context_tokens, sequences, 0, draft_tokens)
        _, dense, attention, head, _ = terms
        return (dense + attention) * self._share + head


class Fixed:
    """A drafter that takes the same time in every step in which a sequence gets a token."""

    def __init__(self, us: float) -> None:
        self._ns = round(us * 1000)

    def __call__(self, plan: Plan) -> int:
        """Nanoseconds that the drafter takes at the end of a step."""
        return self._ns if plan.samples else 0

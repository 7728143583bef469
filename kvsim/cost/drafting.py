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

from kvsim.cost.explain import Explains, Work, Wrapped

if TYPE_CHECKING:
    from kvsim.core.plan import Plan
    from kvsim.cost import Cost

_KERNELS = ("dense", "attention_decode", "head")


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
        self._cost, self._share, self._number = cost, share, number

    def __call__(self, plan: Plan) -> int:
        """Nanoseconds that the drafter takes at the end of a step."""
        import numpy as np

        ready = [each for each in plan.prefills if each.samples]
        sequences = plan.decode_seqs + len(ready)
        if not sequences:
            return 0
        context = plan.context_tokens
        context += sum(each.computed_before + each.scheduled for each in ready)
        # The first pass, and one of the others.
        none, seqs = np.zeros(2, np.int64), np.full(2, sequences)
        drafts = np.array([plan.tokens - sequences, 0])
        work = Work(none, none, seqs, np.full(2, context), seqs, none, drafts)
        terms = self._cost.explain(work)
        dense, attention, head = (np.broadcast_to(terms.get(key, 0.0), 2) for key in _KERNELS)
        first_ns, later_ns = map(float, (dense + attention) * self._share + head)
        return round(first_ns + (self._number - 1) * later_ns)


class Fixed:
    """A drafter that takes the same time in every step in which a sequence gets a token."""

    def __init__(self, us: float) -> None:
        self._ns = round(us * 1000)

    def __call__(self, plan: Plan) -> int:
        """Nanoseconds that the drafter takes at the end of a step."""
        return self._ns if plan.samples else 0

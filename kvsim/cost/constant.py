"""Linear step time with fixed coefficients: transparent and exact, but unlike any real machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvsim.cost.explain import ByStep

if TYPE_CHECKING:
    from kvsim.core.plan import Plan


class ConstantCost(ByStep):
    """step + prompt tokens and drafts, decoding sequences and their context, each times a constant.

    The defaults describe an 8 B model on a data-centre GPU in round numbers. Times are whole
    nanoseconds, so sums are exact: `ValueError` for anything finer. Block copies are free.
    """

    kind = "constant"

    def __init__(
        self,
        step_us: float = 6000,
        prefill_token_us: float = 40,
        decode_seq_us: float = 20,
        context_token_ns: int = 43,
    ) -> None:
        self._step_ns = _whole_ns("step_us", step_us * 1000)
        self._prefill_token_ns = _whole_ns("prefill_token_us", prefill_token_us * 1000)
        self._decode_seq_ns = _whole_ns("decode_seq_us", decode_seq_us * 1000)
        self._context_token_ns = _whole_ns("context_token_ns", context_token_ns)

    @property
    def source(self) -> str:
        """The formula with its coefficients."""
        return (
            f"constant: {self._step_ns / 1000:g} us"
            f" + {self._prefill_token_ns / 1000:g} us per prompt token"
            f" + {self._decode_seq_ns / 1000:g} us per decoding sequence"
            f" + {self._context_token_ns} ns per token of its context"
        )

    def step_ns(self, plan: Plan) -> int:
        """Nanoseconds of a step."""
        ns = (
            self._step_ns
            + plan.decode_seqs * self._decode_seq_ns
            + plan.context_tokens * self._context_token_ns
        )
        ns += plan.draft_tokens * self._prefill_token_ns
        for tokens, _ in plan.chunks:
            ns += tokens * self._prefill_token_ns
        return ns

    def terms(self, *counts: int) -> tuple[float, ...]:
        """What the parts of a step take (`ByStep.terms`); prompts and decodes count as dense."""
        prefill_tokens, _, decode_seqs, context_tokens, _, _, draft_tokens = counts
        dense = (prefill_tokens + draft_tokens) * self._prefill_token_ns
        dense += decode_seqs * self._decode_seq_ns
        return self._step_ns, dense, context_tokens * self._context_token_ns, 0.0, 0.0

    def describe(self) -> dict[str, Any]:
        """Coefficients in nanoseconds."""
        return {
            "kind": self.kind,
            "source": self.source,
            "step_ns": self._step_ns,
            "prefill_token_ns": self._prefill_token_ns,
            "decode_seq_ns": self._decode_seq_ns,
            "context_token_ns": self._context_token_ns,
        }


def _whole_ns(key: str, ns: float) -> int:
    if not 0 <= ns < float("inf") or abs(ns - round(ns)) > 1e-6:
        raise ValueError(f"{key}: expected a whole number of nanoseconds of at least 0")
    return round(ns)

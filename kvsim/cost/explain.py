"""Splits step times into terms after the run, from the counts of many steps at once.

A step's row holds the number of prompt tokens, but not how they were divided into chunks. So
attention of prompts cannot be computed; it is what remains of the step's time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]
    from kvsim.core.plan import Plan
    from kvsim.cost import Cost


class Work(NamedTuple):
    """Counts of many steps, one entry each, as in their rows; see `kvsim.core.plan.Plan`."""

    prefill_tokens: Ints
    prefill_seqs: Ints
    decode_seqs: Ints
    context_tokens: Ints
    samples: Ints
    copied_blocks: Ints
    draft_tokens: Ints | int = 0

    @property
    def tokens(self) -> Ints:
        """Tokens that the linear layers see."""
        return self.prefill_tokens + self.decode_seqs + self.draft_tokens

    @property
    def decode_tokens(self) -> Ints:
        """Tokens of decoding sequences, drafts included."""
        return self.decode_seqs + self.draft_tokens

    def without_prompts(self) -> Work:
        """These steps without their prompts."""
        import numpy as np

        none, seqs = np.zeros_like(self.decode_seqs), self.decode_seqs
        drafts = self.draft_tokens
        return Work(none, none, seqs, self.context_tokens, seqs + drafts, none, drafts)

    def at(self, places: Any) -> Work:
        """Some of these steps."""
        drafts = self.draft_tokens
        picked = Work(*(column[places] for column in self[:6]))
        return picked._replace(draft_tokens=drafts if isinstance(drafts, int) else drafts[places])


@runtime_checkable
class Explains(Protocol):
    """The method of a cost model that explains its prices; it is optional."""

    def explain(self, work: Work) -> dict[str, Any]:
        """Nanoseconds, as floats, of `host`, `dense`, `attention_decode`, `head` and `copies`.

        Missing keys count as 0. They are the terms of `step_ns` before it is rounded or raised to a
        floor. `rest` names the one that takes what is left of a step without prompts, `host` by
        default: a launch floor held the step up.
        """
        ...


def each(price: Callable[..., float], *counts: Ints) -> Floats:
    """What each step takes, given its counts."""
    import numpy as np

    steps = zip(*(column.tolist() for column in counts), strict=True)
    return np.array([price(*step) for step in steps], np.float64)


class Wrapped:
    """Prices steps as another cost model does, and explains them if that one does."""

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self._explains = cost if isinstance(cost, Explains) else None
        if self._explains is not None:
            self.explain = self._explains.explain

    @property
    def kind(self) -> str:
        """That of the cost model; `estimated` where it measured or scaled steps, because what is
        added to them was not measured."""
        kind = self._cost.kind
        return "estimated" if kind in ("measured", "scaled") else kind

    @property
    def source(self) -> str:
        """That of the cost model."""
        return self._cost.source

    def step_ns(self, plan: Plan) -> int:
        """Nanoseconds of a step in the cost model."""
        return self._cost.step_ns(plan)

"""Splits step times into terms after the run, from the counts of many steps at once.

A step's row holds the number of prompt tokens, but not how they were divided into chunks. So
attention of prompts cannot be computed; it is what remains of the step's time.
"""

from __future__ import annotations

from array import array
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    from kvsim.core.plan import Plan
    from kvsim.cost import Cost
    from kvsim.cost.sustained import Sustained


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
        # Each decode and each draft gets logits.
        return Work(none, none, seqs, self.context_tokens, seqs + drafts, none, drafts)

    def at(self, places: Any) -> Work:
        """Some of these steps."""
        drafts = self.draft_tokens
        picked = Work(*(column[places] for column in self[:6]))
        return picked._replace(draft_tokens=drafts if isinstance(drafts, int) else drafts[places])


class Terms(NamedTuple):
    """Nanoseconds of a step by what takes them, before any rounding or floor."""

    host: float
    dense: float
    attention_decode: float
    """Attention of decoding sequences."""
    head: float
    copies: float


@runtime_checkable
class Explains(Protocol):
    """The method of a cost model that explains its prices; it is optional."""

    def explain(self, work: Work) -> dict[str, Any]:
        """Nanoseconds, as floats, of each of `Terms`.

        Missing keys count as 0. They are the terms of `step_ns` before it is rounded or raised to a
        floor. `rest` names the one that takes what is left of a step without prompts, `host` by
        default: a launch floor held the step up.
        """
        ...


class ByStep:
    """A cost model that explains each step by its own counts."""

    rest = "host"
    """The term that takes what is left of a step without prompts."""

    def terms(self, *counts: int) -> tuple[float, ...]:
        """`Terms` of a step with the counts of `Work`."""
        raise NotImplementedError

    def all_terms(self, counts: list[list[int]]) -> Any:
        """`Terms` of many steps, one behind the other, as a buffer of floats; each count of `Work`
        is a list of its own."""
        return array("d", chain.from_iterable(map(self.terms, *counts)))

    def explain(self, work: Work) -> dict[str, Any]:
        """The terms of many steps (`Explains`)."""
        import numpy as np

        columns = np.broadcast_arrays(*work)
        terms = np.frombuffer(self.all_terms([column.tolist() for column in columns]))
        terms = terms.reshape(-1, len(Terms._fields)).T
        return {**dict(zip(Terms._fields, terms, strict=True)), "rest": self.rest}


class Compiled(ByStep):
    """A cost model that compiled code prices, with no call of Python's between."""

    _compiled: Sustained

    @property
    def step_ns(self) -> Callable[[Plan], int]:
        """Nanoseconds of a step."""
        return self._compiled.step_ns

    @property
    def terms(self) -> Callable[..., tuple[float, ...]]:
        """What the parts of a step take."""
        return self._compiled.terms

    @property
    def all_terms(self) -> Callable[[list[list[int]]], Any]:
        """What the parts of many steps take; a subclass with terms of its own is asked for each."""
        # Compiled code would call its own `terms`, past those of the subclass.
        own = type(self).terms is not Compiled.terms
        return super().all_terms if own else self._compiled.all_terms


def terms_of(cost: Explains) -> Callable[..., tuple[float, ...]]:
    """What explains one step by its counts, as `ByStep.terms` does."""
    if isinstance(cost, ByStep) and type(cost).explain is ByStep.explain:
        return cost.terms

    def explained(*counts: int) -> tuple[float, ...]:
        import numpy as np

        terms = cost.explain(Work(*(np.array([count]) for count in counts)))
        return tuple(float(np.broadcast_to(terms.get(key, 0.0), 1)[0]) for key in Terms._fields)

    return explained


class Wrapped:
    """Prices steps as another cost model does, and explains them if that one does."""

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        # `Explains` goes by the presence of the method, so a model without one must not get it
        # here.
        if isinstance(cost, Explains):
            self.explain = cost.explain

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

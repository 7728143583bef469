"""What the parts of steps take, from the counts of their rows: for after a run, many at once.

A row knows how many tokens of prompts a step computed, but not in which chunks. So attention of
prompts is not among the answers: it is what is left of the step.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Work(NamedTuple):
    """Counts of many steps, an entry each, as in their rows; see `kvsim.engine.plan.Plan`."""

    prefill_tokens: Ints
    prefill_seqs: Ints
    decode_seqs: Ints
    context_tokens: Ints
    samples: Ints
    copied_blocks: Ints

    @property
    def tokens(self) -> Ints:
        """Tokens that the linear layers see."""
        return self.prefill_tokens + self.decode_seqs

    def without_prompts(self) -> Work:
        """The same steps if they only decoded."""
        none = np.zeros_like(self.decode_seqs)
        return Work(none, none, self.decode_seqs, self.context_tokens, self.decode_seqs, none)


@runtime_checkable
class Explains(Protocol):
    """What a cost model may offer beside `Cost`."""

    def explain(self, work: Work) -> dict[str, Any]:
        """Nanoseconds, as floats, of `host`, `dense`, `attention_decode`, `head` and `copies`.

        Absent: 0. They are the terms of `step_ns`, before it is rounded or raised to a floor.
        """
        ...

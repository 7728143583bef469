"""How many drafts the model accepts: by rates, or as a trace recorded it.

Nobody computes tokens here, so what is accepted has to be known from elsewhere. It is drawn by the
seed, the request and the number of its tokens so far. So it does not depend on what else runs, and
two settings that are compared meet the same luck.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Seq
from hashlib import blake2b
from itertools import accumulate

from kvsim.core.request import Request


class Rates:
    """Accepts i drafts or more with the probability `rates[i - 1]`.

    That is what `synthetic_acceptance_rates` are in vLLM 0.33.0 (`config/speculative.py`).
    """

    def __init__(self, rates: Seq[float], seed: int) -> None:
        self.rates = tuple(rates)
        self._falling = [-rate for rate in rates]
        self._key = seed.to_bytes(32, "little")

    def accepted(self, sequence: Request, drafts: int) -> int:
        """Returns how many of `drafts` drafts are accepted."""
        place = f"{sequence.length}/{sequence.request.id}".encode()
        drawn = int.from_bytes(blake2b(place, digest_size=8, key=self._key).digest(), "little")
        return min(drafts, bisect_right(self._falling, -(drawn + 1) / (1 << 64)))


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
        """Returns how many of `drafts` drafts are accepted."""
        request = sequence.request
        ends = self._ends.get(request.index)
        if ends is None:
            ends = [*accumulate(1 + each for each in self._steps[request.index])]
            self._ends[request.index] = ends
        # The prompt yields the first token.
        place = (sequence.length - request.input_length - 1) % ends[-1]
        return min(drafts, ends[bisect_right(ends, place)] - place - 1)

"""Times of the all-reduces of a step, by its tokens."""

from __future__ import annotations

from math import ceil

from kvsim.cost.lines import Line
from kvsim.machine.hardware import AllReduce


class AllReduces:
    """`number` all-reduces of `token_bytes` for each token of a step, over `gpus` GPUs."""

    def __init__(self, figures: AllReduce, gpus: int, number: int, token_bytes: int) -> None:
        def us(tokens: float) -> float:
            return number * figures.us(tokens * token_bytes, gpus)

        self._us, large = us, figures.large
        self.breaks: list[int] = []
        """Tokens before and after a change of the regime."""
        if large is not None and gpus > 1:
            first = ceil(large.from_bytes / token_bytes)
            self.breaks = [first - 1, first] if first > 1 else []
        points = sorted({1, *self.breaks, 2 * max([1, *self.breaks])})
        self._line = Line(points, [us(tokens) for tokens in points])

    def us(self, tokens: float) -> float:
        """Returns the microseconds in a step of `tokens` tokens, at least 1."""
        return self._line.at(tokens)

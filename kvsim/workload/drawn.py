"""What generators of sessions share: random numbers with given quantiles, and turns."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

from kvsim.core.sums import added

Quantiles = tuple[tuple[float, float], ...]
Segments = tuple[tuple[str, int], ...]


def quantiles(text: str) -> Quantiles:
    """Points as `SHARE VALUE, ...`."""
    points = (point.split() for point in text.split(","))
    return tuple((float(share), float(value)) for share, value in points)


def draw(quantiles: Quantiles, random: Random) -> int:
    """A random whole number with these quantiles, linear in between."""
    share = random.random()
    above = bisect_right(quantiles, share, key=lambda point: point[0])
    (low_share, low), (high_share, high) = quantiles[above - 1], quantiles[above]
    return round(low + (high - low) * (share - low_share) / (high_share - low_share))


def mean(quantiles: Quantiles) -> float:
    """The mean of the values of `draw`, before rounding."""
    return added((q - p) * (low + high) / 2 for (p, low), (q, high) in pairwise(quantiles))


@dataclass(slots=True)
class Turn:
    """A request without a position in the file yet."""

    arrival_ns: int
    input_length: int
    output_length: int
    segments: Segments = ()
    session: str | None = None
    turn: int | None = None
    before: Turn | None = None
    """The turn with whose tokens its prompt begins."""
    keep: int = 0
    think_ns: int = 0
    index: int = -1
    """Its position in the file, once it has one."""
    after: Turn | None = None
    """The turn that it waits for, if that is not `before`."""
    hints: dict[str, Any] | None = None
    """What it says to policies, as keys of its own (`x_NAME`) by NAME."""

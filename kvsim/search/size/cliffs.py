"""Finds cliffs: places where a few per cent of the knob change a figure several times over."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import NamedTuple

from kvsim.results.metrics import Metric
from kvsim.search.size.search import CLOSE, STEEP
from kvsim.search.sweep.choose import Configuration

Tried = Sequence[tuple[float, Configuration]]

_MOST_OF_IT = 0.9
"""A narrower stretch replaces a cliff if it has at least this share of its height."""


class Cliff(NamedTuple):
    """Two close values of the knob with very different figures (means over the seeds)."""

    metric: Metric
    safe: float
    """The value with the better figure."""
    beyond: float
    figure: float
    """The figure at `safe`."""
    figure_beyond: float

    @property
    def times(self) -> float:
        """By how many times the figure grows, or shrinks."""
        ratio = self.figure_beyond / self.figure
        return max(ratio, 1 / ratio)

    @property
    def step(self) -> float:
        """From safe to beyond, as a share of the safe value."""
        return self.beyond / self.safe - 1

    def distance(self, value: float) -> float:
        """From a value of the knob to the safe edge, as a share of the value; 0: at the edge."""
        return self.safe / value - 1


def find_cliff(tried: Tried, metric: Metric, grain: float = 0.0) -> Cliff | None:
    """The highest cliff of a figure among the tried values, ascending; None if there is none.

    A cliff is a change by `STEEP` times or more within a share `CLOSE` of the knob, or within
    `grain`. Of stretches with about the same height, the narrowest is taken.
    """
    found = [
        (abs(log(b / a)), (high - low) / high, (low, a), (high, b))
        for i, (low, one) in enumerate(tried)
        for high, other in tried[i + 1 :]
        if 0 < high - low <= max(CLOSE * high, grain) and low > 0
        if (a := one.figures.get(metric.key, 0)) > 0
        if (b := other.figures.get(metric.key, 0)) > 0
        if abs(log(b / a)) >= log(STEEP)
    ]
    if not found:
        return None
    height = max(each[0] for each in found)
    *_, (low, a), (high, b) = min(
        (each for each in found if each[0] >= _MOST_OF_IT * height), key=lambda each: each[1]
    )
    rises = b > a
    if rises == (metric.better == "higher"):
        return Cliff(metric, high, low, b, a)
    return Cliff(metric, low, high, a, b)


def slope(tried: Tried, value: float, metric: Metric) -> float | None:
    """Change of a figure in per cent, for one per cent of the knob, around a value.

    It is measured between the tried values nearest to `CLOSE` on either side; None if a figure is
    missing or 0.
    """
    near = [each for each in tried if 0 < abs(each[0] - value) <= 1.2 * CLOSE * abs(value)]
    own = next((each for each in tried if each[0] == value), None)
    if own is None or not near:
        return None
    around = [own, *near]
    (low, one), (high, other) = min(around, key=_value), max(around, key=_value)
    a, b = (each.figures.get(metric.key, 0) for each in (one, other))
    if not (a > 0 and b > 0 and low > 0):
        return None
    return log(b / a) / log(high / low)


def _value(each: tuple[float, Configuration]) -> float:
    return each[0]

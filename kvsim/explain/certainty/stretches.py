"""Differences of one exact replay: what other stretches of similar traffic would have given.

The exact replay of a recorded trace has nothing random in it, and no seed changes it. Its requests,
in order of arrival, are therefore taken as a sample of the traffic. Neighbouring requests share
queues and blocks, so single requests must not be drawn. Whole stretches are drawn instead, with
replacement, the same ones in both runs (the circular block bootstrap of Politis and Romano, 1992).
A stretch is long enough that differences one stretch apart are independent. A replay with fewer
than `FEWEST` stretches says nothing about other traffic, and gets no interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsim.explain.certainty.estimates import Estimate, Floats

FEWEST = 10
"""The fewest stretches from which intervals are made."""
DRAWS = 999
_AT_ONCE = 1 << 21
"""Numbers drawn at once, to bound the memory."""

Statistic = Callable[[Floats], Floats]
"""A statistic: reduces the last axis."""


class Figure(NamedTuple):
    """A figure that is computed from a value per request."""

    first: Floats
    """Values of the first run, one per pair of requests, in order of arrival; `other` has those of
    the other run."""
    other: Floats
    statistic: Statistic


def together(figures: Mapping[str, Figure], *, seed: int = 0) -> dict[str, Estimate]:
    """The difference of each figure for which the replay is long enough.

    All figures have the same requests, and all are drawn together.
    """
    if not figures:
        return {}
    number = len(next(iter(figures.values())).first)
    lengths = {name: stretch(each.other - each.first) for name, each in figures.items()}
    length = max(lengths.values())
    if number < FEWEST * length:
        figures = {name: figures[name] for name, own in lengths.items() if FEWEST * own <= number}
        if not figures:
            return {}
        length = max(lengths[name] for name in figures)
    freedom = number // length - 1
    draws = _drawn(list(figures.values()), number, length, seed)
    return {
        name: _estimate(figure, draws[:, i], freedom)
        for i, (name, figure) in enumerate(figures.items())
    }


def stretch(changes: Floats) -> int:
    """The number of requests after which differences are independent of each other.

    It is twice the distance at which the autocorrelation first falls within noise (2 / sqrt n), and
    at least the cube root of the number of requests.
    """
    number = len(changes)
    least: int = max(1, round(math.cbrt(number)))
    centred = changes - changes.mean()
    power = np.abs(np.fft.rfft(centred, 2 * number)) ** 2
    covariance = np.fft.irfft(power)[:number]
    if covariance[0] <= 0:
        return least
    quiet = np.flatnonzero(covariance / covariance[0] < 2 / number**0.5)
    return max(least, 2 * int(quiet[0]) if len(quiet) else number)


def _drawn(figures: Sequence[Figure], number: int, length: int, seed: int) -> NDArray[np.float64]:
    """Differences of every figure in every draw, of shape (draws, figures)."""
    random = np.random.default_rng(seed)
    starts = -(-number // length)
    batches = []
    left = DRAWS
    while left > 0:
        size = min(left, max(1, _AT_ONCE // number))
        first = random.integers(0, number, (size, starts, 1))
        places = ((first + np.arange(length)) % number).reshape(size, -1)[:, :number]
        batches.append([_change(figure, places) for figure in figures])
        left -= size
    return np.concatenate([np.array(batch).reshape(len(figures), -1).T for batch in batches])


def _change(figure: Figure, places: NDArray[np.int64]) -> Floats:
    return figure.statistic(figure.other[places]) - figure.statistic(figure.first[places])


def _estimate(figure: Figure, draws: Floats, freedom: int) -> Estimate:
    difference = float(figure.statistic(figure.other) - figure.statistic(figure.first))
    if np.array_equal(figure.first, figure.other):
        return Estimate(0.0, 0.0, freedom)
    return Estimate(difference, float(np.std(draws, ddof=1)), freedom, np.sort(draws))

"""The hits of a cache that evicts the least recently used block, at every capacity at once.

A block hits at every capacity above its distance (`kvsim.workload.reuse`). The blocks of a run have
consecutive distances, so each run adds a ramp to the curve, and the curve is a sum of ramps.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvsim.workload.reuse import Found, Reuse

Ints = NDArray[np.int64]

_PENDING = 1 << 18


class Ramps:
    """A sum of ramps over capacities. Its memory follows the number of different ends."""

    def __init__(self) -> None:
        self._at, self._slope = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        self._pending = array("q"), array("q")

    def add(self, begin: int, end: int, weight: int) -> None:
        """Add one that rises by `weight` per block from `begin` to `end`."""
        at, slope = self._pending
        at.extend((begin, end))
        slope.extend((weight, -weight))
        if len(at) >= _PENDING:
            self._merge()

    def values(self, capacities: Sequence[int]) -> list[int]:
        """The height at each capacity."""
        self._merge()
        places = np.searchsorted(self._at, capacities)
        slopes = np.concatenate(([0], self._slope.cumsum()))
        moments = np.concatenate(([0], (self._slope * self._at).cumsum()))
        found: list[int] = (np.array(capacities) * slopes[places] - moments[places]).tolist()
        return found

    @property
    def corners(self) -> list[int]:
        """Capacities at which the slope changes, ascending."""
        self._merge()
        corners: list[int] = self._at[self._slope != 0].tolist()
        return corners

    def _merge(self) -> None:
        at = np.concatenate((self._at, np.array(self._pending[0], dtype=np.int64)))
        slope = np.concatenate((self._slope, np.array(self._pending[1], dtype=np.int64)))
        self._at, places = np.unique(at, return_inverse=True)
        self._slope = np.zeros(len(self._at), dtype=np.int64)
        np.add.at(self._slope, places, slope)
        self._pending = array("q"), array("q")


class Curve:
    """Hits by capacity in blocks, of the requests that were added."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._tokens, self._blocks, self._requests = Ramps(), Ramps(), Ramps()

    def add(self, found: Found) -> None:
        """Count what a request finds."""
        size, most = self._size, found.most_tokens
        for _, first, last, distance in found.runs:
            whole, end = min(last, most // size), min(last, -(-most // size))
            if first < end:
                self._blocks.add(distance, distance + end - first, 1)
            if first < whole:
                self._tokens.add(distance, distance + whole - first, size)
            if first <= whole < last and most > whole * size:
                self._tokens.add(
                    distance + whole - first, distance + whole - first + 1, most % size
                )
        if found.runs and most:
            distance = found.runs[0].distance
            self._requests.add(distance, distance + 1, 1)

    def tokens(self, capacities: Sequence[int]) -> list[int]:
        """Prompt tokens that hit, at each capacity."""
        return self._tokens.values(capacities)

    def blocks(self, capacities: Sequence[int]) -> list[int]:
        """Blocks of prompts that hit, at each capacity."""
        return self._blocks.values(capacities)

    def requests(self, capacities: Sequence[int]) -> list[int]:
        """Requests that find at least one block, at each capacity."""
        return self._requests.values(capacities)


def make_curve(found: Iterable[Found], block_size: int) -> Curve:
    """The curve of these requests, which may be a stream (`Walk.step`)."""
    curve = Curve(block_size)
    for each in found:
        curve.add(each)
    return curve


def lru_tokens(reuse: Reuse, capacities: Sequence[int], since: int = 0) -> list[int]:
    """Prompt tokens that hit under LRU, at each capacity in blocks, from request `since` on."""
    return make_curve(reuse.found[since:], reuse.counting.block_size).tokens(capacities)

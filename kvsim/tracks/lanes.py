"""Packs intervals into as few lanes as possible, so that none on a lane overlap."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush


def pack(intervals: Iterable[tuple[int, int]]) -> list[int]:
    """The lane of each interval (begin, end), from 0 on; intervals come by rising begin.

    Each takes the lowest lane that is free; one that ends where another begins is out of its way.
    There are as many lanes as intervals overlap at most.
    """
    free: list[int] = []
    taken: list[tuple[int, int]] = []
    lanes: list[int] = []
    for begin, end in intervals:
        while taken and taken[0][0] <= begin:
            heappush(free, heappop(taken)[1])
        lane = heappop(free) if free else len(taken)
        heappush(taken, (end, lane))
        lanes.append(lane)
    return lanes

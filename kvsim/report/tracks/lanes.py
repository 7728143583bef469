"""Packs intervals into as few lanes as possible, so that none on a lane overlap."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush


def pack(intervals: Iterable[tuple[int, int]]) -> list[int]:
    """The lane of each interval (begin, end), numbered from 0; intervals come by rising begin.

    Each interval takes the lowest free lane. A lane is free again at the instant where its interval
    ends. The number of lanes is the largest number of intervals that overlap.
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

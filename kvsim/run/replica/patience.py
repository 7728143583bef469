"""When clients give up the requests that they sent."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import inf

from kvsim.core.request import Request
from kvsim.workload.columns import column
from kvsim.workload.trace import Row


class Patience:
    """The requests in progress whose clients will not wait for ever."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._after_ns = column(rows, "abort_after_ns")
        self._due: list[tuple[int, int, Request]] = []
        """Heap of (when its client gives it up, index, request)."""

    def begins(self, request: Request) -> None:
        """A request was sent."""
        after_ns = self._after_ns[request.index]
        if after_ns is not None:
            heapq.heappush(self._due, (request.arrival_ns + after_ns, request.index, request))

    @property
    def next_ns(self) -> float:
        """When the next request in progress is given up; infinite: never."""
        while self._due and self._due[0][2].finish_ns >= 0:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else inf

    def over(self, now_ns: int) -> list[Request]:
        """Takes out the requests in progress that are given up until now, in order."""
        found = []
        while self.next_ns <= now_ns:
            found.append(heapq.heappop(self._due)[2])
        return found

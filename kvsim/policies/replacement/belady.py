"""The oracle among the eviction orders: it knows which prompt looks up what."""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf
from typing import Any

from kvsim.policies.future import Future
from kvsim.policies.replacement.replacement import Ranked

_NEXT_ONES = 64
"""Requests with the same content, in the order of the trace, of which the soonest one counts."""


class Belady(Ranked):
    """ORACLE: evicts what prompts look up furthest in the future, of equals the deepest.

    Belady, "A study of replacement algorithms for a virtual-storage computer", 1966. When a turn
    will follow is estimated from its think time, and requests may overtake each other. So a run can
    have fewer hits than the bounds of `kvsim.explain.cachelab.audit`.
    """

    __slots__ = ("_block_size", "_coming", "_expected", "_future", "_holder", "_now_ns", "_tokens")

    def __init__(self, first: int, size: int, *, future: Future, block_size: int) -> None:
        super().__init__(first, size)
        self._future, self._block_size = future, block_size
        self._coming: dict[int, list[int]] = {}
        """Key → the requests whose prompts have it, the last one first, without those that were
        admitted already."""
        self._tokens: dict[int, int] = {}
        """block → tokens up to its end."""
        self._expected: list[tuple[float, int]] = []
        """Heap of (next use, block), some of them out of date."""
        self._now_ns = 0
        self._holder: dict[int, int] = {}
        """Key → the block with that content that look-ups find. Further copies are of no use."""

    def stored(self, block: int, key: int) -> None:
        self._holder.setdefault(key, block)

    def put(self, block: int, key: int | None, tokens: int, access_ns: int) -> None:
        assert key is not None, "blank blocks are not evicted"
        self._now_ns = max(self._now_ns, access_ns)
        self._holder.setdefault(key, block)
        self._tokens[block] = tokens
        super().put(block, key, tokens, access_ns)

    def rank(self, block: int) -> Any:
        key = self._keys[block]
        next_ns = self._next_use_ns(key) if self._holder.get(key) == block else inf
        heappush(self._expected, (next_ns, block))
        return -next_ns, -self._tokens[block]

    def choose(self) -> int:
        expected, overdue = self._expected, set[int]()
        while expected and expected[0][0] < self._now_ns:
            overdue.add(heappop(expected)[1])
        for block in sorted(overdue & self._idle.keys()):
            self.ranked(block)  # Who was expected did not use it, or is late.
        return super().choose()

    def forgotten(self, block: int) -> None:
        del self._tokens[block]
        if self._holder.get(self._keys[block]) == block:
            del self._holder[self._keys[block]]

    def _next_use_ns(self, key: int) -> float:
        """When the key is looked up next; not before now."""
        future, now_ns = self._future, self._now_ns
        if not self._coming:
            for index in reversed(range(future.requests)):
                for each in future.prompt_keys(index, self._block_size):
                    self._coming.setdefault(each, []).append(index)
        coming = self._coming.get(key, [])
        while coming and future.admitted(coming[-1]):
            coming.pop()
        next_ones = (index for index in coming[-_NEXT_ONES:] if not future.admitted(index))
        times_ns = (future.expected_ns(index, now_ns) for index in next_ones)
        return max(min(times_ns, default=inf), now_ns)

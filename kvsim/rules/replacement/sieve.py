"""SIEVE: one queue, and a hand that goes through it."""

from __future__ import annotations

from collections import deque

from kvsim.rules.replacement.replacement import Replacement


class Sieve(Replacement):
    """A hand goes from the oldest block to the newest and starts again. It spares each block that
    was used since it passed, and evicts the first other one.

    Zhang et al., "SIEVE is simpler than LRU: an efficient turn-key eviction algorithm for web
    caches", NSDI 2024, algorithm 1.
    """

    __slots__ = ("_ahead", "_passed", "_used")

    def __init__(self, first: int = 0, size: int = 0) -> None:
        super().__init__(first, size)
        self._ahead: deque[int] = deque()
        """What the hand has yet to pass, the oldest first."""
        self._passed: deque[int] = deque()
        """What it spared since it began at the oldest block, the oldest first."""
        self._used: dict[int, bool] = {}

    def stored(self, block: int, key: int) -> None:
        self._ahead.append(block)
        self._used[block] = False

    def used(self, block: int) -> None:
        self._used[block] = True

    def choose(self) -> int:
        while True:
            block = self._ahead.popleft()
            chosen = block in self._idle and not self._used[block]
            if chosen:
                del self._used[block]
            else:
                self._used[block] = self._used[block] and block not in self._idle
                self._passed.append(block)
            if not self._ahead:
                self._ahead, self._passed = self._passed, self._ahead
            if chosen:
                return block

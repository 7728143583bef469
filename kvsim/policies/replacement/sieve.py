"""SIEVE: one queue, and a hand that goes through it."""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush

from kvsim.policies.replacement.replacement import Replacement


class Sieve(Replacement):
    """A hand goes from the oldest block to the newest and starts again. It spares each block that
    was used since it passed, and evicts the first other one.

    Zhang et al., "SIEVE is simpler than LRU: an efficient turn-key eviction algorithm for web
    caches", NSDI 2024, algorithm 1. Blocks in use are passed and stay as they are, so only places
    of idle ones are looked at.
    """

    __slots__ = ("_ahead", "_hand", "_listed", "_passed", "_places", "_stored", "_used")

    def __init__(self, first: int = 0, size: int = 0) -> None:
        super().__init__(first, size)
        self._places: OrderedDict[int, int] = OrderedDict()
        """Block → its place in the queue, ascending."""
        self._stored = 0
        self._hand = 0
        """The last place that it passed; 0 at the start of the queue."""
        self._ahead: list[tuple[int, int]] = []
        """Heap of (place, block) after the hand: all idle ones, and some that are in use again."""
        self._passed: list[tuple[int, int]] = []
        """The same before the hand."""
        self._listed: set[int] = set()
        """Blocks in one of the heaps."""
        self._used: set[int] = set()
        """Blocks used since the hand passed."""

    def stored(self, block: int, key: int) -> None:
        self._stored += 1
        self._places[block] = self._stored

    def used(self, block: int) -> None:
        self._used.add(block)

    def emptied(self, block: int) -> None:
        del self._places[block]
        self._used.discard(block)
        self._listed.discard(block)
        for heap in (self._ahead, self._passed):
            heap[:] = [each for each in heap if each[1] != block]
            heapify(heap)

    def put(self, block: int, key: int | None, tokens: int, access_ns: int) -> None:
        super().put(block, key, tokens, access_ns)
        if block not in self._listed:
            self._listed.add(block)
            place = self._places[block]
            heappush(self._ahead if place > self._hand else self._passed, (place, block))

    def choose(self) -> int:
        assert self._idle, "no idle block left"
        while True:
            if not self._ahead:
                self._start_again()
            self._hand, block = heappop(self._ahead)
            if block in self._idle and block in self._used:
                self._used.remove(block)
                heappush(self._passed, (self._hand, block))
                continue
            self._listed.remove(block)
            if block in self._idle:
                break
        del self._places[block]
        if not self._places or self._places[next(reversed(self._places))] < self._hand:
            self._start_again()
        return block

    def _start_again(self) -> None:
        self._hand = 0
        self._ahead, self._passed = self._passed, self._ahead

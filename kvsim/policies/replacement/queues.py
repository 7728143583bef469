"""Queues: first in, first out, with second chances, and with a memory of what was lost."""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush

from kvsim.policies.replacement.replacement import Replacement


class FirstInFirstOut(Replacement):
    """Evicts what was stored first. SGLang 0.5.23 `mem_cache/evict_policy.py`, `FIFOStrategy`."""

    __slots__ = ("_queue",)

    def __init__(self, first: int = 0, size: int = 0) -> None:
        super().__init__(first, size)
        self._queue = self.line()

    def stored(self, block: int, key: int) -> None:
        self._queue.append(block)

    def choose(self) -> int:
        return self.take_from(self._queue)


class Segmented(Replacement):
    """Evicts what was used only once first, then the least recently used. SGLang 0.5.23
    `mem_cache/evict_policy.py`, `SLRUStrategy`, with its `protected_threshold` of 2."""

    __slots__ = ("_again", "_once")

    def __init__(self, first: int = 0, size: int = 0) -> None:
        super().__init__(first, size)
        self._once, self._again = self.line(), self.line()

    def stored(self, block: int, key: int) -> None:
        self._once.append(block)

    def used(self, block: int) -> None:
        if block in self._again:
            self._again.renew(block)
        else:
            self._once.remove(block)
            self._again.append(block)

    def choose(self) -> int:
        return self.take_from(self._once, self._again)


class TwoQueues(Replacement):
    """A quarter of the cache for what is new, first in, first out; what comes back after it left
    that queue is kept by last use.

    Johnson and Shasha, "2Q: a low overhead high performance buffer management replacement
    algorithm", VLDB 1994, the full version, with its sizes: keys of half as many blocks as the
    cache holds are remembered.
    """

    __slots__ = ("_lost", "_most_lost", "_most_new", "_new", "_old")

    def __init__(self, first: int, size: int) -> None:
        super().__init__(first, size)
        self._most_new, self._most_lost = max(1, size // 4), max(1, size // 2)
        self._new, self._old = self.line(), self.line()
        self._lost: OrderedDict[int, None] = OrderedDict()

    def stored(self, block: int, key: int) -> None:
        if key in self._lost:
            del self._lost[key]
            self._old.append(block)
        else:
            self._new.append(block)

    def used(self, block: int) -> None:
        if block in self._old:
            self._old.renew(block)

    def choose(self) -> int:
        queues = (self._new, self._old)
        for blocks in queues if len(self._new) > self._most_new else queues[::-1]:
            block = blocks.take()
            if block is not None:
                if blocks is self._new:
                    self._lost[self._keys[block]] = None
                    if len(self._lost) > self._most_lost:
                        self._lost.popitem(last=False)
                return block
        raise AssertionError("no idle block left")


_MOST_USES = 3
_PROVEN = 2
"""Uses after its first with which content leaves the small queue for the main one."""


class S3Fifo(Replacement):
    """A tenth of the cache is for what is new. What is used twice more there, or comes back soon
    after it was evicted, joins the main queue, where each further use saves it once.

    Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023, algorithm 1.
    """

    __slots__ = ("_lost", "_main", "_most_lost", "_most_main", "_small", "_uses")

    def __init__(self, first: int, size: int) -> None:
        super().__init__(first, size)
        small = max(1, size // 10)
        self._most_main = size - small
        self._most_lost = max(1, size * 9 // 10)
        self._small, self._main = self.line(), self.line()
        self._lost: OrderedDict[int, None] = OrderedDict()
        self._uses: dict[int, int] = {}
        """block → number of uses after the first, at most `_MOST_USES`."""

    def stored(self, block: int, key: int) -> None:
        self._uses[block] = 0
        if key in self._lost:
            del self._lost[key]
            self._main.append(block)
        else:
            self._small.append(block)

    def used(self, block: int) -> None:
        self._uses[block] = min(self._uses[block] + 1, _MOST_USES)

    def choose(self) -> int:
        block = None
        if len(self._main) <= self._most_main:
            block = self._from_small()
        if block is None:
            block = self._from_main()
        if block is None:
            block = self._from_small()
        assert block is not None, "no idle block left"
        del self._uses[block]
        return block

    def _from_small(self) -> int | None:
        while (block := self._small.take()) is not None:
            if self._uses[block] < _PROVEN:
                self._lost[self._keys[block]] = None
                if len(self._lost) > self._most_lost:
                    self._lost.popitem(last=False)
                return block
            self._main.append(block)
        return None

    def _from_main(self) -> int | None:
        while (block := self._main.first()) is not None:
            if not self._uses[block]:
                self._main.remove(block)
                return block
            self._uses[block] -= 1
            self._main.renew(block)
        return None


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

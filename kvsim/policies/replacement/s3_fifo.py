"""S3-FIFO: a small queue for what is new, a main queue, and a memory of what was lost."""

from __future__ import annotations

from collections import OrderedDict

from kvsim.policies.replacement.replacement import Replacement

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

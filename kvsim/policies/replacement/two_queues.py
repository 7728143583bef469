"""2Q: what is new waits in a queue, what comes back joins the rest."""

from __future__ import annotations

from collections import OrderedDict

from kvsim.policies.replacement.replacement import Replacement


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

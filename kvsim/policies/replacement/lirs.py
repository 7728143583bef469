"""LIRS: keeps what comes back after few other blocks."""

from __future__ import annotations

from collections import OrderedDict

from kvsim.policies.replacement.replacement import Replacement


class LowInterReference(Replacement):
    """Most of the cache is for *hot* blocks, whose last two uses had few others between them; one
    hundredth is for the rest, which is evicted, first in, first out.

    Jiang and Zhang, "LIRS: an efficient low inter-reference recency set replacement policy to
    improve buffer cache performance", SIGMETRICS 2002. Keys of twice as many evicted blocks as the
    cache holds are remembered.
    """

    __slots__ = ("_by_use", "_hot", "_lost", "_most_hot", "_most_lost", "_rest", "_stack")

    def __init__(self, first: int, size: int) -> None:
        super().__init__(first, size)
        self._most_hot = size - max(1, size // 100)
        self._most_lost = 2 * size
        self._stack: OrderedDict[int, None] = OrderedDict()
        """Keys by last use, the oldest first. The first one is hot."""
        self._hot: dict[int, int] = {}
        """Keys of hot blocks, all of them in the stack → the block."""
        self._by_use = self.line()
        """Hot blocks by last use, the oldest first."""
        self._rest = self.line()
        """Blocks that are not hot."""
        self._lost: OrderedDict[int, None] = OrderedDict()
        """Evicted keys that are in the stack."""

    def stored(self, block: int, key: int) -> None:
        if key in self._hot:  # A further copy of what is hot.
            self._rest.append(block)
        elif key in self._lost or len(self._hot) < self._most_hot:
            self._warm(block, key)
        else:
            self._push(key)
            self._rest.append(block)

    def used(self, block: int) -> None:
        key = self._keys[block]
        if self._hot.get(key) == block:
            self._by_use.renew(block)
            self._push(key)
            self._prune()
        elif key in self._stack and key not in self._hot:
            self._rest.remove(block)
            self._warm(block, key)
        else:
            self._rest.renew(block)
            if key not in self._hot:
                self._push(key)

    def emptied(self, block: int) -> None:
        super().emptied(block)
        if self._hot.get(key := self._keys[block]) == block:
            del self._hot[key]
            self._prune()

    def choose(self) -> int:
        block = self._rest.take()
        if block is not None:
            key = self._keys[block]
            if key in self._stack and key not in self._hot:
                self._lost[key] = None
                if len(self._lost) > self._most_lost:
                    del self._stack[self._lost.popitem(last=False)[0]]
            return block
        block = self._by_use.take()  # All others are in use: a hot block has to go.
        assert block is not None, "no idle block left"
        key = self._keys[block]
        del self._hot[key]
        self._lost[key] = None
        self._prune()
        return block

    def _push(self, key: int) -> None:
        self._stack[key] = None
        self._stack.move_to_end(key)

    def _warm(self, block: int, key: int) -> None:
        """Make a block hot, in place of the hot one whose last use is longest ago."""
        self._lost.pop(key, None)  # It is there if another copy of the block was evicted.
        self._hot[key] = block
        self._by_use.append(block)
        self._push(key)
        while len(self._hot) > self._most_hot:
            coldest = self._by_use.shift()
            del self._hot[self._keys[coldest]]
            self._rest.append(coldest)
            self._prune()

    def _prune(self) -> None:
        """Forget last uses before that of any hot block."""
        while self._stack and (oldest := next(iter(self._stack))) not in self._hot:
            del self._stack[oldest]
            self._lost.pop(oldest, None)

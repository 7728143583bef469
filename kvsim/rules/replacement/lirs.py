"""LIRS: keeps what comes back after few other blocks."""

from __future__ import annotations

from collections import OrderedDict

from kvsim.rules.replacement.replacement import Replacement


class LowInterReference(Replacement):
    """Most of the cache is for *hot* blocks, whose last two uses had few others between them; one
    hundredth is for the rest, which is evicted, first in, first out.

    Jiang and Zhang, "LIRS: an efficient low inter-reference recency set replacement policy to
    improve buffer cache performance", SIGMETRICS 2002. Keys of twice as many evicted blocks as the
    cache holds are remembered.
    """

    __slots__ = ("_block_of", "_hot", "_lost", "_most_hot", "_most_lost", "_rest", "_stack")

    def __init__(self, first: int, size: int) -> None:
        super().__init__(first, size)
        self._most_hot = size - max(1, size // 100)
        self._most_lost = 2 * size
        self._stack: OrderedDict[int, None] = OrderedDict()
        """Keys by last use, the oldest first. The first one is hot."""
        self._hot: set[int] = set()
        """Keys of hot blocks, all of them in the stack."""
        self._rest: OrderedDict[int, None] = OrderedDict()
        """Blocks that are not hot."""
        self._lost: OrderedDict[int, None] = OrderedDict()
        """Evicted keys that are in the stack."""
        self._block_of: dict[int, int] = {}
        """Key of a hot block → the block."""

    def stored(self, block: int, key: int) -> None:
        if key in self._lost:
            del self._lost[key]
            self._warm(block, key)
        elif key in self._hot:  # A further copy of what is hot.
            self._rest[block] = None
        elif len(self._hot) < self._most_hot:
            self._warm(block, key)
        else:
            self._push(key)
            self._rest[block] = None

    def used(self, block: int) -> None:
        key = self._keys[block]
        if block not in self._rest:
            self._push(key)
            self._prune()
        elif key in self._stack and key not in self._hot:
            del self._rest[block]
            self._warm(block, key)
        else:
            self._rest.move_to_end(block)
            if key not in self._hot:
                self._push(key)

    def choose(self) -> int:
        block = self.idle_of(self._rest)
        if block is not None:
            del self._rest[block]
            key = self._keys[block]
            if key in self._stack and key not in self._hot:
                self._lost[key] = None
                if len(self._lost) > self._most_lost:
                    del self._stack[self._lost.popitem(last=False)[0]]
            return block
        # All others are in use: the coldest of the hot blocks has to go.
        found = self.idle_of(self._block_of[key] for key in self._stack if key in self._hot)
        assert found is not None, "no idle block left"
        key = self._keys[found]
        self._hot.remove(key)
        del self._block_of[key]
        self._lost[key] = None
        self._prune()
        return found

    def _push(self, key: int) -> None:
        self._stack[key] = None
        self._stack.move_to_end(key)

    def _warm(self, block: int, key: int) -> None:
        """Make a block hot, in place of the hot one whose last use is longest ago."""
        self._hot.add(key)
        self._block_of[key] = block
        self._push(key)
        while len(self._hot) > self._most_hot:
            coldest = next(iter(self._stack))
            self._hot.remove(coldest)
            self._rest[self._block_of.pop(coldest)] = None
            self._prune()

    def _prune(self) -> None:
        """Forget last uses before that of any hot block."""
        while self._stack and (oldest := next(iter(self._stack))) not in self._hot:
            del self._stack[oldest]
            self._lost.pop(oldest, None)

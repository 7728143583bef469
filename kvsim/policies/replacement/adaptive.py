"""Policies that learn what comes back: ARC, LIRS, W-TinyLFU."""

from __future__ import annotations

from collections import Counter, OrderedDict

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


class AdaptiveReplacement(Replacement):
    """Evicts from what was used once or from what was used again, whichever was evicted too much.

    Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003, figure 4.
    Where it is not told what is missed before room is made, as in engines, the target moves when
    the content is stored.
    """

    __slots__ = ("_known", "_once", "_once_lost", "_size", "_target", "_twice", "_twice_lost")

    def __init__(self, first: int, size: int) -> None:
        super().__init__(first, size)
        self._size = size
        self._target = 0.0
        """Blocks that those used once should have (p of the paper)."""
        self._once, self._twice = self.line(), self.line()
        """Least recently used first (T1 and T2)."""
        self._once_lost: OrderedDict[int, None] = OrderedDict()
        """Keys evicted from each list (B1 and B2)."""
        self._twice_lost: OrderedDict[int, None] = OrderedDict()
        self._known: dict[int, bool] = {}
        """Keys that came back, until they are stored: whether they were in B2."""

    def missed(self, key: int) -> None:
        once, twice = len(self._once_lost), len(self._twice_lost)
        if key in self._once_lost:
            self._target = min(self._target + max(twice / once, 1), self._size)
            del self._once_lost[key]
            self._known[key] = False
        elif key in self._twice_lost:
            self._target = max(self._target - max(once / twice, 1), 0)
            del self._twice_lost[key]
            self._known[key] = True

    def stored(self, block: int, key: int) -> None:
        self.missed(key)
        if self._known.pop(key, None) is None:
            self._once.append(block)
        else:
            self._twice.append(block)
        while len(self._once) + len(self._once_lost) > self._size and self._once_lost:
            self._once_lost.popitem(last=False)
        lost = len(self._once_lost) + len(self._twice_lost)
        if lost > self._size and self._twice_lost:
            self._twice_lost.popitem(last=False)

    def used(self, block: int) -> None:
        if block in self._twice:
            self._twice.renew(block)
        else:
            self._once.remove(block)
            self._twice.append(block)

    def choose(self) -> int:
        once, again = len(self._once), any(self._known.values())
        from_once = once > 0 and (once > self._target or (again and once == self._target))
        order = ((self._once, self._once_lost), (self._twice, self._twice_lost))
        for blocks, lost in order if from_once else order[::-1]:
            block = blocks.take()
            if block is not None:
                lost[self._keys[block]] = None
                return block
        raise AssertionError("no idle block left")


_SAMPLE = 10
"""Uses per block of the cache after which all counts are halved."""


class WindowTinyLfu(Replacement):
    """One hundredth of the cache is a window for what is new. What leaves it stays only if it was
    used more often, of late, than what the main part would evict.

    Einziger, Friedman and Manes, "TinyLFU: a highly efficient cache admission policy", ACM ToS
    2017, section 4. Counts are exact here, not a sketch; the main part is segmented, with 80 % for
    what was used there.
    """

    __slots__ = (
        "_counts",
        "_most_protected",
        "_most_uses",
        "_most_window",
        "_probation",
        "_protected",
        "_total",
        "_window",
    )

    def __init__(self, first: int, size: int) -> None:
        super().__init__(first, size)
        self._most_window = max(1, size // 100)
        self._most_protected = (size - self._most_window) * 4 // 5
        self._most_uses = _SAMPLE * size
        self._window, self._probation, self._protected = self.line(), self.line(), self.line()
        self._counts: Counter[int] = Counter()
        self._total = 0

    def stored(self, block: int, key: int) -> None:
        self._count(key)
        self._window.append(block)
        if len(self._window) > self._most_window:
            self._probation.append(self._window.shift())

    def used(self, block: int) -> None:
        self._count(self._keys[block])
        if block in self._probation:
            self._probation.remove(block)
            self._protected.append(block)
            if len(self._protected) > self._most_protected:
                self._probation.append(self._protected.shift())
        else:
            (self._window if block in self._window else self._protected).renew(block)

    def choose(self) -> int:
        window, probation, protected = self._window, self._probation, self._protected
        candidate = window.first() if len(window) >= self._most_window else None
        victim = probation.first()
        if candidate is not None and victim is not None:
            counts, keys = self._counts, self._keys
            if counts[keys[candidate]] <= counts[keys[victim]]:
                window.remove(candidate)
                return candidate
        return self.take_from(probation, protected, window)

    def _count(self, key: int) -> None:
        self._counts[key] += 1
        self._total += 1
        if self._total >= self._most_uses:
            self._counts = Counter({k: n // 2 for k, n in self._counts.items() if n > 1})
            self._total //= 2

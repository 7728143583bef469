"""ARC: two lists whose sizes adapt to what comes back."""

from __future__ import annotations

from collections import OrderedDict

from kvsim.policies.replacement.replacement import Replacement


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

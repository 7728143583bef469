"""W-TinyLFU: new content has to be more popular than what it would replace."""

from __future__ import annotations

from collections import Counter, OrderedDict

from kvsim.rules.replacement.replacement import Replacement

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
        self._window: OrderedDict[int, None] = OrderedDict()
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()
        self._counts: Counter[int] = Counter()
        self._total = 0

    def stored(self, block: int, key: int) -> None:
        self._count(key)
        self._window[block] = None
        if len(self._window) > self._most_window:
            self._probation[self._window.popitem(last=False)[0]] = None

    def used(self, block: int) -> None:
        self._count(self._keys[block])
        if block in self._probation:
            del self._probation[block]
            self._protected[block] = None
            if len(self._protected) > self._most_protected:
                self._probation[self._protected.popitem(last=False)[0]] = None
        else:
            (self._window if block in self._window else self._protected).move_to_end(block)

    def choose(self) -> int:
        window = self._window if len(self._window) >= self._most_window else {}
        candidate, victim = self.idle_of(window), self.idle_of(self._probation)
        if candidate is not None and victim is not None:
            counts, keys = self._counts, self._keys
            if counts[keys[candidate]] <= counts[keys[victim]]:
                victim = candidate
        parts = (self._probation, self._protected, self._window)
        if victim is None:
            victim = next(block for part in parts if (block := self.idle_of(part)) is not None)
        for part in parts:
            part.pop(victim, None)
        return victim

    def _count(self, key: int) -> None:
        self._counts[key] += 1
        self._total += 1
        if self._total >= self._most_uses:
            self._counts = Counter({k: n // 2 for k, n in self._counts.items() if n > 1})
            self._total //= 2

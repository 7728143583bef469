"""W-TinyLFU: new content has to be more popular than what it would replace."""

from __future__ import annotations

from collections import Counter

from kvsim.policies.replacement.replacement import Replacement

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

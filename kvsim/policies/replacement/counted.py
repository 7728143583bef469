"""Policies that rank a block by when it came, when it was used last, and how often."""

from __future__ import annotations

from typing import Any

from kvsim.policies.replacement.replacement import Ranked


class Counted(Ranked):
    """Keeps for each block when it was stored, when it was used last, and its number of uses."""

    __slots__ = ("_uses",)

    def __init__(self, first: int = 0, size: int = 0) -> None:
        super().__init__(first, size)
        self._uses: dict[int, tuple[int, int, int]] = {}
        """block → (stored at, last used at, number of uses)."""

    def stored(self, block: int, key: int) -> None:
        now = self.tick()
        self._uses[block] = now, now, 1

    def used(self, block: int) -> None:
        stored, _, uses = self._uses[block]
        self._uses[block] = stored, self.tick(), uses + 1

    def forgotten(self, block: int) -> None:
        del self._uses[block]


class LastInFirstOut(Counted):
    """Evicts what was stored last. SGLang 0.5.23 `mem_cache/evict_policy.py`, `FILOStrategy`."""

    __slots__ = ()

    def rank(self, block: int) -> Any:
        return -self._uses[block][0]


class MostRecentlyUsed(Counted):
    """Evicts what was used last. SGLang 0.5.23 `mem_cache/evict_policy.py`, `MRUStrategy`."""

    __slots__ = ()

    def rank(self, block: int) -> Any:
        return -self._uses[block][1]


class LeastFrequentlyUsed(Counted):
    """Evicts what was used least often, of equals the least recently used. SGLang 0.5.23
    `mem_cache/evict_policy.py`, `LFUStrategy`."""

    __slots__ = ()

    def rank(self, block: int) -> Any:
        _, last, uses = self._uses[block]
        return uses, last

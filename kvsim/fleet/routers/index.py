"""What a worker has in one of its caches, as its events tell.

The rules are those of Dynamo 1.6.1 (`lib/kv-router`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

TIERS = ("device", "host", "disk")


class Tier:
    """The blocks of one tier of one worker: each behind another, or at the start of a prompt."""

    __slots__ = ("_behind", "_parents")

    def __init__(self) -> None:
        self._parents: dict[Hashable, Hashable | None] = {}
        self._behind: dict[Hashable, set[Hashable]] = {}
        """Block → the blocks that follow it."""

    def __len__(self) -> int:
        return len(self._parents)

    def stored(self, parent: Hashable | None, keys: Sequence[Hashable]) -> None:
        """Adds blocks behind a known one; behind an unknown one they are dropped. A block that is
        there already stays as it is, and is not counted twice."""
        if parent is not None and parent not in self._parents:
            return
        for key in keys:
            if key not in self._parents:
                self._parents[key] = parent
                if parent is not None:
                    self._behind.setdefault(parent, set()).add(key)
            parent = key

    def removed(self, keys: Sequence[Hashable]) -> None:
        """Removes known blocks, and all that follow them."""
        going = [key for key in keys if key in self._parents]
        for key in going:
            if (parent := self._parents[key]) is not None:
                self._behind[parent].discard(key)
        while going:
            key = going.pop()
            if key in self._parents:
                del self._parents[key]
                going += self._behind.pop(key, ())

    def run(self, keys: Sequence[Hashable], start: int = 0) -> int:
        """Returns how many blocks of a prompt, from `start` on, are here without a gap."""
        # A block is here only with all before it in this tier, so halving finds the last one.
        low, high = start, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in self._parents:
                low = middle + 1
            else:
                high = middle
        return low - start

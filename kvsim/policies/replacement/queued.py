"""Policies of SGLang that are queues."""

from __future__ import annotations

from kvsim.policies.replacement.replacement import Replacement


class FirstInFirstOut(Replacement):
    """Evicts what was stored first. SGLang 0.5.23 `mem_cache/evict_policy.py`, `FIFOStrategy`."""

    __slots__ = ("_queue",)

    def __init__(self, first: int = 0, size: int = 0) -> None:
        super().__init__(first, size)
        self._queue = self.line()

    def stored(self, block: int, key: int) -> None:
        self._queue.append(block)

    def choose(self) -> int:
        return self.take_from(self._queue)


class Segmented(Replacement):
    """Evicts what was used only once first, then the least recently used. SGLang 0.5.23
    `mem_cache/evict_policy.py`, `SLRUStrategy`, with its `protected_threshold` of 2."""

    __slots__ = ("_again", "_once")

    def __init__(self, first: int = 0, size: int = 0) -> None:
        super().__init__(first, size)
        self._once, self._again = self.line(), self.line()

    def stored(self, block: int, key: int) -> None:
        self._once.append(block)

    def used(self, block: int) -> None:
        if block in self._again:
            self._again.renew(block)
        else:
            self._once.remove(block)
            self._again.append(block)

    def choose(self) -> int:
        return self.take_from(self._once, self._again)

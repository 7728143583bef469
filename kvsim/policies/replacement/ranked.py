"""Policies that rank blocks: by when they came and were used, by hints, by the future."""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush
from math import inf
from typing import Any

from kvsim.policies.future import Future
from kvsim.policies.replacement.replacement import Ranked, Replacement


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


_NEXT_ONES = 64
"""Requests with the same content, in the order of the trace, of which the soonest one counts."""


class Belady(Ranked):
    """ORACLE: evicts what prompts look up furthest in the future, of equals the deepest.

    Belady, "A study of replacement algorithms for a virtual-storage computer", 1966. When a turn
    will follow is estimated from its think time, and requests may overtake each other. So a run can
    have fewer hits than the bounds of `kvsim.explain.cachelab.audit`.
    """

    __slots__ = ("_block_size", "_coming", "_expected", "_future", "_holder", "_now_ns", "_tokens")

    def __init__(self, first: int, size: int, *, future: Future, block_size: int) -> None:
        super().__init__(first, size)
        self._future, self._block_size = future, block_size
        self._coming: dict[int, list[int]] = {}
        """Key → the requests whose prompts have it, the last one first, without those that were
        admitted already."""
        self._tokens: dict[int, int] = {}
        """block → tokens up to its end."""
        self._expected: list[tuple[float, int]] = []
        """Heap of (next use, block), some of them out of date."""
        self._now_ns = 0
        self._holder: dict[int, int] = {}
        """Key → the block with that content that look-ups find. Further copies are of no use."""

    def stored(self, block: int, key: int) -> None:
        self._holder.setdefault(key, block)

    def put(self, block: int, key: int | None, tokens: int, access_ns: int) -> None:
        assert key is not None, "blank blocks are not evicted"
        self._now_ns = max(self._now_ns, access_ns)
        self._holder.setdefault(key, block)
        self._tokens[block] = tokens
        super().put(block, key, tokens, access_ns)

    def rank(self, block: int) -> Any:
        key = self._keys[block]
        next_ns = self._next_use_ns(key) if self._holder.get(key) == block else inf
        heappush(self._expected, (next_ns, block))
        return -next_ns, -self._tokens[block]

    def choose(self) -> int:
        expected, overdue = self._expected, set[int]()
        while expected and expected[0][0] < self._now_ns:
            overdue.add(heappop(expected)[1])
        for block in sorted(overdue & self._idle.keys()):
            self.ranked(block)  # Who was expected did not use it, or is late.
        return super().choose()

    def forgotten(self, block: int) -> None:
        del self._tokens[block]
        if self._holder.get(self._keys[block]) == block:
            del self._holder[self._keys[block]]

    def _next_use_ns(self, key: int) -> float:
        """When the key is looked up next; not before now."""
        future, now_ns = self._future, self._now_ns
        if not self._coming:
            for index in reversed(range(future.requests)):
                for each in future.prompt_keys(index, self._block_size):
                    self._coming.setdefault(each, []).append(index)
        coming = self._coming.get(key, [])
        while coming and future.admitted(coming[-1]):
            coming.pop()
        next_ones = (index for index in coming[-_NEXT_ONES:] if not future.admitted(index))
        times_ns = (future.expected_ns(index, now_ns) for index in next_ones)
        return max(min(times_ns, default=inf), now_ns)


class Retained(Replacement):
    """Least recently used, but the first tokens of every prompt go last for some time after their
    last use.

    What users ask engines for: pin a prefix (vLLM #37003), until a deadline (vLLM #52113). By
    default the first 1,024 tokens, for 300 s.
    """

    __slots__ = ("_now_ns", "_others", "_pinned", "_pinned_tokens", "_ttl_ns")

    def __init__(
        self, first: int = 0, size: int = 0, *, pinned_tokens: int = 1024, ttl_s: float = 300.0
    ) -> None:
        super().__init__(first, size)
        self._pinned_tokens, self._ttl_ns = pinned_tokens, round(ttl_s * 1e9)
        self._pinned: OrderedDict[int, int] = OrderedDict()
        """Idle blocks, least recently used first, with the time of that use."""
        self._others: OrderedDict[int, int] = OrderedDict()
        self._now_ns = 0

    def put(self, block: int, key: int | None, tokens: int, access_ns: int) -> None:
        super().put(block, key, tokens, access_ns)
        self._now_ns = max(self._now_ns, access_ns)
        blocks = self._pinned if tokens <= self._pinned_tokens else self._others
        blocks[block] = access_ns

    def used(self, block: int) -> None:
        self._pinned.pop(block, None)
        self._others.pop(block, None)

    def choose(self) -> int:
        oldest = next(iter(self._pinned.values()), self._now_ns)
        expired = self._now_ns - oldest >= self._ttl_ns
        return (self._pinned if expired or not self._others else self._others).popitem(last=False)[
            0
        ]

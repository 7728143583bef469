"""Orders in which idle blocks with content are evicted. A hit removes a block from the order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice

from kvsim.policies.order import Order, Queue, make_order, out_of_date
from kvsim.policies.replacement import (
    AdaptiveReplacement,
    Belady,
    FirstInFirstOut,
    LastInFirstOut,
    LeastFrequentlyUsed,
    LowInterReference,
    MostRecentlyUsed,
    Retained,
    S3Fifo,
    Segmented,
    Sieve,
    TwoQueues,
    WindowTinyLfu,
)


class LeastRecentlyUsed(Queue):
    """Evicts the blocks that became idle first. The last block of a table goes first.

    The order of the free queue of vLLM V1 (`v1/core/block_pool.py`).
    """


Chain = list[tuple[int, int]]
"""Blocks of a table that became idle together, as (tokens, block): tokens ascend."""


class Evictor(Order):
    """Idle blocks with content, in the eviction order of vLLM 0.6.3.post1.

    The engine (`core/evictor_v2.py`) keeps an insertion-ordered map block → (tokens, last) and
    walks it from the front with a candidate, at first the front entry: an entry with a later
    `last` ends the walk; one with more `tokens` (a longer prefix) becomes the candidate. So the
    walk compares with the *current* candidate, and an older entry behind a newer one is not found.

    The walk is O(entries). Here entries are grouped so that an eviction touches few of them::

        oldest ►  streak(last=7)         streak(last=9) ...      consecutive entries, equal `last`
                    ├ chain 16 32 48 64     ...                  one table released: tokens ascend
                    └ chain 16 32                                ▲ the tail is the chain's longest

    Within a streak nothing ends the walk, so its candidate is the longest prefix, the earliest
    inserted of equals: the best chain tail, kept in a heap. Blocks that are hit leave lazily.
    """

    def __init__(self, first: int = 0, size: int = 0) -> None:
        self._streaks: deque[_Streak] = deque()
        self._home: dict[int, Chain] = {}
        """block → the chain that holds it. Other blocks in a chain have left."""
        self._chains = self._listed = 0

    def __len__(self) -> int:
        return len(self._home)

    def __iter__(self) -> Iterator[int]:
        return iter(self._home)

    def hit(self, block: int) -> None:
        self._home.pop(block, None)

    def put(self, block: int, key: int | None, tokens: int, access_ns: int) -> None:
        self.put_table([block], [key], [tokens], access_ns)

    def put_table(
        self,
        blocks: list[int],
        keys: Sequence[int | None],
        tokens: Sequence[int],
        access_ns: int,
    ) -> None:
        """Inserts the blocks of a table at the back, first to last."""
        if not self._streaks or self._streaks[-1].last != access_ns:
            self._streaks.append(_Streak(access_ns))
        chain = list(zip(tokens, blocks, strict=True))
        self._home.update(dict.fromkeys(blocks, chain))
        self._chains += 1
        heappush(self._streaks[-1].heap, (-tokens[-1], self._chains, chain))
        self._listed += len(chain)
        # Where few are evicted, those that have left would fill memory.
        if self._listed > out_of_date(len(self._home)):
            for streak in self._streaks:
                streak.sweep(self._home)
            self._streaks = deque(streak for streak in self._streaks if streak.heap)
            self._listed = len(self._home)

    def pop(self) -> int:
        return self.pop_many(1)[0]

    def pop_many(self, number: int) -> list[int]:
        """Removes and returns the blocks on which so many walks of the engine end."""
        evicted: list[int] = []
        while len(evicted) < number:
            evicted += self._evicted(number - len(evicted))
        return evicted

    def _evicted(self, most: int) -> list[int]:
        """Removes and returns at least one and at most so many blocks that go next."""
        streaks, home = self._streaks, self._home
        while not streaks[0].trim(home):
            streaks.popleft()
        candidate = streaks[0]
        for streak in islice(streaks, 1, None):
            if streak.trim(home):
                if streak.last > candidate.last:
                    break
                # The next candidate may be in this streak.
                most = 1
                if streak.longest > candidate.longest:
                    candidate = streak
        return candidate.take(most, home)


class _Streak:
    """Consecutively inserted entries with equal `last`."""

    __slots__ = ("heap", "last")

    def __init__(self, last: int) -> None:
        self.last = last
        self.heap: list[tuple[int, int, Chain]] = []
        """(−tokens of the tail, insertion number, chain). The first number may be out of date; it
        is then too small, because chains only get shorter."""

    @property
    def longest(self) -> int:
        """The tokens of the candidate, after `trim`."""
        return -self.heap[0][0]

    def sweep(self, home: dict[int, Chain]) -> None:
        """Forgets all blocks that have left."""
        for _, _, chain in self.heap:
            chain[:] = [entry for entry in chain if home.get(entry[1]) is chain]
        self.heap = [(-chain[-1][0], order, chain) for _, order, chain in self.heap if chain]
        heapify(self.heap)

    def trim(self, home: dict[int, Chain]) -> bool:
        """Brings the candidate to the top. Returns False if nothing is left."""
        heap = self.heap
        while heap:
            key, order, chain = heap[0]
            while chain and home.get(chain[-1][1]) is not chain:
                chain.pop()
            if not chain:
                heappop(heap)
            elif -chain[-1][0] != key:
                heapreplace(heap, (-chain[-1][0], order, chain))
            else:
                return True
        return False

    def take(self, most: int, home: dict[int, Chain]) -> list[int]:
        """Removes and returns the candidate, after `trim`, and those of its chain, at most so many
        in all, that are candidates next."""
        chain = self.heap[0][2]
        # Of the other chains, one of two is next.
        other = -min(self.heap[1:3])[0] if len(self.heap) > 1 else 0
        blocks: list[int] = []
        while chain and len(blocks) < most and (not blocks or chain[-1][0] > other):
            block = chain.pop()[1]
            if home.get(block) is chain:
                del home[block]
                blocks.append(block)
        return blocks


EVICTIONS: dict[str, type[Order]] = {
    "vllm-0.6.3": Evictor,
    "lru": LeastRecentlyUsed,
    "fifo": FirstInFirstOut,
    "filo": LastInFirstOut,
    "mru": MostRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "slru": Segmented,
    "arc": AdaptiveReplacement,
    "2q": TwoQueues,
    "lirs": LowInterReference,
    "s3-fifo": S3Fifo,
    "sieve": Sieve,
    "w-tinylfu": WindowTinyLfu,
    "retained": Retained,
    "belady": Belady,
}
"""Values of the argument `eviction` of managers with a prefix cache."""

make_eviction = partial(make_order, "eviction", EVICTIONS)
"""Returns the factory of an eviction order by name (`kvsim.policies.order.make_order`)."""

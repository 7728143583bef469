"""Orders in which idle blocks with content are evicted. A hit removes a block from the order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from heapq import heappop, heappush, heapreplace
from itertools import islice

from kvsim.policies.order import Order, Queue, make_order
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
        self._home: dict[int, list[tuple[int, int]]] = {}
        """block → the chain that holds it. Other blocks in a chain have left."""
        self._chains = 0

    def __len__(self) -> int:
        return len(self._home)

    def __iter__(self) -> Iterator[int]:
        return iter(self._home)

    def store_table(self, blocks: list[int], keys: list[int]) -> None:
        """Content does not matter."""

    def hit(self, block: int) -> None:
        self._home.pop(block, None)

    def put(self, block: int, key: int | None, tokens: int, access_ns: int) -> None:
        """Inserts a block at the back."""
        streak = self._streaks[-1] if self._streaks else None
        if streak is None or streak.last != access_ns:
            streak = _Streak(access_ns)
            self._streaks.append(streak)
        chain = streak.open
        # Tokens ascend within a chain, so another table begins here.
        if chain is None or chain[-1][0] >= tokens:
            streak.close()
            self._chains += 1
            chain = streak.open = []
            streak.order = self._chains
        chain.append((tokens, block))
        self._home[block] = chain

    def put_table(
        self,
        blocks: list[int],
        keys: Sequence[int | None],
        tokens: Sequence[int],
        access_ns: int,
    ) -> None:
        """Inserts the blocks of a table at the back, first to last."""
        if not blocks:
            return
        self.put(blocks[0], keys[0], tokens[0], access_ns)
        # Tokens ascend in a table, so its other blocks follow in the same chain.
        chain = self._home[blocks[0]]
        chain.extend(zip(tokens[1:], blocks[1:], strict=True))
        self._home.update(dict.fromkeys(blocks, chain))

    def pop(self) -> int:
        """Removes and returns the block on which the engine's walk ends."""
        return self._evicted(1)[0]

    def pop_many(self, number: int) -> list[int]:
        evicted: list[int] = []
        while len(evicted) < number:
            evicted += self._evicted(number - len(evicted))
        return evicted

    def _evicted(self, most: int) -> list[int]:
        """Removes and returns at most so many blocks that go next: one, or several where all are in
        the first streak, which the next one is later than."""
        streaks, home = self._streaks, self._home
        while not streaks[0].trim(home):
            streaks.popleft()
        candidate = streaks[0]
        last, tokens, passed = candidate.last, candidate.longest, False
        for streak in islice(streaks, 1, None):
            if not streak.trim(home):
                continue
            if streak.last > last:
                break
            passed = True
            if streak.longest > tokens:
                candidate, last, tokens = streak, streak.last, streak.longest
        # Where a later streak was looked at, it may hold the next candidate: one at a time.
        return candidate.take(1 if passed else most, home)


class _Streak:
    """Consecutively inserted entries with equal `last`."""

    __slots__ = ("heap", "last", "open", "order")

    def __init__(self, last: int) -> None:
        self.last = last
        self.heap: list[tuple[int, int, list[tuple[int, int]]]] = []
        """(−tokens of the tail, insertion number, chain). The first number may be out of date; it
        is then too small, because chains only get shorter."""
        self.open: list[tuple[int, int]] | None = None
        """The chain that still grows. It is not in the heap."""
        self.order = 0

    @property
    def longest(self) -> int:
        """Returns the tokens of the candidate, after `trim`."""
        return -self.heap[0][0]

    def close(self) -> None:
        """Moves the growing chain, if any, into the heap."""
        if self.open is not None:
            heappush(self.heap, (-self.open[-1][0], self.order, self.open))
            self.open = None

    def trim(self, home: dict[int, list[tuple[int, int]]]) -> bool:
        """Brings the true candidate to the top. Returns False if nothing is left."""
        self.close()
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

    def take(self, most: int, home: dict[int, list[tuple[int, int]]]) -> list[int]:
        """Removes and returns at most so many candidates, one after another."""
        blocks: list[int] = []
        while len(blocks) < most and self.trim(home):
            chain, several = self.heap[0][2], len(self.heap) > 1
            while chain and home.get(block := chain[-1][1]) is chain:
                chain.pop()
                del home[block]
                blocks.append(block)
                # The tail of another chain may be the longest now.
                if several or len(blocks) == most:
                    break
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

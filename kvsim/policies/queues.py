"""Eviction policies that keep queues: first in, first out, with second chances, with a memory of
what was lost, and those that learn from it what comes back: ARC, LIRS, W-TinyLFU.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from heapq import heapify, heappop, heappush

from kvsim.policies.replacement import Replacement


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


class TwoQueues(Replacement):
    """A quarter of the cache for what is new, first in, first out; what comes back after it left
    that queue is kept by last use.

    Johnson and Shasha, "2Q: a low overhead high performance buffer management replacement
    algorithm", VLDB 1994, the full version, with its sizes: keys of half as many blocks as the
    cache holds are remembered.
    """

    __slots__ = ("_lost", "_most_lost", "_most_new", "_new", "_old")

    def __init__(self, first: int, size: int) -> None:
        super().__init__(first, size)
        self._most_new, self._most_lost = max(1, size // 4), max(1, size // 2)
        self._new, self._old = self.line(), self.line()
        self._lost: OrderedDict[int, None] = OrderedDict()

    def stored(self, block: int, key: int) -> None:
        if key in self._lost:
            del self._lost[key]
            self._old.append(block)
        else:
            self._new.append(block)

    def used(self, block: int) -> None:
        if block in self._old:
            self._old.renew(block)

    def choose(self) -> int:
        queues = (self._new, self._old)
        for blocks in queues if len(self._new) > self._most_new else queues[::-1]:
            block = blocks.take()
            if block is not None:
                if blocks is self._new:
                    self._lost[self._keys[block]] = None
                    if len(self._lost) > self._most_lost:
                        self._lost.popitem(last=False)
                return block
        raise AssertionError("no idle block left")


_MOST_USES = 3
_PROVEN = 2
"""Uses after its first with which content leaves the small queue for the main one."""


class S3Fifo(Replacement):
    """A tenth of the cache is for what is new. What is used twice more there, or comes back soon
    after it was evicted, joins the main queue, where each further use saves it once.

    Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023, algorithm 1.
    """

    __slots__ = ("_lost", "_main", "_most_lost", "_most_main", "_small", "_uses")

    def __init__(self, first: int, size: int) -> None:
        super().__init__(first, size)
        small = max(1, size // 10)
        self._most_main = size - small
        self._most_lost = max(1, size * 9 // 10)
        self._small, self._main = self.line(), self.line()
        self._lost: OrderedDict[int, None] = OrderedDict()
        self._uses: dict[int, int] = {}
        """block → number of uses after the first, at most `_MOST_USES`."""

    def stored(self, block: int, key: int) -> None:
        self._uses[block] = 0
        if key in self._lost:
            del self._lost[key]
            self._main.append(block)
        else:
            self._small.append(block)

    def used(self, block: int) -> None:
        self._uses[block] = min(self._uses[block] + 1, _MOST_USES)

    def choose(self) -> int:
        block = None
        if len(self._main) <= self._most_main:
            block = self._from_small()
        if block is None:
            block = self._from_main()
        if block is None:
            block = self._from_small()
        assert block is not None, "no idle block left"
        del self._uses[block]
        return block

    def _from_small(self) -> int | None:
        while (block := self._small.take()) is not None:
            if self._uses[block] < _PROVEN:
                self._lost[self._keys[block]] = None
                if len(self._lost) > self._most_lost:
                    self._lost.popitem(last=False)
                return block
            self._main.append(block)
        return None

    def _from_main(self) -> int | None:
        while (block := self._main.first()) is not None:
            if not self._uses[block]:
                self._main.remove(block)
                return block
            self._uses[block] -= 1
            self._main.renew(block)
        return None


class Sieve(Replacement):
    """A hand goes from the oldest block to the newest and starts again. It spares each block that
    was used since it passed, and evicts the first other one.

    Zhang et al., "SIEVE is simpler than LRU: an efficient turn-key eviction algorithm for web
    caches", NSDI 2024, algorithm 1. Blocks in use are passed and stay as they are, so only places
    of idle ones are looked at.
    """

    __slots__ = ("_ahead", "_hand", "_listed", "_passed", "_places", "_stored", "_used")

    def __init__(self, first: int = 0, size: int = 0) -> None:
        super().__init__(first, size)
        self._places: OrderedDict[int, int] = OrderedDict()
        """Block → its place in the queue, ascending."""
        self._stored = 0
        self._hand = 0
        """The last place that it passed; 0 at the start of the queue."""
        self._ahead: list[tuple[int, int]] = []
        """Heap of (place, block) after the hand: all idle ones, and some that are in use again."""
        self._passed: list[tuple[int, int]] = []
        """The same before the hand."""
        self._listed: set[int] = set()
        """Blocks in one of the heaps."""
        self._used: set[int] = set()
        """Blocks used since the hand passed."""

    def stored(self, block: int, key: int) -> None:
        self._stored += 1
        self._places[block] = self._stored

    def used(self, block: int) -> None:
        self._used.add(block)

    def emptied(self, block: int) -> None:
        del self._places[block]
        self._used.discard(block)
        self._listed.discard(block)
        for heap in (self._ahead, self._passed):
            heap[:] = [each for each in heap if each[1] != block]
            heapify(heap)

    def put(self, block: int, key: int | None, tokens: int, access_ns: int) -> None:
        super().put(block, key, tokens, access_ns)
        if block not in self._listed:
            self._listed.add(block)
            place = self._places[block]
            heappush(self._ahead if place > self._hand else self._passed, (place, block))

    def choose(self) -> int:
        assert self._idle, "no idle block left"
        while True:
            if not self._ahead:
                self._start_again()
            self._hand, block = heappop(self._ahead)
            if block in self._idle and block in self._used:
                self._used.remove(block)
                heappush(self._passed, (self._hand, block))
                continue
            self._listed.remove(block)
            if block in self._idle:
                break
        del self._places[block]
        if not self._places or self._places[next(reversed(self._places))] < self._hand:
            self._start_again()
        return block

    def _start_again(self) -> None:
        self._hand = 0
        self._ahead, self._passed = self._passed, self._ahead


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

"""Eviction policies of the literature and of engines, for prefix caches: those that rank blocks by
when they came and were used, by hints, or by the future; and those that keep queues: first in,
first out, with second chances, with a memory of what was lost, and those that learn from it what
comes back (ARC, LIRS, W-TinyLFU).

`kvsim.policies.eviction.EVICTIONS` names them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Any

from kvsim.policies.future import Future
from kvsim.policies.order import Replacement, out_of_date


class Ranked(Replacement):
    """Evicts the idle block of the least rank. What a block ranks may change when it is used."""

    def __init__(self, first: int = 0, size: int = 0) -> None:
        super().__init__(first, size)
        self._clock = count(1)
        self._heap: list[tuple[Any, int, int]] = []
        """(rank, number, block). An entry whose number is not that of its block is out of date."""
        self._valid: dict[int, int] = {}
        self._numbers = count()

    def tick(self) -> int:
        """Returns a number greater than all before."""
        return next(self._clock)

    def rank(self, block: int) -> Any:
        """Returns what the block ranks now."""
        raise NotImplementedError

    def forgotten(self, block: int) -> None:
        """A block was evicted."""

    def put(self, block: int, key: int | None, tokens: int, access_ns: int) -> None:
        super().put(block, key, tokens, access_ns)
        self.ranked(block)

    def ranked(self, block: int) -> None:
        """Ranks an idle block, again if it was before."""
        number = self._valid[block] = next(self._numbers)
        heappush(self._heap, (self.rank(block), number, block))
        # Where few are evicted, what is out of date would fill memory.
        if len(self._heap) > out_of_date(len(self._idle)):
            self._heap = [e for e in self._heap if e[2] in self._idle and self._valid[e[2]] == e[1]]
            heapify(self._heap)

    def choose(self) -> int:
        heap, valid, idle = self._heap, self._valid, self._idle
        while True:
            _, number, block = heappop(heap)
            if block in idle and valid[block] == number:
                del valid[block]
                self.forgotten(block)
                return block


class Counted(Ranked):
    """Keeps for each block when it was stored, when it was used last, and its number of uses."""

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

    def rank(self, block: int) -> Any:
        return -self._uses[block][0]


class MostRecentlyUsed(Counted):
    """Evicts what was used last. SGLang 0.5.23 `mem_cache/evict_policy.py`, `MRUStrategy`."""

    def rank(self, block: int) -> Any:
        return -self._uses[block][1]


class LeastFrequentlyUsed(Counted):
    """Evicts what was used least often, of equals the least recently used. SGLang 0.5.23
    `mem_cache/evict_policy.py`, `LFUStrategy`."""

    def rank(self, block: int) -> Any:
        _, last, uses = self._uses[block]
        return uses, last


_NEXT_ONES = 64
"""Requests with the same content, in the order of the trace, of which the soonest one counts."""


class Belady(Ranked):
    """ORACLE: evicts what prompts look up furthest in the future, of equals the deepest.

    Belady, "A study of replacement algorithms for a virtual-storage computer", 1966. When a turn
    will follow is estimated from its think time, and requests may overtake each other. So a run can
    have fewer hits than the bounds of `kvsim.explain.cache_eviction`.
    """

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
            # From the last to the first, which is then popped from the end.
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
        oldest_ns = next(iter(self._pinned.values()), None)
        expired = oldest_ns is not None and self._now_ns - oldest_ns >= self._ttl_ns
        blocks = self._pinned if expired or not self._others else self._others
        return blocks.popitem(last=False)[0]


class FirstInFirstOut(Replacement):
    """Evicts what was stored first. SGLang 0.5.23 `mem_cache/evict_policy.py`, `FIFOStrategy`."""

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
                # What leaves the old queue is forgotten.
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
            # One in use is listed again when it returns.
            self._listed.remove(block)
            if block in self._idle:
                break
        del self._places[block]
        # The hand has passed the newest block.
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
        # In the stack, so its last use was later than that of the coldest hot one.
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
            # Remembered as long as its last use is in the stack; if it returns meanwhile, it is
            # hot.
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
        # All four lists together hold at most twice the cache (the paper's case IV).
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
        # At the target, T1 gives way only to what comes back from B2 (the paper's REPLACE).
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
            # At a tie, what is there stays.
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

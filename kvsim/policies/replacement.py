"""Eviction policies of the literature and of engines, for prefix caches: what all of them share,
and those that rank blocks by when they came and were used, by hints, or by the future.

`kvsim.policies.eviction.EVICTIONS` names them. A block in use cannot go, so each policy evicts the
first block of its own order that is idle. Those that keep queues are in `kvsim.policies.queues`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

from kvsim.policies.future import Future
from kvsim.policies.order import Order

Aside = dict[int, "Line"]
"""Block that was passed → its line, until the block is idle again."""


class Line:
    """A queue of blocks, of which the first idle one goes.

    ```
     front ►  passed: in use when looked at   │   ahead: not looked at yet
                └─ idle again: `back`         │
    ```

    A block in use at the front is passed once, however often the line is looked at. It keeps its
    place, to which `returned` brings it back. So each operation takes O(log n).
    """

    __slots__ = ("_ahead", "_aside", "_back", "_idle", "_passed", "_places")

    def __init__(self, idle: Container[int], aside: Aside) -> None:
        self._idle, self._aside = idle, aside
        self._ahead: OrderedDict[int, None] = OrderedDict()
        self._passed: OrderedDict[int, int] = OrderedDict()
        """Block → its place, ascending."""
        self._back: list[tuple[int, int]] = []
        """Heap of (place, block): passed ones that became idle, some of them out of date."""
        self._places = 0

    def __len__(self) -> int:
        return len(self._ahead) + len(self._passed)

    def __contains__(self, block: int) -> bool:
        return block in self._ahead or block in self._passed

    def append(self, block: int) -> None:
        """Add a block at the end."""
        self._ahead[block] = None

    def renew(self, block: int) -> None:
        """Move a block of the line to its end."""
        if block in self._ahead:
            self._ahead.move_to_end(block)
        else:
            self.remove(block)
            self._ahead[block] = None

    def remove(self, block: int) -> None:
        """Take out a block of the line."""
        if block in self._ahead:
            del self._ahead[block]
        else:
            del self._passed[block]
            self._aside.pop(block, None)

    def shift(self) -> int:
        """Take out the first block, idle or not."""
        block = next(iter(self._passed or self._ahead))
        self.remove(block)
        return block

    def first(self) -> int | None:
        """The first idle block; None if there is none."""
        back, passed, ahead, idle = self._back, self._passed, self._ahead, self._idle
        while back:
            place, block = back[0]
            if passed.get(block) == place:
                if block in idle:
                    return block
                self._aside[block] = self
            heappop(back)
        while ahead:
            block = next(iter(ahead))
            if block in idle:
                return block
            del ahead[block]
            self._places += 1
            passed[block] = self._places
            self._aside[block] = self
        return None

    def take(self) -> int | None:
        """Take out the first idle block; None if there is none."""
        block = self.first()
        if block is not None:
            self.remove(block)
        return block

    def returned(self, block: int) -> None:
        """A block that was passed is idle again."""
        heappush(self._back, (self._passed[block], block))


class Replacement(Order):
    """An order that ranks blocks by what was stored and used, not by when they became idle.

    The blocks of a table count as used from last to first, so that a prefix counts as used after
    its continuation.
    """

    __slots__ = ("_aside", "_idle", "_keys", "_lines")

    def __init__(self, first: int = 0, size: int = 0) -> None:
        self._keys: dict[int, int] = {}
        """block → its content, from when it is stored until it is evicted."""
        self._idle: dict[int, None] = {}
        self._aside: Aside = {}
        self._lines: list[Line] = []

    # -- what a policy defines -------------------------------------------------------------------

    def missed(self, key: int) -> None:
        """Content was looked up that is not here; room for it is made next."""

    def stored(self, block: int, key: int) -> None:
        """New content came in."""

    def used(self, block: int) -> None:
        """Content was used once more."""

    def choose(self) -> int:
        """Returns the idle block that is evicted next, and takes it out of the policy's lists."""
        raise NotImplementedError

    def emptied(self, block: int) -> None:
        """The content of a block was lost in another way than by `choose`, as nano-vllm forgets
        that of which it has a newer copy. The block is given other content next."""
        for line in self._lines:
            if block in line:
                line.remove(block)

    # -- the protocol ----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._idle)

    def __iter__(self) -> Iterator[int]:
        return iter(self._idle)

    def store(self, block: int, key: int) -> None:
        if block in self._keys:
            self.emptied(block)
        self._keys[block] = key
        self.stored(block, key)

    def store_table(self, blocks: list[int], keys: list[int]) -> None:
        for block, key in zip(reversed(blocks), reversed(keys), strict=True):
            self.store(block, key)

    def hit(self, block: int) -> None:
        self._idle.pop(block, None)
        self.used(block)

    def hit_table(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.hit(block)

    def put(self, block: int, key: int | None, tokens: int, access_ns: int) -> None:
        self._idle[block] = None
        if block in self._aside:
            self._aside.pop(block).returned(block)

    def pop(self) -> int:
        block = self.choose()
        del self._idle[block], self._keys[block]
        return block

    # -- for policies ----------------------------------------------------------------------------

    def line(self) -> Line:
        """Returns a new line of blocks, which knows those that are idle here."""
        made = Line(self._idle, self._aside)
        self._lines.append(made)
        return made

    def take_from(self, *lines: Line) -> int:
        """Takes the first idle block out of the first line that has one."""
        block = next((block for line in lines if (block := line.take()) is not None), None)
        assert block is not None, "no idle block left"
        return block


class Ranked(Replacement):
    """Evicts the idle block of the least rank. What a block ranks may change when it is used."""

    __slots__ = ("_clock", "_heap", "_numbers", "_valid")

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
    have fewer hits than the bounds of `kvsim.explain.cache_eviction`.
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

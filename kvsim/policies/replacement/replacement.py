"""What all replacement policies share: who holds which content, and what is idle."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator
from heapq import heappop, heappush
from itertools import count
from typing import Any

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

"""What all replacement policies share: who holds which content, and what is idle."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from typing import Any

from kvsim.policies.order import Order
from kvsim.policies.replacement.line import Aside, Line


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

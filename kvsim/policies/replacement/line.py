"""Blocks in the order in which they should go, some of them in use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from heapq import heappop, heappush

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

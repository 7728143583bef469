"""Orders in which idle blocks without content are given out again.

The structure *is* the order. Blocks that were never used are not stored:
a counter stands for them, so that a pool costs nothing until it is used.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from itertools import islice
from typing import Protocol


class IdleOrder(Protocol):
    """What a pool needs of an order; an order may offer more."""

    def __init__(self, first: int, size: int) -> None: ...

    def __len__(self) -> int: ...

    def pop(self) -> int:
        """The next block to use."""
        ...

    def pop_many(self, number: int) -> list[int]:
        """The next `number` blocks, as `pop` would give them one by one."""
        ...

    def put(self, block: int) -> None:
        """Return a block."""
        ...

    def put_many(self, blocks: list[int]) -> None:
        """Return blocks, in this order."""
        ...

    def returned(self) -> list[int]:
        """Idle blocks that were used before, for audits."""
        ...

    @property
    def fresh(self) -> range:
        """Blocks never used."""
        ...


class Stack:
    """Last returned, first reused; blocks never used come last, in ascending order.

    vLLM 0.6.3.post1 `core/block/naive_block.py`: a deque, freed blocks are pushed on its left.
    """

    __slots__ = ("_end", "_fresh", "_returned")

    def __init__(self, first: int, size: int) -> None:
        self._returned: list[int] = []
        self._fresh = first
        self._end = first + size

    def __len__(self) -> int:
        return len(self._returned) + self._end - self._fresh

    def pop(self) -> int:
        """The next block to use."""
        if self._returned:
            return self._returned.pop()
        block = self._fresh
        assert block < self._end, "no idle block left"
        self._fresh = block + 1
        return block

    def pop_many(self, number: int) -> list[int]:
        """The next `number` blocks, as `pop` would give them one by one."""
        returned = self._returned
        if number <= len(returned):
            taken = returned[: -number - 1 : -1]
            del returned[len(returned) - number :]
            return taken
        taken = returned[::-1]
        returned.clear()
        start = self._fresh
        self._fresh = start + number - len(taken)
        assert self._fresh <= self._end, "no idle block left"
        taken.extend(range(start, self._fresh))
        return taken

    def put(self, block: int) -> None:
        """Return a block."""
        self._returned.append(block)

    def put_many(self, blocks: list[int]) -> None:
        """Return blocks, in this order."""
        self._returned.extend(blocks)

    def returned(self) -> list[int]:
        """Idle blocks that were used before, for audits."""
        return list(self._returned)

    @property
    def fresh(self) -> range:
        """Blocks never used."""
        return range(self._fresh, self._end)


class TopStack(Stack):
    """Last returned, first reused; blocks never used come last, in descending order.

    vLLM 0.3.3 `core/block_manager.py`, `BlockAllocator`: a list of all blocks, popped at its end.
    """

    __slots__ = ()

    def pop(self) -> int:
        if self._returned:
            return self._returned.pop()
        assert self._fresh < self._end, "no idle block left"
        self._end -= 1
        return self._end

    def pop_many(self, number: int) -> list[int]:
        return [self.pop() for _ in range(number)]


class Queue:
    """First returned, first reused; blocks never used come first, in ascending order.

    A block whose content is hit leaves from its place in the queue.

    nano-vllm `nanovllm/engine/block_manager.py`: a deque, freed blocks are pushed on its right.
    """

    __slots__ = ("_end", "_fresh", "_returned")

    def __init__(self, first: int, size: int) -> None:
        self._returned: OrderedDict[int, None] = OrderedDict()
        self._fresh = first
        self._end = first + size

    def __len__(self) -> int:
        return len(self._returned) + self._end - self._fresh

    def pop(self) -> int:
        """The next block to use."""
        block = self._fresh
        if block < self._end:
            self._fresh = block + 1
            return block
        assert self._returned, "no idle block left"
        return self._returned.popitem(last=False)[0]

    def pop_many(self, number: int) -> list[int]:
        """The next `number` blocks, as `pop` would give them one by one."""
        fresh = self._fresh
        self._fresh = min(fresh + number, self._end)
        blocks = list(range(fresh, self._fresh))
        number -= len(blocks)
        assert number <= len(self._returned), "no idle block left"
        oldest = list(islice(self._returned, number))
        _discard(self._returned, oldest)
        return blocks + oldest

    def put(self, block: int) -> None:
        """Return a block."""
        self._returned[block] = None

    def put_many(self, blocks: list[int]) -> None:
        """Return blocks, in this order."""
        self._returned.update(dict.fromkeys(blocks))

    def remove(self, block: int) -> None:
        """Take out a returned block because it was hit."""
        del self._returned[block]

    def returned(self) -> list[int]:
        """Idle blocks that were used before, for audits."""
        return list(self._returned)

    @property
    def fresh(self) -> range:
        """Blocks never used."""
        return range(self._fresh, self._end)


def _discard(blocks: OrderedDict[int, None], chosen: list[int]) -> None:
    """Take keys out, without a step of Python for each."""
    deque(map(blocks.__delitem__, chosen), maxlen=0)


IDLE_ORDERS: dict[str, type[IdleOrder]] = {
    "stack": Stack,
    "top-stack": TopStack,
    "queue": Queue,
}
"""Names of the block managers' argument `idle_order`."""

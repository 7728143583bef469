"""Orders in which blank idle blocks are reused.

Blocks that were never used are represented by a counter, so a pool costs no memory until it is
used.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

from kvsim.policies.order import Order, make_order


class Stack(Order):
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

    def __iter__(self) -> Iterator[int]:
        return iter(self._returned)

    def pop(self) -> int:
        if self._returned:
            return self._returned.pop()
        block = self._fresh
        assert block < self._end, "no idle block left"
        self._fresh = block + 1
        return block

    def pop_many(self, number: int) -> list[int]:
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

    def put(self, block: int, key: int | None, tokens: int, access_ns: int) -> None:
        self._returned.append(block)

    def put_table(
        self,
        blocks: list[int],
        keys: Sequence[int | None],
        tokens: Sequence[int],
        access_ns: int,
    ) -> None:
        """Puts a table back so that its last block is reused first."""
        self._returned.extend(blocks)

    @property
    def fresh(self) -> range:
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


class Queue(Order):
    """First returned, first reused; blocks never used come first, in ascending order.

    The last block of a table goes first. A block whose content is hit leaves the order from
    wherever it is.

    nano-vllm `nanovllm/engine/block_manager.py`: a deque, freed blocks are pushed on its right.
    """

    __slots__ = ("_end", "_fresh", "_returned")

    def __init__(self, first: int, size: int) -> None:
        self._returned: OrderedDict[int, None] = OrderedDict()
        self._fresh = first
        self._end = first + size

    def __len__(self) -> int:
        return len(self._returned) + self._end - self._fresh

    def __iter__(self) -> Iterator[int]:
        return iter(self._returned)

    def hit(self, block: int) -> None:
        self._returned.pop(block, None)

    def hit_table(self, blocks: list[int]) -> None:
        leave = self._returned.pop
        for block in blocks:
            leave(block, None)

    def store_table(self, blocks: list[int], keys: list[int]) -> None:
        """Content does not matter."""

    def pop(self) -> int:
        block = self._fresh
        if block < self._end:
            self._fresh = block + 1
            return block
        assert self._returned, "no idle block left"
        return self._returned.popitem(last=False)[0]

    def pop_many(self, number: int) -> list[int]:
        fresh = self._fresh
        self._fresh = min(fresh + number, self._end)
        blocks = list(range(fresh, self._fresh))
        number -= len(blocks)
        assert number <= len(self._returned), "no idle block left"
        oldest = list(islice(self._returned, number))
        _discard(self._returned, oldest)
        return blocks + oldest

    def put(self, block: int, key: int | None, tokens: int, access_ns: int) -> None:
        self._returned[block] = None

    def put_table(
        self,
        blocks: list[int],
        keys: Sequence[int | None],
        tokens: Sequence[int],
        access_ns: int,
    ) -> None:
        self._returned.update(dict.fromkeys(reversed(blocks)))

    @property
    def fresh(self) -> range:
        return range(self._fresh, self._end)


def _discard(blocks: OrderedDict[int, None], chosen: list[int]) -> None:
    """Removes keys from a mapping without a Python loop."""
    deque(map(blocks.__delitem__, chosen), maxlen=0)


IDLE_ORDERS: dict[str, type[Order]] = {
    "stack": Stack,
    "top-stack": TopStack,
    "queue": Queue,
}
"""Values of the block managers' argument `idle_order`."""

make_idle_order = partial(make_order, "idle_order", IDLE_ORDERS)
"""Returns the factory of an idle order by name (`kvsim.policies.order.make_order`)."""

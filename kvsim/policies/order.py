"""The order of idle blocks: which of them is reused next.

```
          store                  put
 in use ────────► in use ─────────────────► idle ── pop ──► in use, its content is lost
                  with content ◄─── hit ────┘
```

A pool reports everything that happens to its blocks to an order, and only ever calls `pop` to get
one. The protocol serves both blocks with content, where the order is the eviction policy, and blank
blocks. The key of a content stands for the tokens of a full block and all tokens before it.
"""

from __future__ import annotations

from bisect import bisect
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from heapq import heappop, heappush
from inspect import signature
from itertools import chain
from typing import Any

from kvsim.errors import ConfigError


class Order:
    """The order in which idle blocks are reused. A new order holds no block.

    To write your own policy, derive a class with `put`, `pop`, `hit` and, if it looks at blocks in
    use or at keys, `store`. Its constructor may name `first` and `size` (the ids of the pool's
    blocks are `first .. first + size - 1`), `block_size`, `num_gpu_blocks`, `seed` and other
    settings of a run. The methods for several blocks exist for speed and must decide the same.
    """

    def store(self, block: int, key: int) -> None:
        """A block in use was given content. Several blocks may hold the same content."""

    def hit(self, block: int) -> None:
        """One more request uses the content of a block; an idle block leaves the order."""

    def put(self, block: int, key: int | None, tokens: int, access_ns: int) -> None:
        """A block became idle.

        `key` is its content, or None for a blank block. `tokens` counts the tokens of its sequence
        up to the end of the block. `access_ns` is when that sequence was last scheduled, or -1 if
        unknown.
        """
        raise NotImplementedError

    def pop(self) -> int:
        """Removes and returns the block that is reused next. Its content is lost."""
        raise NotImplementedError

    def store_table(self, blocks: list[int], keys: list[int]) -> None:
        """Calls `store` for consecutive blocks of a table."""
        for block, key in zip(blocks, keys, strict=True):
            self.store(block, key)

    def put_table(
        self,
        blocks: list[int],
        keys: Sequence[int | None],
        tokens: Sequence[int],
        access_ns: int,
    ) -> None:
        """Blocks of a table, in its order, became idle together.

        They are `put` from last to first, so that no prefix is evicted before its continuation.
        """
        for block, key, upto in zip(
            reversed(blocks), reversed(keys), reversed(tokens), strict=True
        ):
            self.put(block, key, upto, access_ns)

    def put_many(self, blocks: list[int]) -> None:
        """Blank blocks became idle, in this order."""
        for block in blocks:
            self.put(block, None, 0, -1)

    def pop_many(self, number: int) -> list[int]:
        """Returns `number` blocks in the order in which `pop` would return them."""
        return [self.pop() for _ in range(number)]

    @property
    def hears(self) -> Any:
        """The order, if it wants to be told which request gives blocks back
        (`kvsim.policies.sessions.SessionOrder`); None: it does not."""
        return None

    def __len__(self) -> int:
        """The number of idle blocks. For a user's order, the pool keeps the count."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[int]:
        """Iterates over the idle blocks, in no particular order."""
        raise NotImplementedError


MakeOrder = Callable[[int, int], Order]
"""Makes the order of a pool from its first block id and its number of blocks."""


def make_order(
    argument: str,
    table: Mapping[str, Callable[..., Order]],
    name: str | MakeOrder,
    /,
    **given: Any,
) -> MakeOrder:
    """Returns the factory of the order called `name`: a key of `table`, or `package.module:name`.

    `given` holds the arguments that a constructor may name besides `first` and `size`. Raises
    `ConfigError` for an unknown name, and during the run if a user's order returns a block that is
    not idle.
    """
    if callable(name):
        return name
    # An oracle needs what the run gives, too, and is built like a class of an outsider's.
    if name in table and "future" not in signature(table[name]).parameters:
        return table[name]
    from kvsim.settings.library import build, look_up

    label = f"{argument}: {name}"
    maker = look_up(argument, table, str(name))

    def make(first: int, size: int) -> Order:
        order: Order = build(label, maker, {}, **{**given, "first": first, "size": size})
        if not isinstance(order, Order):
            raise ConfigError(
                f"{label} is not a subclass of kvsim.policies.order.Order; make it one"
            )
        return order if name in table else _Checked(label, order)

    return make


class _Checked(Order):
    """Wraps a user's order: checks its choices and counts its blocks."""

    def __init__(self, label: str, order: Order) -> None:
        self._label = label
        self._order = order
        self._idle: dict[int, None] = {}
        # Nothing to check of these, and they are called for every block.
        self.store = order.store  # type: ignore[method-assign]
        self.store_table = order.store_table  # type: ignore[method-assign]

    @property
    def hears(self) -> Any:
        return self._order.hears

    def __len__(self) -> int:
        return len(self._idle)

    def __iter__(self) -> Iterator[int]:
        return iter(self._idle)

    def hit(self, block: int) -> None:
        self._idle.pop(block, None)
        self._order.hit(block)

    def put(self, block: int, key: int | None, tokens: int, access_ns: int) -> None:
        self._idle[block] = None
        self._order.put(block, key, tokens, access_ns)

    def put_table(
        self,
        blocks: list[int],
        keys: Sequence[int | None],
        tokens: Sequence[int],
        access_ns: int,
    ) -> None:
        self._idle.update(dict.fromkeys(blocks))
        self._order.put_table(blocks, keys, tokens, access_ns)

    def put_many(self, blocks: list[int]) -> None:
        self._idle.update(dict.fromkeys(blocks))
        self._order.put_many(blocks)

    def pop(self) -> int:
        block = self._order.pop()
        self._given_out(block)
        return block

    def pop_many(self, number: int) -> list[int]:
        blocks = self._order.pop_many(number)
        for block in blocks:
            self._given_out(block)
        if len(blocks) != number:
            raise ConfigError(f"{self._label} gave out {len(blocks)} blocks instead of {number}")
        return blocks

    def _given_out(self, block: int) -> None:
        if type(block) is not int or block not in self._idle:
            raise ConfigError(
                f"{self._label} gave out {block!r}, which is not idle; let `pop` take out one"
                " that was `put` and not `hit` since"
            )
        del self._idle[block]


def out_of_date(idle: int) -> int:
    """The entries for so many idle blocks among which those of blocks that have left are worth a
    pass: rarely enough to take no time, soon enough to take little memory."""
    return 2 * idle + 1000


class Stack(Order):
    """Last returned, first reused; blocks never used come last, in ascending order.

    vLLM 0.6.3.post1 `core/block/naive_block.py`: a deque, freed blocks are pushed on its left. The
    pool keeps this order itself (`kvsim.core.pool.Pool`).
    """


class TopStack(Order):
    """Last returned, first reused; blocks never used come last, in descending order.

    vLLM 0.3.3 `core/block_manager.py`, `BlockAllocator`: a list of all blocks, popped at its end.
    """

    def __init__(self, first: int, size: int) -> None:
        self.blocks: list[int] = []

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self.blocks)

    def pop(self) -> int:
        return self.blocks.pop()

    def put(self, block: int, key: int | None, tokens: int, access_ns: int) -> None:
        self.blocks.append(block)


class Queue(Order):
    """First returned, first reused; blocks never used come first, in ascending order.

    A block whose content is hit leaves the order from wherever it is.

    nano-vllm `nanovllm/engine/block_manager.py`: a deque, freed blocks are pushed on its right.
    """

    def __init__(self, first: int = 0, size: int = 0) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def hit(self, block: int) -> None:
        self._blocks.pop(block, None)

    def pop(self) -> int:
        return self._blocks.popitem(last=False)[0]

    def put(self, block: int, key: int | None, tokens: int, access_ns: int) -> None:
        self._blocks[block] = None


IDLE_ORDERS: dict[str, type[Order]] = {
    "stack": Stack,
    "top-stack": TopStack,
    "queue": Queue,
}
"""Values of the block managers' argument `idle_order`."""

make_idle_order = partial(make_order, "idle_order", IDLE_ORDERS)
"""Returns the factory of an idle order by name (`kvsim.policies.order.make_order`)."""


class LowestFirst(Order):
    """The lowest id first, where blocks come back in rows."""

    def __init__(self, first: int, size: int) -> None:
        self._blocks: list[int] = []

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def put_many(self, blocks: list[int]) -> None:
        # A row: no other idle block lies between its ids.
        place = bisect(self._blocks, blocks[0])
        self._blocks[place:place] = blocks

    def pop_many(self, number: int) -> list[int]:
        lowest, self._blocks = self._blocks[:number], self._blocks[number:]
        return lowest


class BlankFirst(Order):
    """Blank blocks in one order, and when none is left, those with content in another."""

    def __init__(self, blank: MakeOrder, content: MakeOrder, first: int, size: int) -> None:
        self._blank, self._content = blank(first, size), content(first, size)
        # Only blocks with content are hit, stored, or put one by one.
        self.hit = self._content.hit  # type: ignore[method-assign]
        self.put = self._content.put  # type: ignore[method-assign]
        self.store = self._content.store  # type: ignore[method-assign]
        self.store_table = self._content.store_table  # type: ignore[method-assign]
        self.put_table = self._content.put_table  # type: ignore[method-assign]
        self.put_many = self._blank.put_many  # type: ignore[method-assign]

    def __len__(self) -> int:
        return len(self._blank) + len(self._content)

    def __iter__(self) -> Iterator[int]:
        return chain(self._blank, self._content)

    def pop_many(self, number: int) -> list[int]:
        blank = min(number, len(self._blank))
        return self._blank.pop_many(blank) + self._content.pop_many(number - blank)


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
                # In use again: it waits aside for its next return.
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

    A block in use cannot go, so each policy evicts the first block of its own order that is idle.
    The blocks of a table count as used from last to first, so that a prefix counts as used after
    its continuation.
    """

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

    def put(self, block: int, key: int | None, tokens: int, access_ns: int) -> None:
        self._idle[block] = None
        if block in self._aside:
            self._aside.pop(block).returned(block)

    def pop(self) -> int:
        block = self.choose()
        # After `choose`, which may ask for the key.
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

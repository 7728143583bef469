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

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any

from kvsim.errors import ConfigError


class Order:
    """The order in which idle blocks are reused. A new order holds no block.

    To write your own policy, derive a class with `put`, `pop`, `hit` and, if it looks at blocks in
    use or at keys, `store`. Its constructor may name `first` and `size` (the ids of the pool's
    blocks are `first .. first + size - 1`), `block_size`, `num_gpu_blocks`, `seed` and other
    settings of a run. The methods for several blocks exist for speed and must decide the same.
    """

    __slots__ = ()

    @property
    def fresh(self) -> range:
        """Blocks never used, in an order that holds them from the start."""
        return range(0)

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

    def hit_table(self, blocks: list[int]) -> None:
        """Calls `hit` for the leading blocks of a table."""
        for block in blocks:
            self.hit(block)

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
        """Iterates over the idle blocks except the `fresh` ones, in no particular order."""
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

    def hit_table(self, blocks: list[int]) -> None:
        for block in blocks:
            self._idle.pop(block, None)
        self._order.hit_table(blocks)

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


class Stack(Order):
    """Last returned, first reused; blocks never used come last, in ascending order.

    vLLM 0.6.3.post1 `core/block/naive_block.py`: a deque, freed blocks are pushed on its left. The
    pool keeps this order itself (`kvsim.engines.vllm_063.pool.BlockPool`).
    """


class TopStack(Order):
    """Last returned, first reused; blocks never used come last, in descending order.

    vLLM 0.3.3 `core/block_manager.py`, `BlockAllocator`: a list of all blocks, popped at its end.
    The pool keeps it, too.
    """


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

    def pop(self) -> int:
        block = self._fresh
        if block < self._end:
            self._fresh = block + 1
            return block
        assert self._returned, "no idle block left"
        return self._returned.popitem(last=False)[0]

    def put(self, block: int, key: int | None, tokens: int, access_ns: int) -> None:
        self._returned[block] = None

    @property
    def fresh(self) -> range:
        return range(self._fresh, self._end)


IDLE_ORDERS: dict[str, type[Order]] = {
    "stack": Stack,
    "top-stack": TopStack,
    "queue": Queue,
}
"""Values of the block managers' argument `idle_order`."""

make_idle_order = partial(make_order, "idle_order", IDLE_ORDERS)
"""Returns the factory of an idle order by name (`kvsim.policies.order.make_order`)."""

"""What is decided about idle blocks: which of them is given out next.

```
          store                  put
 in use ────────► in use ─────────────────► idle ── pop ──► in use, its content is lost
                  with content ◄─── hit ────┘
```

A pool tells an order everything that happens to its blocks, and asks it only to `pop`. One protocol
serves blocks with content, whose order is the eviction policy, and blank ones. The key of a content
stands for the tokens of a full block and everything before them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvsim.errors import ConfigError


class Order:
    """The order in which idle blocks are given out again. A new order holds no block.

    A policy of one's own is a subclass with `put`, `pop`, `hit` and, if it looks at blocks in use
    or at keys, `store`. Its constructor may name `first` and `size` (the ids of the pool's blocks
    are `first .. first + size - 1`), `block_size`, `num_gpu_blocks`, `seed` and other settings of
    a run. Methods that take several blocks are there to be faster, and decide the same.
    """

    __slots__ = ()

    @property
    def fresh(self) -> range:
        """Blocks never used, in an order that holds them from the start."""
        return range(0)

    def store(self, block: int, key: int) -> None:
        """A block in use was given content. Several blocks may hold the same."""

    def hit(self, block: int) -> None:
        """One more request uses the content of a block; an idle block leaves the order."""

    def put(self, block: int, key: int | None, tokens: int, access_ns: int) -> None:
        """A block became idle.

        `key`: its content, None for a blank block; `tokens` of its sequence up to and including
        it; `access_ns`: when that sequence was last scheduled, −1 where nobody knows.
        """
        raise NotImplementedError

    def pop(self) -> int:
        """Take out the block that is given out next: its content is lost."""
        raise NotImplementedError

    def store_table(self, blocks: list[int], keys: list[int]) -> None:
        """`store` for consecutive blocks of a table."""
        for block, key in zip(blocks, keys, strict=True):
            self.store(block, key)

    def hit_table(self, blocks: list[int]) -> None:
        """`hit` for the leading blocks of a table."""
        for block in blocks:
            self.hit(block)

    def put_table(
        self,
        blocks: list[int],
        keys: Sequence[int | None],
        tokens: Sequence[int],
        access_ns: int,
    ) -> None:
        """Blocks of a table, in its order, became idle at once.

        They are `put` from last to first: no prefix should go before what continues it.
        """
        for block, key, upto in zip(
            reversed(blocks), reversed(keys), reversed(tokens), strict=True
        ):
            self.put(block, key, upto, access_ns)

    def pop_many(self, number: int) -> list[int]:
        """`number` blocks, as `pop` would give them one by one."""
        return [self.pop() for _ in range(number)]

    def __len__(self) -> int:
        """Idle blocks. The pool counts for an order from outside."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[int]:
        """Idle blocks but for the `fresh` ones, in no particular order."""
        raise NotImplementedError


MakeOrder = Callable[[int, int], Order]
"""Makes the order of a pool from its first block and its number of blocks."""


def make_order(
    argument: str,
    table: Mapping[str, Callable[..., Order]],
    name: str | MakeOrder,
    /,
    **given: Any,
) -> MakeOrder:
    """What makes the orders that `name` stands for: of `table`, or `package.module:name`.

    `given`: what a constructor may name, besides `first` and `size`. Raises `ConfigError`, also
    later, where an outsider's order gives out a block that is not idle.
    """
    if callable(name):
        return name
    if name in table:
        return table[name]
    from kvsim.library import build, look_up

    label = f"{argument}: {name}"
    maker = look_up(argument, table, str(name))

    def make(first: int, size: int) -> Order:
        order: Order = build(label, maker, {}, **{**given, "first": first, "size": size})
        if not isinstance(order, Order):
            raise ConfigError(f"{label} is no subclass of kvsim.engine.order.Order; make it one")
        return _Checked(label, order)

    return make


class _Checked(Order):
    """An outsider's order, whose choices are not trusted, and counted for it."""

    def __init__(self, label: str, order: Order) -> None:
        self._label = label
        self._order = order
        self._idle: dict[int, None] = {}
        self.store = order.store  # type: ignore[method-assign]
        self.store_table = order.store_table  # type: ignore[method-assign]

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
                f"{self._label} gave out {block!r}, which is no idle block; let `pop` take out one"
                " that was `put` and not `hit` since"
            )
        del self._idle[block]

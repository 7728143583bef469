"""The physical blocks of one device: reference counts, and content that later requests can hit.

```
  idle, never used ─┐                       ┌── last reference dropped, no content ──► idle, blank
  idle, blank ──────┼─ take ─► in use ──────┤
  idle, content ────┘ (evicts)  ▲  ▲ share  └── last reference dropped, content ────► idle, content
        └───────── hit ─────────┘  └─┘                                                      │
        ▲──────────────────────────────────────────────────────────────────────────────────┘
```

Ids are `first .. first + size - 1`. A pool costs memory for blocks in use or with content only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import eq

from kvsim.engine.cache_events import CacheEvents
from kvsim.engine.idle import Stack
from kvsim.engine.order import MakeOrder


class BlockPool:
    """Blocks without content, with reference counts and an order of reuse.

    vLLM 0.6.3.post1 `core/block/naive_block.py`.
    """

    events: CacheEvents | None = None
    """Where a prefix cache reports what comes and goes; None if nobody asks."""

    def __init__(self, size: int, first: int = 0, idle_order: MakeOrder = Stack) -> None:
        """`idle_order` makes the order in which blank blocks are reused."""
        self.size = size
        self.first = first
        self.references: dict[int, int] = {}
        """block → number of tables that hold it. Idle blocks are absent."""
        self._blank = idle_order(first, size)
        if not self._blank.fresh:
            for block in range(first, first + size):
                self._blank.put(block, None, 0, -1)

    @property
    def free(self) -> int:
        """Number of blocks that can be taken."""
        return self.size - len(self.references)

    @property
    def idle(self) -> int:
        """Number of blocks that can be taken, counted in the order that holds them (a check on
        `free`)."""
        return len(self._blank)

    @property
    def cached(self) -> int:
        """Number of free blocks whose content can still be hit."""
        return 0

    def cached_blocks(self) -> Iterable[int]:
        """Ids of the free blocks whose content can still be hit, in no particular order."""
        return ()

    @property
    def used(self) -> int:
        """Number of blocks that at least one table holds."""
        return len(self.references)

    def take(self) -> int:
        """Takes an idle block and returns it with one reference and no content."""
        block = self._blank.pop()
        self.references[block] = 1
        return block

    def take_many(self, number: int) -> list[int]:
        """Takes `number` blocks, in the order in which `take` would return them."""
        blocks = self._blank.pop_many(number)
        self.references.update(dict.fromkeys(blocks, 1))
        return blocks

    def share(self, block: int) -> None:
        """Adds a reference to a block in use."""
        self.references[block] += 1

    def drop(self, block: int) -> None:
        """Removes a reference to a block without content."""
        references = self.references
        if references[block] == 1:
            del references[block]
            self._blank.put(block, None, 0, -1)
        else:
            references[block] -= 1

    def drop_table(self, table: list[int]) -> None:
        """Calls `drop` for each block, first to last."""
        for block in table:
            self.drop(block)

    def audit(self) -> None:
        """Asserts that every block is in exactly one place."""
        returned, fresh, references = self._returned(), self._blank.fresh, self.references
        idle = set(returned)
        assert len(idle) == len(returned), "a block is idle twice"
        assert idle.isdisjoint(references), "a block is idle and in use"
        assert not (fresh and any(map(fresh.__contains__, references))), "a fresh block is in use"
        assert min(references.values(), default=1) > 0, "a block in use has no holder"
        assert self.used + self.idle == self.size, "blocks were lost or invented"

    def _returned(self) -> list[int]:
        """Idle blocks that have been used before."""
        return list(self._blank)


class KeyedPool(BlockPool):
    """Blocks that keep their content until they are reused.

    `eviction` makes the order in which idle blocks lose their content once no blank block is left.
    With None, idle blocks with content and blank ones share one order.
    """

    def __init__(
        self, size: int, first: int, idle_order: MakeOrder, eviction: MakeOrder | None
    ) -> None:
        super().__init__(size, first, idle_order)
        self.block_of: dict[int, int] = {}
        """key → the block with that content that a lookup finds, in use or idle."""
        self.key_of: dict[int, int] = {}
        """block → the key of its content."""
        self.content = eviction(first, size) if eviction else self._blank
        """Idle blocks with content."""

    @property
    def idle(self) -> int:
        return sum(map(len, {self._blank, self.content}))

    @property
    def cached(self) -> int:
        return len(self.content)

    def cached_blocks(self) -> Iterable[int]:
        return iter(self.content)

    def take(self) -> int:
        if len(self._blank):
            block = self._blank.pop()
        else:
            block = self.content.pop()
            self.forget([block])
        self.references[block] = 1
        return block

    def take_many(self, number: int) -> list[int]:
        if number == 1:
            return [self.take()]
        blank = min(number, len(self._blank))
        blocks = self._blank.pop_many(blank)
        if blank < number:
            evicted = self.content.pop_many(number - blank)
            self.forget(evicted)
            blocks += evicted
        self.references.update(dict.fromkeys(blocks, 1))
        return blocks

    def hit(self, blocks: list[int]) -> None:
        """Adds a reference to each of these blocks with content, in use or idle."""
        references = self.references
        for block in blocks:
            references[block] = references.get(block, 0) + 1
        self.content.hit_table(blocks)

    def forget(self, blocks: list[int]) -> None:
        """Blocks were taken for other tokens; their old content can no longer be hit."""
        raise NotImplementedError

    def drop_keyed_table(self, table: list[int], size: int, access_ns: int) -> None:
        """Drops a table, last scheduled at `access_ns`, that held these blocks of `size` tokens."""
        raise NotImplementedError

    def audit(self) -> None:
        super().audit()
        key_of = self.key_of
        idle = len(key_of) - sum(map(key_of.__contains__, self.references))
        assert idle == sum(map(key_of.__contains__, self.content)), "content without a block"

    def _returned(self) -> list[int]:
        return [block for order in {self._blank, self.content} for block in order]

    def _let_go(self, table: list[int], size: int) -> tuple[list[int], Sequence[int]]:
        """Drops the references of a table. Returns the blocks that became idle, and for each the
        tokens up to its end."""
        references = self.references
        tokens: Sequence[int] = range(size, (len(table) + 1) * size, size)
        alone = [block for block in table if references[block] == 1]
        if len(alone) < len(table):
            tokens = [upto for upto, b in zip(tokens, table, strict=True) if references[b] == 1]
            for block in table:
                references[block] -= 1
        each(references.__delitem__, alone)
        return alone, tokens


class PrefixPool(KeyedPool):
    """Blocks that keep their content, so that an equal prefix can reuse them.

    Every key has at most one block, because equal contents are merged. A block counts as computed
    after the scheduling call that gave it its content.

    vLLM 0.6.3.post1 `core/block/prefix_caching_block.py`, `core/evictor_v2.py`.
    """

    def __init__(self, size: int, first: int, idle_order: MakeOrder, eviction: MakeOrder) -> None:
        super().__init__(size, first, idle_order, eviction)
        self._last: dict[int, int] = {}
        """Blocks in use that carry the access time of a table freed earlier."""
        self._computed: set[int] = set()
        self._touched: list[int] = []
        """Blocks that were given content since the last `mark_computed`."""
        self.lookups = 0
        self.hits = 0
        """Number of `lookups` that were found. vLLM 0.6.3's own hit-rate metric counts these."""

    def holds(self, key: int) -> bool:
        """Whether a block in use holds the content. Hitting it costs no free block."""
        return self.block_of.get(key) in self.references

    def find(self, key: int) -> int | None:
        """Returns the block with this content if it is computed."""
        block = self.block_of.get(key)
        known = block not in self.references or block in self._computed
        return block if known else None

    def take_keyed(self, key: int) -> int:
        """Returns a block with this content: the existing one, or else a newly taken one."""
        self.lookups += 1
        block = self.block_of.get(key)
        if block is None:
            block = self.take()
            self._label(block, key)
        else:
            self.hits += 1
            self._hit(block)
        return block

    def take_table(self, keys: list[int]) -> list[int]:
        """Calls `take_keyed` for each key, first to last."""
        block_of = self.block_of
        table: list[int] = []
        for place, key in enumerate(keys):
            if key in block_of:
                table.append(self.take_keyed(key))
            elif block_of.keys().isdisjoint(keys[place:]):
                # Nothing of the rest is here, so no eviction can matter to a later hit.
                return table + self._take_new(keys[place:])
            else:
                table.append(self.take_keyed(key))
        return table

    def take_leading(self, keys: list[int]) -> list[int]:
        """Calls `take_keyed` for the leading keys whose content is present, and stops at the first
        other one."""
        block_of = self.block_of
        here = 0
        while here < len(keys) and keys[here] in block_of:
            here += 1
        self.lookups += len(keys) - here
        return self.take_table(keys[:here])

    def _take_new(self, keys: list[int]) -> list[int]:
        blocks = self.take_many(len(keys))
        self.lookups += len(keys)
        self.block_of.update(zip(keys, blocks, strict=True))
        self.key_of.update(zip(blocks, keys, strict=True))
        self._touched += blocks
        self.content.store_table(blocks, keys)
        return blocks

    def fill(self, block: int, key: int) -> int:
        """Books that a block in use became full. Returns the block that holds the content from now
        on."""
        known = self.block_of.get(key)
        if known is None:
            self._label(block, key)
            return block
        self.drop(block)
        self._hit(known)
        return known

    def drop_keyed_table(self, table: list[int], size: int, access_ns: int) -> None:
        """Drops a table that held these full blocks of `size` tokens.

        `access_ns` is when the table was last scheduled. With -1, each block keeps its own time.
        """
        alone, tokens = self._let_go(table, size)
        stamps, keys = self._last, [self.key_of[block] for block in alone]
        if access_ns >= 0 and len(alone) < len(table):
            stamps.update(dict.fromkeys(filter(self.references.__contains__, table), access_ns))
        self._computed.difference_update(alone)
        stamped = {block: stamps.pop(block) for block in alone if block in stamps} if stamps else {}
        if access_ns >= 0 or not stamped:
            self.content.put_table(alone, keys, tokens, access_ns)
            return
        for block, key, upto in zip(alone, keys, tokens, strict=True):
            self.content.put(block, key, upto, stamped.get(block, -1))

    def stamp(self, block: int, access: int) -> None:
        """Notes when the table that holds a block in use was last scheduled."""
        self._last[block] = access

    def drop(self, block: int) -> None:
        super().drop(block)
        if block not in self.references:
            self._computed.discard(block)
            if self._last:
                self._last.pop(block, None)

    def computed_in(self, blocks: list[int]) -> int:
        """Returns how many of these blocks in use hold computed content."""
        computed = self._computed
        return sum([block in computed for block in blocks])

    def mark_computed(self) -> None:
        """Marks content given out during the scheduling call that has just ended as computed."""
        if self._touched:
            self._computed.update(filter(self.references.__contains__, self._touched))
            self._touched.clear()

    def audit(self) -> None:
        super().audit()
        key_of, block_of = self.key_of, self.block_of
        assert all(map(key_of.__contains__, self.content)), "an idle block lost its key"
        assert len(block_of) == len(key_of), "two blocks carry one key"
        assert all(map(eq, map(key_of.get, block_of.values()), block_of)), "a key is misfiled"
        assert self._computed <= self.references.keys(), "an idle block is marked"

    def _label(self, block: int, key: int) -> None:
        self.block_of[key] = block
        self.key_of[block] = key
        self._touched.append(block)
        self.content.store(block, key)

    def _hit(self, block: int) -> None:
        references = self.references
        if block in references:
            references[block] += 1
        else:
            references[block] = 1
            self._computed.add(block)
        self.content.hit(block)

    def forget(self, blocks: list[int]) -> None:
        key_of, block_of = self.key_of, self.block_of
        for block in blocks:
            del block_of[key_of.pop(block)]


def each(call: Callable[[int], None], arguments: list[int]) -> None:
    """Calls a function with each argument, without a Python loop."""
    deque(map(call, arguments), maxlen=0)

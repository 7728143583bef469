"""Physical blocks of one device: reference counts, and the contents that can be hit.

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

from collections.abc import Iterable

from kvsim.blocks.eviction import EvictionOrder, Evictor
from kvsim.blocks.idle import IdleOrder, Stack


class BlockPool:
    """Blocks without content: a reference count, and an order of reuse.

    vLLM 0.6.3.post1 `core/block/naive_block.py`.
    """

    idle_order: type[IdleOrder] = Stack
    """In which order blocks without content are reused."""

    def __init__(
        self, size: int, first: int = 0, idle_order: type[IdleOrder] | None = None
    ) -> None:
        self.size = size
        self.first = first
        self.references: dict[int, int] = {}
        """block → how many tables hold it; idle blocks are absent."""
        self._blank = (idle_order or self.idle_order)(first, size)

    @property
    def free(self) -> int:
        """Blocks that can be taken."""
        return self.size - len(self.references)

    @property
    def idle(self) -> int:
        """The same, counted where they wait."""
        return len(self._blank)

    @property
    def cached(self) -> int:
        """Free blocks whose content can still be hit."""
        return 0

    def cached_blocks(self) -> Iterable[int]:
        """The same blocks by name, in no particular order."""
        return ()

    @property
    def used(self) -> int:
        """Blocks in at least one table."""
        return len(self.references)

    def take(self) -> int:
        """An idle block, with one reference and no content."""
        block = self._blank.pop()
        self.references[block] = 1
        return block

    def take_many(self, number: int) -> list[int]:
        """`number` blocks, as `take` would give them one by one."""
        blocks = self._blank.pop_many(number)
        self.references.update(dict.fromkeys(blocks, 1))
        return blocks

    def share(self, block: int) -> None:
        """One more table holds a block in use."""
        self.references[block] += 1

    def drop(self, block: int) -> None:
        """One table less holds a block without content."""
        references = self.references
        if references[block] == 1:
            del references[block]
            self._blank.put(block)
        else:
            references[block] -= 1

    def drop_table(self, table: list[int]) -> None:
        """`drop` each block, first to last."""
        for block in table:
            self.drop(block)

    def audit(self) -> None:
        """Assert that every block is in exactly one place."""
        returned = self._blank.returned()
        fresh = self._blank.fresh
        assert len(set(returned)) == len(returned), "a block is idle twice"
        assert not set(returned) & self.references.keys(), "a block is idle and in use"
        assert not any(block in fresh for block in self.references), "a fresh block is in use"
        assert all(count > 0 for count in self.references.values()), "a block in use has no holder"
        assert self.used + self.idle == self.size, "blocks were lost or invented"


class PrefixPool(BlockPool):
    """Blocks that remember what they hold, so that an equal prefix can use them again.

    Every key has at most one block: equal contents are merged. A block is *computed* once a
    scheduling call has ended after it was given its content.

    vLLM 0.6.3.post1 `core/block/prefix_caching_block.py`, `core/evictor_v2.py`.
    """

    def __init__(
        self,
        size: int,
        first: int = 0,
        idle_order: type[IdleOrder] | None = None,
        eviction: type[EvictionOrder] = Evictor,
    ) -> None:
        super().__init__(size, first, idle_order)
        self.block_of: dict[int, int] = {}
        """key → the block with that content, in use or idle."""
        self._key_of: dict[int, int] = {}
        self._idle = eviction()
        self._last: dict[int, int] = {}
        """Blocks in use that a freed table stamped with its access time."""
        self._computed: set[int] = set()
        self._touched: list[int] = []
        """Blocks given content since the last `mark_computed`."""
        self.lookups = 0
        self.hits = 0
        """Of `lookups`; vLLM 0.6.3's own hit-rate metric counts these."""

    @property
    def idle(self) -> int:
        return len(self._blank) + len(self._idle)

    @property
    def cached(self) -> int:
        return len(self._idle)

    def cached_blocks(self) -> Iterable[int]:
        return iter(self._idle)

    def take(self) -> int:
        if len(self._blank):
            block = self._blank.pop()
        else:
            block = self._idle.evict()
            del self.block_of[self._key_of.pop(block)]
        self.references[block] = 1
        return block

    def take_many(self, number: int) -> list[int]:
        blocks = self._blank.pop_many(min(number, len(self._blank)))
        if len(blocks) < number:
            evicted = self._idle.evict_many(number - len(blocks))
            key_of, block_of = self._key_of, self.block_of
            for block in evicted:
                del block_of[key_of.pop(block)]
            blocks += evicted
        self.references.update(dict.fromkeys(blocks, 1))
        return blocks

    def holds(self, key: int) -> bool:
        """Whether the content is here in a block in use (hitting it costs no free block)."""
        return self.block_of.get(key) in self.references

    def find(self, key: int) -> int | None:
        """The block with this content, if it is computed."""
        block = self.block_of.get(key)
        known = block not in self.references or block in self._computed
        return block if known else None

    def take_keyed(self, key: int) -> int:
        """A block with this content: the one that has it, or a newly taken one."""
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
        """`take_keyed` each key, first to last."""
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
        """`take_keyed` the leading keys whose content is here, and nothing for the rest."""
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
        self._key_of.update(zip(blocks, keys, strict=True))
        self._touched += blocks
        return blocks

    def fill(self, block: int, key: int) -> int:
        """A block in use became full; answers the block that carries the content from now on."""
        known = self.block_of.get(key)
        if known is None:
            self._label(block, key)
            return block
        self.drop(block)
        self._hit(known)
        return known

    def drop_keyed(self, block: int, tokens: int, access: int | None) -> None:
        """One table less holds a full block, `tokens` up to and including it.

        `access`: when the table was last scheduled; None: the block keeps its own stamp.
        """
        references = self.references
        if references[block] > 1:
            references[block] -= 1
            if access is not None:
                self._last[block] = access
            return
        del references[block]
        self._computed.discard(block)
        stamp = self._last.pop(block, -1) if self._last else -1
        self._idle.add(block, tokens, stamp if access is None else access)

    def drop_keyed_table(self, blocks: list[int], size: int, access: int | None) -> None:
        """`drop_keyed` the full blocks of a table, first to last, `size` tokens each."""
        references = self.references
        counts = [references[block] for block in blocks]
        alone = counts.index(1) if 1 in counts else len(blocks)
        if access is None or sum(counts[alone:]) != len(blocks) - alone:
            alone = len(blocks)
        for place in range(alone):
            self.drop_keyed(blocks[place], (place + 1) * size, access)
        if access is None or alone == len(blocks):
            return
        # What is shared is the head of a table, as a rule; the rest goes in one piece.
        rest = blocks[alone:]
        for block in rest:
            del references[block]
        self._computed.difference_update(rest)
        if self._last:
            for block in rest:
                self._last.pop(block, None)
        self._idle.add_table(rest, alone, size, access)

    def stamp(self, block: int, access: int) -> None:
        """Note when the table that holds a block in use was last scheduled."""
        self._last[block] = access

    def drop(self, block: int) -> None:
        super().drop(block)
        if block not in self.references:
            self._computed.discard(block)
            if self._last:
                self._last.pop(block, None)

    def computed_in(self, blocks: list[int]) -> int:
        """How many of these blocks in use hold computed content."""
        computed = self._computed
        return sum([block in computed for block in blocks])

    def mark_computed(self) -> None:
        """A scheduling call has ended: what it gave content to now counts as computed."""
        if self._touched:
            self._computed.update(filter(self.references.__contains__, self._touched))
            self._touched.clear()

    def audit(self) -> None:
        returned, idle, used = self._blank.returned(), set(self._idle), self.references.keys()
        assert len(set(returned)) == len(returned), "a block is blank twice"
        assert not idle & used, "a block is idle and in use"
        assert not set(returned) & used, "a block is blank and in use"
        assert not set(returned) & idle, "a block is blank and has content"
        assert all(count > 0 for count in self.references.values()), "a block in use has no holder"
        assert self.used + self.free == self.size, "blocks were lost or invented"
        assert len(self.block_of) == len(self._key_of), "two blocks carry one key"
        assert all(self._key_of[b] == k for k, b in self.block_of.items()), "a key is misfiled"
        assert idle <= self._key_of.keys() <= idle | used, "an idle block lost its key"
        assert self._computed <= self.references.keys(), "an idle block is marked"

    def _label(self, block: int, key: int) -> None:
        self.block_of[key] = block
        self._key_of[block] = key
        self._touched.append(block)

    def _hit(self, block: int) -> None:
        references = self.references
        if block in references:
            references[block] += 1
        else:
            self._idle.remove(block)
            references[block] = 1
            self._computed.add(block)

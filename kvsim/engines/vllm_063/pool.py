"""The physical blocks of one device: who holds each, what they hold, and who is reused next.

```
  idle, never used ─┐                       ┌── last reference dropped, no content ──► idle, blank
  idle, blank ──────┼─ take ─► in use ──────┤
  idle, content ────┘ (evicts)  ▲  ▲ share  └── last reference dropped, content ────► idle, content
        └───────── hit ─────────┘  └─┘                                                      │
        ▲──────────────────────────────────────────────────────────────────────────────────┘
```

Ids are `first .. first + size - 1`. A pool costs memory for blocks in use or with content only.
Sources: vLLM 0.6.3.post1, `core/block/naive_block.py`, `core/block/prefix_caching_block.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from librt.vecs import append, vec
from mypy_extensions import i64, mypyc_attr

from kvsim.core import guard
from kvsim.core.vectors import EMPTY
from kvsim.policies.order import Stack, TopStack


@mypyc_attr(allow_interpreted_subclasses=True)
class BlockPool:
    """Blocks without content, with reference counts and an order of reuse.

    By default, the block returned last is reused first; blocks never used come last, from the
    lowest id up, or from the highest down.
    """

    size: i64
    first: i64
    references: dict[int, int]
    """Block → number of tables that hold it. Idle blocks are absent."""
    order: Any
    """Which blank block is reused first (`kvsim.policies.order.Order`); None: the one returned
    last.
    """
    _returned: list[int]
    """Without an order: blank blocks that were used before, the next one to be reused at the end.
    """
    _fresh: i64
    """The next block that was never used, and where they end."""
    _fresh_end: i64
    _down: bool

    def __init__(self, size: int, first: int = 0, idle_order: Any = Stack) -> None:
        """`idle_order` makes the order in which blank blocks are reused."""
        self.size, self.first = size, first
        self.references, self._returned = {}, []
        self._fresh, self._fresh_end = first, first + size
        self._down = idle_order is TopStack
        self.order = None
        if not (self._down or idle_order is Stack):
            self.order = idle_order(first, size)
            if not self.order.fresh:
                for block in range(first, first + size):
                    self.order.put(block, None, 0, -1)

    # -- for those who look on -------------------------------------------------------------------

    @property
    def free(self) -> int:
        """Blocks that can be taken."""
        return self.size - len(self.references)

    @property
    def blank(self) -> int:
        """Idle blocks without content."""
        if self.order is not None:
            return len(self.order)
        return len(self._returned) + self._fresh_end - self._fresh

    @property
    def cached(self) -> int:
        """Free blocks whose content can still be hit."""
        return 0

    def cached_blocks(self) -> Sequence[int]:
        """Ids of the free blocks whose content can still be hit, in no particular order."""
        return ()

    @property
    def used(self) -> int:
        """Blocks that at least one table holds."""
        return len(self.references)

    # -- moves -----------------------------------------------------------------------------------

    def take(self) -> int:
        """Takes an idle block and returns it with one reference and no content."""
        block = self.pop_blank()
        self.references[block] = 1
        return block

    def take_many(self, number: int) -> list[int]:
        """Takes `number` blocks, in the order in which `take` would return them."""
        return [self.take() for _ in range(number)]

    def share(self, block: int) -> None:
        """Adds a reference to a block in use."""
        self.references[block] += 1

    def drop(self, block: int) -> None:
        """Removes a reference to a block without content."""
        holders = self.references[block]
        if holders > 1:
            self.references[block] = holders - 1
            return
        del self.references[block]
        if self.order is None:
            self._returned.append(block)
        else:
            self.order.put(block, None, 0, -1)

    def pop_blank(self) -> int:
        """Removes the blank block that is reused next from those that are idle."""
        if self.order is not None:
            block: int = self.order.pop()
            return block
        if self._returned:
            return self._returned.pop()
        assert self._fresh < self._fresh_end, "no idle block left"
        if self._down:
            self._fresh_end -= 1
            return self._fresh_end
        self._fresh += 1
        return self._fresh - 1

    def audit(self) -> None:
        """Asserts that every block is in exactly one place."""
        returned, references = self.idle_blocks(), self.references
        fresh = range(self._fresh, self._fresh_end) if self.order is None else self.order.fresh
        idle = set(returned)
        assert len(idle) == len(returned), "a block is idle twice"
        assert idle.isdisjoint(references), "a block is idle and in use"
        assert not (fresh and any(map(fresh.__contains__, references))), "a fresh block is in use"
        assert min(references.values(), default=1) > 0, "a block in use has no holder"
        everywhere = len(returned) + len(fresh) + self.used
        assert everywhere == self.size, "blocks were lost or invented"

    def idle_blocks(self) -> list[int]:
        """Idle blocks that have been used before."""
        return list(self._returned if self.order is None else self.order)


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefixPool(BlockPool):
    """Blocks that keep their content, so that an equal prefix can reuse them.

    Every content has at most one block, because equal ones are merged. A block counts as computed
    after the scheduling call that gave it its content (`core/block/prefix_caching_block.py`,
    `core/evictor_v2.py`).
    """

    known: dict[int, int]
    """Content → its block."""
    content_of: dict[int, int]
    """Block → the number of its content."""
    content: Any
    """The idle blocks with content, in the order in which they are evicted."""
    keys: dict[int, int]
    """Content → its key in the stream, for an order that asks."""
    watched: bool
    """Whether the order may ask for keys."""
    lookups: i64
    hits: i64
    """Number of `lookups` that were found. vLLM 0.6.3's own hit-rate metric counts these."""
    _last: dict[int, int]
    """Blocks in use that carry the access time of a table freed earlier."""
    computed: set[int]
    """Blocks in use with computed content."""
    _touched: list[int]
    """Blocks that were given content since the last `mark_computed`."""

    def __init__(
        self, size: int, first: int, idle_order: Any, eviction: Any, watched: bool = True
    ) -> None:
        super().__init__(size, first, idle_order)
        self.known, self.content_of, self.keys = {}, {}, {}
        self.content, self.watched = eviction(first, size), watched
        self.lookups = self.hits = 0
        self._last, self.computed, self._touched = {}, set(), []

    # -- questions -------------------------------------------------------------------------------

    @property
    def cached(self) -> int:
        return len(self.content)

    def cached_blocks(self) -> Sequence[int]:
        return list(self.content)

    def block_with(self, content: i64) -> i64:
        """The block with this content, in use or idle; -1: there is none."""
        return self.known.get(content, -1)

    def holds(self, content: i64) -> bool:
        """Whether a block in use has the content. Hitting it costs no free block."""
        return self.block_with(content) in self.references

    def find(self, content: i64) -> i64:
        """The block with this content if it is computed; else -1."""
        block: i64 = self.block_with(content)
        if block >= 0 and block in self.references and block not in self.computed:
            return -1
        return block

    # -- moves -----------------------------------------------------------------------------------

    def take(self) -> int:
        block: int
        if self.blank:
            block = self.pop_blank()
        else:
            block = self.content.pop()
            self._forget(block)
        self.references[block] = 1
        return block

    def take_many(self, number: int) -> list[int]:
        blank = min(number, self.blank)
        blocks = [self.pop_blank() for _ in range(blank)]
        if blank < number:
            evicted = self.content.pop_many(number - blank)
            for block in evicted:
                self._forget(block)
            blocks += evicted
        for block in blocks:
            self.references[block] = 1
        return blocks

    def take_table(self, contents: vec[i64], number: i64) -> vec[i64]:
        """Blocks with the first `number` of these contents. New ones of which nothing that follows
        is known, either, are taken and given their content together."""
        table: vec[i64] = EMPTY
        place: i64
        for place in range(number):
            if contents[place] not in self.known:
                rest: i64 = place + 1
                while rest < number and contents[rest] not in self.known:
                    rest += 1
                if rest == number:
                    # No eviction can matter to a later hit.
                    return self._take_new(table, contents, place, number)
            self.lookups += 1
            block: int = self.block_with(contents[place])
            if block < 0:
                block = self.take()
                self._label(block, contents[place])
            else:
                self.hits += 1
                self._hit(block)
            table = append(table, block)
        return table

    def take_leading(self, contents: vec[i64], number: i64) -> vec[i64]:
        """The same for the leading contents that are known."""
        here: i64 = 0
        while here < number and contents[here] in self.known:
            here += 1
        self.lookups += number - here
        return self.take_table(contents, here)

    def fill(self, block: int, content: i64) -> int:
        """Books that a block in use became full. Returns the block that holds the content from now
        on."""
        known: int = self.block_with(content)
        if known < 0:
            self._label(block, content)
            return block
        self.drop(block)
        self._hit(known)
        return known

    def drop_table(self, table: vec[i64], full: i64, unit: i64, access_ns: i64) -> None:
        """Drops a table whose first `full` blocks, of `unit` tokens each, have content.

        `access_ns` is when the table was last scheduled. With -1, each block keeps its own time.
        """
        references, stamps = self.references, self._last
        blocks: list[int] = []
        keys: list[int] = []
        tokens: list[int] = []
        place: i64
        block: int
        for place in range(len(table)):
            block = table[place]
            if references[block] > 1:
                references[block] -= 1
                if access_ns >= 0:
                    stamps[block] = access_ns
                continue
            if place >= full:
                self.drop(block)
                continue
            del references[block]
            self.computed.discard(block)
            blocks.append(block)
            keys.append(self.keys[self.content_of[block]] if self.watched else 0)
            tokens.append((place + 1) * unit)
        times = [stamps.pop(block, -1) for block in blocks] if stamps else []
        if access_ns >= 0 or not times or max(times) < 0:
            self.content.put_table(blocks, keys, tokens, access_ns)
        else:
            for k, block in enumerate(blocks):
                self.content.put(block, keys[k], tokens[k], times[k])

    def drop(self, block: int) -> None:
        super().drop(block)
        if block not in self.references:
            self.computed.discard(block)
            if self._last:
                self._last.pop(block, None)

    def mark_computed(self) -> None:
        """Marks content given out during the scheduling call that has just ended as computed."""
        if self._touched:
            for block in self._touched:
                if block in self.references:
                    self.computed.add(block)
            self._touched.clear()

    def audit(self) -> None:
        super().audit()
        idle = set(self.content)
        held = {block for block in self.content_of if block in self.references}
        assert idle | held == set(self.content_of), "an idle block lost its content"
        assert len(idle) + len(held) == len(self.content_of), "content without a block"
        assert len(self.known) == len(self.content_of), "two blocks carry one content"
        for block, content in self.content_of.items():
            assert self.block_with(content) == block, "a content is misfiled"
        assert self.computed <= self.references.keys(), "an idle block is marked"

    def idle_blocks(self) -> list[int]:
        return [*super().idle_blocks(), *self.content]

    # --------------------------------------------------------------------------------------------

    def _take_new(self, table: vec[i64], contents: vec[i64], first: i64, last: i64) -> vec[i64]:
        """Adds new blocks for contents `first .. last - 1`, of which none is known, to a table."""
        number: i64 = last - first
        blocks = self.take_many(number)
        self.lookups += number
        keys: list[int] = []
        place: i64
        for place in range(first, last):
            content: i64 = contents[place]
            block: int = blocks[place - first]
            self._note(block, content)
            keys.append(self.keys[content] if self.watched else 0)
            table = append(table, block)
        self.content.store_table(blocks, keys)
        return table

    def _label(self, block: int, content: i64) -> None:
        self._note(block, content)
        self.content.store(block, self.keys[content] if self.watched else 0)

    def _note(self, block: int, content: i64) -> None:
        self.known[content] = block
        self.content_of[block] = content
        self._touched.append(block)

    def _hit(self, block: int) -> None:
        references = self.references
        if block in references:
            references[block] += 1
        else:
            references[block] = 1
            self.computed.add(block)
        self.content.hit(block)

    def _forget(self, block: int) -> None:
        """A block was taken for other tokens; its content can no longer be hit."""
        self.known.pop(self.content_of.pop(block), None)


guard.keep(BlockPool, "references")
guard.keep(PrefixPool, "references content_of keys computed")

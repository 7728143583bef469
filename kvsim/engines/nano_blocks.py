"""Block managers of nano-vllm: prefix caching over one first-in, first-out queue of idle blocks.

A freed block goes to the end of the queue and keeps its content until it is reused. So the queue is
also the eviction order. Of several blocks with equal content, the one registered last is hit.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvsim.engine.idle import Queue
from kvsim.engine.order import MakeOrder
from kvsim.engine.pool import BlockPool, KeyedPool
from kvsim.engine.request import Request, Sequence
from kvsim.engine.sharing import (
    FullHit,
    HitsSave,
    PublishAt,
    make_full_hit,
    make_hits_save,
    make_publish_at,
)
from kvsim.engine.tables import Tables
from kvsim.rules.eviction import make_eviction


class NanoPool(KeyedPool):
    """Blocks of which, for each content, the one registered last is hit."""

    def __init__(self, size: int, first: int = 0, eviction: MakeOrder | None = None) -> None:
        super().__init__(size, first, Queue, eviction)
        self._cached = 0

    @property
    def cached(self) -> int:
        return self._cached

    def cached_blocks(self) -> Iterable[int]:
        return filter(self._served, self.content)

    def take(self) -> int:
        block = (self._blank if len(self._blank) else self.content).pop()
        self.references[block] = 1
        self.forget([block])
        return block

    def take_many(self, number: int) -> list[int]:
        return [self.take() for _ in range(number)]

    def hit(self, blocks: list[int]) -> None:
        # A table can hold a block twice, by a stale hit.
        self._cached -= sum(map(self._served, set(blocks) - self.references.keys()))
        super().hit(blocks)

    def drop_keyed_table(self, table: list[int], size: int, access_ns: int) -> None:
        """Drops a table that held these blocks, from last to first."""
        references = self.references
        for place in reversed(range(len(table))):
            block = table[place]
            references[block] -= 1
            if not references[block]:
                del references[block]
                order, key = self._blank, None
                if self._served(block):
                    self._cached += 1
                    order, key = self.content, self.key_of[block]
                elif self.content is not self._blank:
                    self.forget([block])
                order.put(block, key, (place + 1) * size, access_ns)

    def register(self, block: int, key: int) -> None:
        """Registers a block in use as the one to be hit for `key` from now on."""
        known = self.block_of.get(key)
        if known is not None and known not in self.references:
            self._cached -= self.key_of.get(known) == key
        self.block_of[key] = block
        self.key_of[block] = key
        self.content.store(block, key)

    def forget(self, blocks: list[int]) -> None:
        for block in blocks:
            if block in self.key_of:
                if self._served(block):
                    self._cached -= 1
                    del self.block_of[self.key_of[block]]
                del self.key_of[block]

    def _served(self, block: int) -> bool:
        """Whether a lookup of the block's content finds this block."""
        return block in self.key_of and self.block_of.get(self.key_of[block]) == block

    def audit(self) -> None:
        super().audit()
        idle = list(self.cached_blocks())
        assert len(idle) == self._cached, "idle blocks with content were miscounted"


class NanoTables(Tables):
    """Block tables of nano-vllm, commit bb823b3 (`nanovllm/engine/block_manager.py`).

    Blocks can be hit once they are computed, and the last block of a sequence never hits, unless
    other rules of `kvsim.engine.sharing` are set.
    """

    needs_keys = True
    gpu: NanoPool

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        *,
        eviction: str | MakeOrder | None = None,
        publish_at: str | PublishAt = "computed",
        hits_save: str | HitsSave = "admission",
        full_hit: str | FullHit = "last-block",
    ) -> None:
        """`eviction` makes the order in which idle blocks lose their content once no blank block is
        left. None stands for the engine's queue, which also holds the blank blocks."""
        given = {"block_size": block_size, "num_gpu_blocks": num_gpu_blocks}
        self.eviction = None if eviction is None else make_eviction(eviction, **given)
        super().__init__(block_size, num_gpu_blocks, num_cpu_blocks)
        self.publish_at = make_publish_at(publish_at)
        self.hits_save = make_hits_save(hits_save)
        self.full_hit = make_full_hit(full_hit)
        self._lookups = 0
        self._hits = 0

    def make_pool(self, size: int, first: int) -> BlockPool:
        return NanoPool(size, first, self.eviction)

    def admission_need(self, request: Request) -> int:
        sequence = request.sequences[0]
        return self.need(sequence, sequence.length, self.match(sequence))

    def need(self, sequence: Sequence, upto: int, hits: list[int]) -> int:
        blocks = -(-upto // self.block_size)
        return blocks - self.held(hits) if self.hits_save.blocks else blocks

    def held(self, hits: list[int]) -> int:
        """Returns how many of the hits are in some table."""
        references = self.gpu.references
        return sum([block in references for block in hits])

    def growth_need(self, sequence: Sequence) -> int:
        """Returns 1 if the newest token opens a block, else 0."""
        return int(sequence.length > len(sequence.table) * self.block_size)

    def match(self, sequence: Sequence) -> list[int]:
        size, block_of = self.block_size, self.gpu.block_of
        blocks: list[int] = []
        for key in sequence.block_keys((sequence.length - self.full_hit.withheld) // size, size):
            block = block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    @property
    def lookups(self) -> tuple[int, int]:
        return self._lookups, self._hits

    def allocate(self, sequence: Sequence) -> None:
        assert not sequence.table
        hits = self.match(sequence)
        self._share(sequence, hits)
        rest = -(-sequence.length // self.block_size) - len(hits)
        sequence.table = hits + self.gpu.take_many(rest)
        self._filled(sequence)
        sequence.seen = sequence.published = len(hits)
        self._lookups += sequence.length // self.block_size
        self._hits += len(hits)
        if not self.publish_at.computed:
            self.publish(sequence, sequence.length)

    def _share(self, sequence: Sequence, hits: list[int]) -> None:
        """Lets a table begin with the blocks that it hits."""
        self.gpu.hit(hits)

    def release(self, sequence: Sequence, pool: BlockPool, access_ns: int) -> None:
        self.gpu.drop_keyed_table(sequence.table, self.block_size, access_ns)

    def scheduled(self, sequence: Sequence, now_ns: int) -> int:
        sequence.access_ns = now_ns
        return sequence.seen * self.block_size

    def publish(self, sequence: Sequence, upto: int) -> None:
        full = upto // self.block_size
        if full > sequence.published:
            keys = sequence.block_keys(full, self.block_size)
            for place in range(sequence.published, full):
                self.gpu.register(sequence.table[place], keys[place])
            sequence.published = full

    def fill(self, sequence: Sequence, place: int) -> None:
        if not self.publish_at.computed:
            self.publish(sequence, (place + 1) * self.block_size)


class StaleNanoPool(NanoPool):
    """Blocks whose registrations are never removed, not even when the blocks are overwritten.

    So a registration can point to a block that now holds something else. A lookup accepts it if the
    block's own tokens agree; the tokens before the block are not compared.
    """

    def __init__(self, size: int, first: int = 0) -> None:
        super().__init__(size, first)
        self._content_of: dict[int, int] = {}

    def find(self, key: int, content: int) -> int | None:
        """Returns the block registered for `key` if it holds these tokens."""
        block = self.block_of.get(key)
        if block is None or self._content_of.get(block) != content:
            return None
        return block

    def fill(self, block: int, key: int, content: int) -> None:
        """Registers a block in use, which holds these tokens, for `key`."""
        self.register(block, key)
        self._content_of[block] = content

    def forget(self, blocks: list[int]) -> None:
        for block in blocks:
            if block in self.key_of:
                self._cached -= self._served(block)
                del self.key_of[block], self._content_of[block]


class NanoTables2025(NanoTables):
    """Block tables of nano-vllm, commit 6ef2a4f (August 2025).

    Blocks can be hit from their allocation on, the last one included. A hit gives the block the
    key under which it was found, even if others hold it: a block that they fill later is chained
    to that key.
    """

    gpu: StaleNanoPool

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        *,
        publish_at: str | PublishAt = "allocation",
        hits_save: str | HitsSave = "charge",
        full_hit: str | FullHit = "nothing",
    ) -> None:
        super().__init__(
            block_size,
            num_gpu_blocks,
            num_cpu_blocks,
            publish_at=publish_at,
            hits_save=hits_save,
            full_hit=full_hit,
        )
        self._chain: dict[tuple[int, int], int] = {}
        """(key of the block before, content) → key; the pool never forgets keys either."""

    def make_pool(self, size: int, first: int) -> BlockPool:
        return StaleNanoPool(size, first)

    def match(self, sequence: Sequence) -> list[int]:
        blocks: list[int] = []
        for key, content in self._identities(sequence, sequence.length - self.full_hit.withheld):
            block = self.gpu.find(key, content)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _share(self, sequence: Sequence, hits: list[int]) -> None:
        super()._share(sequence, hits)
        identities = self._identities(sequence, len(hits) * self.block_size)
        for block, (key, content) in zip(hits, identities, strict=True):
            self.gpu.fill(block, key, content)

    def publish(self, sequence: Sequence, upto: int) -> None:
        first, last = sequence.published, upto // self.block_size
        if last > first:
            for place, content in enumerate(self._contents(sequence, first, last), first):
                before = self.gpu.key_of[sequence.table[place - 1]] if place else _ROOT
                self.gpu.fill(sequence.table[place], self._key(before, content), content)
            sequence.published = last

    def _identities(self, sequence: Sequence, upto: int) -> list[tuple[int, int]]:
        """Returns the key and the content of each full block of the first `upto` tokens."""
        key = _ROOT
        identities: list[tuple[int, int]] = []
        for content in self._contents(sequence, 0, upto // self.block_size):
            key = self._key(key, content)
            identities.append((key, content))
        return identities

    def _key(self, before: int, content: int) -> int:
        return self._chain.setdefault((before, content), len(self._chain))

    def _contents(self, sequence: Sequence, first: int, last: int) -> list[int]:
        """Returns contents, or keys if the tokens are unknown; no hit is stale then."""
        stream = sequence.identities(last * self.block_size)
        assert stream is not None, "block identities are needed"
        return list(stream.contents(first, last, self.block_size))


_ROOT = -1
"""The key that the first block of a sequence is chained to."""

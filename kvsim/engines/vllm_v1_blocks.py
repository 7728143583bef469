"""Block tables of vLLM V1. Equal blocks are all kept, and can be hit from their allocation on.

```
free list    head ► blank, last returned first │ never used │ with content, oldest first ◄ tail
```

So blocks without content are used up before any content is evicted, and the free list is the
eviction order. Hits reduce what an admission needs, but an idle hit block leaves the free list.
vLLM 0.33.0 `v1/core/block_pool.py`, `v1/core/single_type_kv_cache_manager.py`,
`v1/core/kv_cache_manager.py`.
"""

from __future__ import annotations

from kvsim.engine.cache_events import CacheEvents
from kvsim.engine.idle import Stack
from kvsim.engine.order import MakeOrder
from kvsim.engine.pool import BlockPool, KeyedPool, each
from kvsim.engine.request import Sequence
from kvsim.engine.sharing import (
    FullHit,
    HitsSave,
    PublishAt,
    make_full_hit,
    make_hits_save,
    make_publish_at,
)
from kvsim.engine.tables import NAMED, Tables
from kvsim.rules.eviction import LeastRecentlyUsed, make_eviction


class VllmV1Tables(Tables):
    """Block tables without a prefix cache. Block 0 is never used."""

    def __init__(self, block_size: int, num_gpu_blocks: int) -> None:
        super().__init__(block_size, num_gpu_blocks - 1, 0)

    def make_pool(self, size: int, first: int) -> BlockPool:
        return BlockPool(size, first + 1)


class VllmV1PrefixTables(VllmV1Tables):
    """Block tables whose full blocks can be hit by every request admitted after them."""

    needs_keys = True
    gpu: ContentPool

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        *,
        eviction: str | MakeOrder = "lru",
        publish_at: str | PublishAt = "allocation",
        hits_save: str | HitsSave = "admission",
        full_hit: str | FullHit = "last-block",
    ) -> None:
        self.eviction = make_eviction(
            eviction, block_size=block_size, num_gpu_blocks=num_gpu_blocks
        )
        """Makes the order in which idle blocks with content are reused; `lru` is the free list."""
        super().__init__(block_size, num_gpu_blocks)
        self.publish_at = make_publish_at(publish_at)
        self.hits_save = make_hits_save(hits_save)
        self.full_hit = make_full_hit(full_hit)
        self._lookups = 0
        self._hits = 0
        # Requests that decode together get their labels late, which the free list does not mind.
        own = self.eviction is LeastRecentlyUsed
        self.lockstep = NAMED if own and not self.publish_at.computed else ""

    def make_pool(self, size: int, first: int) -> BlockPool:
        return ContentPool(size, first + 1, self.eviction)

    def report(self, events: CacheEvents) -> bool:
        self.gpu.events = events
        return True

    @property
    def lookups(self) -> tuple[int, int]:
        return self._lookups, self._hits

    def match(self, sequence: Sequence) -> list[int]:
        number = (sequence.length - self.full_hit.withheld) // self.block_size
        block_of = self.gpu.block_of
        hits: list[int] = []
        for key in sequence.block_keys(number, self.block_size):
            block = block_of.get(key)
            if block is None:
                break
            hits.append(block)
        return hits

    def need(self, sequence: Sequence, upto: int, hits: list[int]) -> int:
        if not self.hits_save.blocks:
            return max(-(-upto // self.block_size), len(hits))
        references = self.gpu.references
        idle = len(hits) - sum([block in references for block in hits])
        return super().need(sequence, upto, hits) + idle

    def hold(self, sequence: Sequence, upto: int, hits: list[int]) -> None:
        self._lookups += (sequence.length - self.full_hit.withheld) // self.block_size
        self._hits += len(hits)
        self.gpu.hit(hits)
        sequence.published = len(hits)
        super().hold(sequence, upto, hits)

    def allocate(self, sequence: Sequence) -> None:
        self.hold(sequence, sequence.length, self.match(sequence))
        if not self.publish_at.computed:
            self.publish(sequence, sequence.length)

    def publish(self, sequence: Sequence, upto: int) -> None:
        first, last = sequence.published, upto // self.block_size
        if last > first:
            keys = sequence.block_keys(last, self.block_size)
            self.gpu.label(sequence.table[first:last], keys[first:])
            if self.gpu.events is not None:
                self.gpu.events.labelled(keys, first)
            sequence.published = last

    def scheduled(self, sequence: Sequence, now_ns: int) -> int:
        sequence.access_ns = now_ns
        return sequence.seen * self.block_size

    def fill(self, sequence: Sequence, place: int) -> None:
        if not self.publish_at.computed:
            self.publish(sequence, (place + 1) * self.block_size)

    def release(self, sequence: Sequence, pool: BlockPool, access_ns: int) -> None:
        self.gpu.drop_keyed_table(sequence.table, self.block_size, access_ns)
        sequence.published = 0


class ContentPool(KeyedPool):
    """Blocks of which several may hold equal content. The one labelled first is hit."""

    def __init__(self, size: int, first: int, eviction: MakeOrder) -> None:
        super().__init__(size, first, Stack, eviction)
        self._others: dict[int, dict[int, None]] = {}
        """key → further blocks with that content, in the order in which they were labelled."""

    def label(self, blocks: list[int], keys: list[int]) -> None:
        """Gives blocks of one table, which are in use, their contents."""
        if self.block_of.keys().isdisjoint(keys):
            self.block_of.update(zip(keys, blocks, strict=True))
            self.key_of.update(zip(blocks, keys, strict=True))
        else:
            for block, key in zip(blocks, keys, strict=True):
                self.key_of[block] = key
                if self.block_of.setdefault(key, block) != block:
                    self._others.setdefault(key, {})[block] = None
        self.content.store_table(blocks, keys)

    def drop_keyed_table(self, table: list[int], size: int, access_ns: int) -> None:
        """Drops a table that held these blocks of `size` tokens, those with content first.

        Blank blocks go to the head of the free list, the last one first; the others go to its tail.
        """
        alone, tokens = self._let_go(table, size)
        keys = list(map(self.key_of.get, alone))
        full = keys.index(None) if None in keys else len(keys)
        self.content.put_table(alone[:full], keys[:full], tokens[:full], access_ns)
        self._blank.put_table(alone[full:], keys[full:], tokens[full:], access_ns)

    def audit(self) -> None:
        super().audit()
        key_of = self.key_of
        assert all(map(key_of.__contains__, self.content)), "an idle block lost its key"
        keys, blocks = [*self.block_of], [*self.block_of.values()]
        for key, others in self._others.items():
            keys += [key] * len(others)
            blocks += others
        assert len(blocks) == len(key_of), "a block is labelled twice"
        assert keys == list(map(key_of.get, blocks)), "a key is misfiled"
        assert all(self._others.values()), "an empty set of blocks is kept"
        assert self._others.keys() <= self.block_of.keys(), "content cannot be found"

    def forget(self, blocks: list[int]) -> None:
        keys = list(map(self.key_of.pop, blocks))
        if self.events is not None:
            self.events.removed(keys)
        if self._others.keys().isdisjoint(keys):
            each(self.block_of.__delitem__, keys)
            return
        for block, key in zip(blocks, keys, strict=True):
            self._forget_one(block, key)

    def _forget_one(self, block: int, key: int) -> None:
        others = self._others.get(key)
        if others is None:
            del self.block_of[key]
            return
        if self.block_of[key] == block:
            block = self.block_of[key] = next(iter(others))
        del others[block]
        if not others:
            del self._others[key]

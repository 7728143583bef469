"""Block tables of vLLM V1: equal blocks are all kept, and can be hit from their allocation on.

```
free list    head ► blank, last returned first │ never used │ with content, oldest first ◄ tail
```

So blocks without content are used up before any content is evicted, and the free list is the
eviction order. Hits are discounted from what an admission needs, but an idle one leaves the free
list. vLLM 0.33.0 `v1/core/block_pool.py`, `v1/core/single_type_kv_cache_manager.py`,
`v1/core/kv_cache_manager.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from kvsim.blocks.idle import Queue
from kvsim.blocks.pool import BlockPool
from kvsim.blocks.sharing import FULL_HITS, HITS_SAVE, PUBLISH_AT
from kvsim.blocks.tables import NAMED, Tables, named
from kvsim.engine.request import Sequence


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
        publish_at: str = "allocation",
        hits_save: str = "admission",
        full_hit: str = "last-block",
    ) -> None:
        super().__init__(block_size, num_gpu_blocks)
        self.publish_at = named("publish_at", PUBLISH_AT, publish_at)
        self.hits_save = named("hits_save", HITS_SAVE, hits_save)
        self.full_hit = named("full_hit", FULL_HITS, full_hit)
        self._lookups = 0
        self._hits = 0
        self.lockstep = "" if self.publish_at.computed else NAMED

    def make_pool(self, size: int, first: int) -> BlockPool:
        return ContentPool(size, first + 1)

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
            sequence.published = last

    def scheduled(self, sequence: Sequence, now_ns: int) -> int:
        return sequence.seen * self.block_size

    def fill(self, sequence: Sequence, place: int) -> None:
        if not self.publish_at.computed:
            self.publish(sequence, (place + 1) * self.block_size)

    def release(self, sequence: Sequence, pool: BlockPool, access_ns: int) -> None:
        super().release(sequence, pool, access_ns)
        sequence.published = 0


class ContentPool(BlockPool):
    """Blocks that remember what they hold until they are given out again.

    Several blocks may hold the same; the one labelled first is hit.
    """

    def __init__(self, size: int, first: int = 0) -> None:
        super().__init__(size, first)
        self.block_of: dict[int, int] = {}
        """key → the block with that content that is hit."""
        self._others: dict[int, dict[int, None]] = {}
        """key → further blocks with that content, in the order in which they were labelled."""
        self._key_of: dict[int, int] = {}
        self._idle = Queue(first, 0)
        """Idle blocks with content."""

    @property
    def cached(self) -> int:
        return len(self._idle)

    def cached_blocks(self) -> Iterable[int]:
        return self._idle.returned()

    def take(self) -> int:
        if len(self._blank):
            block = self._blank.pop()
        else:
            block = self._idle.pop()
            self._forget_one(block, self._key_of.pop(block))
        self.references[block] = 1
        return block

    def take_many(self, number: int) -> list[int]:
        if number == 1:
            return [self.take()]
        blank = min(number, len(self._blank))
        blocks = self._blank.pop_many(blank)
        if blank < number:
            evicted = self._idle.pop_many(number - blank)
            self._forget(evicted)
            blocks += evicted
        self.references.update(dict.fromkeys(blocks, 1))
        return blocks

    def hit(self, blocks: list[int]) -> None:
        """One more table holds these blocks, idle or in use."""
        references = self.references
        for block in blocks:
            if block in references:
                references[block] += 1
            else:
                self._idle.remove(block)
                references[block] = 1

    def label(self, blocks: list[int], keys: list[int]) -> None:
        """These blocks in use are given content, each another one: they are of one table."""
        if self.block_of.keys().isdisjoint(keys):
            self.block_of.update(zip(keys, blocks, strict=True))
            self._key_of.update(zip(blocks, keys, strict=True))
            return
        for block, key in zip(blocks, keys, strict=True):
            self._key_of[block] = key
            if self.block_of.setdefault(key, block) != block:
                self._others.setdefault(key, {})[block] = None

    def drop(self, block: int) -> None:
        self.drop_table([block])

    def drop_table(self, table: list[int]) -> None:
        """One table less holds these blocks; walked from last to first."""
        references, key_of = self.references, self._key_of
        alone = [block for block in reversed(table) if references[block] == 1]
        if len(alone) < len(table):
            for block in table:
                references[block] -= 1
        _each(references.__delitem__, alone)
        self._idle.put_many([block for block in alone if block in key_of])
        # They go to the head together, so the one walked first is reused first.
        self._blank.put_many([block for block in reversed(alone) if block not in key_of])

    def audit(self) -> None:
        blank, idle, used = self._blank.returned(), self._idle.returned(), self.references.keys()
        places = [*blank, *idle, *used, *self._blank.fresh]
        assert len(places) == len(set(places)) == self.size, "blocks were lost or invented"
        assert all(count > 0 for count in self.references.values()), "a block in use has no holder"
        assert set(idle) <= self._key_of.keys() <= {*idle, *used}, "content without a block"
        labelled = [*self.block_of.items()]
        labelled += [(key, block) for key, others in self._others.items() for block in others]
        assert len(labelled) == len(self._key_of), "a block is labelled twice"
        assert all(self._key_of[block] == key for key, block in labelled), "a key is misfiled"
        assert all(self._others.values()), "an empty set of blocks is kept"
        assert self._others.keys() <= self.block_of.keys(), "content cannot be found"

    def _forget(self, blocks: list[int]) -> None:
        """Blocks are given out again: their content cannot be hit any more."""
        keys = list(map(self._key_of.pop, blocks))
        if self._others.keys().isdisjoint(keys):
            _each(self.block_of.__delitem__, keys)
        else:
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


def _each(call: Callable[[int], None], arguments: list[int]) -> None:
    """Call for each, without a step of Python for each."""
    deque(map(call, arguments), maxlen=0)

"""Paged blocks that are shared between equal prefixes.

A full block is known by a key that stands for its tokens *and* everything before them. As
vLLM 0.6.3.post1 has it (`core/block/prefix_caching_block.py`), sharing begins when a block is given
its content, and saves computation from the next step on; hits reduce neither the admission need nor
the token budget. Other rules of `kvsim.engine.sharing` can be set.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvsim.engine.growth import Growth
from kvsim.engine.order import MakeOrder
from kvsim.engine.pool import BlockPool, PrefixPool
from kvsim.engine.request import Request, Sequence
from kvsim.engine.sharing import (
    FullHit,
    HitsSave,
    PublishAt,
    make_full_hit,
    make_hits_save,
    make_publish_at,
)
from kvsim.engine.tables import NAMED, Tables, waiting_sequence
from kvsim.errors import EngineStopped
from kvsim.rules.eviction import make_eviction


class Naive(Tables):
    """Paged blocks, none shared between requests (vLLM without `enable_prefix_caching`)."""


class PrefixCaching(Tables):
    """Automatic prefix caching: blocks with equal content and prefix are one block."""

    needs_keys = True
    gpu: PrefixPool
    cpu: PrefixPool

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        *,
        growth: str | Growth = "one-each",
        idle_order: str | MakeOrder = "stack",
        eviction: str | MakeOrder = "vllm-0.6.3",
        publish_at: str | PublishAt = "allocation",
        hits_save: str | HitsSave = "computation",
        full_hit: str | FullHit = "last-block",
    ) -> None:
        self.eviction = make_eviction(
            eviction, block_size=block_size, num_gpu_blocks=num_gpu_blocks
        )
        """Makes the order in which idle blocks with content are reused."""
        self.publish_at = make_publish_at(publish_at)
        self.hits_save = make_hits_save(hits_save)
        self.full_hit = make_full_hit(full_hit)
        self._withheld = self.full_hit.withheld
        self.lockstep = "" if self.publish_at.computed else NAMED
        super().__init__(
            block_size, num_gpu_blocks, num_cpu_blocks, growth=growth, idle_order=idle_order
        )

    def make_pool(self, size: int, first: int) -> BlockPool:
        return PrefixPool(size, first, self.idle_order, self.eviction)

    def admission_need(self, request: Request) -> int:
        need = super().admission_need(request)
        if self.hits_save.blocks:
            need -= self._held(waiting_sequence(request))
        return need

    def swap_need(self, sequences: Iterable[Sequence], target: BlockPool) -> int:
        assert isinstance(target, PrefixPool)
        size = self.block_size
        need = 0
        for sequence in sequences:
            need += self._move_need(sequence)
            keys = sequence.block_keys(sequence.published, size)
            need -= sum([target.holds(key) for key in keys])
        return need

    def match(self, sequence: Sequence) -> list[int]:
        size, find = self.block_size, self.gpu.find
        hits: list[int] = []
        for key in sequence.block_keys((sequence.length - self.full_hit.withheld) // size, size):
            block = find(key)
            if block is None:
                break
            hits.append(block)
        return hits

    @property
    def lookups(self) -> tuple[int, int]:
        return self.gpu.lookups, self.gpu.hits

    def allocate(self, sequence: Sequence) -> None:
        assert not sequence.table
        full, rest = divmod(sequence.length, self.block_size)
        keys = sequence.block_keys(full, self.block_size)
        if self.publish_at.computed:
            table = self.gpu.take_leading(keys)
            full = len(table)
            table += self.gpu.take_many(len(keys) - full + (rest > 0))
        else:
            table = self.gpu.take_table(keys)
            if rest:
                table.append(self.gpu.take())
        sequence.table = table
        sequence.published = full
        self._filled(sequence)

    def scheduled(self, sequence: Sequence, now_ns: int) -> int:
        sequence.access_ns = now_ns
        if not sequence.gap:
            last = (sequence.filled - self._withheld) // self.block_size
            if sequence.seen < last:
                sequence.seen += self.gpu.computed_in(sequence.table[sequence.seen : last])
                sequence.gap = sequence.seen < last
        return sequence.seen * self.block_size

    def composed(self) -> None:
        self.gpu.mark_computed()
        self.cpu.mark_computed()

    def fill(self, sequence: Sequence, place: int) -> None:
        if not self.publish_at.computed:
            key = sequence.block_keys(place + 1, self.block_size)[place]
            sequence.table[place] = self.gpu.fill(sequence.table[place], key)
            sequence.published = place + 1

    def publish(self, sequence: Sequence, upto: int) -> None:
        first, last = sequence.published, upto // self.block_size
        if last > first:
            keys, table = sequence.block_keys(last, self.block_size), sequence.table
            for place in range(first, last):
                table[place] = self.gpu.fill(table[place], keys[place])
            sequence.published = last
            self.gpu.mark_computed()

    def release(self, sequence: Sequence, pool: BlockPool, access_ns: int) -> None:
        assert isinstance(pool, PrefixPool)
        full = sequence.published
        table = sequence.table
        pool.drop_keyed_table(table[:full], self.block_size, access_ns)
        for block in table[full:]:
            if access_ns >= 0 and pool.references[block] > 1:
                pool.stamp(block, access_ns)
            pool.drop(block)

    def free_swapped(self, sequence: Sequence) -> None:
        if sequence.access_ns < 0:
            self.release(sequence, self.cpu, -1)
            return
        raise EngineStopped(
            kind="freed-while-swapped",
            request_id=sequence.request.id,
            explanation=(
                f"request {sequence.request.id} was freed while its blocks were on the CPU; the"
                " prefix cache looks for them on the GPU"
            ),
            remedy="use --preemption-mode recompute together with priorities and prefix caching",
            rule="KeyError @ core/block/prefix_caching_block.py:507",
        )

    def retake(self, sequence: Sequence, pool: BlockPool) -> list[int]:
        assert isinstance(pool, PrefixPool)
        full = sequence.published
        table = pool.take_table(sequence.block_keys(full, self.block_size))
        table.extend(pool.take_many(len(sequence.table) - full))
        return table

    def _held(self, sequence: Sequence) -> int:
        """Returns the number of blocks in use that an admission would share."""
        keys = sequence.block_keys(sequence.length // self.block_size, self.block_size)
        block_of, used = self.gpu.block_of, self.gpu.references
        held = 0
        for key in keys:
            if self.publish_at.computed and key not in block_of:
                break
            held += block_of.get(key) in used
        return held

"""Paged blocks that equal prefixes share.

A full block is known by a key that stands for its tokens *and* everything before them. Sharing
begins when a block is given its content; it saves computation only from the next step on, when
the content is computed (vLLM 0.6.3.post1 `core/block/prefix_caching_block.py`). Hits reduce neither
the admission need nor the token budget of that engine.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvsim.blocks.eviction import EVICTIONS
from kvsim.blocks.pool import BlockPool, PrefixPool
from kvsim.blocks.tables import Tables, named
from kvsim.errors import EngineStopped
from kvsim.request import Sequence


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
        growth: str = "one-each",
        idle_order: str = "stack",
        eviction: str = "vllm-0.6.3",
    ) -> None:
        self.eviction = named("eviction", EVICTIONS, eviction)
        """In which order idle blocks with content are reused; a name of `EVICTIONS`."""
        super().__init__(
            block_size, num_gpu_blocks, num_cpu_blocks, growth=growth, idle_order=idle_order
        )

    def make_pool(self, size: int, first: int) -> BlockPool:
        return PrefixPool(size, first, self.idle_order, self.eviction)

    def swap_need(self, sequences: Iterable[Sequence], target: BlockPool) -> int:
        assert isinstance(target, PrefixPool)
        size = self.block_size
        need = 0
        for sequence in sequences:
            keys = sequence.block_keys(sequence.filled // size, self.block_size)
            need += self.growth_need(sequence) + len(keys)
            need -= sum([target.holds(key) for key in keys])
        return need

    @property
    def lookups(self) -> tuple[int, int]:
        return self.gpu.lookups, self.gpu.hits

    def allocate(self, sequence: Sequence) -> None:
        assert not sequence.table
        full, rest = divmod(sequence.length, self.block_size)
        table = self.gpu.take_table(sequence.block_keys(full, self.block_size))
        if rest:
            table.append(self.gpu.take())
        sequence.table = table
        self._filled(sequence)

    def scheduled(self, sequence: Sequence, now_ns: int) -> int:
        sequence.access_ns = now_ns
        if not sequence.gap:
            # The last block never counts, so that at least one token is always computed.
            last = len(sequence.table) - 1
            if sequence.seen < last:
                sequence.seen += self.gpu.computed_in(sequence.table[sequence.seen : last])
                sequence.gap = sequence.seen < last
        return sequence.seen * self.block_size

    def composed(self) -> None:
        self.gpu.mark_computed()
        self.cpu.mark_computed()

    def fill(self, sequence: Sequence, place: int) -> None:
        key = sequence.block_keys(place + 1, self.block_size)[place]
        sequence.table[place] = self.gpu.fill(sequence.table[place], key)

    def release(self, sequence: Sequence, pool: BlockPool, access_ns: int) -> None:
        assert isinstance(pool, PrefixPool)
        size = self.block_size
        full = sequence.filled // size
        access = None if access_ns < 0 else access_ns
        table = sequence.table
        pool.drop_keyed_table(table[:full], size, access)
        for block in table[full:]:
            if access is not None and pool.references[block] > 1:
                pool.stamp(block, access)
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
        full = sequence.filled // self.block_size
        table = pool.take_table(sequence.block_keys(full, self.block_size))
        table.extend(pool.take_many(len(sequence.table) - full))
        return table

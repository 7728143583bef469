"""Memory before paging: every request reserves room for the longest possible sequence.

Orca and FasterTransformer kept the KV cache of a sequence in one contiguous piece of
`max_model_len` tokens, taken at admission and returned at the end ("Efficient Memory Management for
Large Language Model Serving with PagedAttention", SOSP 2023, sections 3.1 and 6). Nothing grows,
so nothing is preempted; what it costs is empty slots (internal fragmentation) and the remainder of
the pool that is too short for one more reservation (external fragmentation).
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from librt.vecs import vec
from mypy_extensions import i64, mypyc_attr

from kvsim.core.request import Request, Table
from kvsim.core.vectors import numbers
from kvsim.engines.vllm_063.blocks import Naive, Pairs, waiting_sequence
from kvsim.engines.vllm_063.pool import BlockPool
from kvsim.errors import ConfigError


@mypyc_attr(allow_interpreted_subclasses=True)
class Contiguous(Naive):
    """One reservation of `max_model_len` tokens per sample, taken at admission.

    All reservations are equal, so the pool is a row of places, and the lowest free one is taken
    (first fit).
    """

    reserved_blocks: i64
    """Number of blocks of one reservation."""
    _places: list[int]
    _total: i64
    _spare: dict[Request, list[list[int]]]
    """Reservations for samples that have not been forked yet."""

    def __init__(
        self, block_size: int, num_gpu_blocks: int, num_cpu_blocks: int, max_model_len: int
    ) -> None:
        super().__init__(block_size, num_gpu_blocks, num_cpu_blocks)
        self.grows = False
        self.reserved_blocks = -(-max_model_len // block_size)
        self._places = list(range(num_gpu_blocks // int(self.reserved_blocks)))
        heapify(self._places)
        if not self._places:
            raise ConfigError(
                f"block_manager: contiguous: {num_gpu_blocks} GPU blocks cannot hold one"
                f" reservation of {max_model_len} tokens ({self.reserved_blocks} blocks); lower"
                " --max-model-len"
            )
        self._total = len(self._places) * self.reserved_blocks
        self._spare = {}

    def make_pool(self, size: int, first: int) -> BlockPool:
        return _Places(size, first)

    @property
    def swaps(self) -> bool:
        return False

    def admission_need(self, request: Request) -> int:
        if waiting_sequence(request).length > self.reserved_blocks * self.block_size:
            return self.gpu.size + 1  # No reservation holds it.
        return request.n * self.reserved_blocks

    @property
    def admission_free(self) -> int:
        return len(self._places) * self.reserved_blocks

    @property
    def admission_total(self) -> int:
        return self._total

    @property
    def stranded(self) -> int:
        return self.gpu.size - self._total

    def growth_need(self, sequence: Request) -> int:
        return 0

    def allocate(self, sequence: Request) -> None:
        request = sequence.request
        self.give(sequence, numbers(self._reserve()))
        if request.n > 1:
            self._spare[request] = [self._reserve() for _ in range(request.n - 1)]

    def fork(self, parent: Request, child: Request) -> Pairs:
        table: Table = Table()
        table.blocks = numbers(self._spare[parent.request].pop())
        child.tables = [table]
        child.filled = parent.filled
        self.empty_slots += self._empty(child)
        used = self._blocks(parent.filled)
        return list(zip(parent.table[:used], child.table[:used], strict=True))

    def release(self, sequence: Request, pool: BlockPool, access_ns: i64) -> None:
        blocks: vec[i64] = sequence.tables[0].blocks
        for table in [list(blocks), *self._spare.pop(sequence.request, [])]:
            for block in table:
                del pool.references[block]
            heappush(self._places, table[0] // int(self.reserved_blocks))

    def audit_references(self, counted: dict[int, int], held: dict[int, int]) -> None:
        for spare in self._spare.values():
            for table in spare:
                counted.update(dict.fromkeys(table, 1))
        super().audit_references(counted, held)

    def _reserve(self) -> list[int]:
        start = heappop(self._places) * self.reserved_blocks
        table = list(range(start, start + self.reserved_blocks))
        for block in table:
            self.gpu.references[block] = 1
        return table


class _Places(BlockPool):
    """A pool whose blocks are given out in reservations."""

    def audit(self) -> None:
        assert all(0 <= block - self.first < self.size for block in self.references)

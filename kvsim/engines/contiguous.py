"""Memory before paging: every request reserves room for the longest possible sequence.

Orca and FasterTransformer kept the KV cache of a sequence in one contiguous piece of
`max_model_len` tokens, taken at admission and returned at the end ("Efficient Memory Management for
Large Language Model Serving with PagedAttention", SOSP 2023, sections 3.1 and 6). Nothing grows,
so nothing is preempted; what it costs is empty slots (internal fragmentation) and the remainder of
the pool that is too short for one more reservation (external fragmentation).
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from kvsim.engine.pool import BlockPool
from kvsim.engine.request import Request, Sequence
from kvsim.engine.tables import Pairs, Tables, waiting_sequence
from kvsim.errors import ConfigError


class Contiguous(Tables):
    """One reservation of `max_model_len` tokens per sample, taken at admission.

    All reservations are equal, so the pool is a row of places, and the lowest free one is taken
    (first fit).
    """

    grows = False
    swaps = False

    def __init__(
        self, block_size: int, num_gpu_blocks: int, num_cpu_blocks: int, max_model_len: int
    ) -> None:
        super().__init__(block_size, num_gpu_blocks, num_cpu_blocks)
        self.reserved_blocks = -(-max_model_len // block_size)
        """Number of blocks of one reservation."""
        self._places = list(range(num_gpu_blocks // self.reserved_blocks))
        heapify(self._places)
        if not self._places:
            raise ConfigError(
                f"block_manager: contiguous: {num_gpu_blocks} GPU blocks cannot hold one"
                f" reservation of {max_model_len} tokens ({self.reserved_blocks} blocks); lower"
                " --max-model-len"
            )
        self._total = len(self._places) * self.reserved_blocks
        self._spare: dict[Request, list[list[int]]] = {}
        """Reservations for samples that have not been forked yet."""

    def make_pool(self, size: int, first: int) -> BlockPool:
        return _Places(size, first)

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

    def growth_need(self, sequence: Sequence) -> int:
        return 0

    def allocate(self, sequence: Sequence) -> None:
        request = sequence.request
        sequence.table = self._reserve()
        if request.n > 1:
            self._spare[request] = [self._reserve() for _ in range(request.n - 1)]
        self._filled(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> Pairs:
        child.table = self._spare[parent.request].pop()
        child.filled = parent.filled
        self.empty_slots += self._empty(child)
        used = -(-parent.filled // self.block_size)
        return list(zip(parent.table[:used], child.table[:used], strict=True))

    def release(self, sequence: Sequence, pool: BlockPool, access_ns: int) -> None:
        for table in [sequence.table, *self._spare.pop(sequence.request, [])]:
            pool.drop_table(table)
            heappush(self._places, table[0] // self.reserved_blocks)

    def audit_references(self, counted: dict[int, int], held: dict[int, int]) -> None:
        for spare in self._spare.values():
            for table in spare:
                counted.update(dict.fromkeys(table, 1))
        super().audit_references(counted, held)

    def _reserve(self) -> list[int]:
        start = heappop(self._places) * self.reserved_blocks
        table = list(range(start, start + self.reserved_blocks))
        self.gpu.references.update(dict.fromkeys(table, 1))
        return table


class _Places(BlockPool):
    """A pool whose blocks are given out in reservations."""

    def drop_table(self, table: list[int]) -> None:
        for block in table:
            del self.references[block]

    def audit(self) -> None:
        assert all(0 <= block - self.first < self.size for block in self.references)

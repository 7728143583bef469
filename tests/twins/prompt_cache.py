"""A prefix cache of prompts alone, with a dictionary entry and a place in the order per block."""

from collections.abc import Iterable

from kvsim.engine.pool import BlockPool
from kvsim.engine.request import Sequence
from kvsim.engines.vllm_063_blocks import PrefixCaching


class PromptCaching(PrefixCaching):
    """Full blocks of prompts are shared, from their registration at admission on.

    Hits are the leading blocks that are registered, also by a request of the same step; output
    blocks and partial last blocks are private. Blank blocks are given out first, then the least
    recently released; a prompt is released from its last block to its first.
    """

    def __init__(self, block_size: int, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        super().__init__(block_size, num_gpu_blocks, num_cpu_blocks, eviction="lru")
        self.hits: dict[Sequence, int] = {}

    def allocate(self, sequence: Sequence) -> None:
        pool, full = self.gpu, self._full(sequence)
        keys = sequence.block_keys(full, self.block_size)
        known = 0
        while known < full and keys[known] in pool.block_of:
            known += 1
        table = [pool.block_of[key] for key in keys[:known]]
        for block in table:
            pool._hit(block)
        pool.lookups += full
        pool.hits += known
        missing = pool.take_many(-(-sequence.length // self.block_size) - known)
        for key, block in zip(keys[known:], missing, strict=False):
            pool._label(block, key)
        sequence.table = table + missing
        self.hits[sequence] = known * self.block_size
        self._filled(sequence)

    def scheduled(self, sequence: Sequence, now_ns: int) -> int:
        sequence.access_ns = now_ns
        return self.hits[sequence]

    def composed(self) -> None:
        pass

    def fill(self, sequence: Sequence, place: int) -> None:
        pass

    def release(self, sequence: Sequence, pool: BlockPool, access_ns: int) -> None:
        full = self._full(sequence)
        pool.drop_keyed_table(sequence.table[:full], self.block_size, access_ns)
        for block in sequence.table[full:]:
            pool.drop(block)

    def swap_need(self, sequences: Iterable[Sequence], target: BlockPool) -> int:
        raise NotImplementedError("prompts are computed again")

    def _full(self, sequence: Sequence) -> int:
        return sequence.request.input_length // self.block_size

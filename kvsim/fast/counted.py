"""Block managers that share nothing, with counted blocks in place of named ones."""

from __future__ import annotations

from kvsim.engine.counted import Counted, CountPool
from kvsim.engine.pool import BlockPool
from kvsim.engine.tables import Tables
from kvsim.engines.vllm_063_blocks import Naive
from kvsim.engines.vllm_v1_blocks import VllmV1Tables


class CountedNaive(Counted, Naive):
    """`Naive`, counted."""

    def make_pool(self, size: int, first: int) -> BlockPool:
        return CountPool(size, first)


class CountedVllmV1(Counted, VllmV1Tables):
    """`VllmV1Tables`, counted."""

    def make_pool(self, size: int, first: int) -> BlockPool:
        return CountPool(size, first + 1)


COUNTED_TWINS: dict[type[Tables], type[Tables]] = {
    Naive: CountedNaive,
    VllmV1Tables: CountedVllmV1,
}
"""Block managers → what decides the same without naming blocks."""

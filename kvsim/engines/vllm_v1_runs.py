"""Block tables of vLLM V1 with its prefix cache, stored in runs: no work and no object per block.

They make the same decisions as `kvsim.engines.vllm_v1_blocks.VllmV1PrefixTables`, without block
ids.
"""

from __future__ import annotations

from typing import Any, cast

from kvsim.engine.pool import BlockPool
from kvsim.engine.request import Sequence
from kvsim.engine.run_tables import RunTables
from kvsim.engine.runs import Hits, RunPool
from kvsim.engines.vllm_v1_blocks import VllmV1PrefixTables
from kvsim.rules.eviction import LeastRecentlyUsed


class VllmV1Runs(RunTables, VllmV1PrefixTables):
    """`VllmV1PrefixTables` stored in runs, with the eviction rule `lru`."""

    gpu: RunPool  # type: ignore[assignment]

    def __init__(self, *sizes: int, **rules: Any) -> None:
        super().__init__(*sizes, **rules)
        assert self.eviction is LeastRecentlyUsed, "runs go in the order of their release"

    def make_pool(self, size: int, first: int) -> BlockPool:
        return RunPool(size, first + 1, self.block_size)

    def match(self, sequence: Sequence) -> list[int]:
        if sequence.shared_tokens < self.block_size and not sequence.spans:
            return []  # Nobody else has its tokens, and no content of its own was ever kept.
        return super().match(sequence)

    def need(self, sequence: Sequence, upto: int, hits: list[int]) -> int:
        blocks, found = -(-upto // self.block_size), len(hits)
        if not (found or sequence.table):
            return blocks
        if not self.hits_save.blocks:
            return max(blocks, found)
        idle = cast(Hits, hits).idle if found else 0
        return max(blocks - found - len(sequence.table), 0) + idle

    def hold(self, sequence: Sequence, upto: int, hits: list[int]) -> None:
        self._lookups += (sequence.length - self.full_hit.withheld) // self.block_size
        self._hits += len(hits)
        RunTables.hold(self, sequence, upto, hits)

    def allocate(self, sequence: Sequence) -> None:
        VllmV1PrefixTables.allocate(self, sequence)

    def is_looked_for(self, sequence: Sequence) -> bool:
        return sequence.shared_tokens >= self.block_size

    def published_last(self, sequence: Sequence) -> int:
        return 0  # Of the tokens that have slots, the last ones may not be known yet.

    def recount(self, sequence: Sequence, known: int) -> None:
        super().recount(sequence, known)
        self.publish(sequence, min(known, sequence.filled))

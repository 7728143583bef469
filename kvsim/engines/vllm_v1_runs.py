"""Block tables of vLLM V1 with its prefix cache, in runs: no work and no object for each block.

They decide what `kvsim.engines.vllm_v1_blocks.VllmV1PrefixTables` decides block by block, and do
not name blocks. Where nobody can look for a block, as nobody else has its tokens, it gets its
content only when it is given back: a request that shares nothing is a number of blocks until then.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from kvsim.engine.counted import Counted
from kvsim.engine.pool import BlockPool
from kvsim.engine.request import Request, Sequence
from kvsim.engine.runs import Hits, Run, RunPool, parts
from kvsim.engine.tables import COUNTED, Pairs
from kvsim.engines.vllm_v1_blocks import VllmV1PrefixTables
from kvsim.rules.eviction import LeastRecentlyUsed

_Blocks = list[int]
"""What other managers return as hits."""


class VllmV1Runs(Counted, VllmV1PrefixTables):
    """`VllmV1PrefixTables` in runs, under the eviction rule `lru`."""

    gpu: RunPool  # type: ignore[assignment]

    def __init__(self, block_size: int, num_gpu_blocks: int, **rules: Any) -> None:
        super().__init__(block_size, num_gpu_blocks, **rules)
        assert self.eviction is LeastRecentlyUsed, "runs go in the order of their release"
        self.lockstep = COUNTED if self.lockstep else ""
        self._runs: dict[Sequence, list[Run]] = {}
        """The content of each table, but for those in which nobody can look for any."""

    def make_pool(self, size: int, first: int) -> BlockPool:
        return RunPool(size, first + 1, self.block_size)

    def match(self, sequence: Sequence) -> list[int]:
        number = (sequence.length - self.full_hit.withheld) // self.block_size
        return cast(_Blocks, self.gpu.find(sequence.block_spans(self.block_size), number))

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
        if hits:
            self._hits += len(hits)
            self._runs[sequence] = self.gpu.hold(cast(Hits, hits))
        elif sequence.shared_tokens >= self.block_size:
            self._runs[sequence] = []
        Counted.hold(self, sequence, upto, hits)
        sequence.published = len(hits)

    def allocate(self, sequence: Sequence) -> None:
        VllmV1PrefixTables.allocate(self, sequence)

    def publish(self, sequence: Sequence, upto: int) -> None:
        first, last = sequence.published, upto // self.block_size
        if last > first:
            runs = self._runs.get(sequence)
            if runs is not None:
                spans = sequence.block_spans(self.block_size)
                self.gpu.label(runs, spans, first, last)
            sequence.published = last

    def give_back(self, sequence: Sequence, blocks: int) -> None:
        full, sequence.published = sequence.published, 0
        runs = self._runs.pop(sequence, None)
        if runs is not None:
            self.gpu.release(runs, full)
        elif full:
            self.gpu.keep(sequence.block_spans(self.block_size), full)
        self.gpu.give_back(blocks - full)

    def append(self, sequence: Sequence) -> Pairs:
        copies = super().append(sequence)
        if not self.publish_at.computed:
            self.publish(sequence, sequence.length)
        return copies

    def recount(self, sequence: Sequence, known: int) -> None:
        super().recount(sequence, known)
        self.publish(sequence, min(known, sequence.filled))

    def awaited(self, sequence: Sequence) -> bool:
        following = (sequence.published + 1) * self.block_size
        return sequence in self._runs and sequence.shared_tokens >= following

    def own_blocks(self, sequence: Sequence) -> int:
        runs = self._runs.get(sequence)
        if runs is None:
            return len(sequence.table)
        end = sequence.published
        own = len(sequence.table) - end
        for run in reversed(runs):
            own += sum(part.end - part.start for part in parts(run, end) if part.refs == 1)
            end = run.start
        return own

    def audit(self, requests: Iterable[Request]) -> None:
        self.gpu.audit()
        blank = empty = 0
        tables = []
        for request in requests:
            sequence = request.sequences[0]
            if sequence.table:
                blank += len(sequence.table)
                if sequence in self._runs:
                    tables.append((self._runs[sequence], sequence.published))
                    blank -= sequence.published
                empty += self._empty(sequence)
        assert len(tables) == len(self._runs), "content without a table"
        content = self.gpu.audit_tables(tables)
        assert self.gpu.used == blank + content, "blocks in use and tables disagree"
        assert empty == self.empty_slots, "empty slots were miscounted"

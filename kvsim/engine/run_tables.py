"""Block tables with a prefix cache whose content is stored in runs (`kvsim.engine.runs`).

A block with tokens that no other request has gets its content only when it is freed, because nobody
can look it up earlier. A sequence that has only such blocks is a mere block count until then.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from kvsim.engine.counted import Counted
from kvsim.engine.request import FINISHED, Request, Sequence
from kvsim.engine.runs import Hits, Run, RunPool, parts
from kvsim.engine.tables import COUNTED, Pairs

_Blocks = list[int]
"""The type that other managers return as hits."""


class RunTables(Counted):
    """The moves of a manager with a prefix cache, without work per block."""

    gpu: RunPool

    def __init__(self, *sizes: int, **rules: Any) -> None:
        super().__init__(*sizes, **rules)
        self.lockstep = COUNTED if self.lockstep else ""
        self._runs: dict[Sequence, list[Run]] = {}
        """The content of each table, except tables whose blocks nobody can look up."""

    def find(self, sequence: Sequence, withheld: int = 0) -> Hits:
        """Returns the leading resident full blocks of a sequence, without those that hold one of
        its last `withheld` tokens."""
        blocks = (sequence.length - withheld) // self.block_size
        return self.gpu.find(sequence.block_spans(self.block_size), blocks)

    def match(self, sequence: Sequence) -> list[int]:
        hits = self.find(sequence, self.full_hit.withheld)
        # The length of a list, which is asked for often, is known at once.
        return cast(_Blocks, hits) if hits.number else []

    def hold(self, sequence: Sequence, upto: int, hits: list[int]) -> None:
        if hits:
            self._runs[sequence] = self.gpu.hold(cast(Hits, hits))
        elif self.is_looked_for(sequence):
            self._runs[sequence] = []
        Counted.hold(self, sequence, upto, hits)
        sequence.published = len(hits)

    def scheduled(self, sequence: Sequence, now_ns: int) -> int:
        sequence.access_ns = now_ns
        return sequence.seen * self.block_size

    def publish(self, sequence: Sequence, upto: int) -> None:
        first, last = sequence.published, upto // self.block_size
        if last > first:
            runs = self._runs.get(sequence)
            if runs is not None:
                spans = sequence.block_spans(self.block_size)
                self.gpu.label(runs, spans, first, last)
                if self.gpu.events is not None:
                    keys = sequence.block_keys(last, self.block_size)
                    self.gpu.events.labelled(keys, first)
            sequence.published = last

    def give_back(self, sequence: Sequence, blocks: int) -> None:
        known = self.published_last(sequence)
        if known:
            self.publish(sequence, known)
        full, sequence.published = sequence.published, 0
        self.gpu.give_back(blocks - full)
        runs = self._runs.pop(sequence, None)
        if runs is not None:
            self.gpu.release(runs, full)
        elif full and sequence.state == FINISHED:
            self.gpu.retire(full)
        elif full:
            self.gpu.keep(sequence.block_spans(self.block_size), full)

    def is_looked_for(self, sequence: Sequence) -> bool:
        """Whether others may look up blocks that a sequence without hits fills."""
        return True

    def published_last(self, sequence: Sequence) -> int:
        """Returns the number of tokens whose full blocks are labelled when the table is freed, if
        they have no content yet."""
        return sequence.computed if self.publish_at.computed else sequence.filled

    def append(self, sequence: Sequence) -> Pairs:
        copies = super().append(sequence)
        if not self.publish_at.computed:
            self.publish(sequence, sequence.length)
        return copies

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
            for sequence in request.sequences:
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

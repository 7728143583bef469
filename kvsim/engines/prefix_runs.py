"""A prefix cache of prompts, kept by hash id instead of by block.

```
 hash ids of a prompt         A            B            C         512 tokens each, 32 blocks
 blocks                   ████████████ ████████████ ███████·····  resident: 32, 32, 7
 order of eviction        C, then B, then A: the tail of a prompt goes first
```

The blocks of a hash id come and go together, but for the tail that an eviction takes. So one entry
per id, with the number of its leading blocks that are resident, decides what an entry per block
would, in a thirtieth of the work: 24 entries instead of 750 for a prompt of 12,000 tokens.

The rules are plain ones, of no engine in particular: full blocks of *prompts* are shared from
their admission on, hits are contiguous from the first block, reduce neither the admission need
nor the token budget and always leave one token to compute; blank blocks are used first, then the
content that was released first; a prompt is released from its last block to its first. Blocks
that outputs fill are private.

It decides like a block-wise LRU cache if every hash id always has the same length, as in the
Mooncake traces. Blocks have no ids, and swapping is not supported.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import cast

from kvsim.engine.counted import CachePool, Counted
from kvsim.engine.pool import BlockPool
from kvsim.engine.request import Request, Sequence, UnitStream
from kvsim.engines.vllm_063_blocks import Naive


class UnitPool(CachePool):
    """A pool that stores its content by hash id."""

    def __init__(self, size: int, first: int = 0) -> None:
        super().__init__(size, first)
        self.resident: dict[int, int] = {}
        """Hash id → number of its leading blocks that are resident, if any."""
        self.holders: dict[int, int] = {}
        """Hash id → number of tables that hold it, if any."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Resident ids that no table holds. The first is evicted next."""

    def hold(self, units: list[tuple[int, int]]) -> tuple[int, int]:
        """Adds a table that holds the prompt made of these `(hash id, blocks)`.

        Returns the number of its leading blocks that were resident, and the number to take for the
        rest.
        """
        resident, holders = self.resident, self.holders
        hits = missing = 0
        contiguous = True
        for place, (unit, blocks) in enumerate(units):
            here = resident.get(unit, 0)
            if not here:
                contiguous = False
                rest = units[place:]
                ids = [each for each, _ in rest]
                if resident.keys().isdisjoint(ids):
                    # As a rule: what follows an id that is not here is not here, either.
                    resident.update(rest)
                    holders.update(dict.fromkeys(ids, 1))
                    return hits, missing + sum([number for _, number in rest])
            if unit in holders:
                holders[unit] += 1
            else:
                holders[unit] = 1
                if here:
                    del self._idle[unit]
                    self._cached -= here
                    if here > blocks:
                        # The rest of a longer prompt: nobody holds it, and an admission counts on
                        # no more than it needs.
                        here = resident[unit] = blocks
                    self.free -= here
            if contiguous:
                hits += min(here, blocks)
                contiguous = here >= blocks
            if here < blocks:
                missing += blocks - here
                resident[unit] = blocks
        return hits, missing

    def release(self, units: list[tuple[int, int]]) -> int:
        """Releases such a table. Returns its number of blocks."""
        resident, holders, idle = self.resident, self.holders, self._idle
        number = 0
        for unit, blocks in reversed(units):
            number += blocks
            if holders[unit] > 1:
                holders[unit] -= 1
            else:
                del holders[unit]
                idle[unit] = None
                self.free += resident[unit]
                self._cached += resident[unit]
        return number

    def audit(self) -> None:
        super().audit()
        assert self.resident.keys() - self.holders.keys() == self._idle.keys(), "an id is misfiled"
        assert self._cached == sum(self.resident[unit] for unit in self._idle)
        assert all(blocks > 0 for blocks in self.resident.values()), "an empty id is kept"

    def _evict(self, number: int) -> None:
        """Evicts `number` blocks, from the ids released first, each from its end."""
        resident, idle = self.resident, self._idle
        while number:
            unit = next(iter(idle))
            here = resident[unit]
            if here > number:
                resident[unit] = here - number
                return
            number -= here
            del idle[unit], resident[unit]


class PrefixRuns(Counted, Naive):
    """Automatic prefix caching of prompts, by hash id."""

    needs_keys = True
    swaps = False
    gpu: UnitPool

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        *,
        growth: str = "one-each",
    ) -> None:
        super().__init__(block_size, num_gpu_blocks, num_cpu_blocks, growth=growth)
        self._units: dict[Sequence, list[tuple[int, int]]] = {}
        """The shared part of each table."""
        self._lookups = 0
        self._hits = 0

    def make_pool(self, size: int, first: int) -> BlockPool:
        return UnitPool(size, first)

    @property
    def lookups(self) -> tuple[int, int]:
        return self._lookups, self._hits

    def allocate(self, sequence: Sequence) -> None:
        size = self.block_size
        shared = sequence.request.input_length // size
        stream = cast(UnitStream, sequence.identities(shared * size))
        units = self._units[sequence] = stream.units(shared, size)
        hits, missing = self.gpu.hold(units)
        self._lookups += shared
        self._hits += hits
        self.gpu.lend(missing + -(-sequence.length // size) - shared)
        sequence.filled = sequence.length
        self.recount(sequence, 0)
        self._filled(sequence)
        sequence.seen = hits

    def scheduled(self, sequence: Sequence, now_ns: int) -> int:
        return sequence.seen * self.block_size

    def give_back(self, sequence: Sequence, blocks: int) -> None:
        shared = self.gpu.release(self._units.pop(sequence))
        self.gpu.give_back(blocks - shared)

    def audit(self, requests: Iterable[Request]) -> None:
        self.gpu.audit()
        private = empty = 0
        for request in requests:
            for sequence in request.sequences:
                if sequence.table:
                    units = self._units[sequence]
                    private += len(sequence.table) - sum(blocks for _, blocks in units)
                    empty += self._empty(sequence)
        held = sum(self.gpu.resident[unit] for unit in self.gpu.holders)
        assert self.gpu.used == held + private, "blocks in use and tables disagree"
        assert empty == self.empty_slots, "empty slots were miscounted"

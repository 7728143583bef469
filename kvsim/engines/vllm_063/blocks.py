"""Block tables over a GPU pool and a CPU pool, and paged blocks that are shared between equal
prefixes.

Questions change nothing. Moves assume that the matching question was asked first and that its
result allowed the move.

```
              table            filled = 10, block_size = 4
  sequence ─► [ 7 | 3 | 12 ]   7 and 3 are full, 12 holds 2 tokens: 2 empty slots
```

Sources: vLLM 0.6.3.post1, `core/block_manager.py`, `core/block/block_table.py`,
`core/block/prefix_caching_block.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from librt.vecs import vec
from mypy_extensions import i64, mypyc_attr

from kvsim.core import guard
from kvsim.core.blocks import BlockManager
from kvsim.core.contents import Numbering
from kvsim.core.plan import Plan
from kvsim.core.request import WAITING, Request, Table
from kvsim.core.vectors import EMPTY
from kvsim.engines.deaths import died
from kvsim.engines.vllm_063.pool import BlockPool
from kvsim.errors import ConfigError
from kvsim.policies.eviction import make_eviction
from kvsim.policies.order import LowestFirst, make_idle_order
from kvsim.policies.tables import (
    FULL_HITS,
    HITS_SAVE,
    PUBLISH_AT,
    make_full_hit,
    make_growth,
    make_hits_save,
    make_publish_at,
)

Pairs = list[tuple[int, int]]
"""Copied blocks: (source, target)."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Naive(BlockManager):
    """Paged blocks, none shared but between the samples of a request (vLLM without
    `enable_prefix_caching`)."""

    gpu: BlockPool
    """Its blocks come before those of `cpu`."""
    idle_order: Any
    """Makes the order in which blocks without content are reused."""
    publish_at: Any
    hits_save: Any
    full_hit: Any
    """Its rules of sharing (`kvsim.policies.tables`)."""
    grows: bool
    """Whether a running request can need more blocks than it has. If not, no request is ever
    preempted for lack of blocks, and a watermark has no purpose."""
    swap_space_rule: str
    """Where the engine raises if the CPU pool is too small for a victim, as `error @ file:line`."""
    _growth: Any

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        *,
        growth: Any = "one-each",
        idle_order: Any = "stack",
    ) -> None:
        """`growth` and `idle_order` are values of `GROWTH` and `IDLE_ORDERS`, or a user's
        `package.module:name`. Values other than those of vLLM 0.6.3 are for research. Raises
        `ConfigError`."""
        self.block_size = block_size
        given = {"block_size": block_size, "num_gpu_blocks": num_gpu_blocks}
        self._growth = make_growth(growth, **given)
        self.idle_order = make_idle_order(idle_order, **given)
        self.gpu = self.make_pool(num_gpu_blocks, 1)
        self.cpu = self.make_pool(num_cpu_blocks, num_gpu_blocks + 1)
        self.empty_slots = 0
        self.tier = None
        self.needs_keys, self.grows = False, True
        self.swap_space_rule = "RuntimeError @ core/scheduler.py:1536"
        self.publish_at = PUBLISH_AT["allocation"]
        self.hits_save = HITS_SAVE["computation"]
        self.full_hit = FULL_HITS["last-block"]

    def make_pool(self, size: int, first: int) -> BlockPool:
        """Returns a pool of the kind that this manager needs."""
        return BlockPool(size, self.block_size, first, self.idle_order)

    # -- for those who look on -------------------------------------------------------------------

    @property
    def swaps(self) -> bool:
        return True

    @property
    def lookups(self) -> tuple[int, int]:
        return self.gpu.lookups, self.gpu.hits

    @property
    def stranded(self) -> int:
        """Free GPU blocks that no admission can use: none, because any block serves any token."""
        return 0

    def observe(self, plan: Plan) -> None:
        gpu, cpu = self.gpu, self.cpu
        plan.used_blocks, plan.cached_blocks = gpu.used, gpu.cached
        plan.free_blocks = gpu.free - plan.cached_blocks
        plan.cpu_used_blocks, plan.empty_slots = cpu.used, self.empty_slots
        plan.stranded_blocks = self.stranded

    def tables(self, request: Request) -> list[list[int]]:
        return [request.table]

    def own_blocks(self, request: Request) -> int:
        return self.gpu.own(request)

    # -- questions -------------------------------------------------------------------------------

    def admission_need(self, request: Request) -> int:
        """The blocks that admitting a waiting request takes, prefix hits not discounted."""
        return self._blocks(waiting_sequence(request).length)

    @property
    def admission_free(self) -> int:
        """The free GPU blocks that an admission can use."""
        return self.gpu.free - self.stranded

    @property
    def admission_total(self) -> int:
        """The value of `admission_free` when nothing runs."""
        return self.gpu.size - self.stranded

    def swapped(self, sequence: Request) -> bool:
        """Whether the table of a sequence that has one is on the CPU."""
        blocks: vec[i64] = sequence.tables[0].blocks
        return len(blocks) > 0 and blocks[0] >= i64(self.cpu.first)

    def growth_need(self, sequence: Request) -> int:
        """The free blocks that `append` requires."""
        pool = self.cpu if self.swapped(sequence) else self.gpu
        need: int = self._growth(sequence, self.block_size, pool)
        return need

    def swap_need(self, sequences: Iterable[Request], target: BlockPool) -> int:
        """The blocks of the pool `target` that moving these sequences there requires."""
        return sum([self._move_need(sequence) for sequence in sequences])

    def match(self, sequence: Request) -> list[int]:
        """The leading blocks of a sequence that an admission would find computed."""
        return []

    def cached_tokens(self, request: Request) -> int:
        hits = self.match(request)
        least = int(self.full_hit.least)
        return min(len(hits) * self.block_size, request.length - least) if hits else 0

    # -- moves -----------------------------------------------------------------------------------

    def allocate(self, sequence: Request) -> None:
        """Gives a sequence without a table slots for all its known tokens."""
        length: i64 = sequence.length
        full: i64 = length // self.block_size
        self.give(sequence, self.take(sequence, self.gpu, full, self._blocks(length)), length)

    def give(self, sequence: Request, blocks: vec[i64], filled: i64) -> None:
        """Gives a sequence without a table one of these blocks, for its first `filled` tokens."""
        assert not sequence.tables
        table: Table = Table()
        table.blocks = blocks
        sequence.tables = [table]
        sequence.filled, sequence.access_ns = filled, -1
        sequence.seen, sequence.gap = 0, False
        self.empty_slots += self._empty(sequence)

    def append(self, sequence: Request) -> Pairs:
        """Adds slots for the known tokens that have none. Returns the copies on write."""
        size: i64 = self.block_size
        table: Table = sequence.tables[0]
        length: i64 = sequence.length
        filled: i64 = sequence.filled
        more: i64 = (length + size - 1) // size - len(table.blocks)
        if more > 0:
            table.blocks = self.gpu.extended(table.blocks, more)
            self.empty_slots += more * size
        self.empty_slots -= length - filled
        copies: Pairs = []
        while filled < length:
            place: i64 = filled // size
            filled = min(length, (place + 1) * size)
            sequence.filled = filled
            block: i64 = table.blocks[place]
            if self.gpu.refs(block) > 1:
                # Others hold it, so it does not become free.
                self.gpu.give_back(vec[i64]([block]), -1)
                table.blocks[place] = self.gpu.take()
                copies.append((block, table.blocks[place]))
            if filled % size == 0:
                self.fill(sequence, place)
        return copies

    def free(self, sequence: Request) -> None:
        """Frees the table of a sequence that has finished or will be recomputed."""
        if not sequence.tables:
            return
        if self.swapped(sequence):
            self.release(sequence, self.cpu, -1)
        else:
            self.empty_slots -= self._empty(sequence)
            self.release(sequence, self.gpu, sequence.access_ns)
        sequence.tables = []
        sequence.filled = 0

    def fork(self, parent: Request, child: Request) -> Pairs:
        """Lets `child` share all blocks of `parent`. Returns the blocks that are copied at once."""
        blocks: vec[i64] = parent.tables[0].blocks
        k: i64
        for k in range(len(blocks)):
            self.gpu.share(blocks[k])
        self.give(child, blocks[0 : len(blocks)], parent.filled)
        child.published = parent.published
        return []

    def swap_out(self, sequences: Iterable[Request]) -> Pairs:
        """Moves tables to the CPU pool and returns the copies."""
        return self._swap(sequences, self.gpu, self.cpu, -1)

    def swap_in(self, sequences: Iterable[Request]) -> Pairs:
        """Moves tables back to the GPU pool and returns the copies."""
        return self._swap(sequences, self.cpu, self.gpu, 1)

    def scheduled(self, sequence: Request, now_ns: i64) -> i64:
        """Notes that a sequence is in the batch. Returns how many of its leading tokens have KV."""
        sequence.access_ns = now_ns
        return 0

    def publish(self, sequence: Request, upto: i64) -> None:
        """Lets others use the full blocks of the first `upto` tokens of a table from now on. Asked
        only where `publish_at` is `computed`."""

    def composed(self) -> None:
        """Called when the step is composed."""
        self.gpu.called()
        self.cpu.called()

    # -- what a manager may do otherwise --------------------------------------------------------

    def take(self, sequence: Request, pool: BlockPool, full: i64, number: i64) -> vec[i64]:
        """Returns `number` blocks of `pool` for a sequence, whose tokens fill the first `full`."""
        return pool.extended(EMPTY, number)

    def fill(self, sequence: Request, place: i64) -> None:
        """Called when block `place` of the table became full."""

    def release(self, sequence: Request, pool: BlockPool, access_ns: i64) -> None:
        """Drops every block of a table, first to last. `access_ns` -1 means never scheduled."""
        pool.give_back(sequence.tables[0].blocks, access_ns)

    def audit(self, requests: Iterable[Request]) -> None:
        for pool in (self.gpu, self.cpu):
            pool.audit()
        counted: Counter[int] = Counter()
        empty: i64 = 0
        sequence: Request
        for request in requests:
            for sequence in request.sequences:
                counted.update(sequence.table)
                if not sequence.tables:
                    continue
                if not self.swapped(sequence):
                    empty += self._empty(sequence)
                assert sequence.filled <= len(sequence.tables[0].blocks) * self.block_size
        held = {**self.gpu.references, **self.cpu.references}
        self.audit_references(counted, held)
        assert empty == self.empty_slots, "empty slots were miscounted"

    def audit_references(self, counted: dict[int, int], held: dict[int, int]) -> None:
        """Asserts that the references of the pools are the entries of the tables."""
        assert counted == held, "references and tables disagree"

    def _blocks(self, tokens: i64) -> i64:
        """The blocks of so many tokens."""
        return (tokens + self.block_size - 1) // self.block_size

    def _move_need(self, sequence: Request) -> int:
        """The number of its full blocks plus its need to grow. That includes a last block with room
        only if growth requires one."""
        need = self.growth_need(sequence) + int(sequence.filled // self.block_size)
        return max(need, len(sequence.tables[0].blocks))

    def _empty(self, sequence: Request) -> i64:
        return len(sequence.tables[0].blocks) * self.block_size - sequence.filled

    def _swap(
        self, sequences: Iterable[Request], source: BlockPool, target: BlockPool, sign: i64
    ) -> Pairs:
        pairs: Pairs = []
        sequence: Request
        for sequence in sequences:
            before: vec[i64] = sequence.tables[0].blocks
            self.release(sequence, source, -1)
            after: vec[i64] = self.take(sequence, target, sequence.published, len(before))
            sequence.tables[0].blocks = after
            pairs.extend(zip(before, after, strict=True))
            self.empty_slots += sign * self._empty(sequence)
        return pairs


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefixCaching(Naive):
    """Automatic prefix caching: blocks with equal content and prefix are one block.

    A full block is known by a number that stands for its tokens *and* everything before them. As
    vLLM 0.6.3.post1 has it, sharing begins when a block is given its content, and saves computation
    from the next step on; hits reduce neither the admission need nor the token budget. Other rules
    of `kvsim.policies.tables` can be set.
    """

    eviction: Any
    """Makes the order in which idle blocks with content are reused."""
    numbering: Numbering
    _computed: bool
    """Whether blocks are shared only once they are computed."""
    _withheld: i64

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        *,
        growth: Any = "one-each",
        idle_order: Any = "stack",
        eviction: Any = "vllm-0.6.3",
        publish_at: Any = "allocation",
        hits_save: Any = "computation",
        full_hit: Any = "last-block",
    ) -> None:
        self.eviction = make_eviction(
            eviction, block_size=block_size, num_gpu_blocks=num_gpu_blocks
        )
        super().__init__(
            block_size, num_gpu_blocks, num_cpu_blocks, growth=growth, idle_order=idle_order
        )
        self.publish_at = make_publish_at(publish_at)
        self.hits_save = make_hits_save(hits_save)
        self.full_hit = make_full_hit(full_hit)
        self._computed, self._withheld = self.publish_at.computed, self.full_hit.withheld
        self.numbering = Numbering(block_size)
        self.needs_keys = True

    def make_pool(self, size: int, first: int) -> BlockPool:
        return BlockPool(size, self.block_size, first, self.idle_order, self.eviction)

    # -- questions -------------------------------------------------------------------------------

    def admission_need(self, request: Request) -> int:
        need = super().admission_need(request)
        if self.hits_save.blocks:
            sequence = waiting_sequence(request)
            units: i64 = sequence.length // self.block_size
            self.numbering.extend(sequence, units)
            need -= self.gpu.held(sequence.contents, units, self._computed)
        return need

    def swap_need(self, sequences: Iterable[Request], target: BlockPool) -> int:
        need = 0
        sequence: Request
        for sequence in sequences:
            need += self._move_need(sequence) - target.held(sequence.contents, sequence.published)
        return need

    def match(self, sequence: Request) -> list[int]:
        units: i64 = (sequence.length - self._withheld) // self.block_size
        self.numbering.extend(sequence, units)
        hits: list[int] = []
        place: i64
        for place in range(units):
            block: i64 = self.gpu.find(sequence.contents[place])
            if block == 0 or (self.gpu.refs(block) and not self.gpu.computed(block)):
                break
            hits.append(block)
        return hits

    # -- moves -----------------------------------------------------------------------------------

    def take(self, sequence: Request, pool: BlockPool, full: i64, number: i64) -> vec[i64]:
        self._know(sequence, 0, full, pool)
        blocks: vec[i64]
        if self._computed and not sequence.tables:
            blocks = pool.take_leading(sequence.contents, full)
        else:
            blocks = pool.take_table(sequence.contents, full)
        sequence.published = len(blocks)
        return pool.extended(blocks, number - len(blocks))

    def free(self, sequence: Request) -> None:
        if sequence.tables and self.swapped(sequence) and sequence.access_ns >= 0:
            raise died("freed-while-swapped", sequence)
        super().free(sequence)

    def scheduled(self, sequence: Request, now_ns: i64) -> i64:
        sequence.access_ns = now_ns
        if not sequence.gap:
            last: i64 = (sequence.filled - self._withheld) // self.block_size
            place: i64
            computed: i64 = 0
            # Those behind a gap count, too: the engine counts blocks, whichever they are.
            for place in range(sequence.seen, last):
                computed += self.gpu.computed(sequence.tables[0].blocks[place])
            if sequence.seen < last:
                sequence.seen += computed
                sequence.gap = sequence.seen < last
        return sequence.seen * self.block_size

    def fill(self, sequence: Request, place: i64) -> None:
        if not self._computed:
            self._publish(sequence, place, place + 1)

    def publish(self, sequence: Request, upto: i64) -> None:
        units: i64 = upto // self.block_size
        if units > sequence.published:
            self._publish(sequence, sequence.published, units)
            self.gpu.called()

    def _publish(self, sequence: Request, first: i64, last: i64) -> None:
        """Gives blocks of a table that are full their content; one that others have takes their
        place."""
        blocks: vec[i64] = sequence.tables[0].blocks
        self._know(sequence, first, last, self.gpu)
        place: i64
        for place in range(first, last):
            blocks[place] = self.gpu.fill(blocks[place], sequence.contents[place], place)
        sequence.published = last

    def _know(self, sequence: Request, first: i64, last: i64, pool: BlockPool) -> None:
        """Numbers the contents of the full blocks `first .. last - 1` of a sequence."""
        self.numbering.extend(sequence, last)
        if pool.watched and last > first:
            keys = sequence._stream.keys(first, last, self.block_size)
            place: i64
            for place in range(first, last):
                pool.keys[sequence.contents[place]] = keys[place - first]


@mypyc_attr(allow_interpreted_subclasses=True)
class Contiguous(Naive):
    """One reservation of `max_model_len` tokens per sample, taken at admission.

    So it was before paging: Orca and FasterTransformer kept the KV cache of a sequence in one
    contiguous piece, and returned it at the end ("Efficient Memory Management for Large Language
    Model Serving with PagedAttention", SOSP 2023, sections 3.1 and 6). Nothing grows, so nothing is
    preempted; what it costs is empty slots (internal fragmentation) and the remainder of the pool
    that is too short for one more reservation (external fragmentation). All reservations are equal,
    so the pool is a row of places, and the lowest free one is taken (first fit).
    """

    reserved_blocks: i64
    """Number of blocks of one reservation."""
    _spare: dict[Request, list[vec[i64]]]
    """Reservations for samples that have not been forked yet."""

    def __init__(
        self, block_size: int, num_gpu_blocks: int, num_cpu_blocks: int, max_model_len: int
    ) -> None:
        super().__init__(block_size, num_gpu_blocks, num_cpu_blocks)
        self.grows = False
        self.reserved_blocks = -(-max_model_len // block_size)
        if not self.admission_total:
            raise ConfigError(
                f"block_manager: contiguous: {num_gpu_blocks} GPU blocks cannot hold one"
                f" reservation of {max_model_len} tokens ({self.reserved_blocks} blocks); lower"
                " --max-model-len"
            )
        self._spare = {}

    def make_pool(self, size: int, first: int) -> BlockPool:
        return BlockPool(size, self.block_size, first, LowestFirst)

    @property
    def swaps(self) -> bool:
        return False

    def admission_need(self, request: Request) -> int:
        if waiting_sequence(request).length > self.reserved_blocks * self.block_size:
            return self.gpu.size + 1  # No reservation holds it.
        return request.n * self.reserved_blocks

    @property
    def stranded(self) -> int:
        return self.gpu.size % self.reserved_blocks

    def growth_need(self, sequence: Request) -> int:
        return 0

    def allocate(self, sequence: Request) -> None:
        request = sequence.request
        self.give(sequence, self._reserve(), sequence.length)
        if request.n > 1:
            self._spare[request] = [self._reserve() for _ in range(request.n - 1)]

    def fork(self, parent: Request, child: Request) -> Pairs:
        self.give(child, self._spare[parent.request].pop(), parent.filled)
        used = self._blocks(parent.filled)
        return list(zip(parent.table[:used], child.table[:used], strict=True))

    def release(self, sequence: Request, pool: BlockPool, access_ns: i64) -> None:
        for blocks in [sequence.tables[0].blocks, *self._spare.pop(sequence.request, [])]:
            pool.give_back(blocks, access_ns)

    def audit_references(self, counted: dict[int, int], held: dict[int, int]) -> None:
        for spare in self._spare.values():
            for blocks in spare:
                counted.update(dict.fromkeys(blocks, 1))
        super().audit_references(counted, held)

    def _reserve(self) -> vec[i64]:
        """Takes the lowest free reservation: the lowest free blocks, as all come and go as whole
        reservations."""
        return self.gpu.extended(EMPTY, self.reserved_blocks)


def waiting_sequence(request: Request) -> Request:
    """The sequence of a waiting request that needs blocks. With `n` > 1 it may be the last
    remaining sample."""
    return request.in_state(WAITING)[0] if request.forked else request


guard.keep(Naive)
guard.keep(PrefixCaching)

"""Block tables of sequences over a GPU pool and a CPU pool.

One class keeps the books of every block manager. A manager adds what is special about *full*
blocks, and what an admission reserves. Questions change nothing. Moves assume that the matching
question was asked first and that its result allowed the move.

```
              table            filled = 10, block_size = 4
  sequence ─► [ 7 | 3 | 12 ]   7 and 3 are full, 12 holds 2 tokens: 2 empty slots
```
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from kvsim.engine.cache_events import CacheEvents
from kvsim.engine.growth import GROWTH, Growth, make_growth
from kvsim.engine.idle import make_idle_order
from kvsim.engine.order import MakeOrder
from kvsim.engine.pool import BlockPool
from kvsim.engine.request import WAITING, Request, Sequence
from kvsim.engine.sharing import FULL_HITS, HITS_SAVE, PUBLISH_AT
from kvsim.errors import EngineStopped
from kvsim.schema import Census

Pairs = list[tuple[int, int]]
"""Copied blocks: (source, target)."""

COUNTED, NAMED = "counted", "named"
"""How block managers serve decoding requests together (`Tables.lockstep`)."""


class Tier(Protocol):
    """Memory below the pools, in equal places."""

    capacity: int
    """Number of places."""

    def contents(self) -> tuple[Iterable[int], Iterable[int]]:
        """Returns the places in use, and for each of them how many loads read it, or -1 while it is
        being written."""
        ...


class Tables:
    """Block tables without sharing, except between the samples of a request.

    The rules of vLLM 0.6.3.post1, `core/block_manager.py` and `core/block/block_table.py`.
    """

    needs_keys = False
    """Whether it reads block keys, so that sequences need a stream."""
    swap_space_rule = "RuntimeError @ core/scheduler.py:1536"
    """Where the engine raises if the CPU pool is too small for a victim, as `error @ file:line`."""
    publish_at = PUBLISH_AT["allocation"]
    hits_save = HITS_SAVE["computation"]
    full_hit = FULL_HITS["last-block"]
    """Its rule for full prefix hits; None if it does not share prefixes."""
    lockstep = ""
    """How it serves requests that decode together (`kvsim.fast.cohort`). `COUNTED`: as a number of
    blocks; `NAMED`: by visiting the requests whose tables change; empty: not at all."""
    label_moves = False
    """Whether labelling a block may move another block with equal content, out of the free blocks
    or out of those that can be hit."""
    swaps = True
    """Whether its tables can move to the CPU pool."""
    tier: Tier | None = None
    """What a connector keeps in CPU memory, for those who look on."""
    grows = True
    """Whether a running request can need more blocks than it has. If not, no request is ever
    preempted for lack of blocks, and a watermark has no purpose."""

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        *,
        growth: str | Growth = "one-each",
        idle_order: str | MakeOrder = "stack",
    ) -> None:
        """`growth` and `idle_order` are values of `GROWTH` and `IDLE_ORDERS`, or a user's
        `package.module:name`. Values other than those of vLLM 0.6.3 are for research. Raises
        `ConfigError`."""
        self.block_size = block_size
        given = {"block_size": block_size, "num_gpu_blocks": num_gpu_blocks}
        self._growth = make_growth(growth, **given)
        self.spare_block = self._growth is GROWTH["one-each"]
        """Whether growth needs a free block even if the last block has room."""
        if self._growth not in GROWTH.values():
            self.lockstep = ""
        self.idle_order = make_idle_order(idle_order, **given)
        """Makes the order in which blocks without content are reused."""
        self.gpu = self.make_pool(num_gpu_blocks, 0)
        self.cpu = self.make_pool(num_cpu_blocks, num_gpu_blocks)
        self.empty_slots = 0
        """Number of empty token slots in the tables on the GPU."""

    def make_pool(self, size: int, first: int) -> BlockPool:
        """Returns a pool of the kind that this manager needs."""
        return BlockPool(size, first, self.idle_order)

    # -- questions ------------------------------------------------------------------------------

    def admission_need(self, request: Request) -> int:
        """Returns the blocks that admitting a waiting request takes, prefix hits not discounted."""
        return -(-waiting_sequence(request).length // self.block_size)

    @property
    def admission_free(self) -> int:
        """Returns the free GPU blocks that an admission can use."""
        return self.gpu.free

    @property
    def admission_total(self) -> int:
        """Returns the value of `admission_free` when nothing runs."""
        return self.gpu.size

    def swapped(self, sequence: Sequence) -> bool:
        """Whether the table of a sequence is on the CPU."""
        return bool(sequence.table) and sequence.table[0] >= self.cpu.first

    def growth_need(self, sequence: Sequence) -> int:
        """Returns the free blocks that `append` requires."""
        return self._growth(sequence, self.block_size, self.gpu)

    def swap_need(self, sequences: Iterable[Sequence], target: BlockPool) -> int:
        """Returns the blocks of `target` that moving these sequences there requires."""
        return sum(map(self._move_need, sequences))

    def match(self, sequence: Sequence) -> list[int]:
        """Returns the leading blocks of a sequence that an admission would find computed."""
        return []

    def hit_tokens(self, sequence: Sequence, hits: list[int]) -> int:
        """Returns the tokens whose computation `hits` would save. `hits` are the blocks that
        `match` returned."""
        return min(len(hits) * self.block_size, sequence.length - self.full_hit.least)

    def cached_tokens(self, sequence: Sequence) -> int:
        """Returns the tokens of a new sequence whose computation an admission would save now.
        Asking changes nothing, not even what counts as used."""
        hits = self.match(sequence)
        return self.hit_tokens(sequence, hits) if hits else 0

    def tables(self, sequence: Sequence) -> list[list[int]]:
        """Returns its block tables: one for each group of layers that keep the same of a sequence.
        An entry of 0 stands for no block where there are several groups."""
        return [sequence.table]

    def own_blocks(self, sequence: Sequence) -> int:
        """Returns the number of blocks in its tables that no other sequence holds."""
        references = self.gpu.references
        tables = self.tables(sequence)
        return sum([references.get(block) == 1 for table in tables for block in table])

    def need(self, sequence: Sequence, upto: int, hits: list[int]) -> int:
        """Returns the free blocks that `hold` (without a table) or `extend` (with one) would use
        for `upto` tokens."""
        return max(-(-upto // self.block_size) - len(hits) - len(sequence.table), 0)

    @property
    def stranded(self) -> int:
        """Returns the free GPU blocks that no admission can use. Here there are none, because any
        block serves any token."""
        return 0

    def census(self) -> Census:
        """Returns how many blocks are in which state."""
        gpu = self.gpu
        cached, free = gpu.cached, gpu.free
        return gpu.used, cached, free - cached, self.cpu.used, self.empty_slots, self.stranded

    def report(self, events: CacheEvents) -> bool:
        """Reports to `events` from now on what enters and leaves the prefix cache. Returns whether
        the engine publishes such events."""
        return False

    @property
    def lookups(self) -> tuple[int, int]:
        """Returns how many full blocks were looked up by content, and how many were found."""
        return 0, 0

    def evictions(self, opened: list[int]) -> list[int]:
        """Returns, after each of these takes of `opened` blocks, the total number of blocks with
        content lost. It is empty if blank blocks suffice."""
        return []

    # -- moves ----------------------------------------------------------------------------------

    def allocate(self, sequence: Sequence) -> None:
        """Gives a sequence without a table slots for all its known tokens."""
        assert not sequence.table
        sequence.table = self.gpu.take_many(-(-sequence.length // self.block_size))
        self._filled(sequence)

    def hold(self, sequence: Sequence, upto: int, hits: list[int]) -> None:
        """Gives a sequence without a table the `hits` that `match` returned, and slots up to `upto`
        tokens.

        Hits may reach further than `upto`.
        """
        assert not sequence.table
        sequence.table = list(hits)
        sequence.seen = len(hits)
        sequence.filled = len(hits) * self.block_size
        sequence.gap = False
        sequence.access_ns = -1
        held = self.extend(sequence, upto)
        assert held, "too few free blocks were left"

    def extend(self, sequence: Sequence, upto: int) -> bool:
        """Adds slots for the first `upto` tokens. Returns False, and changes nothing, if blocks run
        short."""
        size, table = self.block_size, sequence.table
        missing = upto - len(table) * size
        if missing > 0:
            number = -(-missing // size)
            if number > self.gpu.free:
                return False
            table.extend(self.gpu.take_many(number))
            self.empty_slots += number * size
        if upto > sequence.filled:
            self.empty_slots -= upto - sequence.filled
            sequence.filled = upto
        return True

    def append(self, sequence: Sequence) -> Pairs:
        """Adds slots for the known tokens that have none. Returns the copies on write."""
        size, table = self.block_size, sequence.table
        length, filled = sequence.length, sequence.filled
        if length > len(table) * size:
            more = self.gpu.take_many(-(-length // size) - len(table))
            table.extend(more)
            self.empty_slots += len(more) * size
        self.empty_slots -= length - filled
        copies: Pairs = []
        while filled < length:
            place = filled // size
            filled = min(length, (place + 1) * size)
            sequence.filled = filled
            block = table[place]
            if self.gpu.references[block] > 1:
                self.gpu.drop(block)
                table[place] = self.gpu.take()
                copies.append((block, table[place]))
            if filled % size == 0:
                self.fill(sequence, place)
        return copies

    def free(self, sequence: Sequence) -> None:
        """Frees the table of a sequence that has finished or will be recomputed."""
        if not sequence.table:
            return
        if self.swapped(sequence):
            self.free_swapped(sequence)
        else:
            self.empty_slots -= self._empty(sequence)
            self.release(sequence, self.gpu, sequence.access_ns)
        sequence.table = []
        sequence.filled = 0

    def fork(self, parent: Sequence, child: Sequence) -> Pairs:
        """Lets `child` share all blocks of `parent`. Returns the blocks that are copied at once."""
        child.table = list(parent.table)
        child.filled = parent.filled
        child.published = parent.published
        for block in child.table:
            self.gpu.share(block)
        self.empty_slots += self._empty(child)
        return []

    def swap_out(self, sequences: Iterable[Sequence]) -> Pairs:
        """Moves tables to the CPU pool and returns the copies."""
        return self._swap(sequences, self.gpu, self.cpu, -1)

    def swap_in(self, sequences: Iterable[Sequence]) -> Pairs:
        """Moves tables back to the GPU pool and returns the copies."""
        return self._swap(sequences, self.cpu, self.gpu, 1)

    def scheduled(self, sequence: Sequence, now_ns: int) -> int:
        """Notes that a sequence is in the batch. Returns how many of its leading tokens have KV."""
        sequence.access_ns = now_ns
        return 0

    def publish(self, sequence: Sequence, upto: int) -> None:
        """Lets others use the full blocks of the first `upto` tokens of a table from now on."""

    def composed(self) -> None:
        """Called when the step is composed."""

    def open_together(self, blocks: int, tokens: int, lent: int = 0) -> None:
        """Opens `blocks` new blocks for sequences that decode together, and fills `tokens` slots.

        `lent` is the number of these blocks that `lend_together` has already taken.
        """
        raise NotImplementedError

    def lend_together(self, blocks: int) -> None:
        """Takes `blocks` blocks for sequences that decode together, before `open_together` is
        called."""
        raise NotImplementedError

    def recount(self, sequence: Sequence, known: int) -> None:
        """Gives a sequence that `open_together` served a real table for the slots that it has
        filled.

        `known` is the number of its tokens that were known when it got the last of these slots; 0
        if it got none.
        """

    def awaited(self, sequence: Sequence) -> bool:
        """Whether others may look up blocks that a decoding sequence is going to fill.

        If not, these blocks need not be published as they fill: `recount` does it later.
        """
        return False

    # -- what a manager may do otherwise --------------------------------------------------------

    def fill(self, sequence: Sequence, place: int) -> None:
        """Called when block `place` of the table became full."""

    def release(self, sequence: Sequence, pool: BlockPool, access_ns: int) -> None:
        """Drops every block of a table, first to last. `access_ns` -1 means never scheduled."""
        pool.drop_table(sequence.table)

    def free_swapped(self, sequence: Sequence) -> None:
        """Frees a table that is on the CPU."""
        self.cpu.drop_table(sequence.table)

    def retake(self, sequence: Sequence, pool: BlockPool) -> list[int]:
        """Returns blocks of `pool` for a table that moves there."""
        return pool.take_many(len(sequence.table))

    # -------------------------------------------------------------------------------------------

    def audit(self, requests: Iterable[Request]) -> None:
        """Asserts that pools and tables agree: each reference is an entry of one table."""
        for pool in (self.gpu, self.cpu):
            pool.audit()
        counted: Counter[int] = Counter()
        empty = 0
        for request in requests:
            for sequence in request.sequences:
                counted.update(sequence.table)
                if not self.swapped(sequence):
                    empty += self._empty(sequence)
                assert sequence.filled <= len(sequence.table) * self.block_size
        held = {**self.gpu.references, **self.cpu.references}
        self.audit_references(counted, held)
        assert empty == self.empty_slots, "empty slots were miscounted"

    def audit_references(self, counted: dict[int, int], held: dict[int, int]) -> None:
        """Asserts that the references of the pools are the entries of the tables."""
        assert counted == held, "references and tables disagree"

    def _move_need(self, sequence: Sequence) -> int:
        """Returns the number of its full blocks plus its need to grow. That includes a last block
        with room only if growth requires one."""
        need = self.growth_need(sequence) + sequence.filled // self.block_size
        return max(need, len(sequence.table))

    def _empty(self, sequence: Sequence) -> int:
        return len(sequence.table) * self.block_size - sequence.filled

    def _filled(self, sequence: Sequence) -> None:
        sequence.filled = sequence.length
        sequence.seen = 0
        sequence.gap = False
        sequence.access_ns = -1
        self.empty_slots += self._empty(sequence)

    def _swap(
        self, sequences: Iterable[Sequence], source: BlockPool, target: BlockPool, sign: int
    ) -> Pairs:
        pairs: Pairs = []
        for sequence in sequences:
            before = sequence.table
            self.release(sequence, source, -1)
            sequence.table = self.retake(sequence, target)
            pairs.extend(zip(before, sequence.table, strict=True))
            self.empty_slots += sign * self._empty(sequence)
        return pairs


def waiting_sequence(request: Request) -> Sequence:
    """Returns the sequence of a waiting request that needs blocks. With `n` > 1 it may be the last
    remaining sample."""
    sequences = request.sequences
    if len(sequences) == 1:
        return sequences[0]
    return next(sequence for sequence in sequences if sequence.state == WAITING)


def swap_space_exhausted(request: Request, need: int, free: int, rule: str) -> EngineStopped:
    """Returns the outcome if a victim does not fit into the CPU pool."""
    return EngineStopped(
        kind="swap-space-exhausted",
        request_id=request.id,
        explanation=(
            f"request {request.id} had to be swapped out, which needs {need} CPU blocks,"
            f" and {free} were free"
        ),
        remedy="raise --swap-space (GiB of CPU memory), or use --preemption-mode recompute",
        rule=rule,
    )

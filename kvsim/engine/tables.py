"""Block tables of sequences over a GPU pool and a CPU pool.

One class keeps the books for every block manager; a manager says what is special about *full*
blocks, and what an admission reserves. Questions change nothing; moves assume that the question
before them was answered with yes.

```
              table            filled = 10, block_size = 4
  sequence ─► [ 7 | 3 | 12 ]   7 and 3 are full, 12 holds 2 tokens: 2 empty slots
```
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

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
"""Kinds of block managers that can serve decoding requests together (`Tables.lockstep`)."""


class Tables:
    """Block tables without sharing, except between the samples of one request.

    The rules of vLLM 0.6.3.post1, `core/block_manager.py` and `core/block/block_table.py`.
    """

    needs_keys = False
    """Whether it looks at block identities, so that sequences need a stream."""
    swap_space_rule = "RuntimeError @ core/scheduler.py:1536"
    """Where the engine raises if the CPU pool is too small for a victim."""
    prefixes_only = False
    """Whether it serves only requests of which no tokens are known."""
    publish_at = PUBLISH_AT["allocation"]
    hits_save = HITS_SAVE["computation"]
    full_hit = FULL_HITS["last-block"]
    """How it shares prefixes, if it does."""
    lockstep = ""
    """How it serves requests that decode together (`kvsim.fast.cohort`): `COUNTED`, by
    number; `NAMED`, by visiting those whose tables change; empty: not at all."""
    label_moves = False
    """Whether a block that is given its content may move another one with the same, out of the
    blocks that are free or of what can be hit."""
    swaps = True
    """Whether its tables can move to the CPU pool."""
    grows = True
    """Whether a running request can come to need more blocks than it has. If not, nothing is ever
    preempted for want of blocks, and a watermark has nothing to guard."""

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        *,
        growth: str | Growth = "one-each",
        idle_order: str | MakeOrder = "stack",
    ) -> None:
        """`growth`, `idle_order`: names of `GROWTH` and `IDLE_ORDERS`, or of one's own as
        `package.module:name`; others than vLLM 0.6.3's are for research. Raises `ConfigError`."""
        self.block_size = block_size
        given = {"block_size": block_size, "num_gpu_blocks": num_gpu_blocks}
        self._growth = make_growth(growth, **given)
        self.spare_block = self._growth is GROWTH["one-each"]
        """Whether growth is taken to need a free block even where the last block has room."""
        if self._growth not in GROWTH.values():
            self.lockstep = ""
        self.idle_order = make_idle_order(idle_order, **given)
        """In which order blocks without content are reused."""
        self.gpu = self.make_pool(num_gpu_blocks, 0)
        self.cpu = self.make_pool(num_cpu_blocks, num_gpu_blocks)
        self.empty_slots = 0
        """Token slots of tables on the GPU that hold no token."""

    def make_pool(self, size: int, first: int) -> BlockPool:
        """A pool of the kind that this manager needs."""
        return BlockPool(size, first, self.idle_order)

    # -- questions ------------------------------------------------------------------------------

    def admission_need(self, request: Request) -> int:
        """Blocks that admitting a waiting request takes (prefix hits are not discounted)."""
        return -(-waiting_sequence(request).length // self.block_size)

    @property
    def admission_free(self) -> int:
        """Free GPU blocks, as far as an admission can use them."""
        return self.gpu.free

    @property
    def admission_total(self) -> int:
        """What `admission_free` is when nothing runs."""
        return self.gpu.size

    def swapped(self, sequence: Sequence) -> bool:
        """Whether the table of a sequence is on the CPU."""
        return bool(sequence.table) and sequence.table[0] >= self.cpu.first

    def growth_need(self, sequence: Sequence) -> int:
        """Free blocks that `append` is taken to need."""
        return self._growth(sequence, self.block_size, self.gpu)

    def swap_need(self, sequences: Iterable[Sequence], target: BlockPool) -> int:
        """Blocks of `target` that moving these sequences there is taken to need."""
        return sum(map(self._move_need, sequences))

    def match(self, sequence: Sequence) -> list[int]:
        """Blocks whose content an admission would find computed, from the first token on."""
        return []

    def hit_tokens(self, sequence: Sequence, hits: list[int]) -> int:
        """Tokens whose computation `hits`, the blocks that `match` returned, would save."""
        return min(len(hits) * self.block_size, sequence.length - self.full_hit.least)

    def own_blocks(self, sequence: Sequence) -> int:
        """Blocks of its table that nobody else holds."""
        references = self.gpu.references
        return sum([references.get(block) == 1 for block in sequence.table])

    def need(self, sequence: Sequence, upto: int, hits: list[int]) -> int:
        """Free blocks that `hold` (no table yet) or `extend` would use up, for `upto` tokens."""
        return max(-(-upto // self.block_size) - len(hits) - len(sequence.table), 0)

    @property
    def stranded(self) -> int:
        """Free GPU blocks that no admission can use: none, any block serves any token."""
        return 0

    def census(self) -> Census:
        """Where the blocks are."""
        gpu = self.gpu
        cached, free = gpu.cached, gpu.free
        return gpu.used, cached, free - cached, self.cpu.used, self.empty_slots, self.stranded

    @property
    def lookups(self) -> tuple[int, int]:
        """Full blocks looked up by content, and how many of them were found."""
        return 0, 0

    def evictions(self, opened: list[int]) -> list[int]:
        """Blocks with content that are lost in all, as takes of so many blocks follow each other;
        empty: blank ones go first."""
        return []

    # -- moves ----------------------------------------------------------------------------------

    def allocate(self, sequence: Sequence) -> None:
        """Give a sequence without a table slots for all its known tokens."""
        assert not sequence.table
        sequence.table = self.gpu.take_many(-(-sequence.length // self.block_size))
        self._filled(sequence)

    def hold(self, sequence: Sequence, upto: int, hits: list[int]) -> None:
        """Give a sequence without a table `hits`, which `match` returned, and slots up to `upto`.

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
        """Slots for the first `upto` tokens; False, changing nothing, where blocks run out."""
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
        """Slots for the known tokens that have none; returns the copies on write."""
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
        """Give back the table of a sequence that finished, or will be recomputed."""
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
        """Let `child` hold what `parent` holds; returns the blocks copied at once."""
        child.table = list(parent.table)
        child.filled = parent.filled
        child.published = parent.published
        for block in child.table:
            self.gpu.share(block)
        self.empty_slots += self._empty(child)
        return []

    def swap_out(self, sequences: Iterable[Sequence]) -> Pairs:
        """Move tables to the CPU pool; returns the copies."""
        return self._swap(sequences, self.gpu, self.cpu, -1)

    def swap_in(self, sequences: Iterable[Sequence]) -> Pairs:
        """Move tables back to the GPU pool; returns the copies."""
        return self._swap(sequences, self.cpu, self.gpu, 1)

    def scheduled(self, sequence: Sequence, now_ns: int) -> int:
        """Note that a sequence is in the batch; returns how many of its leading tokens have KV."""
        sequence.access_ns = now_ns
        return 0

    def publish(self, sequence: Sequence, upto: int) -> None:
        """From now on, others may use the full blocks of the first `upto` tokens of a table."""

    def composed(self) -> None:
        """The step is composed."""

    def open_together(self, blocks: int, tokens: int, lent: int = 0) -> None:
        """Sequences that decode together open `blocks` new blocks and fill `tokens` slots.

        `lent`: how many of the blocks `lend_together` has taken for them already.
        """
        raise NotImplementedError

    def lend_together(self, blocks: int) -> None:
        """Take `blocks` blocks for sequences that decode together, before `open_together`."""
        raise NotImplementedError

    def recount(self, sequence: Sequence, known: int) -> None:
        """Give a sequence that `open_together` served a table for the slots that it has filled.

        `known`: its tokens that were known when it got the last of these slots; 0: it got none.
        """

    def awaited(self, sequence: Sequence) -> bool:
        """Whether others may look for blocks that a decoding sequence is going to fill.

        If not, who serves it with others need not `publish` them as they fill: `recount` does.
        """
        return False

    # -- what a manager may do otherwise --------------------------------------------------------

    def fill(self, sequence: Sequence, place: int) -> None:
        """Block `place` of the table became full."""

    def release(self, sequence: Sequence, pool: BlockPool, access_ns: int) -> None:
        """Drop every block of a table, first to last; `access_ns` -1: never scheduled."""
        pool.drop_table(sequence.table)

    def free_swapped(self, sequence: Sequence) -> None:
        """Give back a table that is on the CPU."""
        self.cpu.drop_table(sequence.table)

    def retake(self, sequence: Sequence, pool: BlockPool) -> list[int]:
        """Blocks of `pool` for a table that moves there."""
        return pool.take_many(len(sequence.table))

    # -------------------------------------------------------------------------------------------

    def audit(self, requests: Iterable[Request]) -> None:
        """Assert that pools and tables agree: each reference is an entry of one table."""
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
        """Assert that the references of the pools are the entries of the tables."""
        assert counted == held, "references and tables disagree"

    def _move_need(self, sequence: Sequence) -> int:
        """Its full blocks and what it needs to grow; that covers a last block with room only if
        growth is taken to need one."""
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
    """The sequence of a waiting request that needs blocks; it may be the last one of its samples
    (`n` > 1) that is left."""
    sequences = request.sequences
    if len(sequences) == 1:
        return sequences[0]
    return next(sequence for sequence in sequences if sequence.state == WAITING)


def swap_space_exhausted(request: Request, need: int, free: int, rule: str) -> EngineStopped:
    """The outcome where a victim does not fit into the CPU pool."""
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

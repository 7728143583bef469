"""The block manager of vLLM 0.3.3 (`core/block_manager.py`): counts per table entry.

Idle blocks are a stack that starts at the highest id. What makes it different from later versions:

* An admission *sets* the count of every block of the table to the number of sequences of the
  request, finished ones included; forks and swaps count table entries; but releasing a table drops
  each distinct block once. With a sliding window, whose tables repeat blocks, counts go wrong, and
  the engine dies of a double free. A request that was whittled down to one sample leaks blocks.
* A swap keeps what the samples of a request share.
* A *prefix* that the client declares (`prefix_pos`) is kept for ever once it was allocated.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from librt.vecs import append
from mypy_extensions import i64, mypyc_attr

from kvsim.core.contents import Numbering
from kvsim.core.request import Request, Table
from kvsim.core.vectors import numbers
from kvsim.engines.deaths import died
from kvsim.engines.vllm_063.blocks import Naive, Pairs, waiting_sequence
from kvsim.engines.vllm_063.pool import BlockPool
from kvsim.errors import ConfigError
from kvsim.policies.order import TopStack
from kvsim.policies.tables import FULL_HITS, PUBLISH_AT


class TopPool(BlockPool):
    """Blocks without content, reused as a stack from the highest id down."""

    @property
    def free(self) -> int:
        # With wrong counts, a block may be free and in a table at once.
        return self.blank


class Prefix:
    """The leading prompt blocks that requests declare to share."""

    table: list[int]
    """Its blocks; empty until it is allocated."""
    computed: bool

    def __init__(self) -> None:
        self.table, self.computed = [], False


@mypyc_attr(allow_interpreted_subclasses=True)
class Vllm033Tables(Naive):
    """Block tables of vLLM 0.3.3. `sliding_window`: tokens that attention looks back, or None."""

    window: i64
    """Number of blocks after which a table repeats itself; 0 for never."""
    numbering: Numbering
    _no_prefix: Prefix
    _prefixes: dict[tuple[int, int], Prefix]
    """(Blocks, content of the last) → prefix."""
    _lookups: i64
    _hits: i64

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        sliding_window: int | None = None,
    ) -> None:
        super().__init__(block_size, num_gpu_blocks, num_cpu_blocks)
        window, rest = divmod(sliding_window or 0, block_size)
        if rest:
            raise ConfigError(
                f"sliding_window: {sliding_window} tokens are not a whole number of blocks of"
                f" {block_size}; choose a --block-size that divides it"
            )
        self.window = window
        self.numbering = Numbering(block_size)
        self._no_prefix, self._prefixes = Prefix(), {}
        self._lookups = self._hits = 0
        self.swap_space_rule = "RuntimeError @ core/scheduler.py:492"
        # The rules for computing a declared prefix. Its blocks are shared at once.
        self.publish_at, self.full_hit = PUBLISH_AT["computed"], FULL_HITS["nothing"]

    def make_pool(self, size: int, first: int) -> BlockPool:
        return TopPool(size, first, TopStack)

    # -- questions ------------------------------------------------------------------------------

    def admission_need(self, request: Request) -> int:
        need = self._blocks(waiting_sequence(request).length) - len(self._prefix(request).table)
        return min(need, self.window) if self.window else need

    def growth_need(self, sequence: Request) -> int:
        """Always one block, even if the last block has room."""
        return 1

    def swap_need(self, sequences: Iterable[Request], target: Any) -> int:
        """The distinct blocks and, on the way back, one more per sequence to grow into."""
        moving = list(sequences)
        distinct = len({block for sequence in moving for block in sequence.table})
        return distinct + len(moving) if target is self.gpu else distinct

    @property
    def lookups(self) -> tuple[int, int]:
        return self._lookups, self._hits

    # -- moves ----------------------------------------------------------------------------------

    def allocate(self, sequence: Request) -> None:
        window, references = self.window, self.gpu.references
        request = sequence.request
        holders = len(request.sequences)
        prefix: Prefix = self._prefix(request)
        table = list(prefix.table)
        for block in table:
            self._share(self.gpu, block, holders)
        place: i64
        for place in range(self._blocks(sequence.length) - len(table)):
            block = table[place % window] if 0 < window <= place else self.gpu.take()
            references[block] = holders
            table.append(block)
        if prefix is not self._no_prefix:
            self._pin(request, prefix, table)
        self.give(sequence, numbers(table))

    def append(self, sequence: Request) -> Pairs:
        table: Table = sequence.tables[0]
        self.empty_slots -= self._empty(sequence)
        held: i64 = len(table.blocks)
        if held * self.block_size < sequence.length:
            turns: bool = 0 < self.window <= held
            table.blocks = append(
                table.blocks, table.blocks[held % self.window] if turns else self.gpu.take()
            )
        self._fill(sequence, sequence.length)
        last: i64 = len(table.blocks) - 1
        block: int = table.blocks[last]
        if self.gpu.references.get(block) == 1:
            return []
        copy = self.gpu.take()
        table.blocks[last] = copy
        self._drop(self.gpu, block, sequence)
        return [(block, copy)]

    def fork(self, parent: Request, child: Request) -> Pairs:
        self._put(child, parent.table)
        for block in child.table:
            self._share(self.gpu, block)
        self._fill(child, parent.filled)
        return []

    def release(self, sequence: Request, pool: BlockPool, access_ns: i64) -> None:
        """Drops every distinct block of a table once, first to last."""
        for block in dict.fromkeys(sequence.table):
            self._drop(pool, block, sequence)

    def swap_out(self, sequences: Iterable[Request]) -> Pairs:
        moved: dict[int, int] = {}
        sequence: Request
        for sequence in sequences:
            pinned = self._prefix(sequence.request).table
            self.empty_slots -= self._empty(sequence)
            table: list[int] = []
            for block in sequence.table:
                if block not in pinned:
                    table.append(self._move(block, moved, self.cpu))
                self._drop(self.gpu, block, sequence)
            self._put(sequence, table)
            sequence.filled = min(sequence.filled, len(table) * self.block_size)
        return list(moved.items())

    def swap_in(self, sequences: Iterable[Request]) -> Pairs:
        moved: dict[int, int] = {}
        sequence: Request
        for sequence in sequences:
            table = list(self._prefix(sequence.request).table)
            for block in table:
                self._share(self.gpu, block)
            for block in sequence.table:
                table.append(self._move(block, moved, self.gpu))
                self._drop(self.cpu, block, sequence)
            self._put(sequence, table)
            # The newest token has no slot yet: the lack of one was why it was swapped out.
            self._fill(sequence, sequence.length - 1)
        return list(moved.items())

    def scheduled(self, sequence: Request, now_ns: i64) -> i64:
        sequence.access_ns = now_ns
        prefix: Prefix = self._prefix(sequence.request)
        return len(prefix.table) * self.block_size if prefix.computed else 0

    def publish(self, sequence: Request, upto: i64) -> None:
        self._prefix(sequence.request).computed = True

    def audit(self, requests: Iterable[Request]) -> None:
        """Audits the books, except with a window: there the engine itself miscounts."""
        if not self.window:
            super().audit(requests)

    def audit_references(self, counted: dict[int, int], held: dict[int, int]) -> None:
        """Asserts that no block has too few references. Prefixes and the engine's leaks may hold
        some for ever."""
        assert all(n <= held.get(block, 0) for block, n in counted.items()), "a block was lost"

    # -------------------------------------------------------------------------------------------

    def _prefix(self, request: Request) -> Prefix:
        """The prefix that a request declares, in whole blocks of its prompt."""
        number: i64 = self._prefix_blocks(request)
        if not number:
            return self._no_prefix
        self.numbering.extend(request, number)
        return self._prefixes.setdefault((number, request.contents[number - 1]), Prefix())

    def _prefix_blocks(self, request: Request) -> i64:
        return min(request.prefix_pos, request.input_length) // self.block_size

    def _pin(self, request: Request, prefix: Prefix, table: list[int]) -> None:
        """Pins the blocks of a prefix if this request is the first to bring it."""
        number: i64 = self._prefix_blocks(request)
        self._lookups += number
        self._hits += len(prefix.table)
        if not prefix.table:
            prefix.table = table[:number]
            for block in prefix.table:
                self._share(self.gpu, block)

    def _put(self, sequence: Request, blocks: list[int]) -> None:
        """Gives a sequence these blocks in place of those that it has."""
        table: Table = Table()
        table.blocks = numbers(blocks)
        sequence.tables = [table]

    def _fill(self, sequence: Request, tokens: i64) -> None:
        sequence.filled = min(tokens, len(sequence.tables[0].blocks) * self.block_size)
        self.empty_slots += self._empty(sequence)

    def _move(self, block: int, moved: dict[int, int], target: BlockPool) -> int:
        """The copy of a block in `target`, one for all tables that move together."""
        if block in moved:
            self._share(target, moved[block], 1)
        else:
            moved[block] = target.take()
        return moved[block]

    def _share(self, pool: BlockPool, block: int, holders: int = 1) -> None:
        # With wrong counts even a free block may be shared: the engine looks at no list here.
        pool.references[block] = pool.references.get(block, 0) + holders

    def _drop(self, pool: BlockPool, block: int, sequence: Request) -> None:
        if block not in pool.references:
            raise died("double-free", sequence.request)
        pool.drop(block)

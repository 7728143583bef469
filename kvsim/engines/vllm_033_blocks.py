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

from kvsim.engine.idle import TopStack
from kvsim.engine.pool import BlockPool
from kvsim.engine.request import Request, Sequence
from kvsim.engine.sharing import FULL_HITS, PUBLISH_AT
from kvsim.engine.tables import Pairs, Tables, waiting_sequence
from kvsim.errors import ConfigError, EngineStopped


class TopPool(BlockPool):
    """Blocks without content, reused as a stack from the highest id down."""

    @property
    def free(self) -> int:
        # With wrong counts, a block may be free and in a table at once.
        return self.idle


class Prefix:
    """The leading prompt blocks that requests declare to share."""

    def __init__(self) -> None:
        self.table: list[int] = []
        """Its blocks; empty until it is allocated."""
        self.computed = False


class Vllm033Tables(Tables):
    """Block tables of vLLM 0.3.3. `sliding_window`: tokens that attention looks back, or None."""

    swap_space_rule = "RuntimeError @ core/scheduler.py:492"
    publish_at = PUBLISH_AT["computed"]
    full_hit = FULL_HITS["nothing"]
    """The rule for computing a declared prefix. Its blocks are shared at once."""

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
        """Number of blocks after which a table repeats itself; 0 for never."""
        self._no_prefix = Prefix()
        self._prefixes: dict[tuple[int, int], Prefix] = {}
        """(blocks, key of the last) → prefix."""
        self._lookups = 0
        self._hits = 0

    def make_pool(self, size: int, first: int) -> BlockPool:
        return TopPool(size, first, TopStack)

    # -- questions ------------------------------------------------------------------------------

    def admission_need(self, request: Request) -> int:
        sequence = waiting_sequence(request)
        need = -(-sequence.length // self.block_size) - len(self._prefix(request).table)
        return min(need, self.window) if self.window else need

    def growth_need(self, sequence: Sequence) -> int:
        """Always one block, even if the last block has room."""
        return 1

    def swap_need(self, sequences: Iterable[Sequence], target: BlockPool) -> int:
        """Returns the distinct blocks and, on the way back, one more per sequence to grow into."""
        moving = list(sequences)
        distinct = len({block for sequence in moving for block in sequence.table})
        return distinct + len(moving) if target is self.gpu else distinct

    @property
    def lookups(self) -> tuple[int, int]:
        return self._lookups, self._hits

    # -- moves ----------------------------------------------------------------------------------

    def allocate(self, sequence: Sequence) -> None:
        assert not sequence.table
        size, window, references = self.block_size, self.window, self.gpu.references
        request = sequence.request
        holders = len(request.sequences)
        prefix = self._prefix(request)
        table = list(prefix.table)
        for block in table:
            self._share(self.gpu, block, holders)
        for place in range(-(-sequence.length // size) - len(table)):
            block = table[place % window] if 0 < window <= place else self.gpu.take()
            references[block] = holders
            table.append(block)
        if prefix is not self._no_prefix:
            self._pin(request, prefix, table)
        sequence.table = table
        self._filled(sequence)

    def append(self, sequence: Sequence) -> Pairs:
        table = sequence.table
        self.empty_slots -= self._empty(sequence)
        opens = len(table) * self.block_size < sequence.length
        if opens and 0 < self.window <= len(table):
            table.append(table[len(table) % self.window])
        elif opens:
            table.append(self.gpu.take())
        self._fill(sequence, sequence.length)
        block = table[-1]
        if self.gpu.references.get(block) == 1:
            return []
        table[-1] = self.gpu.take()
        self._drop(self.gpu, block, sequence)
        return [(block, table[-1])]

    def fork(self, parent: Sequence, child: Sequence) -> Pairs:
        child.table = list(parent.table)
        for block in child.table:
            self._share(self.gpu, block)
        self._fill(child, parent.filled)
        return []

    def release(self, sequence: Sequence, pool: BlockPool, access_ns: int) -> None:
        """Drops every distinct block of a table once, first to last."""
        for block in dict.fromkeys(sequence.table):
            self._drop(pool, block, sequence)

    def swap_out(self, sequences: Iterable[Sequence]) -> Pairs:
        moved: dict[int, int] = {}
        for sequence in sequences:
            pinned = self._prefix(sequence.request).table
            self.empty_slots -= self._empty(sequence)
            table: list[int] = []
            for block in sequence.table:
                if block not in pinned:
                    table.append(self._move(block, moved, self.cpu))
                self._drop(self.gpu, block, sequence)
            sequence.table = table
            sequence.filled = min(sequence.filled, len(table) * self.block_size)
        return list(moved.items())

    def swap_in(self, sequences: Iterable[Sequence]) -> Pairs:
        moved: dict[int, int] = {}
        for sequence in sequences:
            table = list(self._prefix(sequence.request).table)
            for block in table:
                self._share(self.gpu, block)
            for block in sequence.table:
                table.append(self._move(block, moved, self.gpu))
                self._drop(self.cpu, block, sequence)
            sequence.table = table
            # The newest token has no slot yet: the lack of one was why it was swapped out.
            self._fill(sequence, sequence.length - 1)
        return list(moved.items())

    def scheduled(self, sequence: Sequence, now_ns: int) -> int:
        sequence.access_ns = now_ns
        prefix = self._prefix(sequence.request)
        return len(prefix.table) * self.block_size if prefix.computed else 0

    def publish(self, sequence: Sequence, upto: int) -> None:
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
        """Returns the prefix that a request declares, in whole blocks of its prompt."""
        number = self._prefix_blocks(request)
        if not number:
            return self._no_prefix
        key = request.sequences[0].block_keys(number, self.block_size)[-1]
        return self._prefixes.setdefault((number, key), Prefix())

    def _prefix_blocks(self, request: Request) -> int:
        return min(request.prefix_pos, request.input_length) // self.block_size

    def _pin(self, request: Request, prefix: Prefix, table: list[int]) -> None:
        """Pins the blocks of a prefix if this request is the first to bring it."""
        number = self._prefix_blocks(request)
        self._lookups += number
        self._hits += len(prefix.table)
        if not prefix.table:
            prefix.table = table[:number]
            for block in prefix.table:
                self._share(self.gpu, block)

    def _fill(self, sequence: Sequence, tokens: int) -> None:
        sequence.filled = min(tokens, len(sequence.table) * self.block_size)
        self.empty_slots += self._empty(sequence)

    def _move(self, block: int, moved: dict[int, int], target: BlockPool) -> int:
        """Returns the copy of a block in `target`, one for all tables that move together."""
        if block in moved:
            self._share(target, moved[block])
        else:
            moved[block] = target.take()
        return moved[block]

    def _share(self, pool: BlockPool, block: int, holders: int = 1) -> None:
        # With wrong counts even a free block may be shared: the engine looks at no list here.
        pool.references[block] = pool.references.get(block, 0) + holders

    def _drop(self, pool: BlockPool, block: int, sequence: Sequence) -> None:
        if block not in pool.references:
            raise _double_free(sequence.request)
        pool.drop(block)


def _double_free(request: Request) -> EngineStopped:
    return EngineStopped(
        kind="double-free",
        request_id=request.id,
        explanation=(
            f"a block of request {request.id} was freed more often than it was taken: with a"
            " sliding window its table repeats blocks, and the engine miscounts them"
        ),
        remedy="use --preemption-mode recompute, n = 1, or a model without a sliding window",
        rule="ValueError @ core/block_manager.py:45",
    )

"""vLLM 0.3.3, to be read beside its source: block tables (`core/block_manager.py`), which count per
table entry, and the scheduler (`core/scheduler.py`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from librt.vecs import append
from mypy_extensions import i64, mypyc_attr

from kvsim.core.batch import Batch
from kvsim.core.contents import Numbering
from kvsim.core.plan import SLOTS, TOKENS, Plan
from kvsim.core.request import RUNNING, Request, Table
from kvsim.core.vectors import numbers
from kvsim.engines.deaths import died
from kvsim.engines.vllm_063.blocks import Naive, Pairs, waiting_sequence
from kvsim.engines.vllm_063.moves import (
    complete,
    compute_sequence,
    decode,
    prefill,
    publish,
    sample_sequence,
    tables_of,
    taken_on,
)
from kvsim.engines.vllm_063.pool import BlockPool
from kvsim.engines.vllm_063.scheduler import Entries, Vllm063
from kvsim.errors import ConfigError
from kvsim.policies.order import TopStack
from kvsim.policies.tables import FULL_HITS, PUBLISH_AT


class TopPool(BlockPool):
    """A stack of blocks. With wrong counts, one may be on it twice, or be in a table at once."""

    stack: list[int]

    def __init__(self, size: int, unit: int, first: int) -> None:
        super().__init__(size, unit, first, TopStack)
        self.stack = self.order.blocks

    @property
    def free(self) -> int:
        """Blocks that can be taken."""
        return len(self.stack)

    def take(self) -> i64:
        """Takes the block on top, whoever holds it."""
        block: i64 = self.stack.pop()
        # The count is set to 1, whatever it was.
        self.share(block, 1 - self.refs(block))
        return block

    def share(self, block: i64, holders: i64 = 1) -> None:
        """Adds references to a block, whether it is on the stack or not."""
        if self.refs(block) == 0:
            self.num_free -= 1
        super().share(block, holders)
        if self.refs(block) == 0:
            self.num_free += 1
            self.stack.append(block)


class Prefix:
    """The leading prompt blocks that requests declare to share."""

    blocks: i64
    table: list[int]
    """Its blocks; empty until they are allocated."""
    computed: bool

    def __init__(self, blocks: i64) -> None:
        self.blocks, self.table, self.computed = blocks, [], False


@mypyc_attr(allow_interpreted_subclasses=True)
class Vllm033Tables(Naive):
    """Block tables of vLLM 0.3.3. `sliding_window`: tokens that attention looks back, or None.

    Idle blocks are a stack that starts at the highest id. What makes it different from later
    versions:

    * An admission *sets* the count of every block of the table to the number of sequences of the
      request, finished ones included; forks and swaps count table entries; but releasing a table
      drops each distinct block once. With a sliding window, whose tables repeat blocks, counts go
      wrong, and the engine dies of a double free. A request that was whittled down to one sample
      leaks blocks.
    * A swap keeps what the samples of a request share.
    * A *prefix* that the client declares (`prefix_pos`) is kept for ever once it was allocated.
    """

    window: i64
    """Number of blocks after which a table repeats itself; 0 for never."""
    numbering: Numbering
    _no_prefix: Prefix
    _prefixes: dict[tuple[int, int], Prefix]
    """(Blocks, content of the last) → prefix."""

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
        self._no_prefix, self._prefixes = Prefix(0), {}
        self.swap_space_rule = "RuntimeError @ core/scheduler.py:492"
        # The rules for computing a declared prefix. Its blocks are shared at once.
        self.publish_at, self.full_hit = PUBLISH_AT["computed"], FULL_HITS["nothing"]

    def make_pool(self, size: int, first: int) -> BlockPool:
        return TopPool(size, self.block_size, first)

    # -- questions ------------------------------------------------------------------------------

    def admission_need(self, request: Request) -> int:
        need = self._blocks(waiting_sequence(request).length) - len(self._prefix(request).table)
        return min(need, self.window) if self.window else need

    def growth_need(self, sequence: Request) -> int:
        """Always one block, even if the last block has room."""
        return 1

    def swap_need(self, sequences: Iterable[Request], target: BlockPool) -> int:
        """The distinct blocks and, on the way back, one more per sequence to grow into."""
        moving = list(sequences)
        distinct = len({block for sequence in moving for block in sequence.table})
        return distinct + len(moving) if target is self.gpu else distinct

    # -- moves ----------------------------------------------------------------------------------

    def allocate(self, sequence: Request) -> None:
        window = self.window
        request = sequence.request
        holders = len(request.sequences)
        prefix: Prefix = self._prefix(request)
        table = list(prefix.table)
        for block in table:
            self.gpu.share(block, holders)
        place: i64
        for place in range(self._blocks(sequence.length) - len(table)):
            block = table[place % window] if 0 < window <= place else self.gpu.take()
            # Set, not added: a block that a window repeats has it once.
            self.gpu.share(block, holders - self.gpu.refs(block))
            table.append(block)
        self.gpu.lookups += prefix.blocks
        self.gpu.hits += len(prefix.table)
        if not prefix.table:
            # This request is the first to bring it.
            prefix.table = table[: prefix.blocks]
            for block in prefix.table:
                self.gpu.share(block)
        self.give(sequence, numbers(table), sequence.length)

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
        block: i64 = table.blocks[last]
        if self.gpu.refs(block) == 1:
            return []
        copy: i64 = self.gpu.take()
        table.blocks[last] = copy
        self._drop(self.gpu, block, sequence)
        return [(block, copy)]

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
            sequence.tables[0].blocks = numbers(table)
            sequence.filled = min(sequence.filled, len(table) * self.block_size)
        return list(moved.items())

    def swap_in(self, sequences: Iterable[Request]) -> Pairs:
        moved: dict[int, int] = {}
        sequence: Request
        for sequence in sequences:
            table = list(self._prefix(sequence.request).table)
            for block in table:
                self.gpu.share(block)
            for block in sequence.table:
                table.append(self._move(block, moved, self.gpu))
                self._drop(self.cpu, block, sequence)
            sequence.tables[0].blocks = numbers(table)
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

    def _prefix(self, request: Request) -> Prefix:
        """The prefix that a request declares, in whole blocks of its prompt."""
        number: i64 = min(request.prefix_pos, request.input_length) // self.block_size
        if not number:
            return self._no_prefix
        self.numbering.extend(request, number)
        return self._prefixes.setdefault((number, request.contents[number - 1]), Prefix(number))

    def _fill(self, sequence: Request, tokens: i64) -> None:
        sequence.filled = min(tokens, len(sequence.tables[0].blocks) * self.block_size)
        self.empty_slots += self._empty(sequence)

    def _move(self, block: int, moved: dict[int, int], target: BlockPool) -> int:
        """The copy of a block in `target`, one for all tables that move together."""
        if block in moved:
            target.share(moved[block])
        else:
            moved[block] = target.take()
        return moved[block]

    def _drop(self, pool: BlockPool, block: int, sequence: Request) -> None:
        if pool.refs(block) == 0:
            raise died("double-free", sequence.request)
        pool.share(block, -1)


@mypyc_attr(allow_interpreted_subclasses=True)
class Vllm033(Vllm063):
    """The scheduler of vLLM 0.3.3, where it differs from that of 0.6.3.

    Prompts are charged as the rectangle they are padded to. A decode step sorts the running
    requests by age and needs a free block for every sequence, whatever room its last block has; the
    youngest gives way. What is scheduled is finally sorted by request id, as text.
    """

    max_paddings: i64
    """Most tokens of padding in a step of prompts."""

    def __init__(
        self,
        *,
        num_gpu_blocks: int,
        max_model_len: int,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        max_paddings: int = 256,
        preemption_mode: str | None = None,
        watermark: float = 0.01,
        victim: Any = None,
        requeue: Any = None,
        prices: Any = None,
    ) -> None:
        """`victim`: `kvsim.policies.victims.Victim`; `prices`: `kvsim.policies.victims.Prices`.
        Raises `ValueError` for what the engine refuses."""
        super().__init__(
            block_size=1,  # No chunk is cut where a block ends.
            num_gpu_blocks=num_gpu_blocks,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            preemption_mode=preemption_mode,
            watermark=watermark,
            victim=victim,
            requeue=requeue,
            prices=prices,
        )
        self.max_paddings, self._line = max_paddings, 458

    @property
    def remedies(self) -> str:
        return "raise it, or lower --max-model-len"

    def _excess(self, request: Request, asked: int) -> int:
        lengths = [*[tokens for _, tokens, _ in self._admitted], asked]
        padded = len(lengths) * max(lengths)
        if padded > self.max_num_batched_tokens:
            return TOKENS
        if self._seqs + request.width() > self.max_num_seqs:
            return SLOTS
        return TOKENS if padded - sum(lengths) > self.max_paddings else 0

    def _decodes(self, batch: Batch, blocks: Naive, plan: Plan) -> Entries:
        if plan.ignored:
            # A step that only gives up prompts is a prompt step, too: nobody decodes.
            return []
        batch.running.sort(key=_arrival)
        return super()._decodes(batch, blocks, plan)

    def _choose(self, request: Request, behind: deque[Request], blocks: Naive) -> Request:
        victim: Request = self.victim(behind or (request,), blocks)
        return victim

    def _give_up(self, batch: Batch, plan: Plan, first: int) -> None:
        super()._give_up(batch, plan, first)
        batch.swapped = deque(sorted(batch.swapped, key=_arrival))

    def _outgrown(self, blocks: Naive, need: int) -> bool:
        return False

    def _run(self, batch: Batch, blocks: Naive, plan: Plan, entries: Entries) -> None:
        """Puts the requests of a step into the plan, in the order of `SchedulerOutputs`: by LoRA
        and request id. It sorts if its set of LoRAs is not empty, and a request without LoRA counts
        as one."""
        if self._admitted:
            self._tokens = len(entries) * max([tokens for _, tokens, _ in entries])
        for request, tokens, charged in sorted(entries, key=_id):
            if self._admitted:
                prefill(batch, plan, request, tokens, charged)
            else:
                decode(batch, blocks, plan, request)

    def settle(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        batch.now_ns = now_ns
        blocks: Naive = tables_of(batch)
        taken = taken_on(plan)
        publish(blocks, plan)
        before = len(batch.ended)
        k: i64
        for k, request in enumerate(plan.requests):
            for sequence in request.in_state(RUNNING):
                # Every prompt step draws n samples (`engine/llm_engine.py`). That includes one that
                # recomputes the last of earlier samples.
                children = request.n - 1 if sequence.prompt_stage else 0
                compute_sequence(sequence, taken[k])
                sample_sequence(batch, blocks, sequence, children)
            complete(batch, request)
        if len(batch.ended) > before:
            batch.remove_ended()


def _arrival(request: Request) -> int:
    return request.arrival_ns


def _id(entry: tuple[Request, int, int]) -> str:
    return entry[0].id

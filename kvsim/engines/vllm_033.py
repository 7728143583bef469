"""vLLM 0.3.3, to be read beside its source: block tables (`core/block_manager.py`), which count per
table entry, and the scheduler (`core/scheduler.py`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from librt.vecs import append
from mypy_extensions import i64, mypyc_attr

from kvsim.core.batch import Batch
from kvsim.core.contents import Numbering
from kvsim.core.plan import BLOCKS, SLOTS, SWAP, SWAPPED_OUT, TOKENS, WATERMARK, Plan
from kvsim.core.request import RUNNING, SWAPPED, WAITING, Request, Table
from kvsim.core.scheduler import Scheduler
from kvsim.core.vectors import numbers
from kvsim.engines.deaths import died
from kvsim.engines.vllm_063.blocks import Naive, Pairs, waiting_sequence
from kvsim.engines.vllm_063.moves import (
    admit,
    complete,
    compute_sequence,
    decode,
    grow,
    prefill,
    publish,
    recompute,
    sample_sequence,
    swap_in,
    swap_out,
    tables_of,
    taken_on,
)
from kvsim.engines.vllm_063.pool import BlockPool
from kvsim.errors import ConfigError
from kvsim.policies.order import TopStack
from kvsim.policies.requeue import make_requeue
from kvsim.policies.tables import FULL_HITS, PUBLISH_AT
from kvsim.policies.victims import make_means, tail


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

    table: list[int]
    """Its blocks; empty until it is allocated."""
    computed: bool

    def __init__(self) -> None:
        self.table, self.computed = [], False


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
        return TopPool(size, self.block_size, first)

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
            self.gpu.share(block, holders - self.gpu.refs(block))
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
        block: i64 = table.blocks[last]
        if self.gpu.refs(block) == 1:
            return []
        copy: i64 = self.gpu.take()
        table.blocks[last] = copy
        self._drop(self.gpu, block, sequence)
        return [(block, copy)]

    def fork(self, parent: Request, child: Request) -> Pairs:
        self._put(child, parent.table)
        for block in child.table:
            self.gpu.share(block)
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
                self.gpu.share(block)
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
                self.gpu.share(block)

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
            target.share(moved[block])
        else:
            moved[block] = target.take()
        return moved[block]

    def _drop(self, pool: BlockPool, block: int, sequence: Request) -> None:
        if pool.refs(block) == 0:
            raise died("double-free", sequence.request)
        pool.share(block, -1)


_arrival = attrgetter("arrival_ns")
_id = attrgetter("id")


@mypyc_attr(allow_interpreted_subclasses=True)
class Vllm033(Scheduler):
    """The scheduler of vLLM 0.3.3.

    A step is prompts *or* decodes. Prompts are charged as the rectangle they are padded to, and are
    taken on only while nothing is swapped out. A decode step sorts the running requests by age and
    needs a free block for every sequence, whatever room its last block has; the youngest gives way,
    recomputed if it has one sequence, else swapped. What is scheduled is finally sorted by request
    id, as text.
    """

    max_model_len: i64
    max_paddings: i64
    """Most tokens of padding in a step of prompts."""
    means: Any
    victim: Any
    requeue: Any
    """Its policies: how a victim is preempted, who it is, and where it waits (`kvsim.policies`)."""

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
        if max_num_batched_tokens is None:
            max_num_batched_tokens = max(max_model_len, 2048)
        self.max_model_len = max_model_len
        self.chunked, self.in_flight = False, 1
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_paddings = max_paddings
        self.means = make_means(preemption_mode, prices)
        self.watermark_blocks = int(watermark * num_gpu_blocks)
        self.victim = victim or tail
        self.requeue = make_requeue(requeue)
        self._check()

    @property
    def longest_sequence(self) -> int | None:
        return self.max_model_len + 1

    def _check(self) -> None:
        """Refuses at start-up what the engine refuses (`config.py`, `SchedulerConfig`)."""
        tokens = self.max_num_batched_tokens
        if tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens ({tokens}) is below max_model_len ({self.max_model_len}):"
                " raise it, or lower --max-model-len"
            )
        if tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({tokens}) is below max_num_seqs ({self.max_num_seqs}):"
                " raise it, or lower --max-num-seqs"
            )

    # -- composing a step ------------------------------------------------------------------------

    def compose(self, batch: Batch, now_ns: int) -> Any:
        """Composes the next step."""
        plan: Plan = batch.begin(now_ns, self.max_num_seqs)
        blocks: Naive = tables_of(batch)
        if batch.swapped and batch.waiting:
            plan.blocked = SWAPPED_OUT
        # A step that only gives up prompts is a prompt step, too: nobody decodes.
        if batch.swapped or not self._prompts(batch, blocks, plan):
            self._decodes(batch, blocks, plan)
        blocks.composed()
        return plan

    def _prompts(self, batch: Batch, blocks: Naive, plan: Plan) -> bool:
        """Admits requests from the head of the waiting queue until one is refused. Returns whether
        any left the queue."""
        waiting = batch.waiting
        admitted: list[Request] = []
        lengths: list[int] = []
        seqs = self._sequences(batch)
        while waiting:
            request: Request = waiting[0]
            length = _known(request)
            reason = self._never(blocks, request, length)
            if reason:
                waiting.popleft()
                batch.ignore(request, reason)
                continue
            plan.blocked = self._refusal(blocks, request, [*lengths, length], seqs)
            if plan.blocked:
                request.blocked_steps += 1
                break
            admit(batch, request)
            batch.running.append(request)
            admitted.append(request)
            lengths.append(length)
            seqs += request.width()
        if admitted:
            plan.batched_tokens = len(lengths) * max(lengths)
        for request in _in_batch_order(admitted):
            prefill(batch, plan, request, _known(request), _known(request))
        return bool(admitted or plan.ignored)

    def _never(self, blocks: Naive, request: Request, length: int) -> str:
        """Returns why the engine gives up a prompt; empty if it does not."""
        if length > min(self.max_model_len, self.max_num_batched_tokens):
            return "too-long"
        left = blocks.admission_total - blocks.admission_need(request)
        return "never-fits" if left < self.watermark_blocks else ""

    def _refusal(self, blocks: Naive, request: Request, lengths: list[int], seqs: i64) -> int:
        """Returns why the last of the prompts of these lengths is not admitted now; 0 if it is."""
        left = blocks.admission_free - blocks.admission_need(request)
        if left < self.watermark_blocks:
            return BLOCKS if left < 0 else WATERMARK
        padded = len(lengths) * max(lengths)
        if padded > self.max_num_batched_tokens:
            return TOKENS
        if seqs + request.width() > self.max_num_seqs:
            return SLOTS
        return TOKENS if padded - sum(lengths) > self.max_paddings else 0

    def _decodes(self, batch: Batch, blocks: Naive, plan: Plan) -> None:
        """Decodes one token for every running request. The youngest is preempted if blocks run
        short."""
        waiting_for = deque(sorted(batch.running, key=_arrival))
        batch.running = []
        request: Request
        while waiting_for:
            request = waiting_for.popleft()
            if self._make_room(batch, blocks, plan, request, waiting_for):
                grow(blocks, plan, request)
                batch.running.append(request)
        batch.swapped = deque(sorted(batch.swapped, key=_arrival))
        if not plan.preempted:
            self._swap_in(batch, blocks, plan)
        for request in _in_batch_order(batch.running):
            decode(batch, blocks, plan, request)
        plan.batched_tokens = plan.decode_seqs

    def _make_room(
        self,
        batch: Batch,
        blocks: Naive,
        plan: Plan,
        request: Request,
        younger: deque[Request],
    ) -> bool:
        """Preempts until a request can grow. Returns False if that request had to go itself."""
        while request.count(RUNNING) > blocks.gpu.free:
            victim: Request = self.victim(younger or (request,), blocks)
            self._preempt(batch, plan, victim)
            if victim is request:
                return False
            younger.remove(victim)
        return True

    def _preempt(self, batch: Batch, plan: Plan, victim: Request) -> None:
        """Frees or swaps the blocks of a victim and puts it into a queue (`_preempt`)."""
        if self.means(victim, batch) == SWAP:
            plan.swaps_out += swap_out(batch, victim)
            batch.swapped.append(victim)
        elif victim.count(RUNNING) == 1:
            recompute(batch, victim)
            self.requeue(batch.waiting, victim)
        else:
            raise died("recompute-of-parallel-samples", victim, line=458)

    def _swap_in(self, batch: Batch, blocks: Naive, plan: Plan) -> None:
        """Brings swapped requests back, oldest first, until one does not fit."""
        swapped = batch.swapped
        seqs = self._sequences(batch)
        while swapped:
            request: Request = swapped[0]
            moving = [each for each in request.sequences if each.state == SWAPPED]
            left = blocks.gpu.free - blocks.swap_need(moving, blocks.gpu)
            if left < self.watermark_blocks or seqs + request.width() > self.max_num_seqs:
                break
            swap_in(batch, request)
            grow(blocks, plan, request)
            batch.running.append(request)
            seqs += request.width()

    def _sequences(self, batch: Batch) -> i64:
        """Sequences that running requests may come to have."""
        found: i64 = 0
        request: Request
        for request in batch.running:
            found += request.width()
        return found

    # -- after the step --------------------------------------------------------------------------

    def settle(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        """Settles a step once its time has passed: tokens exist, samples fork, requests end."""
        batch.now_ns = now_ns
        blocks: Naive = tables_of(batch)
        taken = taken_on(plan)
        publish(blocks, plan, taken)
        before = len(batch.ended)
        k: i64
        for k, request in enumerate(plan.requests):
            for sequence in [each for each in request.sequences if each.state == RUNNING]:
                # Every prompt step draws n samples (`engine/llm_engine.py`). That includes one that
                # recomputes the last of earlier samples.
                children = request.n - 1 if sequence.prompt_stage else 0
                compute_sequence(sequence, taken[k])
                sample_sequence(batch, blocks, sequence, children)
            complete(batch, request)
        if len(batch.ended) > before:
            batch.remove_ended()


def _known(request: Request) -> int:
    """Returns the known tokens of a waiting or just admitted request of one sequence."""
    return next(each.length for each in request.sequences if each.state in (WAITING, RUNNING))


def _in_batch_order(requests: Iterable[Request]) -> list[Request]:
    """Sorts requests as `SchedulerOutputs` does, by LoRA and request id. It sorts if its set of
    LoRAs is not empty, and a request without LoRA counts as one."""
    return sorted(requests, key=_id)

"""nano-vllm, to be read beside its source: block tables (`nanovllm/engine/block_manager.py`) and
schedulers (`nanovllm/engine/scheduler.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, cast

from librt.vecs import append, vec
from mypy_extensions import i64, mypyc_attr

from kvsim.core import guard
from kvsim.core.batch import Batch
from kvsim.core.blocks import BlockManager
from kvsim.core.contents import Numbering
from kvsim.core.plan import BLOCKS, SLOTS, TOKENS, Plan
from kvsim.core.pool import Pool
from kvsim.core.request import RUNNING, Request, Table
from kvsim.core.scheduler import Scheduler
from kvsim.core.vectors import EMPTY
from kvsim.engines.deaths import died
from kvsim.policies.eviction import make_eviction
from kvsim.policies.requeue import make_requeue
from kvsim.policies.tables import (
    FullHit,
    HitsSave,
    PublishAt,
    make_full_hit,
    make_hits_save,
    make_publish_at,
)
from kvsim.policies.victims import tail


@mypyc_attr(allow_interpreted_subclasses=True)
class NanoTables(BlockManager):
    """Block tables of nano-vllm, commit bb823b3 (`nanovllm/engine/block_manager.py`).

    A freed block goes to the end of one first-in, first-out queue and keeps its content until it is
    reused. So the queue is also the eviction order. Of several blocks with equal content, the one
    registered last is hit.

    Blocks can be hit once they are computed, and the last block of a sequence never hits, unless
    other rules of `kvsim.policies.tables` are set.
    """

    gpu: Pool
    numbering: Numbering
    publish_at: PublishAt
    hits_save: HitsSave
    full_hit: FullHit
    hits: vec[i64]
    """The blocks that the last look-up found."""
    _lookups: i64
    _hits: i64

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        *,
        eviction: Any = None,
        publish_at: str | PublishAt = "computed",
        hits_save: str | HitsSave = "admission",
        full_hit: str | FullHit = "last-block",
    ) -> None:
        """`eviction` makes the order in which free blocks lose their content once no blank block is
        left (`kvsim.policies.eviction`). None stands for the engine's queue, which also holds the
        blank blocks. Raises `ConfigError` for an unknown rule."""
        order = None
        if eviction is not None:
            order = make_eviction(eviction, block_size=block_size, num_gpu_blocks=num_gpu_blocks)
        self.block_size = block_size
        self.gpu, self.cpu = Pool(num_gpu_blocks, order), Pool(0)
        self.gpu.blank_last = True
        self.numbering = Numbering(block_size)
        self.tier = None
        self.needs_keys = True
        self.publish_at = make_publish_at(publish_at)
        self.hits_save = make_hits_save(hits_save)
        self.full_hit = make_full_hit(full_hit)
        self.hits = EMPTY
        self.empty_slots = self._lookups = self._hits = 0

    # -- for those who look on -------------------------------------------------------------------

    @property
    def lookups(self) -> tuple[int, int]:
        return self._lookups, self._hits

    def observe(self, plan: Plan) -> None:
        gpu: Pool = self.gpu
        plan.used_blocks, plan.cached_blocks = gpu.size - gpu.num_free, gpu.num_cached
        plan.free_blocks, plan.empty_slots = gpu.num_free - gpu.num_cached, self.empty_slots

    def tables(self, request: Request) -> list[list[int]]:
        return [request.table]

    def own_blocks(self, request: Request) -> int:
        return self.gpu.own(request)

    def cached_tokens(self, request: Request) -> int:
        self.find(request)
        return self.hit_tokens(request, len(self.hits))

    # -- questions -------------------------------------------------------------------------------

    def find(self, request: Request) -> None:
        """Looks up its leading blocks that an admission finds computed, and notes them in `hits`
        until the next look-up."""
        gpu: Pool = self.gpu
        units: i64 = (request.length - self.full_hit.withheld) // self.block_size
        self.numbering.extend(request, units)
        contents: vec[i64] = request.contents
        hits: vec[i64] = EMPTY
        k: i64
        for k in range(units):
            block: i64 = gpu.find(contents[k])
            if block == 0:
                break
            hits = append(hits, block)
        self.hits = hits

    def hit_tokens(self, request: Request, blocks: i64) -> i64:
        """The tokens whose computation so many leading blocks save; 0 for none."""
        if blocks == 0:
            return 0
        return min(blocks * self.block_size, request.length - self.full_hit.least)

    def need(self, request: Request) -> i64:
        """The free blocks that a request without a table needs, given what was just found. Hits on
        free blocks take these, so only those in use may save any."""
        blocks: i64 = (request.length + self.block_size - 1) // self.block_size
        if self.hits_save.blocks:
            hits: vec[i64] = self.hits
            k: i64
            for k in range(len(hits)):
                blocks -= self.gpu.refs(hits[k]) > 0
        return blocks

    # -- moves -----------------------------------------------------------------------------------

    def allocate(self, request: Request) -> None:
        """Gives a request without a table what was just found, and slots for all its known tokens
        (`allocate`)."""
        size: i64 = self.block_size
        table: Table = Table()
        # Before new blocks are taken: hits are among the free ones.
        self.share(request)
        request.seen = len(self.hits) * size
        request.published = len(self.hits)
        self._lookups += request.length // size
        self._hits += request.published
        more: i64 = (request.length + size - 1) // size - request.published
        table.blocks = self.extended(self.hits, more)
        self.hits = EMPTY
        request.room = len(table.blocks) * size
        request.tables = [table]
        request.filled = request.length
        self.empty_slots += request.room - request.filled
        if not self.publish_at.computed:
            self.publish(request, request.length)

    def share(self, request: Request) -> None:
        """A table begins with the blocks that were just found. The last one is hit first: to an
        order of their eviction, a prefix was used after its continuation."""
        hits: vec[i64] = self.hits
        k: i64
        for k in range(len(hits) - 1, -1, -1):
            self.gpu.touch(hits[k])

    def extended(self, blocks: vec[i64], number: i64) -> vec[i64]:
        """`blocks`, and behind them so many new ones (`_allocate_block`)."""
        return self.gpu.extended(blocks, number)

    def append(self, request: Request) -> None:
        """Gives a running request a slot for its newest token (`may_append`)."""
        if request.length > request.room:
            table: Table = request.tables[0]
            table.blocks = self.extended(table.blocks, 1)
            request.room += self.block_size
            self.empty_slots += self.block_size
        self.empty_slots -= 1
        request.filled += 1
        if request.filled == request.room and not self.publish_at.computed:
            self.publish(request, request.filled)

    def publish(self, request: Request, upto: i64) -> None:
        """Lets others hit the full blocks of the first `upto` tokens (`hash_blocks`)."""
        if upto < (request.published + 1) * self.block_size:
            return
        units: i64 = upto // self.block_size
        self.numbering.extend(request, units)
        blocks: vec[i64] = request.tables[0].blocks
        if self.gpu.watched:
            keys = request._stream.keys(request.published, units, self.block_size)
            for place, key in enumerate(keys, request.published):
                self.gpu.keys[request.contents[place]] = key
        k: i64
        for k in range(request.published, units):
            self.register(blocks[k], self.content_at(request, k), (k + 1) * self.block_size)
        request.published = units

    def register(self, block: i64, content: i64, end: i64) -> None:
        """From now on, a block in use, which ends after `end` tokens, is the one to be hit for a
        content (`hash_to_block_id`)."""
        gpu: Pool = self.gpu
        # Where nobody has it, that is block 0, which has no content to lose.
        gpu.unname(gpu.find(content))
        gpu.label(block, content, end)

    def content_at(self, request: Request, place: i64) -> i64:
        """The number for which a full block of a table is registered."""
        return request.contents[place]

    def free(self, request: Request) -> None:
        """Gives back all blocks of a request (`deallocate`)."""
        self.empty_slots -= request.room - request.filled
        blocks: vec[i64] = request.tables[0].blocks
        self.gpu.release(blocks, 0, len(blocks), request.access_ns)
        request.tables = []
        request.room = request.filled = request.seen = request.published = 0

    def audit(self, requests: Iterable[Request]) -> None:
        self.gpu.audit()
        counted: Counter[int] = Counter()
        empty: i64 = 0
        for request in requests:
            counted.update(request.table)
            empty += request.room - request.filled
            assert 0 <= request.filled <= request.room == len(request.table) * self.block_size
        assert counted == self.gpu.references, "references and tables disagree"
        assert empty == self.empty_slots, "empty slots were miscounted"


class Chain(Numbering):
    """Numbers that follow from the number of the block before and a block's own tokens.

    These are below 0. Where tokens are known only by their prefix, numbers are as usual, and each
    stands for tokens that no other prefix ends with.
    """

    _numbers: dict[tuple[int, Any], int]
    """(number of the block before, its tokens) → number."""
    _tokens: list[Any]
    """Minus number → what identifies the tokens of its block."""

    def __init__(self, unit: int) -> None:
        super().__init__(unit)
        self._numbers, self._tokens = {}, [None]

    def extend(self, request: Request, units: i64) -> None:
        contents: vec[i64] = request.contents
        done: i64 = len(contents)
        if done >= units:
            return
        stream = request._stream
        assert stream is not None, "block identities are needed"
        if not stream.knows_tokens:
            super().extend(request, units)
            return
        before: i64 = contents[done - 1] if done else 0
        for tokens in stream.contents(done, units, self.unit):
            before = self._follow(before, tokens)
            contents = append(contents, before)
        request.contents = contents

    def behind(self, before: i64, number: i64) -> i64:
        """The number of the same tokens behind another block; 0: behind none."""
        return number if number > 0 else self._follow(before, self._tokens[-number])

    def agree(self, one: i64, other: i64) -> bool:
        """Whether two numbers stand for the same tokens, whatever is before them."""
        if one >= 0 or other >= 0:
            return one == other
        same: bool = self._tokens[-one] == self._tokens[-other]
        return same

    def _follow(self, before: i64, tokens: Any) -> i64:
        number = self._numbers.setdefault((before, tokens), -len(self._tokens))
        if number == -len(self._tokens):
            self._tokens.append(tokens)
        return number


@mypyc_attr(allow_interpreted_subclasses=True)
class NanoTables2025(NanoTables):
    """Block tables of nano-vllm, commit 6ef2a4f (August 2025).

    Blocks can be hit from their allocation on, the last one included. An entry of the cache is
    never removed, not even when its block is overwritten: it is a hit where the block's own tokens
    agree, whatever is before them. A hit gives the block the number under which it was found, even
    if others hold it: a block that they fill later is chained to that number.
    """

    chain: Chain
    known: dict[int, int]
    """Number → the block registered last for it, whatever that holds by now."""
    numbers: dict[int, int]
    """Block → the number for which it was registered last, since it was taken."""

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        *,
        publish_at: str | PublishAt = "allocation",
        hits_save: str | HitsSave = "charge",
        full_hit: str | FullHit = "nothing",
    ) -> None:
        super().__init__(
            block_size,
            num_gpu_blocks,
            publish_at=publish_at,
            hits_save=hits_save,
            full_hit=full_hit,
        )
        self.known, self.numbers = {}, {}
        self.numbering = self.chain = Chain(block_size)

    def find(self, request: Request) -> None:
        chain: Chain = self.chain
        units: i64 = (request.length - self.full_hit.withheld) // self.block_size
        chain.extend(request, units)
        contents: vec[i64] = request.contents
        hits: vec[i64] = EMPTY
        k: i64
        for k in range(units):
            block: i64 = self.known.get(contents[k], 0)
            # The entry may be of a block that holds something else by now.
            if block == 0 or not chain.agree(self.numbers.get(block, 0), contents[k]):
                break
            hits = append(hits, block)
        self.hits = hits

    def share(self, request: Request) -> None:
        super().share(request)
        k: i64
        for k in range(len(self.hits)):
            self.register(self.hits[k], request.contents[k], (k + 1) * self.block_size)

    def extended(self, blocks: vec[i64], number: i64) -> vec[i64]:
        first: i64 = len(blocks)
        blocks = self.gpu.extended(blocks, number)
        k: i64
        # The engine clears the number of a block that it takes; the entry in `known` stays.
        for k in range(first, len(blocks)):
            self.numbers.pop(blocks[k], None)
        return blocks

    def register(self, block: i64, content: i64, end: i64) -> None:
        super().register(block, content, end)
        self.known[content], self.numbers[block] = block, content

    def content_at(self, request: Request, place: i64) -> i64:
        before: i64 = 0
        if place > 0:
            before = self.numbers.get(request.tables[0].blocks[place - 1], 0)
        return self.chain.behind(before, request.contents[place])


@mypyc_attr(allow_interpreted_subclasses=True)
class Nano(Scheduler):
    """nano-vllm, commit bb823b3 (April 2026): prompts in chunks, charged net of prefix hits.

    A step is prompts *or* decodes. `max_num_seqs` bounds the step, not the running queue: what is
    running beyond it waits for its turn. There is no watermark; the victim of a shortage is the
    tail of the running queue, and is recomputed. The engine asserts that every step does something.

    For a policy of your own, override `compose`, `refusal` or `settle`.
    """

    blocks: NanoTables
    victim: Callable[..., Any]
    """Chooses whom to preempt, of those behind the one that lacks a block, or that one alone."""
    requeue: Callable[[Any, Any], None]

    def __init__(
        self,
        *,
        block_size: int,
        max_num_seqs: int = 512,
        max_num_batched_tokens: int | None = None,
        victim: Callable[..., Request] | None = None,
        requeue: str | Callable[[Any, Any], None] | None = None,
    ) -> None:
        if block_size < 2:
            raise ValueError(
                f"block_size ({block_size}) is below 2: nano-vllm opens a block when the length"
                " is 1 more than a multiple of block_size; raise it (the engine's own is 256)"
            )
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = (
            16384 if max_num_batched_tokens is None else max_num_batched_tokens
        )
        self.watermark_blocks = 0
        self.chunked = True
        self.in_flight = 1
        self.victim = victim or tail
        self.requeue = make_requeue(requeue)

    @property
    def rule(self) -> str:
        """Where the engine raises if a step would be empty."""
        return "AssertionError @ scheduler.py:71"

    # -- composing a step (schedule) -------------------------------------------------------------

    def compose(self, batch: Batch, now_ns: int) -> Any:
        plan: Plan = batch.begin(now_ns, self.max_num_seqs)
        self.blocks = cast(NanoTables, batch.blocks)
        if len(batch):
            self._prompts(batch, plan)
            if not plan.num_requests:
                self._decodes(batch, plan)
        return plan

    def _prompts(self, batch: Batch, plan: Plan) -> None:
        """Begins or continues prompts from the head of the waiting queue until one is refused."""
        blocks: NanoTables = self.blocks
        rest: i64
        tokens: i64
        asked: i64
        while batch.waiting:
            request: Request = batch.waiting[0]
            rest = asked = request.length - request.computed
            if not request.tables:
                blocks.find(request)
                saved: i64 = blocks.hit_tokens(request, len(blocks.hits))
                if blocks.hits_save.charged:
                    rest -= saved
                if blocks.hits_save.tested:
                    asked -= saved
            plan.blocked = self.refusal(request, asked, plan.batched_tokens, plan.num_requests)
            if plan.blocked:
                request.blocked_steps += 1
                break
            if not request.tables:
                blocks.allocate(request)
                request.state = RUNNING
                batch.admitted(request)
            tokens = min(rest, self.max_num_batched_tokens - plan.batched_tokens)
            plan.add(request, tokens, 0)
            plan.batched_tokens += tokens
            # Unfinished, it stays at the head, and nobody is admitted behind it.
            if tokens < rest:
                break
            batch.waiting.popleft()
            batch.running.append(request)
        k: i64
        for k, request in enumerate(plan.requests):
            self._chunk(batch, plan, k, request)

    def refusal(self, request: Request, asked: i64, tokens: i64, seqs: i64) -> i64:
        """Returns why the head of the waiting queue gets nothing, as an index into
        `schema.BLOCKED`; 0 if it gets its turn.

        It asks for `asked` tokens; the step has `seqs` prompts, with `tokens` tokens.
        """
        left: i64 = self.max_num_batched_tokens - tokens
        if seqs >= self.max_num_seqs:
            return SLOTS
        if left == 0:
            return TOKENS
        if not request.tables and self.blocks.need(request) > self.blocks.gpu.num_free:
            return BLOCKS
        # Only the first prompt of a step may be cut into chunks.
        return TOKENS if seqs and asked > left else 0

    def _chunk(self, batch: Batch, plan: Plan, place: i64, request: Request) -> None:
        """Books the chunk of the prompt at a place of the step. Hits that are not charged belong to
        the first chunk."""
        blocks: NanoTables = self.blocks
        before: i64 = request.computed
        end: i64 = before + plan.scheduled[place]
        if before == 0 and blocks.hits_save.charged:
            end += blocks.hit_tokens(request, request.seen // blocks.block_size)
        cached: i64 = min(request.seen, min(end, request.length) - blocks.full_hit.least) - before
        batch.chunk(plan, place, request, end - before, max(0, cached) if request.seen else 0)
        request.computed = end

    def _decodes(self, batch: Batch, plan: Plan) -> None:
        """Decodes one token for each of the first `max_num_seqs` running requests. Later requests
        are preempted if blocks run short."""
        k: i64 = 0
        while k < len(batch.running) and k < self.max_num_seqs:
            request: Request = batch.running[k]
            if self._make_room(batch, k):
                self.blocks.append(request)
                plan.add(request, 1, 0)
                plan.yields[k] = 1
                plan.add_decode(request.length)
                request.access_ns = batch.now_ns
                # Booked at once: nothing else happens before the step is settled.
                request.computed += 1
                k += 1
        plan.batched_tokens = k
        # Nobody runs any more, and the queue holds them all.
        if k == 0:
            head: Request = batch.waiting[0]
            raise died("nothing-schedulable", head, length=head.length, rule=self.rule)

    def _make_room(self, batch: Batch, place: i64) -> bool:
        """Preempts until the running request at `place` can grow. Returns False if that request had
        to go itself."""
        request: Request = batch.running[place]
        while request.length > request.room and self.blocks.gpu.num_free == 0:
            behind = tuple(batch.running[place + 1 :])
            victim: Request = self.victim(behind or (request,), self.blocks)
            batch.running.remove(victim)
            self.blocks.free(victim)
            batch.preempt(victim)
            self.requeue(batch.waiting, victim)
            if victim is request:
                return False
        return True

    def settle(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        """Settles a step once its time has passed: blocks can be hit, tokens exist, requests end
        (`postprocess`)."""
        batch.now_ns = now_ns
        blocks: NanoTables = self.blocks
        request: Request
        if blocks.publish_at.computed:
            # For all, before anybody is freed: others hit the blocks of those who end, too.
            for request in plan.requests:
                blocks.publish(request, request.computed)
        before: i64 = len(batch.ended)
        k: i64
        for k, request in enumerate(plan.requests):
            if plan.yields[k] and batch.token(request):
                blocks.free(request)
                batch.complete(request)
        if len(batch.ended) > before:
            batch.remove_ended()


@mypyc_attr(allow_interpreted_subclasses=True)
class Nano2025(Nano):
    """nano-vllm, commit 6ef2a4f (August 2025): whole prompts, hits saving neither blocks nor room.

    A prompt is admitted if its whole length fits the rest of the token budget and of the pool; what
    it is charged is net of hits.
    """

    def __init__(
        self,
        *,
        block_size: int,
        max_model_len: int | None = None,
        max_num_seqs: int = 512,
        max_num_batched_tokens: int | None = None,
        victim: Callable[..., Request] | None = None,
        requeue: str | Callable[[Any, Any], None] | None = None,
    ) -> None:
        super().__init__(
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            victim=victim,
            requeue=requeue,
        )
        if max_model_len is not None and self.max_num_batched_tokens < max_model_len:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_model_len"
                f" ({max_model_len}), and prompts are not cut: raise it, or lower --max-model-len"
            )

    @property
    def rule(self) -> str:
        return "AssertionError @ scheduler.py:56"

    def refusal(self, request: Request, asked: i64, tokens: i64, seqs: i64) -> i64:
        """Returns the reason as `Nano.refusal` does, by the older rule."""
        if seqs >= self.max_num_seqs:
            return SLOTS
        if tokens + asked > self.max_num_batched_tokens:
            return TOKENS
        return BLOCKS if self.blocks.need(request) > self.blocks.gpu.num_free else 0


guard.keep(NanoTables)

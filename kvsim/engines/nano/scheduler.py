"""The schedulers of nano-vllm (`nanovllm/engine/scheduler.py`), to be read beside their source.

A step is prompts *or* decodes. `max_num_seqs` bounds the step, not the running queue: what is
running beyond it waits for its turn. There is no watermark; the victim of a shortage is the tail of
the running queue, and is recomputed. The engine asserts that every step does something.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

from mypy_extensions import i64, mypyc_attr

from kvsim.core.batch import Batch
from kvsim.core.plan import Plan
from kvsim.core.request import RUNNING, Request
from kvsim.core.scheduler import Scheduler
from kvsim.engines.deaths import died
from kvsim.engines.nano.blocks import NanoTables
from kvsim.errors import EngineStopped
from kvsim.policies.requeue import make_requeue
from kvsim.policies.victims import tail

SLOTS: Final = 1
TOKENS: Final = 2
BLOCKS: Final = 3
"""Why the head of the waiting queue was refused: indexes into `kvsim.core.schema.BLOCKED`."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Nano(Scheduler):
    """nano-vllm, commit bb823b3 (April 2026): prompts in chunks, charged net of prefix hits.

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
        """Composes the next step."""
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
                rest -= blocks.charged_hits(request)
                if blocks.hits_save.tested:
                    asked -= blocks.hit_tokens(request, len(blocks.hits))
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
                request.computed += 1
                k += 1
        plan.batched_tokens = k
        if k == 0:
            raise self._stopped(batch.waiting[0])

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

    # -- after the step (postprocess) ------------------------------------------------------------

    def settle(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        """Settles a step once its time has passed: blocks can be hit, tokens exist, requests
        end."""
        batch.now_ns = now_ns
        blocks: NanoTables = self.blocks
        request: Request
        if blocks.publish_at.computed:
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

    def _stopped(self, head: Request) -> EngineStopped:
        return died("nothing-schedulable", head, length=head.length, rule=self.rule)


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

"""The schedulers of nano-vllm (`nanovllm/engine/scheduler.py`), to be read beside their source.

A step is prompts *or* decodes. `max_num_seqs` bounds the step, not the running queue: what is
running beyond it waits for its turn. There is no watermark; the victim of a shortage is the tail of
the running queue, and is recomputed. The engine asserts that every step does something.
"""

from __future__ import annotations

from itertools import islice

from kvsim.engine.batch import Batch
from kvsim.engine.plan import Plan
from kvsim.engine.request import Request
from kvsim.engine.scheduler import Scheduler
from kvsim.errors import EngineStopped
from kvsim.rules.requeue import make_requeue
from kvsim.rules.victims import Victim, tail
from kvsim.schema import BLOCKED

_SLOTS, _TOKENS, _BLOCKS = map(BLOCKED.index, ("slots", "tokens", "blocks"))


class Nano(Scheduler):
    """nano-vllm, commit bb823b3 (April 2026): prompts in chunks, charged net of prefix hits."""

    rule = "AssertionError @ scheduler.py:71"
    """Where the engine raises if a step would be empty."""

    def __init__(
        self,
        *,
        block_size: int,
        max_num_seqs: int = 512,
        max_num_batched_tokens: int | None = None,
        victim: Victim | None = None,
        requeue: str | None = None,
    ) -> None:
        if block_size < 2:
            raise ValueError(
                f"block_size ({block_size}) is below 2: nano-vllm opens a block when the length"
                " is 1 more than a multiple of block_size; raise it (the engine's own is 256)"
            )
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = (
            16384 if max_num_batched_tokens is None else max_num_batched_tokens
        )
        self.victim = victim or tail
        self.requeue = make_requeue(requeue)

    # -- composing a step ------------------------------------------------------------------------

    def compose(self, batch: Batch, now_ns: int) -> Plan:
        """Decide what the next step does."""
        plan = batch.begin(now_ns)
        if len(batch):
            self._prompts(batch)
            if not plan.singles:
                self._decodes(batch)
        return batch.composed()

    def _prompts(self, batch: Batch) -> None:
        """Start or continue prompts from the head of the waiting queue until one is refused."""
        waiting, plan = batch.waiting, batch.plan
        while waiting:
            request = waiting[0]
            plan.blocked = self._refusal(batch, request)
            if plan.blocked:
                request.blocked_steps += 1
                return
            if not self._run(batch, request):
                return

    def _refusal(self, batch: Batch, request: Request) -> int:
        """Why the head of the waiting queue gets nothing in this step; 0: it does."""
        plan, blocks = batch.plan, batch.blocks
        sequence = request.sequences[0]
        left = self.max_num_batched_tokens - plan.batched_tokens
        if len(plan.singles) >= self.max_num_seqs:
            return _SLOTS
        if left == 0:
            return _TOKENS
        known = sequence.computed
        if not sequence.table:
            if blocks.admission_need(request) > blocks.gpu.free:
                return _BLOCKS
            if blocks.hits_save.tested:
                known = blocks.hit_tokens(sequence, blocks.match(sequence))
        # Only the first prompt of a step may be cut into chunks.
        return _TOKENS if plan.singles and sequence.length - known > left else 0

    def _run(self, batch: Batch, request: Request) -> bool:
        """Compute what the budget allows of the head's prompt; whether that completes it."""
        plan, blocks, sequence = batch.plan, batch.blocks, request.sequences[0]
        hit = 0
        if not sequence.table:
            if blocks.hits_save.charged:
                hit = blocks.hit_tokens(sequence, blocks.match(sequence))
            batch.hold(request)
        missing = sequence.length - sequence.computed - hit
        tokens = min(missing, self.max_num_batched_tokens - plan.batched_tokens)
        batch.run_prefill(request, hit + tokens, charged=tokens)
        plan.batched_tokens += tokens
        if tokens == missing:
            batch.join(request)
        return tokens == missing

    def _decodes(self, batch: Batch) -> None:
        """One token for the first `max_num_seqs` running requests, the later ones giving way."""
        running, plan = batch.running, batch.plan
        place = 0
        while place < len(running) and place < self.max_num_seqs:
            request = running[place]
            if self._make_room(batch, place):
                batch.grow(request)
                batch.run_decode(request)
                place += 1
        if not place:
            raise self._stopped(batch.waiting[0])
        plan.batched_tokens = place

    def _make_room(self, batch: Batch, place: int) -> bool:
        """Preempt until the request at `place` can grow; False where it had to go itself."""
        blocks, running = batch.blocks, batch.running
        request = running[place]
        while blocks.growth_need(request.sequences[0]) > blocks.gpu.free:
            candidates = tuple(islice(running, place + 1, None)) or (request,)
            victim = self.victim(candidates, blocks)
            running.remove(victim)
            batch.preempt(victim)
            self.requeue(batch.waiting, victim)
            if victim is request:
                return False
        return True

    def _stopped(self, head: Request) -> EngineStopped:
        return EngineStopped(
            kind="nothing-schedulable",
            request_id=head.id,
            explanation=(
                f"request {head.id} ({head.sequences[0].length} tokens), at the head of the waiting"
                " queue, cannot be scheduled, and nothing is running; the engine asserts that every"
                " step does something"
            ),
            remedy="raise --num-gpu-blocks-override or --max-num-batched-tokens",
            rule=self.rule,
        )


class Nano2025(Nano):
    """nano-vllm, commit 6ef2a4f (August 2025): whole prompts, hits saving neither blocks nor room.

    A prompt is admitted if its whole length fits the rest of the token budget and of the pool; what
    it is charged is net of hits.
    """

    rule = "AssertionError @ scheduler.py:56"

    def __init__(
        self,
        *,
        block_size: int,
        max_model_len: int | None = None,
        max_num_seqs: int = 512,
        max_num_batched_tokens: int | None = None,
        victim: Victim | None = None,
        requeue: str | None = None,
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

    def _refusal(self, batch: Batch, request: Request) -> int:
        plan, blocks, sequence = batch.plan, batch.blocks, request.sequences[0]
        if len(plan.singles) >= self.max_num_seqs:
            return _SLOTS
        asked = sequence.length
        if blocks.hits_save.tested:
            asked -= blocks.hit_tokens(sequence, blocks.match(sequence))
        if plan.batched_tokens + asked > self.max_num_batched_tokens:
            return _TOKENS
        return _BLOCKS if blocks.admission_need(request) > blocks.gpu.free else 0

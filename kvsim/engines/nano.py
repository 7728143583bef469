"""The schedulers of nano-vllm (`nanovllm/engine/scheduler.py`), to be read beside their source.

A step is prompts *or* decodes. `max_num_seqs` bounds the step, not the running queue: what is
running beyond it waits for its turn. There is no watermark; the victim of a shortage is the tail of
the running queue, and is recomputed. The engine asserts that every step does something.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import islice

from kvsim.engine.batch import Batch
from kvsim.engine.plan import Plan
from kvsim.engine.request import Request, Sequence
from kvsim.engine.scheduler import Asked, Scheduler
from kvsim.engine.tables import Tables
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
        waiting, plan, blocks = batch.waiting, batch.plan, batch.blocks
        chunks: list[tuple[Request, int, int]] = []
        while waiting:
            request = waiting[0]
            sequence, used = request.sequences[0], plan.batched_tokens
            _, saved, missing, asked, need = self.ask(blocks, sequence)
            plan.blocked = self.refusal(blocks, blocks.gpu.free, need, asked, used, len(chunks))
            if plan.blocked:
                request.blocked_steps += 1
                break
            if not sequence.table:
                batch.hold(request)
            tokens = min(missing, self.max_num_batched_tokens - used)
            chunks.append((request, saved + tokens, tokens))
            plan.batched_tokens += tokens
            if tokens < missing:
                break
            batch.join(request)
        for request, tokens, charged in chunks:
            batch.run_prefill(request, tokens, charged)

    def _decodes(self, batch: Batch) -> None:
        """Decodes one token for each of the first `max_num_seqs` running requests. Later requests
        are preempted if blocks run short."""
        plan, together, place = batch.plan, 0, 0
        if self.victim is tail:
            give_way = partial(self._give_way, batch)
            together = batch.decode_together(give_way, most=self.max_num_seqs)
            batch.run_together()
        running = batch.others if together else batch.running
        while place < len(running) and together + place < self.max_num_seqs:
            request = running[place]
            if self._make_room(batch, running, place):
                batch.grow(request)
                batch.run_decode(request)
                place += 1
        plan.batched_tokens = together + place
        if not plan.batched_tokens:
            raise self._stopped(batch.waiting[0])

    def _make_room(self, batch: Batch, running: deque[Request], place: int) -> bool:
        """Preempts until the request at `place` can grow. Returns False if that request had to go
        itself."""
        blocks, request = batch.blocks, running[place]
        while blocks.growth_need(request.sequences[0]) > blocks.gpu.free:
            candidates = tuple(islice(running, place + 1, None)) or (request,)
            victim = self.victim(candidates, blocks)
            running.remove(victim)
            self._give_way(batch, victim)
            if victim is request:
                return False
        return True

    def _give_way(self, batch: Batch, victim: Request) -> None:
        """Frees the blocks of a victim."""
        batch.preempt(victim)
        self.requeue(batch.waiting, victim)

    # -- rules -----------------------------------------------------------------------------------

    def ask(self, blocks: Tables, sequence: Sequence) -> Asked:
        """Returns what a waiting request asks for. One with blocks goes on with its prompt."""
        if sequence.table:
            rest = sequence.length - sequence.computed
            return [], 0, rest, rest, 0
        hits, length, save = blocks.match(sequence), sequence.length, blocks.hits_save
        saved = blocks.hit_tokens(sequence, hits) if save.charged else 0
        asked = length - blocks.hit_tokens(sequence, hits) if save.tested else length
        return hits, saved, length - saved, asked, blocks.need(sequence, length, hits)

    def refusal(
        self, blocks: Tables, free: int, need: int, asked: int, tokens: int, seqs: int
    ) -> int:
        """Returns why the head of the waiting queue gets nothing, as an index into
        `schema.BLOCKED`; 0 if it gets its turn.

        It needs `need` of `free` blocks and asks for `asked` tokens; the step has `seqs` prompts,
        with `tokens` tokens.
        """
        left = self.max_num_batched_tokens - tokens
        if seqs >= self.max_num_seqs:
            return _SLOTS
        if not left:
            return _TOKENS
        if need > free:
            return _BLOCKS
        # Only the first prompt of a step may be cut into chunks.
        return _TOKENS if seqs and asked > left else 0

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

    def refusal(
        self, blocks: Tables, free: int, need: int, asked: int, tokens: int, seqs: int
    ) -> int:
        """Returns the reason as `Nano.refusal` does, by the older rule."""
        if seqs >= self.max_num_seqs:
            return _SLOTS
        if tokens + asked > self.max_num_batched_tokens:
            return _TOKENS
        return _BLOCKS if need > free else 0

"""The scheduler of vLLM V1 0.33.0 (`v1/core/sched/scheduler.py`), to be read beside its source.

There are no separate prompt steps and decode steps. First, every running request, in order, takes
on the tokens that it knows and has not computed, within one token budget. Then waiting requests are
admitted with the rest, unless a request was preempted. A running request needs a block only when a
new one begins. If blocks run short, the tail of the running list, or the worst by priority, is
preempted and recomputed. Admissions are tested for the whole known sequence. Prefix hits reduce
both the blocks and the tokens that they need.
"""

from __future__ import annotations

from functools import partial

from kvsim.engine.batch import Batch
from kvsim.engine.plan import Plan
from kvsim.engine.request import RUNNING, WAITING, Request, Sequence
from kvsim.engine.scheduler import Asked, Scheduler
from kvsim.engine.tables import Tables
from kvsim.rules.requeue import make_requeue
from kvsim.rules.victims import Victim, priority, tail
from kvsim.schema import BLOCKED

SLOTS, TOKENS, BLOCKS, WATERMARK, PREEMPTED = map(
    BLOCKED.index, ("slots", "tokens", "blocks", "watermark", "preempted")
)
_NOTHING: Asked = ([], 0, 0, 0, 0)


class VllmV1(Scheduler):
    """vLLM V1 0.33.0 with synchronous scheduling: a step is settled before the next is composed.

    Limits of a step depend on version and GPU: `kvsim.engines.versions`.
    """

    counts_composed = True

    def __init__(
        self,
        *,
        num_gpu_blocks: int,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_chunked_prefill: bool = True,
        scheduling_policy: str = "fcfs",
        watermark: float = 0.0,
        scheduler_reserve_full_isl: bool = True,
        long_prefill_token_threshold: int = 0,
        victim: Victim | None = None,
        requeue: str | None = None,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) is below max_num_seqs"
                f" ({max_num_seqs}): every running sequence needs one token a step; raise it, or"
                " lower --max-num-seqs"
            )
        self.max_model_len = self.longest_sequence = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunked = enable_chunked_prefill
        self.priority = scheduling_policy == "priority"
        self.victim = victim or (priority if self.priority else tail)
        own = "priority" if self.priority else "head"
        self.requeue = make_requeue(requeue, own, sorts=self.priority)
        self.watermark_blocks = int(watermark * num_gpu_blocks)
        self.reserve_full_isl = scheduler_reserve_full_isl
        """Whether an admission needs blocks for the whole known sequence, not only its chunk."""
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self._budget = 0

    def arrive(self, batch: Batch, request: Request) -> None:
        """Accepts a request, or rejects it if its prompt leaves no room for a token."""
        if request.input_length >= self.max_model_len:
            batch.refuse(request, "too-long")
        elif self.priority:
            # The queue is kept sorted: who arrives joins it by the rule for who was preempted.
            self.requeue(batch.waiting, request)
        else:
            batch.arrive(request)

    # -- composing a step ------------------------------------------------------------------------

    def compose(self, batch: Batch, now_ns: int) -> Plan:
        """Composes the next step."""
        plan = batch.begin(now_ns)
        self._budget = self.max_num_batched_tokens
        most = self.long_prefill_token_threshold
        if not most or len(batch) == 1:
            most = self.max_model_len
        running = self._running(batch, most)
        admitted = self._admitted(batch, most)
        self._run(batch, running, admitted)
        plan.batched_tokens = self.max_num_batched_tokens - self._budget
        return batch.composed()

    def _running(self, batch: Batch, most: int) -> dict[Request, int]:
        """Gives running requests slots for the tokens that they take on, at most `most` each, in
        order."""
        scheduled: dict[Request, int] = {}
        blocks = batch.blocks
        extend, size = blocks.extend, blocks.block_size
        shares = blocks.needs_keys and not blocks.publish_at.computed
        budget = self.max_num_batched_tokens
        if self.victim is tail:
            # Another victim could be one that the step has scheduled already.
            budget -= batch.decode_together(partial(self._preempt, batch))
        for request in tuple(batch.others):
            if budget == 0:
                break
            sequence = request.sequences[0]
            if sequence.state != RUNNING:
                continue
            length, coming = sequence.length, sequence.placeholders
            if coming and batch.stopping(sequence):
                continue
            tokens = length + coming - sequence.computed
            if tokens > 1:
                tokens = min(tokens, most, budget)
            upto = sequence.computed + tokens
            while not extend(sequence, upto):
                victim = self._take_victim(batch)
                budget += scheduled.pop(victim, 0)
                self._preempt(batch, victim)
                if victim is request:
                    break
            else:
                scheduled[request] = tokens
                budget -= tokens
                if shares and min(upto, length) // size > sequence.published:
                    blocks.publish(sequence, min(upto, length))
        self._budget = budget
        return scheduled

    def _admitted(self, batch: Batch, most: int) -> list[tuple[Request, int, int]]:
        """Admits requests from the head of the queue until one is refused.

        Returns (request, tokens not charged because of hits, tokens charged) for each.
        """
        admitted: list[tuple[Request, int, int]] = []
        waiting, blocks, plan = batch.waiting, batch.blocks, batch.plan
        if waiting and plan.preempted:
            plan.blocked = PREEMPTED
            return admitted
        while waiting:
            request = waiting[0]
            sequence = request.sequences[0]
            assert not sequence.placeholders, "a step from before its preemption is in flight"
            used, running = self.max_num_batched_tokens - self._budget, batch.num_running
            asks = self.ask(blocks, sequence, self._budget, running, most)
            hits, saved, tokens, asked, need = asks
            plan.blocked = self.refusal(blocks, blocks.gpu.free, need, asked, used, running)
            if plan.blocked:
                request.blocked_steps += 1
                break
            blocks.hold(sequence, saved + tokens, hits)
            if not blocks.publish_at.computed:
                blocks.publish(sequence, saved + tokens)
            batch.join(request)
            admitted.append((request, saved, tokens))
            self._budget -= tokens
        return admitted

    def _run(
        self,
        batch: Batch,
        running: dict[Request, int],
        admitted: list[tuple[Request, int, int]],
    ) -> None:
        """Puts the batch into the plan: running requests in order, then those admitted."""
        batch.run_together()
        for request, tokens in running.items():
            sequence = request.sequences[0]
            if sequence.computed == sequence.length + sequence.placeholders - 1:
                self.run_one(batch, request)
            else:
                computed = sequence.computed + tokens
                batch.run_prefill(request, tokens)
                sequence.computed = computed
        for request, saved, tokens in admitted:
            batch.run_prefill(request, saved + tokens, charged=tokens)
            request.sequences[0].computed = saved + tokens

    # -- rules -----------------------------------------------------------------------------------

    def ask(self, blocks: Tables, sequence: Sequence, left: int, running: int, most: int) -> Asked:
        """Returns what the head of the waiting queue asks for in a step with `left` tokens left,
        beside `running` running requests. A request may take on `most` tokens. The result is empty
        where tokens or slots are used up."""
        if not left or running >= self.max_num_seqs:
            return _NOTHING
        hits, length = blocks.match(sequence), sequence.length
        _, _, tested, charged = blocks.hits_save
        saved = blocks.hit_tokens(sequence, hits) if hits and charged else 0
        tokens = length - saved
        if tokens > most:
            tokens = most
        asked = tokens if tested else saved + tokens
        if tokens > left:
            tokens = left
        upto = length if self.reserve_full_isl else saved + tokens
        return hits, saved, tokens, asked, blocks.need(sequence, upto, hits)

    def refusal(
        self, blocks: Tables, free: int, need: int, asked: int, tokens: int, seqs: int
    ) -> int:
        """Returns why the head of the waiting queue is not admitted, as an index into
        `schema.BLOCKED`; 0 if it is.

        It needs `need` of `free` blocks and asks for `asked` tokens; the step has `tokens` tokens
        and the engine `seqs` running sequences without it.
        """
        left = self.max_num_batched_tokens - tokens
        if not left:
            return TOKENS
        if seqs >= self.max_num_seqs:
            return SLOTS
        if asked > left and not self.chunked:
            return TOKENS
        if need > free:
            return BLOCKS
        guarded = seqs and blocks.grows
        return WATERMARK if guarded and need + self.watermark_blocks > free else 0

    def _take_victim(self, batch: Batch) -> Request:
        # A request that lacks a block is handled on its own, and so is the tail.
        candidates = batch.others if self.victim is tail else batch.running
        victim = self.victim(candidates, batch.blocks)
        batch.others.remove(victim)
        return victim

    def _preempt(self, batch: Batch, victim: Request) -> None:
        batch.preempt(victim)
        self.requeue(batch.waiting, victim)

    # -- after the step --------------------------------------------------------------------------

    def settle(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        """Settles a step once its time has passed: tokens exist, requests end."""
        batch.now_ns = now_ns
        batch.publish(plan)
        ended = False
        for request, _, samples in batch.to_book(plan):
            if samples and batch.token(request.sequences[0]):
                batch.complete(request)
                ended = True
        if ended:
            batch.remove_ended()

    # -- requests that decode together -----------------------------------------------------------

    def only_decodes(self, request: Request) -> bool:
        """Whether a running request takes on only its next token."""
        sequence = request.sequences[0]
        known = sequence.length + sequence.placeholders
        return sequence.computed == known - 1 and known != request.input_length

    def run_one(self, batch: Batch, request: Request) -> None:
        """Adds a request that only decodes, and has its slots, to the plan."""
        sequence = request.sequences[0]
        known = sequence.length + sequence.placeholders
        batch.run_token(request, known)
        sequence.computed = known

    def last_tokens(self, batch: Batch, requests: list[Request]) -> None:
        """Ends requests that decode together with others."""
        blocks = batch.blocks
        for request in requests:
            if blocks.needs_keys:
                sequence = request.sequences[0]
                blocks.publish(sequence, sequence.length - 1)
            batch.complete(request)

    def grow_one(self, batch: Batch, request: Request) -> None:
        """Gives a request that decodes together with others slots for its next token."""
        sequence, blocks = request.sequences[0], batch.blocks
        upto = sequence.length + sequence.placeholders
        held = blocks.extend(sequence, upto)
        assert held, "too few free blocks were left"
        blocks.publish(sequence, min(upto, sequence.length))


class VllmV1Async(VllmV1):
    """vLLM V1 0.33.0 with asynchronous scheduling, its default (`async_scheduler.py`).

    Two steps are in flight: step i + 1 is composed while step i computes, before its tokens are
    known. A request counts a *placeholder* for each token that was sampled and is not known yet, so
    it can take on the next one. A request that is preempted meanwhile still gets the token of the
    step in flight, and may end with it in the waiting queue.
    """

    in_flight = 2

    def compose(self, batch: Batch, now_ns: int) -> Plan:
        plan = super().compose(batch, now_ns)
        for request, _, samples in plan.singles:
            request.sequences[0].placeholders += samples
        return plan

    def settle(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        batch.now_ns = now_ns
        batch.publish(plan)
        ended = False
        for request, _, samples in batch.to_book(plan):
            if not samples:
                continue
            sequence = request.sequences[0]
            preempted = sequence.state == WAITING
            if not (preempted or batch.blocks.publish_at.computed):
                # What the step has computed is all that was known before its token.
                batch.blocks.publish(sequence, sequence.length)
            if batch.token(sequence, placeholders=1):
                batch.complete(request)
                ended = True
                if preempted:
                    batch.waiting.remove(request)
        if ended:
            batch.remove_ended()

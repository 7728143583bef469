"""The scheduler of vLLM V1 0.33.0 (`v1/core/sched/scheduler.py`), to be read beside its source.

There are no prompt steps and decode steps: every running request, in order, takes on the tokens
that it knows and has not computed, under one token budget; then waiting requests are admitted with
what is left, unless somebody was preempted. A running request needs a block only when a new one
begins. The victim of a shortage is the tail of the running list, or the worst by priority; it is
recomputed. Admissions are tested for the whole known sequence, and prefix hits are discounted
from blocks and from the budget.
"""

from __future__ import annotations

from functools import partial
from sys import maxsize

from kvsim.batch.batch import Batch
from kvsim.batch.pace import Moves, Terms
from kvsim.blocks.tables import NAMED, Tables
from kvsim.plan import Plan
from kvsim.recorder import BLOCKED
from kvsim.request import RUNNING, Request
from kvsim.schedule.requeue import make_requeue
from kvsim.schedule.victims import Victim, priority, tail
from kvsim.schedule.vllm_v1_outputs import process_token, stops, stops_after

_SLOTS, _TOKENS, _BLOCKS, _WATERMARK, _PREEMPTED = map(
    BLOCKED.index, ("slots", "tokens", "blocks", "watermark", "preempted")
)


class VllmV1:
    """vLLM V1 0.33.0 with synchronous scheduling: a step is settled before the next is composed.

    Defaults are those of an API server on a GPU of 70 GiB or more (`engine/arg_utils.py`).
    """

    in_flight = 1
    """Steps that are composed and not settled at the same time."""
    ahead = False
    counts_composed = True
    lingers = False

    def __init__(
        self,
        *,
        num_gpu_blocks: int,
        max_model_len: int,
        max_num_seqs: int = 1024,
        max_num_batched_tokens: int | None = None,
        enable_chunked_prefill: bool = True,
        scheduling_policy: str = "fcfs",
        watermark: float = 0.0,
        scheduler_reserve_full_isl: bool = True,
        long_prefill_token_threshold: int = 0,
        victim: Victim | None = None,
        requeue: str | None = None,
    ) -> None:
        if max_num_batched_tokens is None:
            max_num_batched_tokens = 8192 if enable_chunked_prefill else max(8192, max_model_len)
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) is below max_num_seqs"
                f" ({max_num_seqs}): every running sequence needs one token a step"
            )
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunked = enable_chunked_prefill
        self.priority = scheduling_policy == "priority"
        self.victim = victim or (priority if self.priority else tail)
        own = "priority" if self.priority else "head"
        self.requeue = make_requeue(requeue, own, sorts=self.priority)
        self.watermark_blocks = int(watermark * num_gpu_blocks)
        self.reserve_full_isl = scheduler_reserve_full_isl
        """Whether an admission must find blocks for the whole known sequence, not its chunk."""
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self._budget = 0

    def arrive(self, batch: Batch, request: Request) -> None:
        """Take a request in, or turn it away if its prompt leaves no room for a token."""
        if request.input_length >= self.max_model_len:
            batch.refuse(request, "too-long")
        elif self.priority:
            # The queue is kept sorted: who arrives joins it by the rule for who was preempted.
            self.requeue(batch.waiting, request)
        else:
            batch.arrive(request)

    # -- composing a step ------------------------------------------------------------------------

    def compose(self, batch: Batch, now_ns: int) -> Plan:
        """Decide what the next step does."""
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
        """Slots for what the running requests take on, at most `most` tokens each, in order."""
        scheduled: dict[Request, int] = {}
        blocks = batch.blocks
        extend, size = blocks.extend, blocks.block_size
        shares = blocks.needs_keys and not blocks.publish_at.computed
        budget = self.max_num_batched_tokens
        if self.victim is tail:
            # Another victim could be one that the step has scheduled already.
            budget -= batch.decode_together(self, partial(self._preempt, batch), spare=False)
        for request in tuple(batch.behind):
            if budget == 0:
                break
            sequence = request.sequences[0]
            if sequence.state != RUNNING:
                continue
            length, coming = sequence.length, sequence.placeholders
            if coming and stops(sequence, self.max_model_len, coming):
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
        """Admit from the head of the queue until one is refused.

        Answers (request, tokens not charged because of hits, tokens charged) of each.
        """
        admitted: list[tuple[Request, int, int]] = []
        waiting, blocks, plan = batch.waiting, batch.blocks, batch.plan
        if waiting and plan.preempted:
            plan.blocked = _PREEMPTED
            return admitted
        while waiting:
            request = waiting[0]
            sequence = request.sequences[0]
            assert not sequence.placeholders, "a step from before its preemption is in flight"
            hits: list[int] = []
            saved = tokens = asked = need = 0
            used, running = self.max_num_batched_tokens - self._budget, batch.num_running
            if self._budget and running < self.max_num_seqs:
                hits = blocks.match(sequence)
                if blocks.hits_save.charged:
                    saved = blocks.hit_tokens(sequence, hits)
                tokens = min(sequence.length - saved, most)
                asked = tokens if blocks.hits_save.tested else saved + tokens
                tokens = min(tokens, self._budget)
                upto = sequence.length if self.reserve_full_isl else saved + tokens
                need = blocks.need(sequence, upto, hits)
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
        """Put the batch into the plan: running requests in order, then those admitted."""
        for request, tokens in running.items():
            sequence = request.sequences[0]
            computed = sequence.computed
            known = sequence.length + sequence.placeholders
            if computed == known - 1:
                batch.run_token(request, known)
            else:
                batch.run_prefill(request, tokens)
            sequence.computed = computed + tokens
        for request, saved, tokens in admitted:
            batch.run_prefill(request, saved + tokens, charged=tokens)
            request.sequences[0].computed = saved + tokens

    # -- rules -----------------------------------------------------------------------------------

    def turns_away(self, blocks: Tables, tokens: int, need: int) -> str:
        """Nobody who has arrived."""
        return ""

    def refusal(
        self, blocks: Tables, free: int, need: int, asked: int, tokens: int, seqs: int
    ) -> int:
        """Why the head of the waiting queue is not admitted (`pace.Sprinter.refusal`)."""
        left = self.max_num_batched_tokens - tokens
        if not left:
            return _TOKENS
        if seqs >= self.max_num_seqs:
            return _SLOTS
        if asked > left and not self.chunked:
            return _TOKENS
        if need > free:
            return _BLOCKS
        guarded = seqs and blocks.grows
        return _WATERMARK if guarded and need + self.watermark_blocks > free else 0

    def refuses_from(self, blocked: int, need: int) -> int:
        """Blocks are looked at last."""
        return need if blocked == _WATERMARK else 0

    def _take_victim(self, batch: Batch) -> Request:
        # Whoever lacks a block is looked at by itself, and so is the tail.
        candidates = batch.behind if self.victim is tail else batch.running
        victim = self.victim(candidates, batch.blocks)
        batch.behind.remove(victim)
        return victim

    def _preempt(self, batch: Batch, victim: Request) -> None:
        batch.preempt(victim)
        self.requeue(batch.waiting, victim)

    def overlap(self, batch: Batch, now_ns: int) -> None:
        """What the engine does while the model runs."""

    # -- after the step --------------------------------------------------------------------------

    def settle(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        """The step's time has passed: tokens exist, requests end."""
        batch.now_ns = now_ns
        batch.publish(plan)
        ended = False
        left = batch.settle_together(plan, self)
        for request, _, samples in (*left, *plan.entries):
            if samples and process_token(batch, request, self.max_model_len):
                ended = True
        if ended:
            batch.remove_ended()

    # -- requests that decode together -----------------------------------------------------------

    def decodes(self, request: Request) -> int:
        """Steps until a running request ends, if its next token is all that it takes on."""
        sequence = request.sequences[0]
        known = sequence.length + sequence.placeholders
        if sequence.computed != known - 1 or known == request.input_length:
            return 0
        return stops_after(sequence, self.max_model_len)

    def terms(self, blocks: Tables) -> Terms | None:
        """What its steps have in common (`kvsim.batch.stretch`)."""
        plain = self.reserve_full_isl and not self.long_prefill_token_threshold
        if not plain or self.victim is not tail:
            return None
        return Terms(
            mixes=True,
            chunked=self.chunked,
            by_chunk=True,
            prompts_first=False,
            max_num_batched_tokens=self.max_num_batched_tokens,
            longest=maxsize,
            spare=False,
            requeue=self.requeue,
            blocked=_PREEMPTED,
        )

    def undisturbed(self, batch: Moves) -> bool:
        """Nothing but the terms decides."""
        return True

    def last_tokens(self, batch: Moves, requests: list[Request]) -> None:
        """End requests that decode together with others."""
        for request in requests:
            if batch.blocks.lockstep == NAMED:
                sequence = request.sequences[0]
                batch.blocks.publish(sequence, sequence.length - 1)
            batch.complete(request)

    def grow_one(self, batch: Moves, request: Request) -> None:
        """Slots for the next token of a request that decodes together with others."""
        sequence, blocks = request.sequences[0], batch.blocks
        upto = sequence.length + sequence.placeholders
        held = blocks.extend(sequence, upto)
        assert held, "too few free blocks were left"
        blocks.publish(sequence, min(upto, sequence.length))

"""The scheduler of vLLM V1 0.33.0 (`v1/core/sched/scheduler.py`), to be read beside its source.

There are no prompt steps and decode steps: every running request, in order, takes on the tokens
that it knows and has not computed, under one token budget; then waiting requests are admitted with
what is left, unless somebody was preempted. A running request needs a block only when a new one
begins. The victim of a shortage is the tail of the running list, or the worst by priority; it is
recomputed. Admissions are tested for the whole known sequence, and prefix hits are discounted
from blocks and from the budget.
"""

from __future__ import annotations

from bisect import insort

from kvsim.plan import Plan
from kvsim.recorder import BLOCKED
from kvsim.request import RUNNING, Request, Sequence
from kvsim.schedule.batch import Batch
from kvsim.schedule.groups import remove_ended
from kvsim.schedule.victims import Victim, priority, tail
from kvsim.schedule.vllm_v1_outputs import process_token, stops

_SLOTS, _TOKENS, _BLOCKS, _WATERMARK, _PREEMPTED = map(
    BLOCKED.index, ("slots", "tokens", "blocks", "watermark", "preempted")
)


class VllmV1:
    """vLLM V1 0.33.0 with synchronous scheduling: a step is settled before the next is composed.

    Defaults are those of an API server on a GPU of 70 GiB or more (`engine/arg_utils.py`).
    """

    in_flight = 1
    """Steps that are composed and not settled at the same time."""

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
            insort(batch.waiting, request, key=_priority)
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
        extend, size, shares = blocks.extend, blocks.block_size, blocks.needs_keys
        budget = self.max_num_batched_tokens
        for request in tuple(batch.running):
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

        Answers (request, tokens that hits save, tokens to compute) of each.
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
            cached = tokens = 0
            if self._budget == 0:
                plan.blocked = _TOKENS
            elif len(batch.running) >= self.max_num_seqs:
                plan.blocked = _SLOTS
            else:
                hits = blocks.match(sequence)
                cached = len(hits) * blocks.block_size
                tokens = min(sequence.length - cached, most)
                if tokens > self._budget and not self.chunked:
                    plan.blocked = _TOKENS
                else:
                    tokens = min(tokens, self._budget)
                    plan.blocked = self._refusal(batch, sequence, cached + tokens, hits)
            if plan.blocked:
                request.blocked_steps += 1
                break
            blocks.hold(sequence, cached + tokens, hits)
            blocks.publish(sequence, cached + tokens)
            batch.join(request)
            admitted.append((request, cached, tokens))
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
        for request, cached, tokens in admitted:
            batch.run_prefill(request, cached + tokens, charged=tokens)
            request.sequences[0].computed = cached + tokens

    # -- rules -----------------------------------------------------------------------------------

    def _refusal(self, batch: Batch, sequence: Sequence, upto: int, hits: list[int]) -> int:
        """Why a waiting request does not get its blocks: index into `BLOCKED`, 0 if it does."""
        blocks = batch.blocks
        if self.reserve_full_isl:
            upto = sequence.length
        need = blocks.need(sequence, upto, hits)
        free = blocks.gpu.free
        if need > free:
            return _BLOCKS
        guarded = batch.running and blocks.grows
        return _WATERMARK if guarded and need + self.watermark_blocks > free else 0

    def _take_victim(self, batch: Batch) -> Request:
        victim = self.victim(batch.running, batch.blocks)
        batch.running.remove(victim)
        return victim

    def _preempt(self, batch: Batch, victim: Request) -> None:
        batch.preempt(victim)
        if self.priority:
            insort(batch.waiting, victim, key=_priority)
        else:
            batch.waiting.appendleft(victim)

    def overlap(self, batch: Batch, now_ns: int) -> None:
        """What the engine does while the model runs."""

    # -- after the step --------------------------------------------------------------------------

    def settle(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        """The step's time has passed: tokens exist, requests end."""
        batch.now_ns = now_ns
        ended = False
        for request, _, samples in plan.entries:
            if samples and process_token(batch, request, self.max_model_len):
                ended = True
        if ended:
            remove_ended(batch)


def _priority(request: Request) -> tuple[int, int, str]:
    """Order of the waiting queue under the priority policy (`v1/request.py`, `__lt__`)."""
    return request.priority, request.arrival_ns, request.id

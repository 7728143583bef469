"""The scheduler of vLLM 0.6.3.post1 (`core/scheduler.py`), to be read beside its source.

A step is prompts *or* decodes; with chunked prefill it is both, running requests first. Growth
needs a free block for every running sequence, even where its last block has room. The victim of
a shortage is the tail of the running queue: recomputed if it has one sequence, else swapped. The
watermark guards admissions and swap-ins, not growth. Prefix hits reduce neither the token budget
nor the admission need.
"""

from __future__ import annotations

from collections import deque

from kvsim.plan import Plan
from kvsim.recorder import BLOCKED
from kvsim.request import RUNNING, SWAPPED, WAITING, Request
from kvsim.schedule import vllm063_deaths as deaths
from kvsim.schedule.batch import Batch
from kvsim.schedule.groups import by_priority, count, remove_ended, width
from kvsim.schedule.victims import Victim, tail
from kvsim.schedule.vllm063_outputs import process_outputs

OK, LATER, NEVER = range(3)
_SLOTS, _TOKENS, _BLOCKS, _WATERMARK, _SWAPPED = map(
    BLOCKED.index, ("slots", "tokens", "blocks", "watermark", "swapped")
)


class Vllm063:
    """vLLM 0.6.3.post1 with synchronous output processing."""

    def __init__(
        self,
        *,
        block_size: int,
        num_gpu_blocks: int,
        max_model_len: int,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        enable_chunked_prefill: bool = False,
        enable_prefix_caching: bool = False,
        preemption_mode: str | None = None,
        scheduling_policy: str = "fcfs",
        watermark: float = 0.01,
        victim: Victim | None = None,
    ) -> None:
        if max_num_batched_tokens is None:
            max_num_batched_tokens = 512 if enable_chunked_prefill else max(max_model_len, 2048)
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunked = enable_chunked_prefill
        self.whole_blocks = enable_prefix_caching
        """Chunks end on block boundaries."""
        self.preemption_mode = preemption_mode
        self.priority = scheduling_policy == "priority" and not enable_chunked_prefill
        self.watermark_blocks = int(watermark * num_gpu_blocks)
        self.victim = victim or tail
        self.prompt_limit = (
            max_model_len if enable_chunked_prefill else min(max_model_len, max_num_batched_tokens)
        )
        self._tokens = 0
        self._seqs = 0
        self._check()
        self._start()

    def _start(self) -> None:
        """State of a variant of the engine."""

    def _check(self) -> None:
        """Refuse at start-up what the engine refuses (`config.py`, `SchedulerConfig`)."""
        tokens = self.max_num_batched_tokens
        if tokens < self.max_model_len and not self.chunked:
            raise ValueError(
                f"max_num_batched_tokens ({tokens}) is below max_model_len ({self.max_model_len}):"
                " raise it, lower --max-model-len, or use --enable-chunked-prefill"
            )
        if tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({tokens}) is below max_num_seqs ({self.max_num_seqs}):"
                " every running sequence needs one token a step"
            )

    # -- composing a step ------------------------------------------------------------------------

    def compose(self, batch: Batch, now_ns: int) -> Plan:
        """Decide what the next step does."""
        plan = batch.begin(now_ns)
        self._tokens = 0
        self._seqs = 0
        if self.chunked:
            self._compose_chunked(batch)
        else:
            self._compose_default(batch)
        plan.batched_tokens = self._tokens
        return batch.composed()

    def _compose_default(self, batch: Batch) -> None:
        self._seqs = sum(map(width, batch.running))
        prompts: list[tuple[Request, int]] = []
        if not batch.swapped:
            prompts = self._prompts(batch)
        elif batch.waiting:
            batch.plan.blocked = _SWAPPED
        swapped_out: list[Request] = []
        victims: list[Request] = []
        decodes: list[tuple[Request, int]] = []
        back: list[tuple[Request, int]] = []
        if not prompts:
            if self.priority:
                self._preempt_by_priority(batch)
            decodes = self._running(batch, victims, swapped_out)
            if not (victims or swapped_out):
                back = self._swap_in(batch)
        batch.waiting.extendleft(victims)
        batch.running.extend(request for request, _ in (*prompts, *decodes, *back))
        batch.swapped.extend(swapped_out)
        _run(batch, prompts, [*decodes, *back])

    def _compose_chunked(self, batch: Batch) -> None:
        swapped_out: list[Request] = []
        victims: list[Request] = []
        running = self._running(batch, victims, swapped_out)
        back: list[tuple[Request, int]] = []
        if not (victims or swapped_out):
            back = self._swap_in(batch)
        infeasible = batch.plan.ignored
        batch.plan.ignored = []
        prompts = self._prompts(batch)
        batch.plan.ignored += infeasible
        batch.waiting.extendleft(victims)
        batch.swapped.extend(swapped_out)
        running_prefills, running_decodes = _by_stage(running)
        back_prefills, back_decodes = _by_stage(back)
        for entries in (back_decodes, back_prefills, running_decodes, running_prefills, prompts):
            batch.running.extend(request for request, _ in entries)
        _run(batch, prompts, [*running_prefills, *back_prefills, *running_decodes, *back_decodes])

    def _prompts(self, batch: Batch) -> list[tuple[Request, int]]:
        """Admit from the head of the waiting queue until one is refused.

        `core/scheduler.py`, `_schedule_prefills`.
        """
        admitted: list[tuple[Request, int]] = []
        waiting, plan = batch.waiting, batch.plan
        while waiting:
            request = waiting[0]
            if count(request, WAITING) != 1:
                raise deaths.swapped_in_waiting(request)
            tokens = self._new_tokens(request, WAITING, self.chunked)
            if tokens > self.prompt_limit:
                waiting.popleft()
                batch.ignore(request, "too-long")
                continue
            verdict = self._admission(batch, request)
            if verdict == NEVER:
                waiting.popleft()
                batch.ignore(request, "never-fits")
                continue
            if verdict == LATER:
                enough = batch.blocks.admission_free >= batch.blocks.admission_need(request)
                plan.blocked = _WATERMARK if enough else _BLOCKS
            elif tokens == 0 or self._tokens + tokens > self.max_num_batched_tokens:
                plan.blocked = _TOKENS
            elif self._seqs + width(request) > self.max_num_seqs:
                plan.blocked = _SLOTS
            else:
                batch.admit(request)
                admitted.append((request, tokens))
                self._tokens += tokens
                self._seqs += width(request)
                continue
            request.blocked_steps += 1
            break
        return admitted

    def _running(
        self, batch: Batch, victims: list[Request], swapped_out: list[Request]
    ) -> list[tuple[Request, int]]:
        """Let running requests grow, those behind giving way where blocks run out."""
        scheduled: list[tuple[Request, int]] = []
        running = batch.running
        self._begin_running(batch)
        while running:
            request = running[0]
            tokens = self._new_tokens(request, RUNNING, self.chunked)
            if tokens == 0:
                break
            running.popleft()
            if self._stopped(batch, request):
                continue
            if not self._make_room(batch, request, victims, swapped_out):
                continue
            batch.grow(request)
            scheduled.append((request, tokens))
            self._tokens += tokens
            if self.chunked:
                self._seqs += width(request)
        return scheduled

    def _make_room(
        self, batch: Batch, request: Request, victims: list[Request], swapped_out: list[Request]
    ) -> bool:
        """Preempt until `request` can grow; False where it had to go itself."""
        blocks = batch.blocks
        while True:
            need = 0
            for sequence in request.sequences:
                if sequence.state == RUNNING:
                    need += blocks.growth_need(sequence)
            if need <= blocks.gpu.free:
                return True
            victim = request
            if batch.running:
                victim = self.victim(batch.running, blocks)
                batch.running.remove(victim)
            if not self._ended_meanwhile(batch, victim):
                means = self._preempt(batch, victim, batch.plan.swaps_out)
                (swapped_out if means == "swap" else victims).append(victim)
            if victim is request:
                return False

    def _swap_in(self, batch: Batch) -> list[tuple[Request, int]]:
        """Bring swapped requests back, in order, until one does not fit (`_schedule_swapped`)."""
        back: list[tuple[Request, int]] = []
        swapped, blocks = batch.swapped, batch.blocks
        while swapped:
            request = swapped[0]
            moving = [s for s in request.sequences if s.state == SWAPPED]
            need = blocks.swap_need(moving, blocks.gpu)
            if blocks.gpu.size < need:
                # Its CPU blocks stay taken for ever, as in the engine.
                swapped.popleft()
                batch.ignore(request, "outgrew-pool")
                continue
            if blocks.gpu.free - need < self.watermark_blocks:
                break
            tokens = self._new_tokens(request, SWAPPED, chunking=False)
            if tokens == 0 or not self._fits(tokens, width(request)):
                break
            batch.swap_in(request)
            batch.grow(request)
            back.append((request, tokens))
            self._tokens += tokens
            self._seqs += width(request)
        return back

    def _preempt_by_priority(self, batch: Batch) -> None:
        """Make the worst of the running give way to a better head of the waiting queue."""
        running = deque(sorted(batch.running, key=by_priority))
        waiting = batch.waiting
        if waiting:
            head = waiting.popleft()
            tokens = self._new_tokens(head, WAITING, chunking=False)
            while running and by_priority(running[-1]) > by_priority(head):
                if self._admission(batch, head) == OK and self._fits(tokens, width(head)):
                    break
                victim = running.pop()
                self._seqs -= width(victim)
                # The engine drops the block pairs of a victim swapped out here.
                self._preempt(batch, victim, [])
                waiting.appendleft(victim)
            waiting.appendleft(head)
            batch.waiting = deque(sorted(waiting, key=by_priority))
        batch.running = running

    # -- rules -----------------------------------------------------------------------------------

    def _new_tokens(self, request: Request, state: int, chunking: bool) -> int:
        """Tokens that the sequences of a request in `state` would take on in this step."""
        tokens = 0
        number = 0
        for sequence in request.sequences:
            if sequence.state == state:
                number += 1
                tokens += sequence.length - sequence.computed if sequence.prompt_stage else 1
        if chunking and number == 1:
            if self.whole_blocks and self.max_num_batched_tokens % self.block_size:
                raise deaths.chunk_of_part_blocks(request)
            left = self.max_num_batched_tokens - self._tokens
            if tokens > left:
                tokens = left - left % self.block_size if self.whole_blocks else left
        return tokens

    def _fits(self, tokens: int, seqs: int) -> bool:
        return (
            self._tokens + tokens <= self.max_num_batched_tokens
            and self._seqs + seqs <= self.max_num_seqs
        )

    def _admission(self, batch: Batch, request: Request) -> int:
        """Whether a waiting request gets its blocks (`core/block_manager.py:108`)."""
        blocks = batch.blocks
        need = blocks.admission_need(request)
        watermark = self.watermark_blocks if blocks.grows else 0
        if blocks.admission_total - need < watermark:
            return NEVER
        return OK if blocks.admission_free - need >= watermark else LATER

    def _preempt(self, batch: Batch, victim: Request, pairs: list[tuple[int, int]]) -> str:
        """Take the blocks of a victim; answers the means (S:1454)."""
        means = self.preemption_mode or ("recompute" if width(victim) == 1 else "swap")
        if means == "swap":
            pairs.extend(batch.swap_out(victim))
            return means
        if count(victim, RUNNING) != 1:
            raise deaths.recompute_of_many(victim)
        batch.preempt(victim)
        return means

    # -- what asynchronous output processing does otherwise --------------------------------------

    def _begin_running(self, batch: Batch) -> None:
        """The running requests are about to be looked at."""

    def _stopped(self, batch: Batch, request: Request) -> bool:
        """Whether a running request is left out because it is about to end."""
        return False

    def _ended_meanwhile(self, batch: Batch, victim: Request) -> bool:
        """Whether a victim turns out to have ended already."""
        return False

    def overlap(self, batch: Batch, now_ns: int) -> None:
        """What the engine does while the model runs."""

    # -- after the step --------------------------------------------------------------------------

    def settle(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        """The step's time has passed: tokens exist, samples fork, requests end."""
        batch.now_ns = now_ns
        if process_outputs(batch, plan, self.max_model_len):
            remove_ended(batch)


def _by_stage(
    entries: list[tuple[Request, int]],
) -> tuple[list[tuple[Request, int]], list[tuple[Request, int]]]:
    prefills = [entry for entry in entries if entry[0].sequences[0].prompt_stage]
    decodes = [entry for entry in entries if not entry[0].sequences[0].prompt_stage]
    return prefills, decodes


def _run(
    batch: Batch, prompts: list[tuple[Request, int]], others: list[tuple[Request, int]]
) -> None:
    """Put the entries of the batch into the plan, in batch order.

    The first sequence decides what a request counts as. So a request whose first sample has ended
    and whose last one is computed again is a decode, of all the tokens it was admitted with.
    """
    for entries, admitted in ((prompts, True), (others, False)):
        for request, tokens in entries:
            if not request.sequences[0].prompt_stage:
                batch.run_decode(request, tokens if admitted else 1)
            elif len(request.sequences) == 1:
                batch.run_prefill(request, tokens)
            else:
                raise deaths.prefill_of_many(request)

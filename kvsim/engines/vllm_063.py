"""The scheduler of vLLM 0.6.3.post1 (`core/scheduler.py`), to be read beside its source.

A step is prompts *or* decodes; with chunked prefill it is both, running requests first. Growth
requires a free block for every running sequence, even if its last block has room. If blocks run
short, the tail of the running queue is preempted: recomputed if it has one sequence, else swapped.
The watermark guards admissions and swap-ins, not growth. Prefix hits reduce neither the token
budget nor the admission need.
"""

from __future__ import annotations

from collections import deque
from functools import partial

from kvsim.engine.batch import Batch, GiveWay
from kvsim.engine.plan import Plan
from kvsim.engine.request import RUNNING, SWAPPED, WAITING, Request
from kvsim.engine.scheduler import Scheduler, compute
from kvsim.engine.tables import Tables, waiting_sequence
from kvsim.engines import vllm_063_deaths as deaths
from kvsim.rules.groups import by_priority, count, width
from kvsim.rules.means import Prices, make_means
from kvsim.rules.requeue import make_requeue
from kvsim.rules.victims import Victim, tail
from kvsim.schema import BLOCKED

SLOTS, TOKENS, BLOCKS, WATERMARK, SWAPPED_OUT = map(
    BLOCKED.index, ("slots", "tokens", "blocks", "watermark", "swapped")
)

Admissions = list[tuple[Request, int, int]]
"""A list of (request, tokens that it takes on, tokens charged to the budget)."""

Entries = list[tuple[Request, int]]
"""A list of (running or swapped request, tokens that it takes on)."""


class Vllm063(Scheduler):
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
        requeue: str | None = None,
        prices: Prices | None = None,
    ) -> None:
        if max_num_batched_tokens is None:
            max_num_batched_tokens = 512 if enable_chunked_prefill else max(max_model_len, 2048)
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunked = enable_chunked_prefill
        self.whole_blocks = enable_prefix_caching
        """Whether chunks end on block boundaries."""
        self.priority = scheduling_policy == "priority" and not enable_chunked_prefill
        self.means = make_means(preemption_mode, prices, self.priority)
        self.watermark_blocks = int(watermark * num_gpu_blocks)
        self.victim = victim or tail
        self.requeue = make_requeue(requeue, sorts=self.priority)
        self.prompt_limit = (
            max_model_len if enable_chunked_prefill else min(max_model_len, max_num_batched_tokens)
        )
        self.longest_sequence = max_model_len + 1
        self._tokens = 0
        self._seqs = 0
        self._check()
        self._start()

    def _start(self) -> None:
        """Sets up the state of a variant of the engine."""

    def _check(self) -> None:
        """Refuses at start-up what the engine refuses (`config.py`, `SchedulerConfig`)."""
        tokens = self.max_num_batched_tokens
        if tokens < self.max_model_len and not self.chunked:
            raise ValueError(
                f"max_num_batched_tokens ({tokens}) is below max_model_len ({self.max_model_len}):"
                " raise it, lower --max-model-len, or use --enable-chunked-prefill"
            )
        if tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({tokens}) is below max_num_seqs ({self.max_num_seqs}):"
                " every running sequence needs one token a step; raise it, or lower --max-num-seqs"
            )

    # -- composing a step ------------------------------------------------------------------------

    def compose(self, batch: Batch, now_ns: int) -> Plan:
        """Composes the next step."""
        plan = batch.begin(now_ns)
        self._tokens = self._seqs = 0
        if self.chunked:
            self._compose_chunked(batch)
        else:
            self._compose_default(batch)
        plan.batched_tokens = self._tokens
        return batch.composed()

    def _compose_default(self, batch: Batch) -> None:
        self._seqs = batch.num_together + sum(map(width, batch.others))
        prompts: Admissions = []
        if not batch.swapped:
            prompts = self._prompts(batch)
        elif batch.waiting:
            batch.plan.blocked = SWAPPED_OUT
        swapped_out: list[Request] = []
        victims: list[Request] = []
        decodes: Entries = []
        back: Entries = []
        if not prompts:
            if self.priority:
                self._preempt_by_priority(batch)
            decodes = self._running(batch, victims, swapped_out)
            if not (victims or swapped_out):
                back = self._swap_in(batch)
        self._give_up(batch, victims, swapped_out)
        for entries in (prompts, decodes, back):
            if entries:
                batch.others.extend([entry[0] for entry in entries])
        self._run(batch, prompts, [], [*decodes, *back])

    def _compose_chunked(self, batch: Batch) -> None:
        swapped_out: list[Request] = []
        victims: list[Request] = []
        running = self._running(batch, victims, swapped_out)
        back: Entries = []
        if not (victims or swapped_out):
            back = self._swap_in(batch)
        infeasible = batch.plan.ignored
        batch.plan.ignored = []
        prompts = self._prompts(batch)
        batch.plan.ignored += infeasible
        self._give_up(batch, victims, swapped_out)
        running_prefills, running_decodes = by_stage(running)
        back_prefills, back_decodes = by_stage(back)
        if back:
            batch.lead(entry[0] for entry in (*back_decodes, *back_prefills))
        for entries in (running_decodes, running_prefills, prompts):
            if entries:
                batch.others.extend([entry[0] for entry in entries])
        prefills, decodes = running_prefills + back_prefills, running_decodes + back_decodes
        self._run(batch, prompts, prefills, decodes)

    def _give_up(self, batch: Batch, victims: list[Request], swapped_out: list[Request]) -> None:
        """Puts preempted requests into their queues, in this order."""
        for victim in victims:
            self.requeue(batch.waiting, victim)
        batch.swapped.extend(swapped_out)

    def _prompts(self, batch: Batch) -> Admissions:
        """Admits requests from the head of the waiting queue until one is refused.

        `core/scheduler.py`, `_schedule_prefills`.
        """
        admitted: Admissions = []
        waiting, plan, blocks = batch.waiting, batch.plan, batch.blocks
        hits_save = blocks.hits_save
        while waiting:
            request = waiting[0]
            if count(request, WAITING) != 1:
                raise deaths.swapped_in_waiting(request)
            saved = self._saved(batch, request) if hits_save.charged else 0
            tokens = self._new_tokens(request, WAITING, self.chunked, saved)
            need = blocks.admission_need(request)
            reason = self.turns_away(blocks, saved + tokens, need)
            if reason:
                waiting.popleft()
                batch.ignore(request, reason)
                continue
            asked = tokens if hits_save.tested or self.chunked else saved + tokens
            if saved + tokens == 0:
                # Not even one token is left of the budget.
                asked = self.max_num_batched_tokens + 1
            plan.blocked = self._hindrance(batch, request, need, asked)
            if plan.blocked:
                request.blocked_steps += 1
                break
            batch.admit(request)
            admitted.append((request, saved + tokens, tokens))
            self._tokens += tokens
            self._seqs += width(request)
        return admitted

    def _running(
        self, batch: Batch, victims: list[Request], swapped_out: list[Request]
    ) -> list[tuple[Request, int]]:
        """Lets running requests grow; later ones are preempted if blocks run short."""
        scheduled: list[tuple[Request, int]] = []
        running = batch.others
        self._begin_running(batch)
        if not self.priority:
            self._lead(batch, victims, swapped_out)
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
        """Preempts until `request` can grow. Returns False if it had to go itself."""
        blocks = batch.blocks
        while True:
            need = 0
            for sequence in request.sequences:
                if sequence.state == RUNNING:
                    need += blocks.growth_need(sequence)
            if need <= blocks.gpu.free:
                return True
            victim = request
            if batch.others:
                victim = self.victim(batch.others, blocks)
                batch.others.remove(victim)
            self._give_way(batch, victim, victims, swapped_out)
            if victim is request:
                return False

    def _give_way(
        self, batch: Batch, victim: Request, victims: list[Request], swapped_out: list[Request]
    ) -> None:
        """Frees or swaps the blocks of a victim, unless it turns out to have ended."""
        if not self._ended_meanwhile(batch, victim):
            means = self._preempt(batch, victim, batch.plan.swaps_out)
            (swapped_out if means == "swap" else victims).append(victim)

    def _lead(self, batch: Batch, victims: list[Request], swapped_out: list[Request]) -> None:
        """Lets the leading requests that only decode grow, all at once."""
        give_way: GiveWay | None = None
        if self.victim is tail:
            give_way = partial(self._give_way, batch, victims=victims, swapped_out=swapped_out)
        number = batch.decode_together(give_way, batch.blocks.spare_block)
        self._tokens += number
        if self.chunked:
            self._seqs += number

    def _run(self, batch: Batch, prompts: Admissions, prefills: Entries, decodes: Entries) -> None:
        """Puts the requests of a step into the plan, in batch order.

        The first sequence decides whether a request counts as prefill or decode. So a request whose
        first sample has ended and whose last one is recomputed is a decode, of all the tokens that
        it was admitted with.
        """
        for request, tokens, charged in prompts:
            if request.sequences[0].prompt_stage:
                _prefill(batch, request, tokens, charged)
            else:
                batch.run_decode(request, tokens)
        for request, tokens in prefills:
            _prefill(batch, request, tokens, tokens)
        batch.run_together()
        for request, tokens in decodes:
            if request.sequences[0].prompt_stage:
                _prefill(batch, request, tokens, tokens)
            else:
                batch.run_decode(request)

    def _swap_in(self, batch: Batch) -> list[tuple[Request, int]]:
        """Brings swapped requests back, in order, until one does not fit (`_schedule_swapped`)."""
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
        """Preempts the worst running requests for a waiting head of better priority."""
        running = deque(sorted(batch.running, key=by_priority))
        waiting = batch.waiting
        if waiting:
            head = waiting.popleft()
            tokens = self._new_tokens(head, WAITING, chunking=False)
            while running and by_priority(running[-1]) > by_priority(head):
                need = batch.blocks.admission_need(head)
                never = self._never(batch.blocks, need)
                if not never and not self._hindrance(batch, head, need, tokens):
                    break
                victim = running.pop()
                self._seqs -= width(victim)
                # The engine drops the block pairs of a victim swapped out here.
                self._preempt(batch, victim, [])
                waiting.appendleft(victim)
            waiting.appendleft(head)
            batch.waiting = deque(sorted(waiting, key=by_priority))
        batch.running = running

    # -- what asynchronous output processing does otherwise --------------------------------------

    def _begin_running(self, batch: Batch) -> None:
        """Called before the running requests are handled."""

    def _stopped(self, batch: Batch, request: Request) -> bool:
        """Whether a running request is left out because it is about to end."""
        return False

    def _ended_meanwhile(self, batch: Batch, victim: Request) -> bool:
        """Whether a victim turns out to have ended already."""
        return False

    # -- rules -----------------------------------------------------------------------------------

    def _new_tokens(self, request: Request, state: int, chunking: bool, saved: int = 0) -> int:
        """Returns the tokens that the sequences of a request in `state` would be charged for in
        this step."""
        number = 0
        tokens = -saved
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

    def _saved(self, batch: Batch, request: Request) -> int:
        """Returns the tokens of a waiting request that hits save from being charged."""
        left = self.max_num_batched_tokens - self._tokens
        if self.chunked and left < (self.block_size if self.whole_blocks else 1):
            return 0
        sequence = waiting_sequence(request)
        return batch.blocks.hit_tokens(sequence, batch.blocks.match(sequence))

    def _fits(self, tokens: int, seqs: int) -> bool:
        return (
            self._tokens + tokens <= self.max_num_batched_tokens
            and self._seqs + seqs <= self.max_num_seqs
        )

    def turns_away(self, blocks: Tables, tokens: int, need: int) -> str:
        """Returns why a waiting request that needs these tokens and blocks is given up;
        empty if it is not (`core/block_manager.py:108`)."""
        if tokens > self.prompt_limit:
            return "too-long"
        return "never-fits" if self._never(blocks, need) else ""

    def _never(self, blocks: Tables, need: int) -> bool:
        """Whether an admission that needs `need` blocks can never succeed."""
        return blocks.admission_total - need < self._watermark(blocks)

    def _hindrance(self, batch: Batch, request: Request, need: int, asked: int) -> int:
        """Returns why a waiting request has to wait, as an index into `BLOCKED`; 0 if it need not.

        `need` is the number of blocks that it takes; `asked` is the number of tokens that must fit
        the budget.
        """
        blocks, seqs = batch.blocks, self._seqs + width(request) - 1
        return self.refusal(blocks, blocks.admission_free, need, asked, self._tokens, seqs)

    def refusal(
        self, blocks: Tables, free: int, need: int, asked: int, tokens: int, seqs: int
    ) -> int:
        """Returns why the head of the waiting queue is not admitted, as an index into
        `schema.BLOCKED`; 0 if it is.

        It needs `need` of `free` blocks and asks for `asked` tokens; the step has `tokens` tokens
        and the engine `seqs` running sequences without it.
        """
        left = free - need
        if left < self.watermark_blocks and left < self._watermark(blocks):
            return WATERMARK if left >= 0 else BLOCKS
        if tokens + asked > self.max_num_batched_tokens:
            return TOKENS
        return SLOTS if seqs >= self.max_num_seqs else 0

    def _watermark(self, blocks: Tables) -> int:
        return self.watermark_blocks if blocks.grows else 0

    def _preempt(self, batch: Batch, victim: Request, pairs: list[tuple[int, int]]) -> str:
        """Preempts a victim and returns how, `recompute` or `swap` (`core/scheduler.py:1454`)."""
        means = self.means(victim, batch)
        if means == "swap":
            pairs.extend(batch.swap_out(victim))
            return means
        if count(victim, RUNNING) != 1:
            raise deaths.recompute_of_many(victim)
        batch.preempt(victim)
        return means


class Vllm063Async(Vllm063):
    """vLLM 0.6.3.post1 with asynchronous output processing, its default on CUDA (n = 1 only).

    The stop test of a step runs while the next one computes, so a finished request takes part in
    one more decode step and holds its blocks for one step longer (`engine/llm_engine.py`,
    `_process_model_outputs`).
    """

    lingers = True

    def _start(self) -> None:
        self._pending: dict[Request, None] = {}
        """Requests that got a token in the last step and have not had the stop test yet, in batch
        order."""

    def overlap(self, batch: Batch, now_ns: int) -> None:
        batch.now_ns = now_ns
        self._process_pending(batch)

    def settle(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        batch.now_ns = now_ns
        batch.publish(plan)
        for request, tokens, samples in batch.to_book(plan):
            if request.finish_ns < 0:
                compute(request, tokens)
                if samples:
                    batch.token(request.sequences[0])
                    self._pending[request] = None
        if not len(batch):
            self._process_pending(batch)

    def skip_stop_test(self) -> None:
        """Skips the stop test of the last step, because none of its requests has ended."""
        self._pending.clear()

    def last_tokens(self, batch: Batch, requests: list[Request]) -> None:
        self._pending.update(dict.fromkeys(requests))
        if any(request.sequences[0].length > self.max_model_len for request in requests):
            # They are left out of the next step; see `_stopped`.
            batch.dissolve()

    def _process_pending(self, batch: Batch) -> None:
        pending, self._pending = self._pending, {}
        ended = [self._process(batch, request) for request in pending]
        if any(ended):
            batch.remove_ended()
            for request in batch.aside:
                if request.finish_ns < 0:
                    batch.lose(request)
            batch.aside.clear()

    def _process(self, batch: Batch, request: Request) -> bool:
        """Runs the stop test of one request. Returns whether it ended."""
        sequence = request.sequences[0]
        if sequence.state > SWAPPED or not batch.stopped(sequence):
            return False
        batch.complete(request)
        return True

    def _begin_running(self, batch: Batch) -> None:
        if batch.aside:
            raise deaths.stopped_but_not_ended(batch.aside[0])

    def _stopped(self, batch: Batch, request: Request) -> bool:
        if request.sequences[0].length <= self.max_model_len:
            return False
        batch.aside.append(request)
        return True

    def _ended_meanwhile(self, batch: Batch, victim: Request) -> bool:
        if victim not in self._pending:
            return False
        del self._pending[victim]
        return self._process(batch, victim)


def by_stage(entries: Entries) -> tuple[Entries, Entries]:
    """Returns prefills and decodes, each in order."""
    prefills = [entry for entry in entries if entry[0].sequences[0].prompt_stage]
    decodes = [entry for entry in entries if not entry[0].sequences[0].prompt_stage]
    return prefills, decodes


def _prefill(batch: Batch, request: Request, tokens: int, charged: int) -> None:
    if len(request.sequences) > 1:
        raise deaths.prefill_of_many(request)
    batch.run_prefill(request, tokens, charged)

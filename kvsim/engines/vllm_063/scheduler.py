"""The scheduler of vLLM 0.6.3.post1 (`core/scheduler.py`), to be read beside its source.

A step is prompts *or* decodes; with chunked prefill it is both, running requests first. Growth
requires a free block for every running sequence, even if its last block has room. If blocks run
short, the tail of the running queue is preempted: recomputed if it has one sequence, else swapped.
The watermark guards admissions and swap-ins, not growth. Prefix hits reduce neither the token
budget nor the admission need.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from mypy_extensions import i64, mypyc_attr

from kvsim.core.batch import Batch
from kvsim.core.plan import BLOCKS, SLOTS, SWAP, SWAPPED_OUT, TOKENS, WATERMARK, Plan
from kvsim.core.request import RUNNING, SWAPPED, WAITING, Request
from kvsim.core.scheduler import Scheduler, check_seqs
from kvsim.engines.deaths import died
from kvsim.engines.vllm_063.blocks import Naive, waiting_sequence
from kvsim.engines.vllm_063.moves import (
    admit,
    compute,
    decode,
    grow,
    prefill,
    publish,
    recompute,
    sample,
    swap_in,
    swap_out,
    tables_of,
    taken_on,
)
from kvsim.policies.requeue import make_requeue
from kvsim.policies.victims import by_priority, make_means, tail

Entries = list[tuple[Request, int, int]]
"""A list of (request, tokens that each of its sequences takes on, tokens charged to the budget)."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Vllm063(Scheduler):
    """vLLM 0.6.3.post1 with synchronous output processing."""

    block_size: i64
    max_model_len: i64
    priority: bool
    """Whether requests are served by priority."""
    prompt_limit: i64
    """Tokens of the longest prompt that is served."""
    means: Any
    victim: Any
    requeue: Any
    """Its policies: how a victim is preempted, who it is, and where it waits (`kvsim.policies`)."""
    _line: i64
    """Where the engine raises if it is to recompute several samples."""
    _whole: bool
    _admitted: Entries
    """Prompts that the step begins."""
    _tokens: i64
    """Tokens charged to the budget of the step so far, and sequences that count against
    `max_num_seqs`."""
    _seqs: i64

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
        victim: Any = None,
        requeue: Any = None,
        prices: Any = None,
    ) -> None:
        """`victim`: `kvsim.policies.victims.Victim`; `prices`: `kvsim.policies.victims.Prices`.
        Raises `ValueError` for what the engine refuses."""
        if max_num_batched_tokens is None:
            max_num_batched_tokens = 512 if enable_chunked_prefill else max(max_model_len, 2048)
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.in_flight = 1
        self.chunked = enable_chunked_prefill
        self._line, self._whole = 1505, enable_prefix_caching
        self.priority = scheduling_policy == "priority" and not enable_chunked_prefill
        self.means = make_means(preemption_mode, prices, self.priority)
        self.watermark_blocks = int(watermark * num_gpu_blocks)
        self.victim = victim or tail
        self.requeue = make_requeue(requeue, sorts=self.priority)
        self.prompt_limit = (
            max_model_len if enable_chunked_prefill else min(max_model_len, max_num_batched_tokens)
        )
        self._admitted, self._tokens, self._seqs = [], 0, 0
        self._check()
        self._start()

    def _start(self) -> None:
        """Sets up the state of a variant of the engine."""

    @property
    def longest_sequence(self) -> int | None:
        return self.max_model_len + 1

    @property
    def whole_blocks(self) -> bool:
        return self._whole

    @property
    def remedies(self) -> str:
        """What helps where `max_num_batched_tokens` is below `max_model_len`."""
        return "raise it, lower --max-model-len, or use --enable-chunked-prefill"

    def _check(self) -> None:
        """Refuses at start-up what the engine refuses (`config.py`, `SchedulerConfig`)."""
        tokens = self.max_num_batched_tokens
        if tokens < self.max_model_len and not self.chunked:
            raise ValueError(
                f"max_num_batched_tokens ({tokens}) is below max_model_len ({self.max_model_len}):"
                f" {self.remedies}"
            )
        check_seqs(self.max_num_seqs, tokens)

    # -- composing a step ------------------------------------------------------------------------

    def compose(self, batch: Batch, now_ns: int) -> Any:
        plan: Plan = batch.begin(now_ns, self.max_num_seqs)
        blocks: Naive = tables_of(batch)
        self._admitted, self._tokens, self._seqs = [], 0, 0
        if self.chunked:
            self._compose_chunked(batch, blocks, plan)
        else:
            self._compose_default(batch, blocks, plan)
        plan.batched_tokens = self._tokens
        blocks.composed()
        return plan

    def _compose_default(self, batch: Batch, blocks: Naive, plan: Plan) -> None:
        request: Request
        for request in batch.running:
            self._seqs += request.width()
        entries: Entries = []
        if not batch.swapped:
            entries = self._prompts(batch, blocks, plan)
        elif batch.waiting:
            plan.blocked = SWAPPED_OUT
        if not entries:
            entries = self._decodes(batch, blocks, plan)
        batch.running += [entry[0] for entry in entries]
        self._run(batch, blocks, plan, entries)

    def _decodes(self, batch: Batch, blocks: Naive, plan: Plan) -> Entries:
        """Serves running requests, and swapped ones if nobody was preempted."""
        if self.priority:
            self._preempt_by_priority(batch, blocks)
        # Victims of a better priority are in the queue already, and keep nobody swapped out.
        before = len(plan.preempted)
        entries = self._running(batch, blocks, plan)
        self._give_up(batch, plan, before)
        if len(plan.preempted) == before:
            entries += self._swap_in(batch, blocks, plan)
        return entries

    def _compose_chunked(self, batch: Batch, blocks: Naive, plan: Plan) -> None:
        running = self._running(batch, blocks, plan)
        back: Entries = []
        if not plan.preempted:
            back = self._swap_in(batch, blocks, plan)
        # Given up on the way back: named behind the prompts that are given up, as in the engine.
        infeasible = plan.ignored
        plan.ignored = []
        prompts = self._prompts(batch, blocks, plan)
        plan.ignored += infeasible
        self._give_up(batch, plan, 0)
        # The engine's order, which decides who is served first and who gives way in the next step.
        batch.running = [
            *[entry[0] for entry in sorted(back, key=_prefills)],
            *batch.running,
            *[entry[0] for entry in sorted(running, key=_prefills)],
            *[entry[0] for entry in prompts],
        ]
        self._run(batch, blocks, plan, prompts + sorted(running + back, key=_decodes))

    def _run(self, batch: Batch, blocks: Naive, plan: Plan, entries: Entries) -> None:
        """Puts the requests of a step into the plan, in batch order.

        The first sequence decides whether a request counts as prefill or decode. So a request whose
        first sample has ended and whose last one is recomputed is a decode, of all the tokens that
        it was admitted with.
        """
        for request, tokens, charged in entries:
            if not request.prompt_stage:
                decode(batch, blocks, plan, request, tokens)
            elif request.forked:
                raise died("prefill-of-parallel-samples", request)
            else:
                prefill(batch, plan, request, tokens, charged)

    def _give_up(self, batch: Batch, plan: Plan, first: int) -> None:
        """Puts the requests that were preempted from the `first` on into their queues, in this
        order."""
        for victim, means in plan.preempted[first:]:
            if means == SWAP:
                batch.swapped.append(victim)
            else:
                self.requeue(batch.waiting, victim)

    def _prompts(self, batch: Batch, blocks: Naive, plan: Plan) -> Entries:
        """Admits requests from the head of the waiting queue until one is refused.

        `core/scheduler.py`, `_schedule_prefills`.
        """
        admitted: Entries = self._admitted
        waiting = batch.waiting
        charged: bool = blocks.hits_save.charged
        tested: bool = blocks.hits_save.tested
        while waiting:
            request: Request = waiting[0]
            if len(request.in_state(WAITING)) != 1:
                raise died("swapped-request-in-waiting-queue", request)
            saved = self._saved(blocks, request) if charged else 0
            tokens = self._new_tokens(request, WAITING, self.chunked, saved)
            need = blocks.admission_need(request)
            reason = self.turns_away(blocks, saved + tokens, need)
            if reason:
                waiting.popleft()
                batch.ignore(request, reason)
                continue
            asked = tokens if tested or self.chunked else saved + tokens
            if saved + tokens == 0:
                # Not even one token is left of the budget.
                asked = self.max_num_batched_tokens + 1
            plan.blocked = self._hindrance(blocks, request, need, asked)
            if plan.blocked:
                request.blocked_steps += 1
                break
            admit(batch, request)
            admitted.append((request, saved + tokens, tokens))
            self._tokens += tokens
            self._seqs += request.width()
        return admitted

    def _running(self, batch: Batch, blocks: Naive, plan: Plan) -> Entries:
        """Lets running requests grow; later ones are preempted if blocks run short."""
        scheduled: Entries = []
        running = deque(batch.running)
        lingers: bool = self.lingers
        if batch.aside:
            raise died("stopped-but-not-ended", batch.aside[0])
        while running:
            request: Request = running[0]
            tokens = self._new_tokens(request, RUNNING, self.chunked)
            # The budget is spent. Who follows keeps his place.
            if tokens == 0:
                break
            running.popleft()
            if lingers and request.length > self.max_model_len:
                # It is about to end.
                batch.aside.append(request)
                continue
            if not self._make_room(batch, blocks, plan, request, running):
                continue
            grow(blocks, plan, request)
            scheduled.append((request, tokens if request.prompt_stage else 1, tokens))
            self._tokens += tokens
            if self.chunked:
                self._seqs += request.width()
        batch.running = list(running)
        return scheduled

    def _make_room(
        self, batch: Batch, blocks: Naive, plan: Plan, request: Request, running: deque[Request]
    ) -> bool:
        """Preempts until `request` can grow; those in `running` come behind it. Returns False if it
        had to go itself."""
        while True:
            need = 0
            if request.state == RUNNING:
                need = blocks.growth_need(request)
            for sequence in request.forked:
                if sequence.state == RUNNING:
                    need += blocks.growth_need(sequence)
            if need <= blocks.gpu.free:
                return True
            victim: Request = self._choose(request, running, blocks)
            if victim is not request:
                running.remove(victim)
            if not self._ended_meanwhile(batch, victim):
                self._preempt(batch, victim, plan.swaps_out)
            if victim is request:
                return False

    def _choose(self, request: Request, behind: deque[Request], blocks: Naive) -> Request:
        """Returns who gives way to a request: itself if nobody comes behind it."""
        victim: Request = self.victim(behind, blocks) if behind else request
        return victim

    def _swap_in(self, batch: Batch, blocks: Naive, plan: Plan) -> Entries:
        """Brings swapped requests back, in order, until one does not fit (`_schedule_swapped`)."""
        back: Entries = []
        swapped = batch.swapped
        while swapped:
            request: Request = swapped[0]
            need = blocks.swap_need(request.in_state(SWAPPED), blocks.gpu)
            if self._outgrown(blocks, need):
                # Its CPU blocks stay taken for ever, as in the engine.
                swapped.popleft()
                batch.ignore(request, "outgrew-pool")
                continue
            if blocks.gpu.free - need < self.watermark_blocks:
                break
            tokens = self._new_tokens(request, SWAPPED, False)
            if tokens == 0 or self._excess(request, tokens):
                break
            swap_in(batch, request)
            grow(blocks, plan, request)
            back.append((request, tokens if request.prompt_stage else 1, tokens))
            self._tokens += tokens
            self._seqs += request.width()
        return back

    def _preempt_by_priority(self, batch: Batch, blocks: Naive) -> None:
        """Preempts the worst running requests for a waiting head of better priority."""
        running = sorted(batch.running, key=by_priority)
        waiting = batch.waiting
        if waiting:
            # As in the engine, whoever is at the head, as the queue is sorted only afterwards.
            head: Request = waiting.popleft()
            tokens = self._new_tokens(head, WAITING, False)
            while running and by_priority(running[-1]) > by_priority(head):
                need = blocks.admission_need(head)
                never = self._never(blocks, need)
                if not never and not self._hindrance(blocks, head, need, tokens):
                    break
                victim = running.pop()
                self._seqs -= victim.width()
                # The engine drops the block pairs of a victim swapped out here.
                self._preempt(batch, victim, [])
                waiting.appendleft(victim)
            waiting.appendleft(head)
            batch.waiting = deque(sorted(waiting, key=by_priority))
        batch.running = running

    # -- rules -----------------------------------------------------------------------------------

    def _new_tokens(self, request: Request, state: i64, chunking: bool, saved: int = 0) -> int:
        """Returns the tokens that the sequences of a request in `state` would be charged for in
        this step."""
        number = 0
        tokens: i64 = -saved
        if request.state == state:
            number = 1
            tokens += request.length - request.computed if request.prompt_stage else 1
        for sequence in request.forked:
            if sequence.state == state:
                number += 1
                tokens += sequence.length - sequence.computed if sequence.prompt_stage else 1
        if chunking and number == 1:
            if self._whole and self.max_num_batched_tokens % self.block_size:
                raise died("chunk-of-part-blocks", request)
            left: i64 = self.max_num_batched_tokens - self._tokens
            if tokens > left:
                # With the prefix cache on, a chunk ends at the end of a block.
                tokens = left - left % self.block_size if self._whole else left
        return tokens

    def _saved(self, blocks: Naive, request: Request) -> int:
        """Returns the tokens of a waiting request that hits save from being charged."""
        left = self.max_num_batched_tokens - self._tokens
        if self.chunked and left < (self.block_size if self._whole else 1):
            return 0
        return blocks.cached_tokens(waiting_sequence(request))

    def turns_away(self, blocks: Naive, tokens: int, need: int) -> str:
        """Returns why a waiting request that needs these tokens and blocks is given up;
        empty if it is not (`core/block_manager.py:108`)."""
        if tokens > self.prompt_limit:
            return "too-long"
        return "never-fits" if self._never(blocks, need) else ""

    def _never(self, blocks: Naive, need: int) -> bool:
        """Whether an admission that needs `need` blocks can never succeed."""
        return blocks.admission_total - need < self._watermark(blocks)

    def _outgrown(self, blocks: Naive, need: int) -> bool:
        """Whether the engine gives up a swapped request that needs `need` blocks."""
        return need > blocks.gpu.size

    def _hindrance(self, blocks: Naive, request: Request, need: int, asked: int) -> int:
        """Returns why a waiting request has to wait, as an index into `BLOCKED`; 0 if it need not.

        `need` is the number of blocks that it takes; `asked` is the number of tokens that must fit
        the budget.
        """
        left = blocks.admission_free - need
        if left < self._watermark(blocks):
            return WATERMARK if left >= 0 else BLOCKS
        return self._excess(request, asked)

    def _excess(self, request: Request, asked: int) -> int:
        """Returns which limit of a step a request exceeds by `asked` more tokens; 0: none."""
        if self._tokens + asked > self.max_num_batched_tokens:
            return TOKENS
        return SLOTS if self._seqs + request.width() > self.max_num_seqs else 0

    def _watermark(self, blocks: Naive) -> int:
        return self.watermark_blocks if blocks.grows else 0

    def _preempt(self, batch: Batch, victim: Request, pairs: list[tuple[int, int]]) -> None:
        """Preempts a victim, which joins no queue yet (`core/scheduler.py:1454`)."""
        if self.means(victim, batch) == SWAP:
            pairs += swap_out(batch, victim)
        elif len(victim.in_state(RUNNING)) != 1:
            raise died("recompute-of-parallel-samples", victim, line=self._line)
        else:
            recompute(batch, victim)

    def _ended_meanwhile(self, batch: Batch, victim: Request) -> bool:
        """Whether a victim turns out to have ended already."""
        return False

    def settle(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        """Settles a step once its time has passed: tokens exist, samples fork, requests end."""
        batch.now_ns = now_ns
        blocks: Naive = tables_of(batch)
        taken = taken_on(plan)
        publish(blocks, plan)
        before = len(batch.ended)
        k: i64
        for k, request in enumerate(plan.requests):
            compute(request, taken[k])
            if plan.yields[k]:
                sample(batch, blocks, request)
        if len(batch.ended) > before:
            batch.remove_ended()


@mypyc_attr(allow_interpreted_subclasses=True)
class Vllm063Async(Vllm063):
    """vLLM 0.6.3.post1 with asynchronous output processing, its default on CUDA (n = 1 only).

    The stop test of a step runs while the next one computes, so a finished request takes part in
    one more decode step and holds its blocks for one step longer (`engine/llm_engine.py`,
    `_process_model_outputs`).
    """

    _pending: dict[Request, None]
    """Requests that got a token in the last step and have not had the stop test yet, in batch
    order."""

    @property
    def lingers(self) -> bool:
        return True

    def _start(self) -> None:
        self._pending = {}

    def overlap(self, batch: Batch, now_ns: int) -> None:
        batch.now_ns = now_ns
        self._process_pending(batch)

    def settle(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        batch.now_ns = now_ns
        taken = taken_on(plan)
        publish(tables_of(batch), plan)
        k: i64
        for k, request in enumerate(plan.requests):
            if request.finish_ns < 0:
                compute(request, taken[k])
                if plan.yields[k]:
                    batch.token(request)
                    self._pending[request] = None
        # There is no further step beside which to do it.
        if not len(batch):
            self._process_pending(batch)

    def _process_pending(self, batch: Batch) -> None:
        pending, self._pending = self._pending, {}
        ended = False
        for request in pending:
            ended = self._process(batch, request) or ended
        if ended:
            batch.remove_ended()
            # The engine's fault: set aside for the stop test, they are forgotten with their blocks
            # if somebody else ended.
            for request in batch.aside:
                if request.finish_ns < 0:
                    batch.lose(request)
            batch.aside.clear()

    def _process(self, batch: Batch, request: Request) -> bool:
        """Runs the stop test of one request. Returns whether it ended."""
        if request.state > SWAPPED or not batch.stopped(request):
            return False
        tables_of(batch).free(request)
        batch.complete(request)
        return True

    def _ended_meanwhile(self, batch: Batch, victim: Request) -> bool:
        if victim not in self._pending:
            return False
        del self._pending[victim]
        return self._process(batch, victim)


def _prefills(entry: tuple[Request, int, int]) -> bool:
    return entry[0].prompt_stage


def _decodes(entry: tuple[Request, int, int]) -> bool:
    return not entry[0].prompt_stage

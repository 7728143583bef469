"""The scheduler of vLLM 0.3.3 (`core/scheduler.py`), to be read beside its source.

A step is prompts *or* decodes. Prompts are charged as the rectangle they are padded to, and are
taken on only while nothing is swapped out. A decode step sorts the running requests by age and
needs a free block for every sequence, whatever room its last block has; the youngest gives way,
recomputed if it has one sequence, else swapped. What is scheduled is finally sorted by request id,
as text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from operator import attrgetter
from typing import Any, Final

from mypy_extensions import i64, mypyc_attr

from kvsim.core.batch import Batch
from kvsim.core.plan import SWAP, Plan
from kvsim.core.request import RUNNING, SWAPPED, WAITING, Request
from kvsim.core.scheduler import Scheduler
from kvsim.core.schema import BLOCKED
from kvsim.engines.deaths import died
from kvsim.engines.vllm_063.blocks import Naive
from kvsim.engines.vllm_063.moves import (
    admit,
    complete,
    compute_sequence,
    decode,
    grow,
    prefill,
    publish,
    recompute,
    sample_sequence,
    swap_in,
    swap_out,
    tables_of,
    taken_on,
)
from kvsim.policies.requeue import make_requeue
from kvsim.policies.victims import make_means, tail

SLOTS: Final = BLOCKED.index("slots")
TOKENS: Final = BLOCKED.index("tokens")
BLOCKS: Final = BLOCKED.index("blocks")
WATERMARK: Final = BLOCKED.index("watermark")
SWAPPED_OUT: Final = BLOCKED.index("swapped")

_arrival = attrgetter("arrival_ns")
_id = attrgetter("id")


@mypyc_attr(allow_interpreted_subclasses=True)
class Vllm033(Scheduler):
    """vLLM 0.3.3."""

    max_model_len: i64
    max_paddings: i64
    """Most tokens of padding in a step of prompts."""
    means: Any
    victim: Any
    requeue: Any
    """Its policies: how a victim is preempted, who it is, and where it waits (`kvsim.policies`)."""

    def __init__(
        self,
        *,
        num_gpu_blocks: int,
        max_model_len: int,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        max_paddings: int = 256,
        preemption_mode: str | None = None,
        watermark: float = 0.01,
        victim: Any = None,
        requeue: Any = None,
        prices: Any = None,
    ) -> None:
        """`victim`: `kvsim.policies.victims.Victim`; `prices`: `kvsim.policies.victims.Prices`.
        Raises `ValueError` for what the engine refuses."""
        if max_num_batched_tokens is None:
            max_num_batched_tokens = max(max_model_len, 2048)
        self.max_model_len = max_model_len
        self.chunked, self.in_flight = False, 1
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_paddings = max_paddings
        self.means = make_means(preemption_mode, prices)
        self.watermark_blocks = int(watermark * num_gpu_blocks)
        self.victim = victim or tail
        self.requeue = make_requeue(requeue)
        self._check()

    @property
    def longest_sequence(self) -> int | None:
        return self.max_model_len + 1

    def _check(self) -> None:
        """Refuses at start-up what the engine refuses (`config.py`, `SchedulerConfig`)."""
        tokens = self.max_num_batched_tokens
        if tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens ({tokens}) is below max_model_len ({self.max_model_len}):"
                " raise it, or lower --max-model-len"
            )
        if tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({tokens}) is below max_num_seqs ({self.max_num_seqs}):"
                " raise it, or lower --max-num-seqs"
            )

    # -- composing a step ------------------------------------------------------------------------

    def compose(self, batch: Batch, now_ns: int) -> Any:
        """Composes the next step."""
        plan: Plan = batch.begin(now_ns, self.max_num_seqs)
        blocks: Naive = tables_of(batch)
        if batch.swapped and batch.waiting:
            plan.blocked = SWAPPED_OUT
        # A step that only gives up prompts is a prompt step, too: nobody decodes.
        if batch.swapped or not self._prompts(batch, blocks, plan):
            self._decodes(batch, blocks, plan)
        blocks.composed()
        return plan

    def _prompts(self, batch: Batch, blocks: Naive, plan: Plan) -> bool:
        """Admits requests from the head of the waiting queue until one is refused. Returns whether
        any left the queue."""
        waiting = batch.waiting
        admitted: list[Request] = []
        lengths: list[int] = []
        seqs = self._sequences(batch)
        while waiting:
            request: Request = waiting[0]
            length = _known(request)
            reason = self._never(blocks, request, length)
            if reason:
                waiting.popleft()
                batch.ignore(request, reason)
                continue
            plan.blocked = self._refusal(blocks, request, [*lengths, length], seqs)
            if plan.blocked:
                request.blocked_steps += 1
                break
            admit(batch, request)
            batch.running.append(request)
            admitted.append(request)
            lengths.append(length)
            seqs += request.width()
        if admitted:
            plan.batched_tokens = len(lengths) * max(lengths)
        for request in _in_batch_order(admitted):
            prefill(batch, plan, request, _known(request), _known(request))
        return bool(admitted or plan.ignored)

    def _never(self, blocks: Naive, request: Request, length: int) -> str:
        """Returns why the engine gives up a prompt; empty if it does not."""
        if length > min(self.max_model_len, self.max_num_batched_tokens):
            return "too-long"
        left = blocks.admission_total - blocks.admission_need(request)
        return "never-fits" if left < self.watermark_blocks else ""

    def _refusal(self, blocks: Naive, request: Request, lengths: list[int], seqs: i64) -> int:
        """Returns why the last of the prompts of these lengths is not admitted now; 0 if it is."""
        left = blocks.admission_free - blocks.admission_need(request)
        if left < self.watermark_blocks:
            return BLOCKS if left < 0 else WATERMARK
        padded = len(lengths) * max(lengths)
        if padded > self.max_num_batched_tokens:
            return TOKENS
        if seqs + request.width() > self.max_num_seqs:
            return SLOTS
        return TOKENS if padded - sum(lengths) > self.max_paddings else 0

    def _decodes(self, batch: Batch, blocks: Naive, plan: Plan) -> None:
        """Decodes one token for every running request. The youngest is preempted if blocks run
        short."""
        waiting_for = deque(sorted(batch.running, key=_arrival))
        batch.running = []
        request: Request
        while waiting_for:
            request = waiting_for.popleft()
            if self._make_room(batch, blocks, plan, request, waiting_for):
                grow(blocks, plan, request)
                batch.running.append(request)
        batch.swapped = deque(sorted(batch.swapped, key=_arrival))
        if not plan.preempted:
            self._swap_in(batch, blocks, plan)
        for request in _in_batch_order(batch.running):
            decode(batch, blocks, plan, request)
        plan.batched_tokens = plan.decode_seqs

    def _make_room(
        self,
        batch: Batch,
        blocks: Naive,
        plan: Plan,
        request: Request,
        younger: deque[Request],
    ) -> bool:
        """Preempts until a request can grow. Returns False if that request had to go itself."""
        while request.count(RUNNING) > blocks.gpu.free:
            victim: Request = self.victim(younger or (request,), blocks)
            self._preempt(batch, plan, victim)
            if victim is request:
                return False
            younger.remove(victim)
        return True

    def _preempt(self, batch: Batch, plan: Plan, victim: Request) -> None:
        """Frees or swaps the blocks of a victim and puts it into a queue (`_preempt`)."""
        if self.means(victim, batch) == SWAP:
            plan.swaps_out += swap_out(batch, victim)
            batch.swapped.append(victim)
        elif victim.count(RUNNING) == 1:
            recompute(batch, victim)
            self.requeue(batch.waiting, victim)
        else:
            raise died("recompute-of-parallel-samples", victim, line=458)

    def _swap_in(self, batch: Batch, blocks: Naive, plan: Plan) -> None:
        """Brings swapped requests back, oldest first, until one does not fit."""
        swapped = batch.swapped
        seqs = self._sequences(batch)
        while swapped:
            request: Request = swapped[0]
            moving = [each for each in request.sequences if each.state == SWAPPED]
            left = blocks.gpu.free - blocks.swap_need(moving, blocks.gpu)
            if left < self.watermark_blocks or seqs + request.width() > self.max_num_seqs:
                break
            swap_in(batch, request)
            grow(blocks, plan, request)
            batch.running.append(request)
            seqs += request.width()

    def _sequences(self, batch: Batch) -> i64:
        """Sequences that running requests may come to have."""
        found: i64 = 0
        request: Request
        for request in batch.running:
            found += request.width()
        return found

    # -- after the step --------------------------------------------------------------------------

    def settle(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        """Settles a step once its time has passed: tokens exist, samples fork, requests end."""
        batch.now_ns = now_ns
        blocks: Naive = tables_of(batch)
        taken = taken_on(plan)
        publish(blocks, plan, taken)
        before = len(batch.ended)
        k: i64
        for k, request in enumerate(plan.requests):
            for sequence in [each for each in request.sequences if each.state == RUNNING]:
                # Every prompt step draws n samples (`engine/llm_engine.py`). That includes one that
                # recomputes the last of earlier samples.
                children = request.n - 1 if sequence.prompt_stage else 0
                compute_sequence(sequence, taken[k])
                sample_sequence(batch, blocks, sequence, children)
            complete(batch, request)
        if len(batch.ended) > before:
            batch.remove_ended()


def _known(request: Request) -> int:
    """Returns the known tokens of a waiting or just admitted request of one sequence."""
    return next(each.length for each in request.sequences if each.state in (WAITING, RUNNING))


def _in_batch_order(requests: Iterable[Request]) -> list[Request]:
    """Sorts requests as `SchedulerOutputs` does, by LoRA and request id. It sorts if its set of
    LoRAs is not empty, and a request without LoRA counts as one."""
    return sorted(requests, key=_id)

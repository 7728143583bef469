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
from itertools import islice

from kvsim.engine.batch import Batch
from kvsim.engine.plan import Plan
from kvsim.engine.request import FINISHED, RUNNING, SWAPPED, WAITING, Request, Sequence
from kvsim.engine.scheduler import Scheduler, sample_sequence
from kvsim.engines.vllm_063_deaths import recompute_of_many
from kvsim.rules.groups import count, width
from kvsim.rules.means import Prices, make_means
from kvsim.rules.requeue import make_requeue
from kvsim.rules.victims import Victim, tail
from kvsim.schema import BLOCKED

_SLOTS, _TOKENS, _BLOCKS, _WATERMARK, _SWAPPED = map(
    BLOCKED.index, ("slots", "tokens", "blocks", "watermark", "swapped")
)


class Vllm033(Scheduler):
    """vLLM 0.3.3."""

    chunked = False

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
        victim: Victim | None = None,
        requeue: str | None = None,
        prices: Prices | None = None,
    ) -> None:
        if max_num_batched_tokens is None:
            max_num_batched_tokens = max(max_model_len, 2048)
        self.max_model_len = max_model_len
        self.longest_sequence = max_model_len + 1
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_paddings = max_paddings
        self.means = make_means(preemption_mode, prices)
        self.watermark_blocks = int(watermark * num_gpu_blocks)
        self.victim = victim or tail
        self.requeue = make_requeue(requeue)
        self._check()

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

    def compose(self, batch: Batch, now_ns: int) -> Plan:
        """Composes the next step."""
        plan = batch.begin(now_ns)
        if batch.swapped and batch.waiting:
            plan.blocked = _SWAPPED
        # A step that only gives up prompts is a prompt step, too: nobody decodes.
        if batch.swapped or not self._prompts(batch):
            self._decodes(batch)
        return batch.composed()

    def _prompts(self, batch: Batch) -> bool:
        """Admits requests from the head of the waiting queue until one is refused. Returns whether
        any left the queue."""
        waiting, plan = batch.waiting, batch.plan
        admitted: list[Request] = []
        lengths: list[int] = []
        seqs = sum(map(width, batch.running))
        while waiting:
            request = waiting[0]
            length = _known(request)
            reason = self._never(batch, request, length)
            if reason:
                waiting.popleft()
                batch.ignore(request, reason)
                continue
            plan.blocked = self._refusal(batch, request, [*lengths, length], seqs)
            if plan.blocked:
                request.blocked_steps += 1
                break
            batch.admit(request)
            batch.running.append(request)
            admitted.append(request)
            lengths.append(length)
            seqs += width(request)
        if admitted:
            plan.batched_tokens = len(lengths) * max(lengths)
        for request in _in_batch_order(admitted):
            batch.run_prefill(request, _known(request))
        return bool(admitted or plan.ignored)

    def _never(self, batch: Batch, request: Request, length: int) -> str:
        """Returns why the engine gives up a prompt; empty if it does not."""
        if length > min(self.max_model_len, self.max_num_batched_tokens):
            return "too-long"
        left = batch.blocks.admission_total - batch.blocks.admission_need(request)
        return "never-fits" if left < self.watermark_blocks else ""

    def _refusal(self, batch: Batch, request: Request, lengths: list[int], seqs: int) -> int:
        """Returns why the last of the prompts of these lengths is not admitted now; 0 if it is."""
        left = batch.blocks.admission_free - batch.blocks.admission_need(request)
        if left < self.watermark_blocks:
            return _BLOCKS if left < 0 else _WATERMARK
        padded = len(lengths) * max(lengths)
        if padded > self.max_num_batched_tokens:
            return _TOKENS
        if seqs + width(request) > self.max_num_seqs:
            return _SLOTS
        return _TOKENS if padded - sum(lengths) > self.max_paddings else 0

    def _decodes(self, batch: Batch) -> None:
        """Decodes one token for every running request. The youngest is preempted if blocks run
        short."""
        batch.running = running = deque(sorted(batch.running, key=_arrival))
        place = 0
        while place < len(running):
            if self._make_room(batch, place):
                batch.grow(running[place])
                place += 1
        batch.swapped = deque(sorted(batch.swapped, key=_arrival))
        if not batch.plan.preempted:
            self._swap_in(batch)
        for request in _in_batch_order(running):
            batch.run_decode(request)
        batch.plan.batched_tokens = batch.plan.decode_seqs

    def _make_room(self, batch: Batch, place: int) -> bool:
        """Preempts until the request at `place` can grow. Returns False if that request had to go
        itself."""
        running = batch.running
        request = running[place]
        while count(request, RUNNING) > batch.blocks.gpu.free:
            candidates = tuple(islice(running, place + 1, None)) or (request,)
            victim = self.victim(candidates, batch.blocks)
            self._preempt(batch, victim)
            running.remove(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, batch: Batch, victim: Request) -> None:
        """Frees or swaps the blocks of a victim and puts it into a queue (`_preempt`)."""
        means = self.means(victim, batch)
        if means == "swap":
            batch.plan.swaps_out.extend(batch.swap_out(victim))
            batch.swapped.append(victim)
        elif count(victim, RUNNING) == 1:
            batch.preempt(victim)
            self.requeue(batch.waiting, victim)
        else:
            raise recompute_of_many(victim, "AssertionError @ core/scheduler.py:458")

    def _swap_in(self, batch: Batch) -> None:
        """Brings swapped requests back, oldest first, until one does not fit."""
        swapped, blocks = batch.swapped, batch.blocks
        seqs = sum(map(width, batch.running))
        while swapped:
            request = swapped[0]
            moving = [s for s in request.sequences if s.state == SWAPPED]
            left = blocks.gpu.free - blocks.swap_need(moving, blocks.gpu)
            if left < self.watermark_blocks or seqs + width(request) > self.max_num_seqs:
                break
            batch.swap_in(request)
            batch.grow(request)
            batch.running.append(request)
            seqs += width(request)

    # -- after the step --------------------------------------------------------------------------

    def settle(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        """Settles a step once its time has passed: tokens exist, samples fork, requests end."""
        batch.now_ns = now_ns
        batch.publish(plan)
        before = len(batch.ended)
        for request, tokens, _ in plan.entries:
            for sequence in [s for s in request.sequences if s.state == RUNNING]:
                self._sampled(batch, sequence, tokens)
            if all(s.state == FINISHED for s in request.sequences):
                batch.finish(request)
        if len(batch.ended) > before:
            batch.remove_ended()

    def _sampled(self, batch: Batch, sequence: Sequence, tokens: int) -> None:
        """Books the token of a sequence, or of all n samples (`engine/llm_engine.py`).

        Every prompt step draws n samples. That includes one that recomputes the last of earlier
        samples.
        """
        children = sequence.request.n - 1 if sequence.prompt_stage else 0
        batch.compute(sequence, tokens)
        sample_sequence(batch, sequence, children)


def _known(request: Request) -> int:
    """Returns the known tokens of a waiting or just admitted request of one sequence."""
    return next(s.length for s in request.sequences if s.state in (WAITING, RUNNING))


def _arrival(request: Request) -> int:
    return request.arrival_ns


def _in_batch_order(requests: Iterable[Request]) -> list[Request]:
    """Sorts requests as `SchedulerOutputs` does, by LoRA and request id. It sorts if its set of
    LoRAs is not empty, and a request without LoRA counts as one."""
    return sorted(requests, key=lambda request: request.id)

"""What vLLM 0.6.3.post1 does with a step's tokens (`engine/output_processor/single_step.py`).

The prompt's blocks are shared by all samples: the first token forks the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from kvsim.batch.batch import Batch
from kvsim.batch.pace import Pace
from kvsim.plan import Plan
from kvsim.request import FINISHED, RUNNING, SWAPPED, Request, Sequence


class Stops(Pace, Protocol):
    """What the stop test needs to know of a scheduler."""

    max_model_len: int


def process_outputs(batch: Batch, plan: Plan, scheduler: Stops) -> int:
    """Book the tokens of a step in batch order; answers how many requests ended."""
    before = len(batch.ended)
    longest = scheduler.max_model_len
    for request, tokens, samples in in_batch_order(batch, plan, scheduler):
        computed(request, tokens)
        if samples:
            _sampled(batch, request, longest)
    return len(batch.ended) - before


def in_batch_order(batch: Batch, plan: Plan, pace: Pace) -> Iterable[tuple[Request, int, bool]]:
    """The entries of a step; what decodes together is settled between prefills and decodes."""
    if plan.together:
        return _around_the_cohort(batch, plan, pace)
    batch.settle_together(plan, pace)
    return plan.entries


def _around_the_cohort(batch: Batch, plan: Plan, pace: Pace) -> Iterator[tuple[Request, int, bool]]:
    place = len(plan.prefills)
    yield from plan.entries[:place]
    yield from batch.settle_together(plan, pace)
    yield from plan.entries[place:]


def stops(sequence: Sequence, max_model_len: int) -> bool:
    """Whether a sequence has its last token: end of sequence, or the length limit.

    A sequence can hold `max_model_len` + 1 tokens.
    """
    request = sequence.request
    generated = sequence.length - request.input_length
    if generated >= request.output_length or sequence.length > max_model_len:
        return True
    lengths = request.output_lengths
    return lengths is not None and generated == lengths[sequence.sample]


def stops_after(sequence: Sequence, max_model_len: int) -> int:
    """Tokens until `stops` becomes true of the sequence of a request with n = 1; 0: it is now."""
    request = sequence.request
    lengths, end = request.output_lengths, request.output_length
    if lengths is not None and lengths[0] < end:
        end = lengths[0]
    end += request.input_length
    if end > max_model_len:
        end = max_model_len + 1
    left = end - sequence.length
    return left if left > 0 else 0


def computed(request: Request, tokens: int) -> None:
    """The KV of `tokens` more tokens of each unfinished sequence exists."""
    for sequence in request.sequences:
        if sequence.state <= SWAPPED:
            sequence.computed = known = sequence.computed + tokens
            if known == sequence.length:
                sequence.prompt_stage = False


def _sampled(batch: Batch, request: Request, max_model_len: int) -> None:
    if request.n == 1:
        sequence = request.sequences[0]
        batch.token(sequence)
        if stops(sequence, max_model_len):
            batch.complete(request)
        return
    for sequence in [s for s in request.sequences if s.state == RUNNING]:
        children: list[Sequence] = []
        if len(request.sequences) == 1:
            children = [sequence.child(sample) for sample in range(request.n - 1)]
        for sampled in (*children, sequence):
            batch.token(sampled)
            if stops(sampled, max_model_len):
                sampled.state = FINISHED
        batch.fork(sequence, children)
        if sequence.state == FINISHED:
            batch.end_sequence(sequence)
    if all(s.state == FINISHED for s in request.sequences):
        batch.finish(request)

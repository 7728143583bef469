"""Moves of requests that may have several samples, and whose blocks may be swapped, as vLLM 0.6.3
and 0.3.3 make them."""

from __future__ import annotations

from mypy_extensions import i64

from kvsim.core import records
from kvsim.core.batch import Batch
from kvsim.core.plan import Plan
from kvsim.core.request import FINISHED, RUNNING, SWAPPED, WAITING, Request
from kvsim.engines.deaths import died
from kvsim.engines.vllm_063.blocks import Naive, Pairs


def tables_of(batch: Batch) -> Naive:
    """The block tables of a batch."""
    blocks = batch.blocks
    assert isinstance(blocks, Naive)
    return blocks


# -- while a step is composed --------------------------------------------------------------------


def admit(batch: Batch, request: Request) -> None:
    """Takes the head of the waiting queue out of it, and gives it its blocks."""
    blocks: Naive = tables_of(batch)
    batch.waiting.popleft()
    for sequence in request.in_state(WAITING):
        blocks.allocate(sequence)
        sequence.state = RUNNING
    batch.admitted(request)


def grow(blocks: Naive, plan: Plan, request: Request) -> None:
    """Gives a running request slots for its newest tokens. A shared block is copied first."""
    copies: Pairs
    if not request.forked:
        copies = blocks.append(request)
        if copies:
            plan.copies += copies
        return
    for sequence in request.in_state(RUNNING):
        plan.copies += blocks.append(sequence)


def recompute(batch: Batch, request: Request) -> None:
    """Frees the blocks of a running request; its KV will be computed again."""
    blocks: Naive = tables_of(batch)
    for sequence in request.in_state(RUNNING):
        blocks.free(sequence)
        batch.preempt(sequence)


def swap_out(batch: Batch, request: Request) -> Pairs:
    """Moves the blocks of a running request to the CPU, and returns the copies. Raises
    `EngineStopped` if the CPU pool is too small, as vLLM does."""
    blocks: Naive = tables_of(batch)
    moving = request.in_state(RUNNING)
    need = blocks.swap_need(moving, blocks.cpu)
    if need > blocks.cpu.free:
        rule = blocks.swap_space_rule
        raise died("swap-space-exhausted", request, need=need, free=blocks.cpu.free, rule=rule)
    pairs = blocks.swap_out(moving)
    batch.swap_out(request, pairs)
    return pairs


def swap_in(batch: Batch, request: Request) -> None:
    """Takes the head of the swapped queue out of it, and moves its blocks back to the GPU."""
    batch.swapped.popleft()
    batch.swap_in(request, tables_of(batch).swap_in(request.in_state(SWAPPED)))


def prefill(batch: Batch, plan: Plan, request: Request, scheduled: i64, charged: i64) -> None:
    """Adds a chunk of `scheduled` known tokens to the step, of which `charged` count against the
    token budget. Those that hit the prefix cache are not computed."""
    blocks: Naive = tables_of(batch)
    sequence: Request = request.in_state(RUNNING)[0]
    before: i64 = sequence.computed
    end: i64 = before + scheduled
    cached: i64 = 0
    known: i64 = blocks.scheduled(sequence, batch.now_ns)
    if known:
        least: i64 = blocks.full_hit.least
        cached = max(0, min(known, min(sequence.length, end) - least) - before)
    place: i64 = plan.num_requests
    plan.add(request, charged, 0)
    batch.chunk(plan, place, sequence, scheduled, cached)


def decode(batch: Batch, blocks: Naive, plan: Plan, request: Request, tokens: i64 = 1) -> None:
    """Adds one decode token for each running sequence of a request. With `tokens` above 1, the step
    also computes lost KV of a sample again."""
    place: i64 = plan.num_requests
    plan.add(request, tokens, 0)
    plan.yields[place] = 1
    if tokens > 1:
        plan.add_repair(tokens - 1)
        batch.note(request, records.RESUMED)
    if not request.forked:
        blocks.scheduled(request, batch.now_ns)
        plan.add_decode(request.length)
        return
    for sequence in request.in_state(RUNNING):
        blocks.scheduled(sequence, batch.now_ns)
        plan.add_decode(sequence.length)


# -- when its time has passed --------------------------------------------------------------------


def taken_on(plan: Plan) -> list[int]:
    """Of each request in a step, the tokens that it takes on, hits included."""
    k: i64
    tokens: list[int] = [plan.scheduled[k] for k in range(plan.num_requests)]
    for k in range(plan.num_chunks):
        place: i64 = plan.chunk_places[k]
        if place >= 0:
            tokens[place] = plan.chunk_tokens[k] + plan.chunk_cached[k]
    return tokens


def publish(blocks: Naive, plan: Plan) -> None:
    """Publishes blocks once the KV of a step exists, before its tokens are booked. Other requests
    may then share them."""
    if not blocks.publish_at.computed:
        return
    k: i64
    upto: dict[int, int] = {}
    for k in range(plan.num_chunks):
        place: i64 = plan.chunk_places[k]
        if place >= 0:
            upto[place] = plan.chunk_context[k] + plan.chunk_tokens[k]
    places = [*upto, *[each for each in range(plan.num_requests) if each not in upto]]
    requests = plan.requests
    for each in places:
        for sequence in requests[each].in_state(RUNNING):
            blocks.publish(sequence, upto.get(each, sequence.length))


def compute(request: Request, tokens: i64) -> None:
    """Books that the KV of `tokens` more tokens of each unfinished sequence of a request exists."""
    for sequence in request.sequences:
        if sequence.state <= SWAPPED:
            compute_sequence(sequence, tokens)


def compute_sequence(sequence: Request, tokens: i64) -> None:
    """Books that the KV of `tokens` more tokens of a sequence exists."""
    sequence.computed += tokens
    if sequence.computed == sequence.length:
        sequence.prompt_stage = False


def sample(batch: Batch, blocks: Naive, request: Request) -> None:
    """Books one more token of each running sequence of a request, and ends those with their last
    one.

    All samples share the blocks of the prompt: the first token forks the sequence (vLLM
    0.6.3.post1 `engine/output_processor/single_step.py`).
    """
    if request.n == 1:
        if batch.token(request):
            blocks.free(request)
            batch.complete(request)
        return
    for sequence in request.in_state(RUNNING):
        sample_sequence(batch, blocks, sequence, 0 if request.forked else request.n - 1)
    complete(batch, request)


def sample_sequence(batch: Batch, blocks: Naive, sequence: Request, children: i64) -> None:
    """Books one more token of a sequence and of each of the `children` forked from it."""
    forked = batch.fork(sequence, children)
    for sampled in (*forked, sequence):
        sampled.request.sampled_tokens += 1
        if batch.token(sampled):
            sampled.state = FINISHED
    # Before the parent may give back the blocks that they share.
    for child in forked:
        if child.state == RUNNING:
            blocks.fork(sequence, child)
    if sequence.state == FINISHED:
        blocks.free(sequence)


def complete(batch: Batch, request: Request) -> None:
    """Ends a request if all its samples have ended."""
    if all(each.state == FINISHED for each in request.sequences):
        batch.complete(request)

"""One pass of SGLang 0.5.23 over its waiting queue (`managers/schedule_policy.py`, `PrefillAdder`).

The unfinished chunk continues first. Then requests are taken on in the order of the queue; the
first one refused blocks all behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple, cast

from kvsim.engine.batch import Batch
from kvsim.engine.request import Request, Sequence
from kvsim.engines.sglang_blocks import SglangTables
from kvsim.engines.sglang_budget import Budget, Lives, State, life
from kvsim.engines.sglang_queue import Look, Standing
from kvsim.engines.sglang_radix import Node
from kvsim.errors import EngineStopped
from kvsim.schema import BLOCKED

SLOTS, TOKENS, BLOCKS = map(BLOCKED.index, ("slots", "tokens", "blocks"))


class Rules(NamedTuple):
    """Settings that stay the same in every pass."""

    slots: int
    """Most requests that may hold pages."""
    prefill_max_requests: int | None
    """Most requests of a pass; None for no limit."""
    preempts: bool
    """Whether running requests may be preempted."""
    preemption_threshold: int
    """Difference by which their priority must be worse."""
    clip_tokens: int
    """Most tokens that any request is expected to generate."""
    shortest_first: bool
    """Whether a chunk leaves room for shorter prefills."""


class Group:
    """The requests of a step. The running batch is a group, too."""

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        self.requests = list(requests)
        self.extends = False
        """Whether it computed prompts in its last step."""
        self.chunked: Request | None = None
        """The request whose prompt was unfinished when the group was made."""
        self.silent = True
        """Whether no request in it may generate a token."""
        self.computed_tokens = 0
        """Number of tokens that it computed when it was made; later steps count them again."""

    def let_go(self, leaving: Collection[Request | None] = ()) -> bool:
        """Removes ended requests, and those in `leaving`. Returns whether there were any."""
        stay = [each for each in self.requests if each.finish_ns < 0]
        if leaving:
            stay = [each for each in stay if each not in leaving]
        if len(stay) == len(self.requests):
            return False
        self.requests = stay
        return True


class Prefill:
    """One pass over the waiting queue (`PrefillAdder`)."""

    def __init__(
        self,
        rules: Rules,
        batch: Batch,
        budget: Budget,
        running: Group,
        standings: Mapping[Request, Standing],
        ratio: float,
        give_up: Callable[[Request, int], None],
    ) -> None:
        """`give_up` takes the pages of a running request; it is given how many requests remain."""
        self._rules, self._batch, self._budget = rules, batch, budget
        self._running, self._standings, self._ratio = running, standings, ratio
        self._give_up = give_up
        self._blocks = tables_of(batch)
        self._lives: Lives | None = None
        self._held = 0
        """Chosen requests that have had a slot before this pass."""
        self.chosen: list[Request] = []
        """The requests of the step. Their chunks end at `Standing.end`."""
        self.preempted: list[Request] = []
        """Running requests that were preempted by one with a better priority."""
        self.unfinished: Request | None = None
        """The request whose prompt remains unfinished after this step."""
        self.full = False
        """Whether the running batch is full."""
        self.refusal = 0
        """Why the head of the queue was refused, as an index into `kvsim.schema.BLOCKED`."""
        self.reserved = False
        """Whether memory was free for its prompt, but kept for what is still to be generated."""
        self.forgotten = 0
        """Number of unfinished prompts that the engine loses sight of, because it cuts another."""

    def choose(self, unfinished: Request | None, full: bool, looks: Mapping[Request, Look]) -> None:
        """Goes through the queue. `looks` holds what its order has already looked up."""
        self.unfinished, self.full = unfinished, full
        rules, batch, running = self._rules, self._batch, self._running
        if unfinished is not None:
            self._go_on(unfinished, looks)
        while batch.waiting and self._budget.state() is not State.OTHER:
            request = batch.waiting[0]
            new = len(self.chosen) - self._held
            slots = rules.slots - (batch.num_running - new) + self._held
            if len(self.chosen) >= min(rules.slots - len(running.requests), slots):
                self.full, self.refusal = True, SLOTS
            if self.full and not (rules.preempts and self._make_way(request)):
                break
            state = self._add(request)
            if state is not State.CONTINUE:
                self.refusal = TOKENS
                if state is State.NO_TOKEN:
                    self.refusal = BLOCKS
                    self.reserved = self._is_free(request)
                    self.full = bool(self.chosen or running.requests)
                break
        else:
            self.refusal = TOKENS
        if batch.waiting and self.refusal:
            batch.waiting[0].blocked_steps += 1

    def _is_free(self, request: Request) -> bool:
        """Whether memory that is not in use would hold the rest of a prompt."""
        rest = request.sequences[0].length - self._standings[request].prefix
        return self._budget.paged(rest) + self._blocks.block_size <= self._budget.now

    def _go_on(self, request: Request, looks: Mapping[Request, Look]) -> None:
        """Continues an unfinished prompt. SGLang does not test whether memory suffices for it."""
        budget, standing = self._budget, self._standings[request]
        rest = request.sequences[0].length - standing.prefix
        assert budget.chunk_tokens is not None
        most = min(budget.chunk_tokens, int(budget.left))
        if most <= 0:
            most = budget.chunk_tokens
        if self._rules.shortest_first:
            most = min(most, self._spared(rest, looks))
        expected = min(standing.limit_tokens, self._rules.clip_tokens) if rest <= most else 0
        self._held = 1
        self._take(request, min(rest, most), expected)
        if rest <= most:
            self.unfinished = None

    def _spared(self, rest: int, looks: Mapping[Request, Look]) -> int:
        """Returns the tokens that a chunk leaves to shorter prefills that wait."""
        budget = self._budget
        left, kept = budget.chunk_tokens or 0, 0
        if left < 2 * self._blocks.block_size:
            return left
        for request in self._batch.waiting:
            work = looks[request].work_tokens
            if work >= rest or kept + budget.paged(work) > left - self._blocks.block_size:
                break
            kept += budget.paged(work)
        return self._down(left - kept) if kept else left

    def _add(self, request: Request) -> State:
        """Tries to take on the head of the queue."""
        most, tree = self._rules.prefill_max_requests, self._blocks.gpu.tree
        sequence, standing = request.sequences[0], self._standings[request]
        standing.prefix, node = self._blocks.find(sequence, standing.node)
        standing.node = node
        standing.considered_tokens = sequence.length
        if most and len(self.chosen) >= most:
            return State.OTHER
        if standing.ignore_eos and not self._blocks.needs_keys:
            return self._add_exactly(request, standing, node)
        # What it hits is not there to be evicted.
        tree.lock(node)
        state, tokens = self._test(sequence, standing)
        if state is State.CONTINUE:
            self._admit(request, node, tokens)
            state = self._budget.state()
        tree.unlock(node)
        return state

    def _test(self, sequence: Sequence, standing: Standing) -> tuple[State, int]:
        """Returns whether a request can be taken on, and the tokens of its chunk."""
        budget, rules = self._budget, self._rules
        rest = sequence.length - standing.prefix
        generated = sequence.length - sequence.request.input_length
        expected = min(max(standing.limit_tokens - generated, 0), rules.clip_tokens)
        if rest + expected + self._blocks.block_size >= budget.left:
            return State.NO_TOKEN, 0
        if budget.chunk_tokens is None:
            full = self.chosen and budget.paged(rest) >= budget.prefill_tokens
            return (State.OTHER, 0) if full else (State.CONTINUE, rest)
        if budget.paged(rest) <= budget.chunk_tokens:
            return State.CONTINUE, rest
        if rules.shortest_first and self.unfinished is not None:
            return State.OTHER, 0
        end = self._down(standing.prefix + self._down(budget.chunk_tokens))
        tokens = end - standing.prefix
        return (State.CONTINUE, tokens) if tokens > 0 else (State.OTHER, 0)

    def _add_exactly(self, request: Request, standing: Standing, node: Node) -> State:
        """Tries to take on a request that ignores the end of sequence, where nothing is cached."""
        budget = self._budget
        rest = request.sequences[0].length
        need = budget.paged(rest) + self._blocks.block_size
        if need > min(budget.now, budget.left):
            return State.NO_TOKEN
        if self._lives is None:
            everybody = [request, *self._running.requests, *self.chosen]
            self._lives = Lives(map(self._life, everybody))
        else:
            self._lives.add(self._life(request))
        if not self._lives.hold(budget.now - need):
            return State.NO_TOKEN
        if budget.chunk_tokens is None or rest <= budget.chunk_tokens:
            self._admit(request, node, rest)
        elif budget.chunk_tokens <= 0:
            return State.OTHER
        else:
            self._admit(request, node, budget.chunk_tokens)
        return budget.state()

    def _life(self, request: Request) -> tuple[float, int]:
        standing = self._standings[request]
        factor = 1 if standing.ignore_eos else self._ratio
        return life(request, standing.limit_tokens, factor)

    def _admit(self, request: Request, node: Node, tokens: int) -> None:
        """Takes on `tokens` tokens of the head of the queue and locks its cached pages."""
        sequence, standing = request.sequences[0], self._standings[request]
        self._blocks.admit(sequence, node)
        self._batch.join(request)
        standing.retracted, standing.place = False, None
        cut = standing.prefix + tokens < sequence.length
        expected = 0 if cut else min(standing.limit_tokens, self._rules.clip_tokens)
        self._take(request, tokens, expected)
        if cut:
            self.forgotten += self.unfinished is not None
            self.unfinished = request

    def _take(self, request: Request, tokens: int, expected: int) -> None:
        standing = self._standings[request]
        standing.end = standing.prefix + tokens
        self.chosen.append(request)
        self._budget.charge(tokens, expected)

    def _make_way(self, request: Request) -> bool:
        """Preempts running requests of worse priority, the worst and newest first. Returns whether
        that made enough room."""
        rules, budget = self._rules, self._budget
        standings, running = self._standings, self._running
        own = standings[request]
        need = own.considered_tokens - own.prefix - budget.left
        need += min(own.limit_tokens, rules.clip_tokens)
        victims: list[Request] = []
        worst = sorted(
            (each for each in running.requests if each.finish_ns < 0),
            key=lambda each: (-standings[each].rank, -standings[each].entry),
        )
        for each in worst:
            if standings[each].rank - own.rank <= rules.preemption_threshold:
                break
            victims.append(each)
            need -= self._expected(each)
            if need <= 0:
                break
        if not victims or need > 0:
            return False
        left = len(running.requests)
        for each in [each for each in running.requests if each in victims]:
            budget.give_back(self._expected(each))
            left -= 1
            self._give_up(each, left)
        running.let_go(victims)
        self.preempted += victims
        return True

    def _down(self, tokens: int) -> int:
        size = self._blocks.block_size
        return tokens // size * size

    def _expected(self, request: Request) -> float:
        return expected_tokens([request], self._standings, self._ratio, self._rules.clip_tokens)


def expected_tokens(
    requests: Iterable[Request],
    standings: Mapping[Request, Standing],
    ratio: float,
    clip_tokens: int,
) -> float:
    """Returns the tokens that running requests are still expected to generate."""
    expected = 0.0
    for request in requests:
        standing = standings[request]
        rest = standing.limit_tokens - request.sequences[0].length + request.input_length
        if rest > clip_tokens:
            rest = clip_tokens
        expected += rest if standing.ignore_eos else rest * ratio
    return expected


def generated_tokens(request: Request) -> int:
    """Returns the number of known output tokens of a request."""
    return request.sequences[0].length - request.input_length


def tables_of(batch: Batch) -> SglangTables:
    """Returns the block manager, which must be one of SGLang's."""
    return cast(SglangTables, batch.blocks)


def out_of_memory(request: Request, need: int, free: int) -> EngineStopped:
    """Returns how the engine dies of a prefill that needs more pages than are free."""
    return EngineStopped(
        kind="engine-error",
        request_id=request.id,
        explanation=f"a prefill needs {need:,} pages, {free:,} are free: the next chunk of a prompt"
        " is taken on without a look at memory",
        remedy="give the engine more memory, or lower schedule_conservativeness no further",
        rule="RuntimeError @ srt/mem_cache/allocation.py:170",
    )

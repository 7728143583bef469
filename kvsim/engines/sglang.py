"""The scheduler of SGLang 0.5.23 (`managers/scheduler.py`, `managers/schedule_policy.py`).

A step either *extends* prompts or *decodes*. Nothing decodes as long as a prompt can be admitted.
An admission also reserves the tokens that running requests are expected to generate: what their
clients announced, times a *ratio* that falls with every decode step. If that was too optimistic and
memory runs out, requests are *retracted*: they lose their pages and go to the end of the queue.

```
 waiting ── prefill ──► extend batch ── next step ──► running batch ── decode ──► ... ──► finished
    ▲                        (an unfinished chunk goes on first)       │
    └────────────────────────────── retract ───────────────────────────┘
```
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from functools import partial
from itertools import count
from types import MappingProxyType

from kvsim.engine.batch import Batch
from kvsim.engine.plan import Plan
from kvsim.engine.request import Request, Stream
from kvsim.engine.scheduler import Scheduler
from kvsim.engines.sglang_budget import Budget, NewTokenRatio, bounded_interval, read_environment
from kvsim.engines.sglang_prefill import (
    SLOTS,
    Group,
    Prefill,
    Rules,
    expected_tokens,
    generated_tokens,
    out_of_memory,
    tables_of,
)
from kvsim.engines.sglang_queue import Engine, QueueOrder, StandIn, Standing
from kvsim.engines.sglang_remarks import remarks
from kvsim.engines.sglang_server import DEFAULT_MAX_PREFILL_TOKENS, max_running_requests
from kvsim.schema import SGLANG_COLUMNS

STOP_TOKENS = 5
"""A prompt is rejected if it is within this many tokens of the longest sequence."""


class Sglang(Scheduler):
    """SGLang 0.5.23 without overlap: a step is settled before the next is composed.

    Arguments have SGLang's names, but for those that every engine has: `max_num_seqs` is its
    `max_running_requests`, `max_num_batched_tokens` its `chunked_prefill_size`, `block_size` its
    `page_size`, `max_model_len` its `context_length`. `environment` has the names of `Environment`.
    """

    counts_composed = True
    gauged = SGLANG_COLUMNS

    def __init__(
        self,
        *,
        block_size: int,
        num_gpu_blocks: int,
        max_model_len: int,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int = 8192,
        enable_chunked_prefill: bool = True,
        max_prefill_tokens: int = DEFAULT_MAX_PREFILL_TOKENS,
        prefill_max_requests: int | None = None,
        max_queued_requests: int | None = None,
        min_free_slots_delay: int | None = None,
        prefill_decode_interval: int = 0,
        prefill_decode_interval_min_bs: int = 0,
        schedule_policy: str = "fcfs",
        schedule_conservativeness: float = 1.0,
        enable_mixed_chunk: bool = False,
        enable_priority_scheduling: bool = False,
        disable_priority_preemption: bool = False,
        schedule_low_priority_values_first: bool = False,
        priority_scheduling_preemption_threshold: int = 10,
        retraction_policy: str = "length",
        enable_prefix_caching: bool = True,
        environment: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        if schedule_policy == "shortest-prefill-first" and not enable_prefix_caching:
            raise ValueError("shortest-prefill-first looks at the radix cache; switch it on")
        if retraction_policy not in ("length", "priority"):
            raise ValueError(f"retraction_policy: {retraction_policy!r} is not length or priority")
        self._size = block_size
        self._pool_tokens = num_gpu_blocks * block_size
        own = max_running_requests(self._pool_tokens, max_model_len)
        self.max_num_seqs = own if max_num_seqs is None else max_num_seqs
        self._slots = min(self.max_num_seqs, self._pool_tokens // 2)
        self._delay = min(min_free_slots_delay or 0, self._slots)
        self._sign = 1 if schedule_low_priority_values_first else -1
        self.max_model_len = max_model_len
        self.chunked = enable_chunked_prefill
        # A prompt that is not cut may be of any length.
        self.max_num_batched_tokens = max_num_batched_tokens if self.chunked else max_model_len
        self.max_prefill_tokens = max_prefill_tokens
        self.max_queued_requests = max_queued_requests
        self.interval = bounded_interval(prefill_decode_interval)
        self.interval_min_seqs = prefill_decode_interval_min_bs
        self.mixes = enable_mixed_chunk and enable_chunked_prefill
        self.has_priorities = enable_priority_scheduling
        self.preempts = enable_priority_scheduling and not disable_priority_preemption
        self.retracts_by_priority = retraction_policy == "priority"
        env = read_environment(environment)
        self.retract_decode_steps = int(env.retract_decode_steps)
        threshold, clip = priority_scheduling_preemption_threshold, int(env.clip_max_new_tokens)
        shortest = schedule_policy == "shortest-prefill-first"
        self._rules = Rules(
            self._slots, prefill_max_requests, self.preempts, threshold, clip, shortest
        )
        self._ratio = NewTokenRatio(env, schedule_conservativeness)
        self.order = QueueOrder(schedule_policy, env, enable_priority_scheduling)
        self._begin()

    def _begin(self) -> None:
        """Sets the state of the engine before its first step."""
        self._idle = False
        """Whether the event loop found nothing to do and no result to wait for."""
        self.standings: dict[Request, Standing] = {}
        self._entries = count()
        self.running = Group()
        """The requests that decode together. Other requests hold pages as well: those whose prompts
        were computed last, and one with an unfinished prompt."""
        self.last: Group | None = None
        """The step composed last, if it ran."""
        self.unfinished: Request | None = None
        """The request whose prompt is computed in chunks and is not complete."""
        self.full = False
        """Whether the running batch was found to be full. If so, no admission is tried."""
        self._refusal = 0
        """Why the head of the queue was refused, as an index into `kvsim.schema.BLOCKED`."""
        self._happened: Counter[str] = Counter()
        """What a user may not expect → how often it happened."""
        self._armed = 0
        """Number of decode steps left before the next prefill."""
        self._counts = False
        """Whether one was counted just now."""
        self._computed_tokens = 0
        self.pending: deque[list[Request]] = deque()
        """Requests of the steps in flight."""
        self.turned_away: list[Request] = []
        """Requests that lost their place in the queue to a newcomer."""

    @property
    def ratio(self) -> float:
        """The expected share of the announced output tokens."""
        return self._ratio.now

    def gauges(self, batch: Batch) -> tuple[int, int]:
        """Returns the protected pages, and the new-token ratio in parts per million."""
        return tables_of(batch).gpu.tree.locked_pages, self._ratio.ppm

    def free_slots(self, batch: Batch) -> int:
        """Returns how many more requests could hold pages."""
        return self._slots - batch.num_running

    # -- requests come ---------------------------------------------------------------------------

    def arrive(self, batch: Batch, request: Request) -> None:
        """Accepts a request, or rejects it (`handle_generate_request`)."""
        prompt, size = request.input_length, self._size
        if prompt >= self.max_model_len:
            batch.refuse(request, "too-long")
            return
        longest = min(self.max_model_len - 1, self._pool_tokens - 1)
        announced = longest if request.max_new_tokens is None else request.max_new_tokens
        limit = max(0, min(announced, longest - prompt - 1))
        paged = -(-prompt // size) * size
        limit = max(0, min(limit, self._pool_tokens - paged - size - 1))
        served = prompt < longest - STOP_TOKENS
        rank = self._sign * request.priority
        self._happened["arrived"] += 1
        self._happened["ignore_eos"] += request.ignore_eos
        self._happened["stuck"] += served and prompt + size >= self._pool_tokens
        self.standings[request] = Standing(limit, rank, request.ignore_eos, served)
        if not served:
            batch.replace_prompt(request, self.stand_in(request), 1)
        loser = self._enqueue(batch, request)
        if loser is request:
            batch.refuse(request, "queue-full")
        elif loser is not None:
            self.turned_away.append(loser)

    def stand_in(self, request: Request) -> Stream:
        """Returns the prompt that replaces a too long one: token 0, and a continuation that no
        other request has."""
        return StandIn(request.index)

    def _enqueue(self, batch: Batch, request: Request) -> Request | None:
        """Adds a request to the queue. Returns the request that lost its place in it, if any."""
        waiting, standings, most = batch.waiting, self.standings, self.max_queued_requests
        loser = None
        if most is not None and len(waiting) >= most:
            loser = request
            if self.has_priorities and waiting:
                worst = max(waiting, key=lambda each: (standings[each].rank, standings[each].entry))
                if standings[request].rank < standings[worst].rank:
                    loser = worst
                    waiting.remove(worst)
            if loser is request:
                return loser
        standing = standings[request]
        standing.entry, standing.since_tokens = next(self._entries), self._computed_tokens
        batch.arrive(request)
        return loser

    # -- composing a step ------------------------------------------------------------------------

    def compose(self, batch: Batch, now_ns: int) -> Plan:
        """Composes the next step."""
        batch.begin(now_ns)
        if self._idle:
            self._ratio.reset()
        for request in self.turned_away:
            self._abort(batch, request, "queue-full")
        self.turned_away.clear()
        group = self._schedule(batch)
        while group is None and self._spins(batch):
            group = self._schedule(batch)
        return self.composed(batch, group)

    def composed(self, batch: Batch, group: Group | None) -> Plan:
        """Completes a step of these requests and returns its plan."""
        self._idle = group is None and not (batch or self.pending)
        if group is not None:
            self._computed_tokens += group.computed_tokens
            self.pending.append(group.requests)
        self.last = group
        plan = batch.plan
        plan.blocked = self.blocked(batch)
        plan.batched_tokens = sum([each.charged for each in plan.prefills]) + plan.decode_seqs
        return batch.composed()

    def blocked(self, batch: Batch) -> int:
        """Returns why the head of the queue waits, as an index into `kvsim.schema.BLOCKED`. If
        memory is the reason, part of it may be free, but reserved for running requests."""
        return self._refusal if batch.waiting else 0

    def _spins(self, batch: Batch) -> bool:
        """Whether the event loop goes round again at once, because it counted a decode step though
        there was nothing to decode."""
        return self._counts and not self.pending and len(batch) > 0

    def _schedule(self, batch: Batch) -> Group | None:
        """Returns what the event loop runs next (`get_next_batch_to_run`), or None."""
        group = self.next_prefill(batch)
        if group is None and self.running.requests and not self.running.silent:
            group = self.decode(batch)
        return group

    def next_prefill(self, batch: Batch) -> Group | None:
        """Returns a step that computes prompts, which goes before decodes, or None."""
        unfinished, last, running = self.unfinished, self.last, self.running
        if unfinished is not None:
            self._checkpoint(batch, unfinished)
        if last is not None and last.extends:
            if last.let_go((unfinished, last.chunked)):
                self.full = False
            if last.requests and running.requests:
                running.requests = running.requests + last.requests
                running.silent = running.silent and last.silent
            elif last.requests:
                self.running = running = last
                self.full = False
        if running.let_go():
            self.full = False
        group = None
        self._counts = self._armed > 0 and len(running.requests) >= self.interval_min_seqs
        if self._counts:
            self._armed -= 1
        else:
            self._armed = 0
            group = self._prefill(batch)
            if group is not None:
                self._armed = self.interval
        return group

    # -- prefill ---------------------------------------------------------------------------------

    def _prefill(self, batch: Batch) -> Group | None:
        """Returns a step that computes prompts (`get_new_batch_prefill`), or None."""
        running, unfinished = self.running.requests, self.unfinished
        if self.preempts or not running:
            self.full = False
        if (self.full or not batch.waiting) and unfinished is None:
            return None
        slots = min(self._slots - len(running), self.free_slots(batch))
        if unfinished is None:
            if 1 < self._delay > slots and running:
                self._refusal = SLOTS
                return None
            if slots <= 0 and not self.preempts:
                self.full, self._refusal = True, SLOTS
                return None
        blocks = tables_of(batch)
        engine = Engine(blocks, running, self._computed_tokens, self.standings)
        batch.waiting = self.order.sort(batch.waiting, engine)
        riders = len(running) if self.mixes else 0
        clip = self._rules.clip_tokens
        expected = expected_tokens(running, self.standings, self.ratio, clip)
        chunk = self.max_num_batched_tokens if self.chunked else None
        prefill = Prefill(
            self._rules,
            batch,
            Budget(blocks, riders, expected, self.max_prefill_tokens, chunk),
            self.running,
            self.standings,
            self.ratio,
            partial(self._give_up, batch),
        )
        prefill.choose(unfinished, self.full, self.order.looks)
        self.unfinished, self.full = prefill.unfinished, prefill.full
        if prefill.refusal or not self.full:
            self._refusal = prefill.refusal
        self._happened["forgotten"] += prefill.forgotten
        self._happened["reserved"] += prefill.reserved
        for request in prefill.preempted:
            self._queue_again(batch, request, retracted=False)
        chosen = prefill.chosen
        if not chosen:
            return None
        if self.unfinished is not None:
            # Of two that were cut, the engine knows the later one alone: the other decodes next,
            # without the rest of its prompt.
            self.standings[self.unfinished].middle_chunks += 1
        return self._extend(batch, chosen)

    def _extend(self, batch: Batch, chosen: list[Request]) -> Group:
        """Gives the chosen requests pages for their chunks and adds them to the plan."""
        blocks, standings, size = tables_of(batch), self.standings, self._size
        group = Group(chosen)
        group.extends = True
        group.chunked = self.unfinished
        need = 0
        for request in chosen:
            standing = standings[request]
            prefix, end = standing.prefix, standing.end
            group.silent = group.silent and standing.limit_tokens == 0
            group.computed_tokens += end - prefix
            need += -(-end // size) - -(-prefix // size)
        blocks.make_room(group.computed_tokens + (size * len(chosen) if size > 1 else 0))
        if need > blocks.gpu.blank:
            raise out_of_memory(chosen[0], need, blocks.gpu.blank)
        for request in chosen:
            sequence, standing = request.sequences[0], standings[request]
            end, before = standing.end, sequence.computed
            blocks.extend(sequence, end)
            batch.run_prefill(request, end - before, charged=end - standing.prefix)
            sequence.computed = end
        if self.mixes and self.running.requests:
            self._mix(batch, group)
        return group

    def _mix(self, batch: Batch, group: Group) -> None:
        """Adds the running requests' decodes to the step, if memory suffices for all of them."""
        running = self.running
        self.drop_finishing()
        if not running.requests or not self._fits(batch, running.requests):
            return
        self._one_more(batch, running.requests)
        for request in running.requests:
            # The result of its prefill may be pending; it is cached as far as it is known now.
            sequence = request.sequences[0]
            self.standings[request].end = min(sequence.filled, sequence.length)
        group.requests += running.requests
        group.computed_tokens += len(running.requests)
        group.silent = group.silent and running.silent
        self.running = Group()

    # -- decode ----------------------------------------------------------------------------------

    def decode(self, batch: Batch) -> Group | None:
        """Returns a step of the running batch (`update_running_batch`), or None."""
        running = self.running
        before = len(running.requests)
        finishing = self.drop_finishing()
        if not running.requests:
            self.full = False
            return None
        if self._fits(batch, running.requests):
            self._ratio.decay()
        elif finishing:
            self.full = False
            return None
        else:
            self._retract(batch)
        if len(running.requests) < before:
            self.full = False
        if not running.requests:
            return None
        self._one_more(batch, running.requests)
        running.extends = False
        return running

    def decoded(self, steps: int) -> list[int]:
        """Counts decode steps of the running batch that had memory for all of it. Returns the
        new-token ratio in the first of them, in parts per million, until it falls no more."""
        self._computed_tokens += steps * self.running.computed_tokens
        self.running.extends = False
        self.last = self.running
        return self._ratio.decay(steps)

    def drop_finishing(self) -> bool:
        """Removes requests from the running batch whose last token is in flight. Returns whether
        there are any."""
        if not self.pending:
            return False
        inside, standings = self.pending[-1], self.standings
        finishing = [
            request
            for request in self.running.requests
            if generated_tokens(request) + 1 >= standings[request].limit_tokens
            and request in inside
        ]
        dropped = self.running.let_go(finishing)
        if dropped:
            self.full = False
        return dropped

    def _fits(self, batch: Batch, requests: list[Request]) -> bool:
        """Whether each of these requests can get one more token, evictions included."""
        blocks, size = tables_of(batch), self._size
        need = size * sum(each.sequences[0].filled % size == 0 for each in requests)
        blocks.make_room(need)
        return blocks.unused_tokens >= need

    def _one_more(self, batch: Batch, requests: list[Request]) -> None:
        """Gives each of these requests a slot for one more token. With pages of several tokens,
        SGLang makes room for a page each, although few requests need one."""
        blocks = tables_of(batch)
        blocks.make_room(len(requests) * self._size)
        for request in requests:
            sequence = request.sequences[0]
            upto = sequence.filled + 1
            blocks.extend(sequence, upto)
            batch.run_token(request, upto)
            sequence.computed = upto

    def _retract(self, batch: Batch) -> None:
        """Takes the pages of running requests until the others fit (`retract_decode`). Those that
        have generated least go first. The remaining ones stay in that order."""
        standings = self.standings

        def worth(request: Request) -> tuple[int, ...]:
            key = (generated_tokens(request), -request.input_length)
            return (-standings[request].rank, *key) if self.retracts_by_priority else key

        kept = sorted(self.running.requests, key=worth, reverse=True)
        retracted: list[Request] = []
        while not retracted or not self._fits(batch, kept):
            if len(kept) == 1:
                break
            request = kept.pop()
            self._give_up(batch, request, len(kept))
            retracted.append(request)
        if len(kept) <= 1 and not self._fits(batch, kept):
            for request in kept:
                batch.others.remove(request)
                batch.blocks.free(request.sequences[0])
                self._abort(batch, request, "out-of-memory")
            kept = []
        self.running.requests = kept
        generated = sum(map(generated_tokens, kept)) + self.retract_decode_steps * len(kept)
        self._ratio.estimate(generated, [standings[each].limit_tokens for each in kept])
        for request in retracted:
            self._queue_again(batch, request, retracted=True)

    # -- giving up -------------------------------------------------------------------------------

    def _give_up(self, batch: Batch, request: Request, left: int) -> None:
        """Takes all pages of a request, and makes room for what the `left` remaining ones generate
        soon."""
        batch.others.remove(request)
        batch.preempt(request)
        tables_of(batch).make_room(left * self.retract_decode_steps)
        standing = self.standings[request]
        standing.prefix = standing.end = standing.middle_chunks = 0
        standing.retracted = True

    def _queue_again(self, batch: Batch, request: Request, retracted: bool) -> None:
        """Puts a request that lost its pages at the end of the queue, if there is a place. It was
        retracted, or had to yield to one with better priority."""
        loser = self._enqueue(batch, request)
        if retracted:
            self._happened["retracted"] += 1
        if loser is not None:
            self._happened["aborted"] += loser is request
            self._abort(batch, loser, "queue-full")

    def _abort(self, batch: Batch, request: Request, reason: str) -> None:
        """Ends a request that is in no queue and holds no pages."""
        del self.standings[request]
        batch.ignore(request, reason)

    def remarks(self) -> list[str]:
        """Returns which of SGLang's surprises this run met."""
        return remarks(self._happened, self._ratio)

    # -- after the step --------------------------------------------------------------------------

    def settle(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        """Settles a step once its time has passed (`batch_result_processor.py`)."""
        batch.now_ns = now_ns
        if not plan.computes:
            return  # Requests were given up, and nothing ran.
        blocks = tables_of(batch)
        self.pending.popleft()
        blocks.gpu.collect()
        before = len(batch.ended)
        for place, (request, _, _) in enumerate(plan.entries):
            if request.finish_ns >= 0:
                continue
            standing = self.standings[request]
            if standing.retracted:
                continue
            if place < len(plan.prefills) and standing.middle_chunks:
                standing.middle_chunks -= 1
                continue
            last = batch.token(request.sequences[0])
            if last or not standing.served or generated_tokens(request) >= standing.limit_tokens:
                self.complete(batch, request)
            elif place < len(plan.prefills):
                self._checkpoint(batch, request)
        blocks.gpu.apply()
        if len(batch.ended) > before:
            batch.remove_ended()

    def complete(self, batch: Batch, request: Request) -> None:
        """Ends a request that has its last token, and caches what it computed."""
        sequence = request.sequences[0]
        upto = sequence.filled
        if self.standings.pop(request).served:
            upto = min(upto, sequence.length)
        else:
            request.reason = "too-long"
        tables_of(batch).checkpoint(sequence, upto, request.priority)
        batch.complete(request)

    def _checkpoint(self, batch: Batch, request: Request) -> None:
        """Caches, once, what a request has computed of its prompt."""
        standing = self.standings[request]
        if standing.end > standing.prefix:
            tables_of(batch).checkpoint(request.sequences[0], standing.end, request.priority)
            standing.prefix = standing.end


class SglangOverlap(Sglang):
    """SGLang 0.5.23 with overlap, its default: a step is composed while the one before computes, so
    tokens and ends are seen one step late (`event_loop_overlap`)."""

    in_flight = 2

"""The scheduler of SGLang 0.5.23 (`managers/scheduler.py`), to be read beside its source.

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

from collections.abc import Mapping
from typing import Any, Final, cast

from librt.vecs import vec
from mypy_extensions import i64, mypyc_attr

from kvsim.core.batch import Batch
from kvsim.core.plan import BLOCKS, SLOTS, TOKENS, Plan
from kvsim.core.request import Request
from kvsim.core.scheduler import Scheduler
from kvsim.core.schema import SGLANG_COLUMNS
from kvsim.engines.deaths import died
from kvsim.engines.sglang.adder import (
    NO_TOKEN,
    OTHER,
    UNLIMITED,
    Adder,
    NewTokenRatio,
    Surprises,
)
from kvsim.engines.sglang.manager import Group, SglangTables, Standing
from kvsim.engines.sglang.queue import QueueOrder
from kvsim.engines.sglang.server import (
    DEFAULT_MAX_PREFILL_TOKENS,
    max_running_requests,
    read_environment,
)
from kvsim.workload.streams import ENDLESS, SpanStream

STOP_TOKENS: Final = 5
"""A prompt is rejected if it is within this many tokens of the longest sequence."""

LONGEST_INTERVAL: Final = 1 << 16
"""Decode steps between prompts. Where there is nothing to decode, the engine counts them down all
the same."""

ZERO: Final = -(1 << 62)
"""The key of token 0 in place of a too long prompt. Those of a trace are far above it."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Sglang(Scheduler):
    """SGLang 0.5.23 without overlap: a step is settled before the next is composed.

    Arguments have SGLang's names, but for those that every engine has: `max_num_seqs` is its
    `max_running_requests`, `max_num_batched_tokens` its `chunked_prefill_size`, `block_size` its
    `page_size`, `max_model_len` its `context_length`. `environment` has the names of `Environment`.

    For a policy of your own, override `before_admissions`, `worth`, `compose`, `settle` or
    `after_step`.
    """

    max_model_len: i64
    max_queued_requests: int | None
    interval: i64
    interval_min_seqs: i64
    mixes: bool
    has_priorities: bool
    preempts: bool
    """Whether running requests may be preempted by one with a better priority."""
    retracts_by_priority: bool
    preemption_threshold: i64
    """Difference by which their priority must be worse."""
    retract_decode_steps: i64
    order: QueueOrder
    adder: Adder
    blocks: SglangTables
    running: Group
    """The requests that decode together. Other requests hold pages as well: those whose prompts
    were computed last, and one with an unfinished prompt."""
    last: Group | None
    """The step composed last, if it ran."""
    unfinished: Request | None
    """The request whose prompt is computed in chunks and is not complete."""
    full: bool
    """Whether the running batch was found to be full. If so, no admission is tried."""
    turned_away: list[Request]
    """Requests that lost their place in the queue to a newcomer."""
    _ratio: NewTokenRatio
    _size: i64
    _pool_tokens: i64
    _slots: i64
    _delay: i64
    _sign: i64
    _idle: bool
    """Whether the event loop found nothing to do and no result to wait for."""
    _entries: i64
    _refusal: i64
    """Why the head of the queue was refused, as an index into `kvsim.core.schema.BLOCKED`."""
    _surprises: Surprises
    _armed: i64
    """Number of decode steps left before the next prefill."""
    _counts: bool
    """Whether one was counted just now."""
    _computed_tokens: i64
    _soonest: i64
    """The first step in which a running request may reach its limit."""
    _gone: i64
    """The last step that may hold a request whose result is dropped, or that is at its limit and
    does not run any more."""
    _ended: bool
    """Whether requests may have ended in the running batch since it was looked through."""
    _pending: i64
    """Steps in flight."""
    _sent: i64
    """Number of the step sent last."""

    def __init__(
        self,
        block_size: int,
        *,
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
        environment: Mapping[str, float] | None = None,
    ) -> None:
        _check_settings(retraction_policy, prefill_decode_interval)
        shortest = schedule_policy == "shortest-prefill-first"
        if shortest and not enable_prefix_caching:
            raise ValueError("shortest-prefill-first looks at the radix cache; switch it on")
        self._size = block_size
        self._pool_tokens = num_gpu_blocks * block_size
        own = max_running_requests(int(self._pool_tokens), max_model_len)
        self.max_num_seqs = own if max_num_seqs is None else max_num_seqs
        # The rows of the engine's table of requests, at most one for two tokens of the pool.
        self._slots = min(self.max_num_seqs, self._pool_tokens // 2)
        self._delay = min(min_free_slots_delay or 0, self._slots)
        self._sign = 1 if schedule_low_priority_values_first else -1
        self.max_model_len = max_model_len
        self.chunked = enable_chunked_prefill
        # A prompt that is not cut may be of any length.
        self.max_num_batched_tokens = max_num_batched_tokens if self.chunked else max_model_len
        self.watermark_blocks = 0
        self.in_flight = 1 + self.overlaps()
        self.max_queued_requests = max_queued_requests
        self.interval = prefill_decode_interval
        self.interval_min_seqs = prefill_decode_interval_min_bs
        self.mixes = enable_mixed_chunk and self.chunked
        self.has_priorities = enable_priority_scheduling
        self.preempts = enable_priority_scheduling and not disable_priority_preemption
        self.preemption_threshold = priority_scheduling_preemption_threshold
        self.retracts_by_priority = retraction_policy == "priority"
        env = read_environment(environment or {})
        self.retract_decode_steps = int(env.retract_decode_steps)
        self._ratio = NewTokenRatio(env, schedule_conservativeness)
        self.order = QueueOrder(schedule_policy, env, enable_priority_scheduling)
        self._surprises = Surprises()
        self.adder = Adder(
            block_size,
            max_num_batched_tokens if self.chunked else 0,
            max_prefill_tokens,
            prefill_max_requests or UNLIMITED,
            int(env.clip_max_new_tokens),
            shortest,
            self._surprises,
        )
        self._idle = self._counts = self._ended = self.full = False
        self.running, self.last, self.unfinished = Group([]), None, None
        self.turned_away = []
        self._entries = self._refusal = self._armed = 0
        self._computed_tokens = self._pending = self._sent = self._soonest = self._gone = 0

    # -- what a run asks of a scheduler ----------------------------------------------------------

    def overlaps(self) -> bool:
        """Whether a step is composed while the one before computes."""
        return False

    @property
    def gauged(self) -> tuple[str, ...]:
        return SGLANG_COLUMNS

    def gauges(self, batch: Batch) -> tuple[int, ...]:
        """Returns the protected pages, and the new-token ratio in parts per million."""
        return self.blocks.tree.locked_pages, self._ratio.ppm

    def remarks(self) -> list[str]:
        """Returns which of SGLang's surprises this run met."""
        return self._surprises.remarks(self._ratio)

    @property
    def ratio(self) -> float:
        """The expected share of the announced output tokens."""
        return self._ratio.now

    def free_slots(self, batch: Batch) -> i64:
        """Returns how many more requests could hold pages."""
        return self._slots - len(batch.running)

    # -- policy ----------------------------------------------------------------------------------

    def before_admissions(self, batch: Batch, now_ns: int) -> None:
        """Called before each prefill, when the queue has its order. It may set `batch.waiting` in
        another one."""

    def worth(self, request: Request) -> tuple[int, ...]:
        """Of the running requests, the one that is worth least is retracted first."""
        key = (request.output_tokens, -int(request.input_length))
        return (-int(request.standing.rank), *key) if self.retracts_by_priority else key

    def after_step(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        """Called when a step is settled."""

    # -- requests come ---------------------------------------------------------------------------

    def arrive(self, batch: Batch, request: Request) -> None:
        """Accepts a request, or rejects it (`handle_generate_request`)."""
        prompt: i64 = request.input_length
        size: i64 = self._size
        if prompt >= self.max_model_len:
            batch.refuse(request, "too-long")
            return
        longest: i64 = min(self.max_model_len - 1, self._pool_tokens - 1)
        announced: i64 = longest
        if request.max_new_tokens is not None:
            announced = min(request.max_new_tokens, UNLIMITED)
        paged: i64 = (prompt + size - 1) // size * size
        # A page more than the prompt needs: SGLang counts so, and may refuse for ever what would
        # fit.
        room: i64 = min(longest - prompt, self._pool_tokens - paged - size)
        limit: i64 = max(0, min(announced, room - 1))
        served: bool = prompt < longest - STOP_TOKENS
        surprises: Surprises = self._surprises
        surprises.arrived += 1
        surprises.ignore_eos += request.ignore_eos
        surprises.stuck += served and prompt + size >= self._pool_tokens
        if not served:
            batch.replace_prompt(request, self.stand_in(request), 1)
            batch.enter(request)
        request.standing = Standing(request, limit, self._sign * request.priority, served)
        loser: Request | None = self._enqueue(batch, request)
        if loser is request:
            request.standing = None
            batch.refuse(request, "queue-full")
            return
        batch.accept(request)
        if loser is not None:
            self.turned_away.append(loser)

    def stand_in(self, request: Request) -> Any:
        """Returns the prompt that replaces a too long one: token 0, and a continuation that no
        other request has."""
        # 2**30 keys for each request (`+` binds closer than `<<`), more than an output has tokens.
        own: i64 = ZERO - (request.index + 1 << 30)
        stops: vec[i64] = vec[i64]([1, ENDLESS])
        return SpanStream(request.index, 0, 1, stops, vec[i64]([ZERO, own]))

    def _enqueue(self, batch: Batch, request: Request) -> Request | None:
        """Adds a request to the queue. Returns the request that lost its place in it, if any."""
        loser: Request | None = None
        most = self.max_queued_requests
        standing: Standing = request.standing
        if most is not None and len(batch.waiting) >= most:
            loser = request
            if self.has_priorities and batch.waiting:
                worst: Request = max(batch.waiting, key=_precedence)
                if standing.rank < cast(Standing, worst.standing).rank:
                    loser = worst
                    batch.waiting.remove(worst)
            if loser is request:
                return loser
        standing.entry, standing.since = self._entries, self._computed_tokens
        self._entries += 1
        batch.waiting.append(request)
        return loser

    # -- composing a step ------------------------------------------------------------------------

    def compose(self, batch: Batch, now_ns: int) -> Plan:
        plan: Plan = batch.begin(now_ns, self._slots)
        self.blocks = cast(SglangTables, batch.blocks)
        if self._idle:
            self._ratio.reset()
        if self.turned_away:
            for request in self.turned_away:
                self._abort(batch, request, "queue-full")
            self.turned_away = []
        group: Group | None = _schedule(self, batch, plan)
        # The real loop spins here without the GPU; no time passes.
        while group is None and self._spins(batch):
            group = _schedule(self, batch, plan)
        self._idle = group is None and len(batch) == 0 and self._pending == 0
        if group is not None:
            self._computed_tokens += group.computed_tokens
            self._pending += 1
            self._sent += 1
        self.last = group
        plan.blocked = self._refusal if batch.waiting else 0
        plan.batched_tokens = plan.prefill_tokens + plan.decode_seqs
        return plan

    def _spins(self, batch: Batch) -> bool:
        """Whether the event loop goes round again at once, because it counted a decode step though
        there was nothing to decode."""
        return self._counts and self._pending == 0 and len(batch) > 0

    # -- giving up -------------------------------------------------------------------------------

    def _queue_again(self, batch: Batch, request: Request, retracted: bool) -> None:
        """Puts a request that lost its pages at the end of the queue, if there is a place. It was
        retracted, or had to yield to one with better priority."""
        loser = self._enqueue(batch, request)
        if retracted:
            self._surprises.retracted += 1
        if loser is not None:
            self._surprises.aborted += loser is request
            self._abort(batch, loser, "queue-full")

    def _abort(self, batch: Batch, request: Request, reason: str) -> None:
        """Ends a request that is in no queue and holds no pages."""
        request.standing = None
        batch.ignore(request, reason)

    # -- after the step --------------------------------------------------------------------------

    def settle(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        """Settles a step once its time has passed (`batch_result_processor.py`)."""
        batch.now_ns = now_ns
        if plan.num_requests == 0:
            return  # Requests were given up, and nothing ran.
        self._pending -= 1
        blocks: SglangTables = self.blocks
        blocks.gpu.collect()
        ended: i64 = len(batch.ended)
        # The oldest step in flight, which this one is.
        step: i64 = self._sent - self._pending
        # Nobody can end in this step, and nobody's result is dropped: only decodes to book.
        if plan.num_chunks == 0 and self._gone < step < self._soonest:
            for request in plan.places:
                if batch.token(request):
                    self._complete(batch, request)
        else:
            _settle_each(self, batch, plan)
        blocks.gpu.apply()
        if len(batch.ended) > ended:
            batch.remove_ended()
        self.after_step(batch, plan, now_ns)

    def _complete(self, batch: Batch, request: Request) -> None:
        """Ends a request that has its last token, and caches what it computed."""
        standing: Standing = request.standing
        upto: i64 = request.filled
        if standing.served:
            upto = min(upto, request.length)
        else:
            request.reason = "too-long"
        self._ended |= not standing.leaves
        self._gone = self._sent
        self.blocks.checkpoint(request, upto)
        self.blocks.release(request)
        request.standing = None
        batch.complete(request)


@mypyc_attr(allow_interpreted_subclasses=True)
class SglangOverlap(Sglang):
    """SGLang 0.5.23 with overlap, its default: a step is composed while the one before computes, so
    tokens and ends are seen one step late (`event_loop_overlap`)."""

    def overlaps(self) -> bool:
        return True


def _check_settings(retraction_policy: str, prefill_decode_interval: int) -> None:
    """Raises `ValueError` for values that SGLang does not have."""
    if retraction_policy not in ("length", "priority"):
        raise ValueError(f"retraction_policy: {retraction_policy!r} is not length or priority")
    if prefill_decode_interval > LONGEST_INTERVAL:
        what = f"{prefill_decode_interval:,} is above {LONGEST_INTERVAL:,} steps; give less"
        raise ValueError(f"prefill_decode_interval: {what}")


# No methods: those of a scheduler of your own are looked up at each call, that is at each step.
def _schedule(scheduler: Sglang, batch: Batch, plan: Plan) -> Group | None:
    """Returns what the event loop runs next (`get_next_batch_to_run`), or None."""
    if scheduler.unfinished is not None:
        _checkpoint(scheduler.blocks, scheduler.unfinished)
    if scheduler.last is not None and scheduler.last.extends:
        _merge(scheduler, scheduler.last)
    running: Group = scheduler.running
    if scheduler._ended and running.let_go():
        scheduler.full = False
    scheduler._ended = False
    scheduler._counts = scheduler._armed > 0 and len(running.members) >= scheduler.interval_min_seqs
    if scheduler._counts:
        scheduler._armed -= 1
    else:
        scheduler._armed = 0
        group: Group | None = _prefill(scheduler, batch, plan)
        if group is not None:
            scheduler._armed = scheduler.interval
            return group
    return None if running.silent else _decode(scheduler, batch, plan)


def _merge(scheduler: Sglang, last: Group) -> None:
    """The requests whose prompts the last step completed join the running batch."""
    running: Group = scheduler.running
    if last.let_go(scheduler.unfinished, last.chunked):
        scheduler.full = False
    if not last.members:
        return
    soonest: i64 = scheduler._sent + _steps_left(last.members)
    scheduler._soonest = min(scheduler._soonest, soonest)
    if running.members:
        running.members = running.members + last.members
        running.silent = running.silent and last.silent
    else:
        scheduler.running = last
        scheduler.full = False


def _prefill(scheduler: Sglang, batch: Batch, plan: Plan) -> Group | None:
    """Returns a step that computes prompts (`get_new_batch_prefill`), or None."""
    blocks: SglangTables = scheduler.blocks
    running: Group = scheduler.running
    unfinished: Request | None = scheduler.unfinished
    # `batch_is_full` is a memory of the last refusal. It is forgotten where a better request could
    # preempt, or nobody runs whose end would clear it.
    if scheduler.preempts or not running.members:
        scheduler.full = False
    # A prompt under way goes on even where nobody may be admitted.
    if unfinished is None and not _may_admit(scheduler, batch):
        return None
    batch.waiting = scheduler.order.sort(batch.waiting, blocks, running, scheduler._computed_tokens)
    scheduler.before_admissions(batch, batch.now_ns)
    adder: Adder = scheduler.adder
    riders: i64 = len(running.members) if scheduler.mixes else 0
    adder.begin(batch, blocks, running, unfinished, scheduler._ratio.now, riders)
    if unfinished is not None:
        adder.go_on(unfinished)
    _fill(scheduler, batch)
    scheduler.unfinished = adder.unfinished
    if not adder.chosen:
        return None
    if scheduler.unfinished is not None:
        # Of two that were cut, the engine knows the later one alone: the other decodes next,
        # without the rest of its prompt.
        standing: Standing = scheduler.unfinished.standing
        standing.middle += 1
    return _extend(scheduler, batch, plan, adder.chosen)


def _may_admit(scheduler: Sglang, batch: Batch) -> bool:
    """Whether somebody waits, and there may be a place in the running batch."""
    if not batch.waiting or scheduler.full:
        return False
    running: i64 = len(scheduler.running.members)
    slots: i64 = min(scheduler._slots - running, scheduler.free_slots(batch))
    # Prefills wait until several slots are free, so that there are fewer, larger ones.
    if scheduler._delay > 1 and slots < scheduler._delay and running:
        scheduler._refusal = SLOTS
        return False
    if slots <= 0 and not scheduler.preempts:
        scheduler.full, scheduler._refusal = True, SLOTS
        return False
    return True


def _fill(scheduler: Sglang, batch: Batch) -> None:
    """Takes on waiting requests. Those that are preempted for their sake queue again."""
    preempted: list[Request] = []
    refusal: i64 = _choose(scheduler, batch, preempted)
    # A batch that was full before keeps the reason of that time.
    if refusal or not scheduler.full:
        scheduler._refusal = refusal
    if batch.waiting and refusal:
        batch.waiting[0].blocked_steps += 1
    for request in preempted:
        scheduler._queue_again(batch, request, retracted=False)


def _choose(scheduler: Sglang, batch: Batch, preempted: list[Request]) -> i64:
    """Takes on requests in the order of the queue; the first one refused blocks all behind it.
    Returns why the head of the queue was refused."""
    adder: Adder = scheduler.adder
    running: Group = scheduler.running
    refusal: i64 = 0
    # Where memory is used up, the head is asked all the same: its own test says that the batch is
    # full.
    while batch.waiting and adder.state() != OTHER:
        request: Request = batch.waiting[0]
        taken: i64 = len(adder.chosen) + len(running.members)
        # Two tests of the engine's: places in its table of requests, and in the batch.
        if scheduler.free_slots(batch) <= 0 or taken >= scheduler._slots:
            scheduler.full, refusal = True, SLOTS
        if scheduler.full and not (
            scheduler.preempts and _make_way(scheduler, batch, request, preempted)
        ):
            return refusal
        state: i64 = adder.add(request)
        if state == OTHER:
            return TOKENS
        if state == NO_TOKEN:
            scheduler._surprises.reserved += adder.is_free(request)
            scheduler.full = bool(adder.chosen or running.members)
            return BLOCKS
    return TOKENS


def _precedence(request: Request) -> tuple[int, int]:
    """Smaller values go first."""
    standing: Standing = request.standing
    return standing.rank, standing.entry


def _make_way(scheduler: Sglang, batch: Batch, asking: Request, preempted: list[Request]) -> bool:
    """Preempts running requests of worse priority, the worst and newest first. Returns whether
    that made enough room."""
    adder: Adder = scheduler.adder
    running: Group = scheduler.running
    own: Standing = asking.standing
    # A request that was never considered counts as if it had no prompt (`considered` is 0), as in
    # the engine.
    need: float = float(own.considered - own.prefix) - adder.left
    need += float(min(own.limit, adder.clip_tokens))
    victims: list[Request] = []
    for each in sorted(running.members, key=_precedence, reverse=True):
        if each.standing.rank - own.rank <= scheduler.preemption_threshold:
            break
        victims.append(each)
        need -= adder.expected([each])
        if need <= 0:
            break
    if not victims or need > 0:
        return False
    before: list[Request] = running.members
    running.members = before[:]
    for each in before:
        if each in victims:
            adder.reserved -= adder.expected([each])
            running.members.remove(each)
            _give_up(scheduler, batch, each, len(running.members))
    preempted += victims
    return True


def _extend(scheduler: Sglang, batch: Batch, plan: Plan, chosen: list[Request]) -> Group:
    """Gives the chosen requests pages for their chunks and adds them to the plan."""
    blocks: SglangTables = scheduler.blocks
    group: Group = Group(chosen)
    group.extends, group.chunked = True, scheduler.unfinished
    need: i64 = 0
    standing: Standing
    for request in chosen:
        standing = request.standing
        group.silent = group.silent and standing.limit == 0
        group.computed_tokens += standing.end - standing.prefix
        need += blocks.pages_of(standing.end) - blocks.pages_of(standing.prefix)
    # The engine makes room for a page more for each, which evicts more than is needed.
    spare: i64 = scheduler._size * len(chosen) if scheduler._size > 1 else 0
    blocks.make_room(group.computed_tokens + spare)
    if need > blocks.gpu.blank:
        raise died("prefill-out-of-memory", chosen[0], need=need, free=blocks.gpu.blank)
    plan.places = []  # Those of its step before may be `Group.members`, which it is not to change.
    for request in chosen:
        standing = request.standing
        tokens: i64 = standing.end - standing.prefix
        blocks.extend(request, standing.end)
        place: i64 = plan.num_requests
        plan.add(request, tokens, 0)
        scheduled: i64 = standing.end - request.computed
        batch.chunk(plan, place, request, scheduled, scheduled - tokens)
        request.computed, request.batch = standing.end, scheduler._sent + 1
    if scheduler.mixes and scheduler.running.members:
        _mix(scheduler, batch, plan, group)
    return group


def _settle_each(scheduler: Sglang, batch: Batch, plan: Plan) -> None:
    """Books the results of a step, request by request."""
    chunks: i64 = plan.num_chunks
    # Chunks stand before decodes in a mixed step.
    for request in plan.places:
        chunks -= 1
        if request.finish_ns >= 0:
            continue
        standing: Standing = request.standing
        if standing.retracted:
            continue
        if chunks >= 0 and standing.middle:
            standing.middle -= 1
        elif batch.token(request) or not standing.served or request.length >= standing.longest:
            scheduler._complete(batch, request)
        elif chunks >= 0:
            _checkpoint(scheduler.blocks, request)


def _mix(scheduler: Sglang, batch: Batch, plan: Plan, group: Group) -> None:
    """Adds the running requests' decodes to the step, if memory suffices for all of them."""
    running: Group = scheduler.running
    _drop_finishing(scheduler)
    if not running.members or not scheduler.blocks.fits(running.members):
        return
    _one_more(scheduler, batch, plan, running.members)
    for request in running.members:
        # The result of its prefill may be pending; it is cached as far as it is known now.
        standing: Standing = request.standing
        standing.end = min(request.filled, request.length)
    # It becomes the running batch as a whole, so each mixed step rotates the order.
    group.members = group.members + running.members
    group.computed_tokens += len(running.members)
    group.silent = group.silent and running.silent
    scheduler.running = Group([])


def _decode(scheduler: Sglang, batch: Batch, plan: Plan) -> Group | None:
    """Returns a step of the running batch (`update_running_batch`), or None."""
    running: Group = scheduler.running
    finishing: bool = _drop_finishing(scheduler)
    if not running.members:
        return None
    if scheduler.blocks.fits(running.members):
        scheduler._ratio.decay()
    # Those who are about to end free memory, so nobody is retracted and nothing decodes.
    elif finishing:
        return None
    else:
        _retract(scheduler, batch)
        scheduler.full = False
    if not running.members:
        return None
    _one_more(scheduler, batch, plan, running.members)
    running.extends = False
    return running


def _steps_left(requests: list[Request]) -> i64:
    """The steps in which each of these requests may generate a token that is not its last."""
    left: i64 = UNLIMITED
    for request in requests:
        standing: Standing = request.standing
        left = min(left, standing.longest - request.length - 1)
    return left


def _drop_finishing(scheduler: Sglang) -> bool:
    """Removes running requests whose last token is in flight. Returns whether there are any."""
    sent: i64 = scheduler._sent
    if scheduler._pending == 0 or sent < scheduler._soonest:
        return False
    running: Group = scheduler.running
    places: list[int] = []
    for place, request in enumerate(running.members):
        standing: Standing = request.standing
        if request.length + 1 >= standing.longest and request.batch == sent:
            standing.leaves = True
            places.append(place)
    found: bool = running.drop(places)
    scheduler._soonest = sent + _steps_left(running.members)
    if not found:
        return False
    scheduler._gone = sent
    scheduler.full = False
    return True


def _one_more(scheduler: Sglang, batch: Batch, plan: Plan, members: list[Request]) -> None:
    """Gives each of these requests a slot for one more token. With pages of several tokens,
    SGLang makes room for a page each, although few requests need one."""
    blocks: SglangTables = scheduler.blocks
    blocks.make_room(len(members) * scheduler._size)
    scheduled, yields, lengths = plan.scheduled, plan.yields, plan.decode_lengths
    now_ns: i64 = batch.now_ns
    sent: i64 = scheduler._sent + 1
    context_tokens: i64 = 0
    extended: i64 = 0
    seqs: i64 = 0
    before: i64 = plan.num_requests
    for request in members:
        upto: i64 = request.filled + 1
        if upto > request.room:
            blocks.extend(request, upto)
            extended += 1
        request.filled = request.computed = lengths[seqs] = upto
        request.access_ns, request.batch = now_ns, sent
        scheduled[before + seqs] = yields[before + seqs] = 1
        context_tokens += upto
        seqs += 1
    # `extend` has counted its own.
    blocks.empty_slots -= seqs - extended
    if before:
        for request in members:
            plan.add(request, 1, 0)
    else:
        # Decodes alone: the plan borrows the list, as copying it in each step takes time.
        plan.places, plan.num_requests = members, seqs
    plan.add_decodes(seqs, context_tokens, 0)


def _retract(scheduler: Sglang, batch: Batch) -> None:
    """Takes the pages of running requests until the others fit (`retract_decode`). Those that
    are worth least go first. The remaining ones stay in that order."""
    kept: list[Request] = sorted(scheduler.running.members, key=scheduler.worth, reverse=True)
    retracted: list[Request] = []
    # At least one goes, as the engine tests only afterwards.
    while len(kept) > 1 and (not retracted or not scheduler.blocks.fits(kept)):
        request = kept.pop()
        _give_up(scheduler, batch, request, len(kept))
        retracted.append(request)
    if not scheduler.blocks.fits(kept):
        request = kept.pop()
        _take_pages(scheduler, batch, request)
        scheduler._abort(batch, request, "out-of-memory")
    scheduler.running.members = kept
    generated: i64 = scheduler.retract_decode_steps * len(kept)
    limits: i64 = 0
    for request in kept:
        standing: Standing = request.standing
        generated += request.length - request.input_length
        limits += standing.limit
    scheduler._ratio.estimate(int(generated), int(limits))
    for request in retracted:
        scheduler._queue_again(batch, request, retracted=True)


def _give_up(scheduler: Sglang, batch: Batch, request: Request, left: i64) -> None:
    """Takes all pages of a request, and makes room for what the `left` others generate soon."""
    _take_pages(scheduler, batch, request)
    batch.preempt(request)
    scheduler.blocks.make_room(left * scheduler.retract_decode_steps)
    standing: Standing = request.standing
    standing.prefix = standing.end = standing.middle = 0
    standing.retracted = True


def _take_pages(scheduler: Sglang, batch: Batch, request: Request) -> None:
    """Takes all pages of a running request, whose results in flight are dropped."""
    scheduler._gone = scheduler._sent
    batch.running.remove(request)
    scheduler.blocks.release(request)


def _checkpoint(blocks: SglangTables, request: Request) -> None:
    """Caches, once, what a request has computed of its prompt."""
    standing: Standing = request.standing
    if standing.end > standing.prefix:
        blocks.checkpoint(request, standing.end)
        standing.prefix = standing.end

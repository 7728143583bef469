"""The scheduler of vLLM V1 0.33.0 (`v1/core/sched/scheduler.py`), to be read beside its source.

There are no separate prompt steps and decode steps. First, every running request, in order, takes
on the tokens that it knows and has not computed, within one token budget. Then waiting requests are
admitted with the rest, unless a request was preempted. If blocks run short, the tail of the running
list, or the worst by priority, is preempted and computed again. Connectors, drafts, adapters and
stages of a pipeline are parts that are asked where vLLM asks them, and by default are not there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from librt.vecs import vec
from mypy_extensions import i64, mypyc_attr

from kvsim.core import records
from kvsim.core.batch import Batch
from kvsim.core.plan import BLOCKS, LORAS, PREEMPTED, SLOTS, TOKENS, WATERMARK, Moved, Plan
from kvsim.core.records import DraftLog
from kvsim.core.request import ABORTED, FINISHED, LOADED, LOADING, RUNNING, UNLOADED, Request
from kvsim.core.scheduler import Scheduler, check_seqs
from kvsim.engines.deaths import died
from kvsim.engines.vllm_v1.connector import NOTHING, Connector, Done, Match, Worker, note_tiers
from kvsim.engines.vllm_v1.drafts import Speculation
from kvsim.engines.vllm_v1.manager import Admission, KVCacheManager
from kvsim.engines.vllm_v1.passing import AdapterSlots, Cadence
from kvsim.engines.vllm_v1.releases import Release
from kvsim.policies import victims
from kvsim.policies.requeue import make_requeue, priority_by_trace

ASIDE: Final = -1000
"""A request that is passed over, for those behind it."""

NO_MATCH: Final = Match()


@mypyc_attr(allow_interpreted_subclasses=True)
class VllmV1(Scheduler):
    """vLLM V1 0.33.0 with synchronous scheduling: a step is settled before the next is composed.

    For a policy of your own, override `before_admissions`, `choose_victim`, `compose`, `settle` or
    `after_step`; the constructor may name any setting of a run, and hands what is the engine's on.
    """

    blocks: KVCacheManager
    release: Release
    max_model_len: i64
    priority: bool
    reserve_full_isl: bool
    """Whether an admission needs blocks for the whole known sequence, not only its chunk."""
    long_prefill_token_threshold: i64
    long_prefill_token_threshold_adaptive: bool
    """Whether a chunk may always be a fair share of `max_num_batched_tokens`."""
    max_num_active_seqs: i64
    """Requests that may run; the others of `max_num_seqs` stay empty."""
    max_num_scheduled_tokens: i64
    """Tokens that a step computes; `max_num_batched_tokens` limits its input, with what drafts need
    besides."""
    victim: Callable[..., Request] | None
    """Chooses whom to preempt; None: the last of those that run."""
    requeue: Callable[[Any, Any], None]
    asynchronous: bool
    connector: Connector | None
    worker: Worker | None
    speculation: Speculation
    draft_log: DraftLog
    adapters: AdapterSlots
    cadence: Cadence
    pipeline_parallel_size: i64
    finished: list[Request]
    """Requests that are over since the last step was composed."""
    _num_spec_tokens: i64
    _lookahead: i64
    _slots: i64
    _too_long: i64
    """What becomes of a prompt that is not cut, where it is longer than what is left of a step."""
    _call: i64
    """Number of scheduling calls so far."""
    _sent: i64
    """Number of the last step with tokens that was composed."""
    _known: i64
    """Number of the last step with tokens whose result is known."""
    _budget: i64
    """Tokens that the step may still take on."""
    _inputs: i64
    """Positions of its input that are left."""
    _most: i64
    """The most tokens that a request takes on in it."""
    _place: i64
    """Where the running request stands that lacks blocks."""
    _verified_seqs: i64
    _verified: i64
    _met: i64
    """Of the step being settled: sequences with drafts, these drafts, and those accepted."""
    _prefills: dict[Request, None]
    """Requests that have blocks for a part of their prompt and need more, for connectors."""
    _kept: dict[Request, list[list[int]]]
    """Blocks of ended requests that a transfer still reads or writes."""
    _late: deque[tuple[int, list[list[int]]]]
    """(number of a step, blocks to release once its result is known), in order."""

    def __init__(
        self,
        *,
        blocks: KVCacheManager,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_chunked_prefill: bool = True,
        scheduling_policy: str = "fcfs",
        watermark: float = 0.0,
        scheduler_reserve_full_isl: bool = True,
        long_prefill_token_threshold: int = 0,
        long_prefill_token_threshold_adaptive: bool | None = None,
        max_num_active_seqs: int | None = None,
        max_num_scheduled_tokens: int | None = None,
        prefill_schedule_interval: int | None = None,
        victim: Callable[..., Request] | None = None,
        requeue: str | Callable[[Any, Any], None] | None = None,
        connector: Connector | None = None,
        worker: Worker | None = None,
        speculation: Speculation | None = None,
        draft_log: DraftLog | None = None,
        max_loras: int | None = None,
        pipeline_parallel_size: int = 1,
    ) -> None:
        release = blocks.release
        active = max_num_seqs if max_num_active_seqs is None else max_num_active_seqs
        _check_seqs(max_num_seqs, active, max_num_batched_tokens)
        self.blocks, self.release = blocks, release
        self.max_model_len, self.max_num_seqs = max_model_len, max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_active_seqs = active
        self.max_num_scheduled_tokens = max_num_scheduled_tokens or max_num_batched_tokens
        self.chunked = enable_chunked_prefill or not release.cuts_on_request
        self.priority = scheduling_policy == "priority" and release.knows_priorities
        self.victim, self.requeue = _order(release, self.priority, victim, requeue)
        kept = watermark if release.keeps_a_watermark else 0.0
        # A share of `num_gpu_blocks`, which counts block 0, too.
        self.watermark_blocks = int(kept * int(blocks.gpu.size + 1))
        self.reserve_full_isl = scheduler_reserve_full_isl and release.reserves_whole_prompts
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.long_prefill_token_threshold_adaptive = bool(long_prefill_token_threshold_adaptive)
        self.connector, self.worker = connector, worker
        self.speculation, self.draft_log = speculation or Speculation(), draft_log or DraftLog()
        self.adapters = AdapterSlots(max_loras)
        self.cadence = Cadence(prefill_schedule_interval or 1)
        self.pipeline_parallel_size = pipeline_parallel_size
        self.asynchronous = self.schedules_ahead() and release.schedules_ahead
        self.in_flight = pipeline_parallel_size + self.asynchronous
        self.finished = []
        self._num_spec_tokens = self.speculation.num_spec_tokens
        self._lookahead, self._slots = self.speculation.lookahead, self.speculation.slots
        self._too_long = ASIDE if release.sets_long_prompts_aside else -TOKENS
        self._call = self._sent = self._known = self._place = 0
        self._budget = self._inputs = self._most = 0
        self._prefills, self._kept, self._late = {}, {}, deque()

    # -- what a run asks of a scheduler ----------------------------------------------------------

    def schedules_ahead(self) -> bool:
        """Whether one step more is in flight than the pipeline has stages."""
        return False

    @property
    def longest_sequence(self) -> int | None:
        return self.max_model_len

    @property
    def ends_early(self) -> bool:
        return True

    def remarks(self) -> list[str]:
        said = [] if self.connector is None else self.connector.remarks()
        return [*said, *self.adapters.remarks()]

    def unfinished(self, batch: Batch) -> bool:
        """Whether there is something to schedule, or to hear from a transfer."""
        return bool(len(batch) or self._kept or (self.connector and self.connector.busy))

    def before_admissions(self, batch: Batch, now_ns: int) -> None:
        """Called when running requests have their tokens, before waiting ones are admitted. It may
        set `batch.waiting` in another order."""

    def choose_victim(self, batch: Batch, request: Request) -> Any:  # checked by `_chosen`
        """Whom to preempt so that a running request gets blocks; it may be the request itself."""
        running: list[Request] = batch.running
        if self.victim is not None:
            return self.victim(running, self.blocks)
        return running[len(running) - 1]

    def after_step(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        """Called when a step is settled."""

    def arrive(self, batch: Batch, request: Request) -> None:
        """Accepts a request, or rejects it if its prompt leaves no room for a token."""
        if request.input_length >= self.max_model_len:
            batch.refuse(request, "too-long")
            return
        if self.priority:
            # The queue is kept sorted: who arrives joins it by the rule for who was preempted.
            batch.accept(request)
            self.requeue(batch.waiting, request)
        else:
            batch.arrive(request)

    # -- composing a step (schedule) -------------------------------------------------------------

    def compose(self, batch: Batch, now_ns: int) -> Any:
        plan: Plan = batch.begin(now_ns, self.max_num_seqs)
        self.blocks.begin()
        # No step is in flight whose end would report transfers.
        if self.worker is not None and self._sent == self._known:
            self._hear(batch, self.worker.pause(now_ns))
        self._call += 1
        self._budget, self._inputs = self.max_num_scheduled_tokens, self.max_num_batched_tokens
        self._most = self._longest_chunk(batch)
        self.cadence.begin(batch, self._sent + 1)
        self._schedule_running(batch, plan)
        # From here on, whoever joins the batch was waiting.
        plan.num_continued = plan.num_requests
        # Blocks that a victim gave back are for those who run: nobody is admitted in the same step.
        if plan.preempted:
            plan.blocked = PREEMPTED if batch.waiting else 0
        else:
            self.before_admissions(batch, now_ns)
            if batch.waiting or batch.holding:
                self._schedule_waiting(batch, plan)
        if self.finished:
            plan.finished, self.finished = self.finished, []
        # Behind `plan.finished`, of which it hears, and before `computed` counts this step.
        if self.connector is not None and self.worker is not None:
            self._start_transfers(batch, plan, self.connector, self.worker)
        if plan.num_requests:
            self._sent += 1
        self.cadence.end(batch, plan, self._sent)
        self._update_after_schedule(batch, plan)
        plan.batched_tokens = self.max_num_scheduled_tokens - self._budget
        if self._num_spec_tokens:
            plan.drafter_ns = self.speculation.drafter_ns(plan)
        return plan

    def _longest_chunk(self, batch: Batch) -> i64:
        """The most tokens that a request takes on in a step."""
        most: i64 = self.long_prefill_token_threshold
        if most == 0 or (self.release.spares_the_only_request and len(batch) == 1):
            return self.max_model_len
        if self.long_prefill_token_threshold_adaptive:
            return max(most, self.max_num_batched_tokens // max(len(batch), 1))
        return most

    def _start_transfers(
        self, batch: Batch, plan: Plan, connector: Connector, worker: Worker
    ) -> None:
        """Starts the transfers of a step. One takes place for their sake, too: to begin them, or
        because requests wait."""
        plan.transfers = connector.build_connector_meta(plan)
        worker.start(plan.transfers)
        plan.waits = plan.transfers.begin
        if connector.busy or worker.busy:
            plan.waits |= len(batch) > 0 or worker.unsent or connector.restless

    def waits(self, batch: Batch, plan: Plan, start_ns: int, next_ns: int) -> Moved:
        assert self.connector is not None and self.worker is not None
        idle = not plan.num_requests and (len(batch) > 0 or self.connector.restless)
        return self.worker.launch(plan.transfers, start_ns, idle, next_ns)

    def _schedule_running(self, batch: Batch, plan: Plan) -> None:
        """Gives running requests slots for the tokens that they take on, in order."""
        # Locals, for speed: around `_make_room`, which spends tokens, too, they go through `self`.
        blocks: KVCacheManager = self.blocks
        running: list[Request] = batch.running
        cadence: Cadence = self.cadence
        holds: bool = cadence.holds
        cuts: bool = blocks.cuts
        slots: i64 = self._slots
        lookahead: i64 = self._lookahead
        longest: i64 = self.max_model_len - 1
        call: i64 = self._call
        stops: bool = self.release.knows_the_last_token
        most: i64 = self._most
        budget: i64 = self._budget
        inputs: i64 = self._inputs
        k: i64 = 0
        while k < len(running):
            # A drafter takes positions of the input that the budget does not count.
            left: i64 = min(budget, inputs - slots)
            if left <= 0:
                break
            request: Request = running[k]
            if (holds and request.mid_prompt) or _pauses(batch, request, call, stops):
                k += 1
                continue
            computed: i64 = request.computed
            known: i64 = request.length + request.placeholders
            tokens: i64 = min(min(known + request.drafts - computed, most), left)
            # The token at `max_model_len` is never computed: the sequence ends with it.
            tokens = max(min(tokens, longest - computed), 0)
            if cuts:
                tokens = blocks.cut(request, computed, tokens)
            if tokens <= 0:
                k += 1
                continue
            if not blocks.allocate(request, tokens, lookahead, None):
                self._budget, self._inputs, self._place = budget, inputs, k
                has_blocks: bool = self._make_room(batch, plan, request, tokens)
                budget, inputs, k = self._budget, self._inputs, self._place
                if not has_blocks:
                    continue
            drafts: i64 = 0
            # What is cut off a request that decodes are its drafts; its own token comes first.
            if request.drafts:
                drafts = max(0, min(request.drafts, tokens + computed - known))
                request.drafts = 0
            if request.passed_over:
                request.passed_over = False
                batch.note(request, records.CONTINUED)
            cadence.carries |= request.mid_prompt
            plan.add(request, tokens, drafts)
            budget -= tokens
            inputs -= tokens + slots
            k += 1
        self._budget, self._inputs = budget, inputs

    def _make_room(self, batch: Batch, plan: Plan, request: Request, tokens: i64) -> bool:
        """Preempts others until the running request at `_place` has blocks for `tokens` more
        tokens. Returns whether it has them; then `_place` is where it stands, else who follows."""
        while self._preempt_for(batch, plan, request):
            if self.blocks.allocate(request, tokens, self._lookahead, None):
                return True
        return False

    def _preempt_for(self, batch: Batch, plan: Plan, request: Request) -> bool:
        """Preempts somebody, so that a running request gets blocks. Returns whether it may ask for
        them again."""
        running: list[Request] = batch.running
        victim: Request = _chosen(batch, self.choose_victim(batch, request))
        if self._is_late(victim):
            # Its blocks would be released too late, so nobody else gets slots.
            self._pass_over(batch, self._place)
            self._place = len(running)
            return False
        at: i64 = running.index(victim)
        del running[at]
        # The victim had its tokens in this step already. They can be spent again, unless the
        # release forgets to take it out of the batch.
        # The last one never stands before the request; a victim by priority or another rule may.
        if at < self._place:
            returned: i64 = plan.remove(victim)
            if returned and self.release.keeps_victims_in_the_batch:
                plan.ghosts.append((victim, returned))
            elif returned:
                self._budget += returned
                self._inputs += returned + self._slots
                self._place -= 1
            elif not self.release.passes_over_behind_victims:
                self._place -= 1
        self._preempt(batch, victim)
        if victim is request and self.release.ends_at_own_preemption:
            self._place = len(running)
        return victim is not request

    def _pass_over(self, batch: Batch, first: i64) -> None:
        """A running request and those behind it get no slots in this step."""
        stops: bool = self.release.knows_the_last_token
        k: i64
        for k in range(first, len(batch.running)):
            request: Request = batch.running[k]
            if not (request.passed_over or _pauses(batch, request, self._call, stops)):
                request.passed_over = True
                batch.note(request, records.PASSED_OVER)

    def _is_late(self, request: Request) -> bool:
        """Whether the blocks of a request cannot be released before a step in flight is known, as
        that may still write to them while a load into them begins."""
        if self.connector is None or self.in_flight == 1:
            return False
        return self.connector.loads and request.batch > self._known

    def _preempt(self, batch: Batch, victim: Request) -> None:
        """Takes its blocks from a request that was removed from the running ones."""
        self.blocks.free(victim)
        batch.preempt(victim)
        self.requeue(batch.waiting, victim)
        delivers = self.connector is not None and self.connector.delivers
        # The step in flight still yields a token. Where another engine goes on with the KV, it is
        # worthless without.
        victim.drops_stale = delivers or (victim.drops_stale and victim.stale > 0)
        # After `drops_stale`, which reads what an earlier preemption left.
        victim.stale, victim.placeholders, victim.drafts = victim.in_flight, 0, 0
        victim.passed_over = False
        self._prefills.pop(victim, None)

    # -- admissions ------------------------------------------------------------------------------

    def _schedule_waiting(self, batch: Batch, plan: Plan) -> None:
        """Admits requests from the two queues until one is refused, and passes over those that
        cannot be scheduled now."""
        passed: list[Request] = []
        passed_holding: list[Request] = []
        self.adapters.begin(batch.running)
        while queue := batch.holding or batch.waiting:
            request: Request = queue[0]
            admitted: i64 = self._try(batch, plan, request)
            if admitted < 0 and admitted != ASIDE:
                plan.blocked = -admitted
                request.blocked_steps += 1
                break
            queue.popleft()
            if admitted == ASIDE:
                passed.append(request)
            elif admitted == 0:
                self.cadence.passed(request)
                # After `_try`: a load that began there gave it blocks, and so another queue.
                keeps: bool = request.load != UNLOADED or request.computed > 0
                (passed_holding if keeps else passed).append(request)
        if self.adapters.refuses and not plan.blocked:
            plan.blocked = LORAS
        self._put_back(batch.waiting, passed)
        self._put_back(batch.holding, passed_holding)

    def _put_back(self, queue: deque[Request], passed: list[Request]) -> None:
        """Puts requests that were passed over back to the front of their queue."""
        if self.priority:
            for request in passed:
                self.requeue(queue, request)
        # `extendleft` reverses them; releases that set long prompts aside let it.
        elif passed:
            queue.extendleft(passed if self.release.sets_long_prompts_aside else passed[::-1])

    def _ready(self, batch: Batch, request: Request) -> bool:
        """Whether a waiting request can be looked at in this step."""
        if request.load == LOADING or request.options.grammar_ready_ns > batch.now_ns:
            return False
        if request.load == LOADED:
            request.load = UNLOADED
            # Its blocks had no content, so that nobody hit them before the load was over.
            self.blocks.publish(request, request.computed)
            # Everything was loaded, but the model must run for a token: the last one is computed
            # again.
            if request.computed == request.length:
                request.computed -= 1
        # Its token of a step in flight is still to come.
        if request.stale and not request.drops_stale:
            return False
        return self.adapters.admits(request)

    def _try(self, batch: Batch, plan: Plan, request: Request) -> i64:
        """Admits the head of a waiting queue, if it can. Returns the tokens that it takes on; 0: it
        cannot be scheduled now; less than 0 for the reason why it is refused."""
        if self._budget <= 0 or self._inputs <= self._slots:
            return -TOKENS
        if len(batch.running) >= self.max_num_active_seqs:
            return -SLOTS
        if not self._ready(batch, request):
            return 0
        # Its load is over, or it was preempted and stayed in the batch (`Plan.ghosts`): no look-up.
        if request.computed:
            self.blocks.forget_hits()
            return self._admit(batch, plan, request, 0, NO_MATCH)
        found: i64 = self._find(request)
        match: Match | None = self._match(batch, request, found)
        if match is None:
            return 0
        return self._admit(batch, plan, request, found, match)

    def _find(self, request: Request) -> i64:
        """Tokens of a waiting request that the prefix cache has."""
        if request.options.skip_reading_prefix_cache:
            self.blocks.forget_hits()
            return 0
        return self.blocks.find(request)

    def _match(self, batch: Batch, request: Request, found: i64) -> Match | None:
        """What the connector can load behind the tokens found; None if it cannot say yet."""
        if self.connector is None:
            return NO_MATCH
        match = self.connector.get_num_new_matched_tokens(request, found)
        held = match is None
        if held != request.held and not request.num_preemptions:
            request.held = held
            batch.note(request, records.HELD if held else records.LOOKED_UP)
        if request.options.skip_reading_prefix_cache:
            self.blocks.forget_hits()
            return NO_MATCH
        return match

    def _admit(self, batch: Batch, plan: Plan, request: Request, found: i64, match: Match) -> i64:
        """The same for a request of which tokens were found, or are computed already."""
        computed: i64 = request.computed + found + match.tokens
        tokens: i64 = 0
        drafts: i64 = 0
        loads: bool = match.asynchronous
        # Tokens that are loaded while others compute are no work for this step.
        if not loads:
            tokens, drafts = self._num_new_tokens(plan, request, computed)
            if tokens <= 0:
                return tokens
        # With nobody running, nobody would ever free the blocks of the watermark.
        watermark: i64 = self.watermark_blocks if batch.running else 0
        admission: Admission = Admission(found, match.tokens, self.reserve_full_isl, watermark)
        if loads:
            admission.loads, admission.reserved = True, self._reserved()
        if not self.blocks.allocate(request, tokens, 0 if loads else self._lookahead, admission):
            return -WATERMARK if 0 < self.blocks.short_blocks <= watermark else -BLOCKS
        if self.connector is not None:
            self._has_blocks(self.connector, request, computed + tokens, found, match)
        # Not before `allocate`, which adds what was found to what was computed.
        request.computed = computed
        if loads:
            request.load = LOADING
            kind = records.RELOADING if request.num_preemptions else records.LOADING
            batch.note(request, kind, match.tokens)
            return 0
        batch.join(request)
        self.cadence.left(request)
        self.cadence.carries |= computed < request.length - 1
        self.adapters.admitted(request)
        plan.add(request, tokens, drafts)
        self._budget -= tokens
        self._inputs -= tokens + self._slots
        return tokens

    def _has_blocks(
        self, connector: Connector, request: Request, upto: i64, found: i64, match: Match
    ) -> None:
        """A connector hears that a request has blocks, and will have its first `upto` tokens."""
        connector.update_state_after_alloc(request, found, match)
        if match.tokens:
            request.match = match
        if match.asynchronous or upto < request.length:
            self._prefills[request] = None

    def _num_new_tokens(self, plan: Plan, request: Request, computed: i64) -> tuple[i64, i64]:
        """The tokens that the head of a waiting queue takes on, less than 0 for the reason why it
        is refused; and the drafts among them."""
        if self.cadence.holds and computed < request.length - 1:
            return -TOKENS, 0
        left: i64 = min(self._budget, self._inputs - self._slots)
        drafts: i64 = self._padding(plan, request, computed)
        if drafts and 1 + drafts > left:
            return -TOKENS, 0
        tokens: i64 = min(request.length - computed + drafts, self._most)
        if tokens > left and not self.chunked:
            return self._too_long, 0
        tokens = min(tokens, left)
        if self.blocks.cuts:
            tokens = self.blocks.cut(request, computed, tokens)
        # It reaches no block end: a running request is passed over, this one holds up the queue.
        if tokens == 0:
            return -TOKENS, 0
        # Some of the padding was cut off. Groups of states do that, others must not.
        if drafts and tokens != 1 + drafts:
            if not self.blocks.keeps_states:
                raise died("padding-cut", request, padded=1 + drafts, most=self._most)
            return 1, 0
        return tokens, drafts

    def _padding(self, plan: Plan, request: Request, computed: i64) -> i64:
        """Drafts beside the one token that a request lacks, so that all who decode in the step have
        equally many."""
        spec: i64 = self._num_spec_tokens
        if spec == 0 or request.length - computed != 1 or computed + spec + 2 > self.max_model_len:
            return 0
        continued: i64 = plan.num_continued
        # A prompt of one token, and nobody else: there are no decodes to be like.
        if continued == 0 and computed == 0:
            return 0
        # Nobody who goes on is in the middle of a prompt.
        return 0 if any(each.mid_prompt for each in plan.requests[:continued]) else spec

    def _reserved(self) -> i64:
        """The blocks that unfinished prompts and loads will still need. A load holds its blocks
        without progress, so it may not take them."""
        spec: i64 = self._num_spec_tokens
        return self.blocks.reserved(self._prefills, 1 + spec + self._lookahead if spec else 0)

    def _update_after_schedule(self, batch: Batch, plan: Plan) -> None:
        """Puts the part of each request into the sums of the plan, and counts its tokens as
        computed."""
        connected: bool = self.connector is not None
        requests: list[Request] = plan.places
        scheduled, yields, drafts = plan.scheduled, plan.yields, plan.drafts
        lengths: vec[i64] = plan.decode_lengths
        seqs: i64 = 0
        context_tokens: i64 = 0
        draft_tokens: i64 = 0
        now_ns: i64 = batch.now_ns
        sent: i64 = self._sent
        asynchronous: bool = self.asynchronous
        spec: i64 = self._num_spec_tokens
        resumes_at: i64 = self._call + self.pipeline_parallel_size
        for ghost, taken in plan.ghosts:
            ghost.computed = ghost.seen = taken
        entries: i64 = plan.num_requests + len(plan.ghosts)
        if self.release.dies_of_victims_in_the_batch and entries > len(batch.running):
            raise died("batch-too-large", plan.ghosts[0][0])
        continued: i64 = plan.num_continued
        k: i64
        for k in range(plan.num_requests):
            request: Request = requests[k]
            tokens: i64 = scheduled[k]
            before: i64 = request.computed
            after: i64 = before + tokens
            known: i64 = request.length + request.placeholders
            if k >= continued:
                # From the start, so that what was found or loaded is the cached part of it.
                request.computed = 0
                batch.chunk(plan, k, request, after, request.saved(0, after))
                if connected:
                    note_tiers(request)
            elif before < known - 1:
                batch.chunk(plan, k, request, tokens, request.saved(before, after))
            else:
                request.access_ns = now_ns
                yields[k] = 1
                lengths[seqs] = known
                seqs += 1
                context_tokens += known
                draft_tokens += tokens - 1
            request.computed = after
            request.in_flight += tokens
            request.batch = sent
            request.mid_prompt = after < known
            # The step samples a token for it. Scheduled ahead, it counts as a placeholder until the
            # step is settled, so that the next step can go on behind it.
            if after >= known:
                if connected and self._prefills:
                    self._prefills.pop(request, None)
                if asynchronous:
                    # How many drafts are accepted is known once the step is over (`_verify`).
                    request.placeholders += 1 + drafts[k]
                    request.drafts = spec
                    request.resumes_at = resumes_at
        plan.add_decodes(seqs, context_tokens, draft_tokens)

    def settle(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        """Settles a step once its time has passed: tokens exist, requests and transfers end
        (`update_from_output`)."""
        batch.now_ns = now_ns
        self._known += plan.computes
        self._release_late()
        over = len(batch.ended)
        waiting_ended: bool = False
        self._verified_seqs = self._verified = self._met = 0
        blocks: KVCacheManager = self.blocks
        spec: i64 = self._num_spec_tokens
        requests: list[Request] = plan.places
        scheduled, yields, all_drafts = plan.scheduled, plan.yields, plan.drafts
        k: i64
        for k in range(plan.num_requests):
            request: Request = requests[k]
            # Given up meanwhile, or, before 0.11.1, scheduled once more behind its last token.
            if request.state >= FINISHED:
                continue
            tokens: i64 = scheduled[k]
            request.in_flight -= tokens
            # Tokens from before a preemption come home first.
            stale: bool = request.stale > 0
            request.stale = max(0, request.stale - tokens)
            if yields[k] == 0 or (stale and request.drops_stale):
                continue
            accepted: i64 = 0
            drafts: i64 = all_drafts[k]
            if drafts:
                accepted = self._verify(request, drafts, k < plan.num_continued, stale)
            if _update_request_with_output(blocks, batch, request, accepted, stale, spec):
                # Preempted in flight, it ends in the waiting queue. `_retire` overwrites the state.
                waiting_ended |= request.state != RUNNING
                self._retire(batch, request, False)
        if spec:
            self._propose(plan, now_ns)
        if len(batch.ended) > over:
            batch.remove_ended()
        if waiting_ended:
            batch.remove_waiting()
        if self.worker is not None:
            self._hear(batch, self.worker.collect(now_ns))
        self.after_step(batch, plan, now_ns)

    def _release_late(self) -> None:
        """Releases blocks of ended requests to which no step in flight writes any more."""
        while self._late and self._late[0][0] <= self._known:
            self.blocks.drop_at_once(self._late.popleft()[1])

    def _verify(self, request: Request, drafts: i64, padless: bool, stale: bool) -> i64:
        """How many of the drafts of a request the model accepts: of padding, none. The KV of the
        others is forgotten."""
        accepted: i64 = 0
        if padless:
            accepted = self.speculation.accepted(request, drafts)
            self._verified_seqs += 1
            self._verified += drafts
            self._met += accepted
        if not stale:
            # Rejected drafts were counted as computed when the step was composed.
            if request.computed > 0:
                request.computed -= drafts - accepted
            if request.placeholders > 0:
                request.placeholders -= drafts - accepted
        return accepted

    def _propose(self, plan: Plan, now_ns: int) -> None:
        """Logs what became of the drafts of a step, and makes those for the next one."""
        counts = self._verified_seqs, self._verified, self._met
        self.draft_log.end_step(now_ns, plan.drafter_ns, *counts)
        # Scheduled ahead, drafts are placeholders that `_update_after_schedule` has counted.
        for request in [] if self.asynchronous else plan.requests:
            if request.state < FINISHED:
                drafts: i64 = self.speculation.propose(request)
                request.drafts = 0 if request.mid_prompt else drafts

    def _retire(self, batch: Batch, request: Request, keeps: bool) -> None:
        """Ends a request. `keeps`: a load into its blocks is under way."""
        blocks: KVCacheManager = self.blocks
        if self.connector is not None:
            # What left a window is given back at once; only the rest may be kept for a transfer.
            blocks.trim(request, max(0, request.computed - request.in_flight))
            if self.connector.request_finished(request):
                keeps = True
            self._prefills.pop(request, None)
            if keeps:
                self._kept[request] = blocks.detach(request)
            # A step in flight may write to its blocks; a load into them must not begin before.
            elif self._is_late(request):
                self._late.append((self._sent, blocks.detach(request)))
        self.finished.append(request)
        self.cadence.left(request)
        blocks.free(request)
        batch.complete(request)

    def abort(self, batch: Batch, request: Request) -> bool:
        if request.state >= FINISHED or not batch.knows(request):
            return False
        request.reason = ABORTED
        self._retire(batch, request, request.load == LOADING)
        batch.remove_ended()
        batch.remove_waiting()
        return True

    def _hear(self, batch: Batch, done: Done) -> None:
        """The worker reports which transfers are over."""
        if done is NOTHING or self.connector is None:
            return
        received, sent = self.connector.update_connector_output(done)
        for request in received:
            if request.state < FINISHED:
                request.load = LOADED
                kind = records.RELOADED if request.num_preemptions else records.LOADED
                batch.note(request, kind, 0, batch.now_ns)
            else:
                # Given up while it was loading: the load wrote to its blocks until now.
                self.blocks.drop_tables(self._kept.pop(request))
        for request in sent:
            self.blocks.drop_tables(self._kept.pop(request))


@mypyc_attr(allow_interpreted_subclasses=True)
class VllmV1Async(VllmV1):
    """vLLM V1 0.33.0 with asynchronous scheduling, its default (`async_scheduler.py`).

    Step i + 1 is composed while step i computes, before its tokens are known. A request counts a
    *placeholder* for each token that was sampled and is not known yet, so it can take on the next
    one. A request that is preempted meanwhile still gets the token of the step in flight, and may
    end with it in the waiting queue.
    """

    def schedules_ahead(self) -> bool:
        return True


def _check_seqs(most: int, active: int, max_num_batched_tokens: int) -> None:
    """Raises `ValueError` for numbers of sequences that no step can hold."""
    check_seqs(most, max_num_batched_tokens)
    if active > most:
        raise ValueError(
            f"max_num_active_seqs ({active}) is above max_num_seqs ({most}); lower it, or raise"
            " --max-num-seqs"
        )


def _order(
    release: Release,
    by_priority: bool,
    victim: Callable[..., Request] | None,
    requeue: str | Callable[[Any, Any], None] | None,
) -> tuple[Callable[..., Request] | None, Callable[[Any, Any], None]]:
    """Whom to preempt, and how victims join the queue: by the rules given, or by the engine's."""
    if not by_priority:
        return victim, make_requeue(requeue)
    joins, own = make_requeue(requeue, "priority", sorts=True), victims.priority
    if release.ties_in_order_of_the_trace:
        joins, own = priority_by_trace, victims.priority_by_trace
    return own if victim is None else victim, joins


# No methods: those of a scheduler of your own are looked up at each call, that is for each request.
def _pauses(batch: Batch, request: Request, call: i64, stops: bool) -> bool:
    """Whether a running request waits, in this call, for a stage that has it, or for its last token
    where the engine `stops` at that."""
    if call < request.resumes_at:
        return True
    return stops and request.placeholders > 0 and batch.ending(request)


def _update_request_with_output(
    blocks: KVCacheManager, batch: Batch, request: Request, accepted: i64, stale: bool, spec: i64
) -> bool:
    """Books the token of a request, and of its drafts the `accepted` ones. Returns whether it
    stops. `stale`: it was preempted while the step was in flight. `spec`: the most drafts."""
    stopped: bool = batch.token(request)
    beyond: i64 = accepted  # further tokens, of which those behind the last one do not count
    while beyond > 0 and not stopped:
        stopped = batch.further_token(request)
        beyond -= 1
    if not stale:
        request.computed -= beyond
        expected: bool = request.placeholders > 0
        if expected:
            request.placeholders -= 1 + accepted
        # A step that is settled before the next is composed leaves this to the next `allocate`.
        computed: i64 = request.computed - request.in_flight
        if computed >= request.next_unit and request.state == RUNNING and (expected or spec):
            blocks.publish(request, computed)
    return stopped


def _chosen(batch: Batch, victim: Any) -> Request:
    """A victim, which must be running."""
    if victim not in batch.running:
        raise ValueError(f"choose_victim returned {victim!r}; return one of batch.running")
    found: Request = victim
    return found

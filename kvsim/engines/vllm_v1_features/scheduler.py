"""The scheduler of vLLM V1 0.33.0 with its parts: connector, speculation, LoRA, pipelines.

It differs from the plain one (`kvsim.engines.vllm_v1`) in what the parts ask for. A waiting request
may own blocks before it runs, while a connector loads into them: such requests queue in
`Batch.holding`, which is served first. A step may verify drafts, whose tokens may be taken back.
Blocks may be released later than their request ends. Source: `v1/core/sched/scheduler.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Any, NamedTuple

from kvsim.engine.batch import Batch
from kvsim.engine.plan import Moved, Plan
from kvsim.engine.request import ABORTED, RUNNING, Request, Sequence
from kvsim.engines.vllm_v1 import BLOCKS, PREEMPTED, SLOTS, TOKENS, VllmV1
from kvsim.engines.vllm_v1_features import standing
from kvsim.engines.vllm_v1_features.connector import Connector, Done, Match, Worker
from kvsim.engines.vllm_v1_features.live import LOADED, LOADING, UNLOADED, Budget, Live
from kvsim.engines.vllm_v1_features.lora import LoraSlots
from kvsim.engines.vllm_v1_features.plan import FeaturePlan, Move
from kvsim.engines.vllm_v1_features.speculation import Speculation
from kvsim.engines.vllm_v1_groups.lookup import Hits
from kvsim.engines.vllm_v1_groups.manager import GroupTables
from kvsim.errors import EngineStopped
from kvsim.records.drafts import DraftLog
from kvsim.schema import BLOCKED

LORAS = BLOCKED.index("loras")


class _Found(NamedTuple):
    """What is computed already of a waiting request."""

    hits: Hits
    match: Match
    computed: int
    """Tokens in blocks, hit and loaded together."""


class VllmV1Features(VllmV1):
    """vLLM V1 0.33.0 with features, and synchronous scheduling."""

    ends_early = True
    _ahead = 0
    """Number of steps composed ahead of those that the stages of a pipeline work on."""

    def __init__(
        self,
        *,
        blocks: GroupTables,
        connector: Connector | None = None,
        worker: Worker | None = None,
        speculation: Speculation | None = None,
        draft_log: DraftLog | None = None,
        max_loras: int | None = None,
        pipeline_parallel_size: int = 1,
        **plain: Any,
    ) -> None:
        super().__init__(**plain)
        self.blocks = blocks
        self.connector = connector or Connector()
        self.worker = worker or Worker()
        self.speculation = speculation or Speculation()
        self.draft_log = draft_log or DraftLog()
        self.loras = LoraSlots(max_loras)
        self.pipeline_parallel_size = pipeline_parallel_size
        self.in_flight = pipeline_parallel_size + self._ahead
        self.live: dict[Request, Live] = {}
        self.finished: list[Request] = []
        """Requests that are over since the last step was composed."""
        self._call = 0
        """Number of scheduling calls so far."""
        self._prefills: dict[Request, None] = {}
        """Requests that have blocks for a part of their prompt and need more."""
        self._kept: dict[Request, list[list[int]]] = {}
        """Blocks of ended requests that a transfer still reads or writes."""
        self._late: deque[tuple[int, list[list[int]]]] = deque()
        """(number of a batch, blocks to release once its result is known), in order."""
        self._sent = self._known = 0
        """Numbers of the last batch with tokens that was composed, and whose result is known."""

    @property
    def _releases_late(self) -> bool:
        """Whether blocks wait for batches in flight, which may still write to them while a load
        into them begins."""
        return self.in_flight > 1 and self.connector.loads

    def remarks(self) -> list[str]:
        return [*super().remarks(), *self.connector.remarks(), *self.loras.remarks()]

    def arrive(self, batch: Batch, request: Request) -> None:
        """Accepts a request, or rejects it if its prompt leaves no room for a token."""
        super().arrive(batch, request)
        if not request.reason:
            self.live[request] = Live()

    def unfinished(self, batch: Batch) -> bool:
        """Whether there is something to schedule, or to hear from a transfer."""
        return bool(len(batch) or self._kept or self.connector.busy)

    @property
    def at_rest(self) -> bool:
        """Whether no transfer is under way, and nothing is left to do for requests that ended."""
        late = self.finished or self._kept or self._late
        return not (late or self.connector.busy or self.worker.busy or self.worker.unsent)

    def repeated(self, requests: Iterable[Request], composed: int, settled: int) -> None:
        """Counts steps of these requests that were composed, and settled, without being asked."""
        self._call += composed
        self._sent += composed
        self._known += settled
        for request in requests:
            live = self.live[request]
            live.batch, live.resumes_at = self._sent, self._call + self.pipeline_parallel_size

    # -- composing a step ------------------------------------------------------------------------

    def compose(self, batch: Batch, now_ns: int) -> Plan:
        """Composes the next step."""
        plan = FeaturePlan()
        batch.begin(now_ns, plan)
        self.blocks.begin()
        if self._sent == self._known:
            self._hear(batch, self.worker.pause(now_ns))
        self._call += 1
        budget = Budget(self.max_num_batched_tokens, self.speculation.slots)
        most = self.long_prefill_token_threshold
        if not most or len(batch) == 1:
            most = self.max_model_len
        plan.moves = self._continued(batch, budget, most)
        if plan.preempted:
            plan.blocked = PREEMPTED if batch.waiting else 0
        else:
            plan.moves += self._admissions(batch, plan, budget, most)
        plan.finished, self.finished = self.finished, []
        plan.transfers = self.connector.build_connector_meta(plan)
        self.worker.start(plan.transfers)
        moving = self.connector.busy or self.worker.busy
        plan.waits = moving and self._steps_on(batch, plan)
        if plan.moves:
            self._sent += 1
        for move in plan.moves:
            self._take_on(batch, move)
        plan.batched_tokens = self.max_num_batched_tokens - budget.tokens
        batch.composed()
        plan.drafter_ns = self.speculation.drafter_ns(plan)
        return plan

    def _steps_on(self, batch: Batch, plan: FeaturePlan) -> bool:
        """Whether a step takes place for the sake of transfers: to begin them, or because requests
        wait."""
        return (
            len(batch) > 0
            or self.worker.unsent
            or self.connector.restless
            or bool(plan.transfers.loads or plan.transfers.stores or plan.transfers.below)
        )

    def waits(self, batch: Batch, plan: Plan, start_ns: int, next_ns: float) -> Moved:
        assert isinstance(plan, FeaturePlan)
        idle = not plan.moves and (len(batch) > 0 or self.connector.restless)
        return self.worker.launch(plan.transfers, start_ns, idle, next_ns)

    def _continued(self, batch: Batch, budget: Budget, most: int) -> list[Move]:
        """Gives running requests slots for the tokens that they take on, at most `most` each, in
        order."""
        moves: dict[Request, Move] = {}
        blocks, lookahead = self.blocks, self.speculation.lookahead
        for request in tuple(batch.others):
            if budget.spent:
                break
            sequence, live = request.sequences[0], self.live[request]
            if sequence.state != RUNNING or self._pauses(batch, sequence, live):
                continue
            computed, known = sequence.computed, sequence.length + sequence.placeholders
            tokens = min(known + live.drafts - computed, most, budget.left)
            tokens = min(tokens, self.max_model_len - computed - 1)
            if tokens > 0:
                tokens = blocks.cut(sequence, computed, tokens)
            if tokens <= 0:
                continue
            while not blocks.allocate_slots(sequence, tokens, lookahead=lookahead, flying=live.fly):
                victim = self.victim(batch.others, blocks)
                if self._in_flight(victim):
                    # Its blocks would be released too late.
                    self._pass_over(batch, request)
                    return [*moves.values()]
                batch.others.remove(victim)
                if victim in moves:
                    budget.refund(moves.pop(victim).tokens)
                self._preempt(batch, victim)
                if victim is request:
                    break
            else:
                drafts = max(0, min(live.drafts, tokens + computed - known))
                live.drafts = 0
                standing.goes_on(batch, request, live)
                moves[request] = Move(request, tokens, drafts)
                budget.spend(tokens)
        return [*moves.values()]

    def _pauses(self, batch: Batch, sequence: Sequence, live: Live) -> bool:
        """Whether a running request takes on nothing, whatever is known of it."""
        return False

    def _pass_over(self, batch: Batch, first: Request) -> None:
        """A running request and those behind it get no slots in this step."""
        for request in islice(batch.others, batch.others.index(first), None):
            live = self.live[request]
            if not self._pauses(batch, request.sequences[0], live):
                standing.passed_over(batch, request, live)

    def _in_flight(self, request: Request) -> bool:
        """Whether the blocks of a request cannot be released before a batch in flight is known."""
        return self._releases_late and self.live[request].batch > self._known

    def _preempt(self, batch: Batch, victim: Request) -> None:
        super()._preempt(batch, victim)
        live, sequence = self.live[victim], victim.sequences[0]
        live.drop = self.connector.delivers or (live.drop and live.stale > 0)
        live.stale, sequence.placeholders, live.drafts, live.passed_over = live.fly, 0, 0, False
        self._prefills.pop(victim, None)

    # -- admissions ------------------------------------------------------------------------------

    def _admissions(self, batch: Batch, plan: FeaturePlan, budget: Budget, most: int) -> list[Move]:
        """Admits requests from the two queues until one is refused, and passes over those that
        cannot be scheduled now."""
        admitted: list[Move] = []
        aside: tuple[list[Request], list[Request]] = ([], [])
        self.loras.begin(batch.others)
        while queue := batch.holding or batch.waiting:
            if budget.spent or batch.num_running >= self.max_num_seqs:
                plan.blocked = TOKENS if budget.spent else SLOTS
                queue[0].blocked_steps += 1
                break
            request = queue[0]
            found = self._found(batch, request) if self._ready(batch, request) else None
            if found is not None:
                move = self._chunk(request, found, budget, most, plan.moves)
                if move is None or not self._allocated(batch, move, found):
                    plan.blocked = TOKENS if move is None else BLOCKS
                    request.blocked_steps += 1
                    break
                if move.tokens:
                    if queue is batch.holding:
                        batch.waiting.appendleft(queue.popleft())
                    self._admit(batch, move, found)
                    budget.spend(move.tokens)
                    admitted.append(move)
                    continue
                self._load(batch, request, found)
            queue.popleft()
            aside[self._holds(request)].append(request)
        if self.loras.refuses and not plan.blocked:
            plan.blocked = LORAS
        for queue, passed in zip((batch.waiting, batch.holding), aside, strict=True):
            self._put_back(queue, passed)
        return admitted

    def _ready(self, batch: Batch, request: Request) -> bool:
        """Whether a waiting request can be looked at in this step."""
        live, sequence = self.live[request], request.sequences[0]
        if live.load == LOADING or request.options.grammar_ready_ns > batch.now_ns:
            return False
        if live.load == LOADED:
            live.load = UNLOADED
            self.blocks.publish(sequence, sequence.computed)
            if sequence.computed == sequence.length:
                sequence.computed -= 1
        return (live.drop or not live.stale) and self.loras.admits(request)

    def _found(self, batch: Batch, request: Request) -> _Found | None:
        """Returns what is computed already of a waiting request; None if the connector cannot say
        it yet."""
        sequence, nothing = request.sequences[0], self.blocks.nothing
        if sequence.computed:
            return _Found(nothing, Match(), sequence.computed)
        skips = request.options.skip_reading_prefix_cache
        hits = nothing if skips else self.blocks.lookup(sequence)
        match = self.connector.get_num_new_matched_tokens(request, hits.tokens)
        standing.looked_up(batch, request, self.live[request], match)
        if skips:
            match = Match()
        return None if match is None else _Found(hits, match, hits.tokens + match.tokens)

    def _chunk(
        self, request: Request, found: _Found, budget: Budget, most: int, continued: list[Move]
    ) -> Move | None:
        """Returns the tokens that a waiting request takes on, none if it is loaded first. None: it
        does not fit into the step.

        With k drafts, its last token is padded to 1 + k tokens where those that the step continues
        all decode, so that all of them have equally many."""
        if found.match.asynchronous:
            return Move(request, 0, resumed=True)
        spec, left, computed = self.speculation.num_spec_tokens, budget.left, found.computed
        sequence = request.sequences[0]
        tokens, padded = sequence.length - computed, False
        if spec and tokens == 1 and (continued or computed > 0):
            decodes = not any(self.live[move.request].mid_prompt for move in continued)
            padded = decodes and computed + spec + 2 <= self.max_model_len
            if padded and 1 + spec > left:
                return None
            tokens += spec if padded else 0
        tokens = min(tokens, most)
        if tokens > left and not self.chunked:
            return None
        tokens = self.blocks.cut(sequence, computed, min(tokens, left))
        if not tokens:
            return None
        if padded and tokens != 1 + spec:
            if not self.blocks.cuts:
                raise _padding_cut(request, spec, most)
            tokens, padded = 1, False
        return Move(request, tokens, spec if padded else 0, padded, resumed=True)

    def _allocated(self, batch: Batch, move: Move, found: _Found) -> bool:
        """Gives a waiting request its blocks. Returns whether they were free."""
        loads, request = found.match.asynchronous, move.request
        sequence = request.sequences[0]
        allocated = self.blocks.allocate_slots(
            sequence,
            move.tokens,
            hits=found.hits,
            external=found.match.tokens,
            whole=self.reserve_full_isl,
            lookahead=0 if loads else self.speculation.lookahead,
            delay=loads,
            watermark=self.watermark_blocks if batch.num_running else 0,
            reserved=self._reserved() if loads else 0,
            flying=self.live[request].fly,
        )
        if allocated:
            self.connector.update_state_after_alloc(request, found.hits.tokens, found.match)
            if found.match.tokens:
                self.live[request].match = found.match
        return allocated

    def _reserved(self) -> int:
        """Returns the blocks that unfinished prompts and loads will still need. A load holds its
        blocks without progress, so it may not take them."""
        spec = self.speculation
        extra = 1 + spec.num_spec_tokens + spec.lookahead if spec.num_spec_tokens else 0
        own = sum([-(-extra // group.block_size) for group in self.blocks.groups])
        lacking = [self.blocks.reserve(each.sequences[0], extra) for each in self._prefills]
        return sum(lacking) + own

    def _load(self, batch: Batch, request: Request, found: _Found) -> None:
        """A connector loads the KV of a waiting request, which has its blocks."""
        request.sequences[0].computed = found.computed
        self.live[request].load = LOADING
        standing.load_begins(batch, request, found.match)
        self._prefills[request] = None

    def _admit(self, batch: Batch, move: Move, found: _Found) -> None:
        """Moves the head of the waiting queue to the end of the running ones."""
        request, sequence = move.request, move.request.sequences[0]
        batch.join(request)
        self.loras.admitted(request)
        if found.computed + move.tokens < sequence.length:
            self._prefills[request] = None
        # The step computes what lies behind; the plan counts the rest as cached.
        sequence.computed = found.computed

    def _holds(self, request: Request) -> bool:
        """Whether a waiting request owns blocks."""
        return self.live[request].load != UNLOADED or request.sequences[0].computed > 0

    def _put_back(self, queue: deque[Request], passed: list[Request]) -> None:
        """Puts requests that were passed over back to the front of their queue."""
        if self.priority:
            for request in passed:
                self.requeue(queue, request)
        else:
            queue.extendleft(reversed(passed))

    def _take_on(self, batch: Batch, move: Move) -> None:
        """Puts the part of a request into the plan, and counts its tokens as computed."""
        request, tokens = move.request, move.tokens
        sequence, live = request.sequences[0], self.live[request]
        before = sequence.computed
        known = sequence.length + sequence.placeholders
        if move.resumed:
            sequence.computed = 0
            batch.run_prefill(request, before + tokens, charged=tokens)
            standing.admitted(request, live.match)
        elif before < known - 1:
            batch.run_prefill(request, tokens)
        elif tokens == 1:
            batch.run_token(request, known)
        else:
            batch.run_verify(request, tokens - 1, known)
        sequence.computed = before + tokens
        live.fly += tokens
        live.batch = self._sent
        live.mid_prompt = sequence.computed < known
        if not live.mid_prompt:
            self._prefills.pop(request, None)
            self._samples(sequence, live, move)

    def _samples(self, sequence: Sequence, live: Live, move: Move) -> None:
        """A step that was composed will yield tokens for a request."""

    # -- after the step --------------------------------------------------------------------------

    def settle(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        """Settles a step once its time has passed: tokens exist, requests and transfers end."""
        assert isinstance(plan, FeaturePlan)
        batch.now_ns = now_ns
        if plan.moves:
            self._known += 1
            while self._late and self._late[0][0] <= self._known:
                self.blocks.drop_at_once(self._late.popleft()[1])
        over = len(self.finished)
        for move, (_, _, samples) in zip(plan.moves, plan.singles, strict=True):
            self._book(batch, move, samples)
        self.draft_log.end_step(now_ns, plan.drafter_ns)
        if len(self.finished) > over:
            self._remove_ended(batch)
        self._propose(plan)
        self._hear(batch, self.worker.collect(now_ns))

    def _book(self, batch: Batch, move: Move, samples: bool) -> None:
        """Books the tokens that a step yielded for a request."""
        request = move.request
        live = self.live.get(request)
        if live is None:
            return
        live.fly -= move.tokens
        stale = live.stale > 0
        if stale:
            live.stale -= move.tokens
        if not samples or (stale and live.drop):
            return
        sequence = request.sequences[0]
        accepted = 0
        if move.drafts and not move.padded:
            accepted = self.speculation.accepted(sequence, move.drafts)
            self.draft_log.verified(move.drafts, accepted)
        expected = sequence.placeholders > 0
        if not stale:
            self._take_back(sequence, move.drafts - accepted)
        stopped, new = batch.token(sequence), 1
        while not stopped and new <= accepted:
            stopped, new = batch.further_token(sequence), new + 1
        if not stale:
            sequence.computed -= 1 + accepted - new
            if sequence.placeholders:
                sequence.placeholders -= 1 + accepted
            if sequence.state == RUNNING and (expected or self.speculation.num_spec_tokens):
                self.blocks.publish(sequence, sequence.computed - live.fly)
        if stopped:
            self._retire(batch, request)

    def _take_back(self, sequence: Sequence, rejected: int) -> None:
        """Forgets the KV of rejected drafts."""
        if sequence.computed > 0:
            sequence.computed -= rejected
        if sequence.placeholders > 0:
            sequence.placeholders -= rejected

    def _retire(self, batch: Batch, request: Request, keeps: bool = False) -> None:
        """Ends a request. `keeps`: a load into its blocks is under way."""
        live, sequence = self.live.pop(request), request.sequences[0]
        blocks = self.blocks
        if self.connector.__class__ is not Connector:
            blocks.trim(sequence, max(0, sequence.computed - live.fly))
        keeps |= self.connector.request_finished(request)
        self._prefills.pop(request, None)
        if keeps:
            self._kept[request] = blocks.detach(sequence)
        elif self._releases_late and live.batch > self._known:
            self._late.append((self._sent, blocks.detach(sequence)))
        batch.complete(request)
        self.finished.append(request)

    def _remove_ended(self, batch: Batch) -> None:
        """Removes ended requests from all queues."""
        batch.remove_ended()
        for queue in (batch.waiting, batch.holding):
            for request in [each for each in queue if each.finish_ns >= 0]:
                queue.remove(request)

    def abort(self, batch: Batch, request: Request) -> bool:
        """Ends a request that its client gave up. Returns whether it was in progress."""
        live = self.live.get(request)
        if live is None:
            return False
        request.reason = ABORTED
        self._retire(batch, request, keeps=live.load == LOADING)
        self._remove_ended(batch)
        return True

    def _propose(self, plan: FeaturePlan) -> None:
        """The drafter proposes tokens behind those of a step."""
        for move in plan.moves:
            live = self.live.get(move.request)
            if live is not None:
                drafts = self.speculation.propose(move.request.sequences[0])
                live.drafts = 0 if live.mid_prompt else drafts

    def _hear(self, batch: Batch, done: Done) -> None:
        """The worker reports which transfers are over."""
        if not done:
            return
        received, sent = self.connector.update_connector_output(done)
        for request in received:
            live = self.live.get(request)
            if live is not None:
                live.load = LOADED
                standing.load_is_over(batch, request)
            else:
                self._drop_kept(request)
        for request in sent:
            self._drop_kept(request)

    def _drop_kept(self, request: Request) -> None:
        tables = self._kept.pop(request)
        self.blocks.drop_tables(tables)


class VllmV1FeaturesAsync(VllmV1Features):
    """vLLM V1 0.33.0 with features, and asynchronous scheduling (`async_scheduler.py`).

    One batch more is in flight than the pipeline has stages. A request with drafts counts one
    placeholder for each of them, too.
    """

    _ahead = 1

    def _pauses(self, batch: Batch, sequence: Sequence, live: Live) -> bool:
        if sequence.placeholders and batch.ending(sequence):
            return True
        return self._call < live.resumes_at

    def _samples(self, sequence: Sequence, live: Live, move: Move) -> None:
        sequence.placeholders += 1 + move.drafts
        live.drafts = self.speculation.num_spec_tokens
        live.resumes_at = self._call + self.pipeline_parallel_size

    def _propose(self, plan: FeaturePlan) -> None:
        """Placeholders stand for the drafts from the time when a step is composed."""


def _padding_cut(request: Request, spec: int, most: int) -> EngineStopped:
    """Returns the outcome if a padded decode does not fit the prompt threshold."""
    return EngineStopped(
        kind="engine-error",
        request_id=request.id,
        explanation=(
            f"request {request.id} was padded to {1 + spec} tokens, and"
            f" long_prefill_token_threshold cut it to {most}"
        ),
        remedy=f"set --long-prefill-token-threshold to 0, or to {1 + spec} at least",
        rule="AssertionError @ v1/core/sched/scheduler.py",
    )

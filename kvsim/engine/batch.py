"""The queues of a replica and the step being composed: the one place where requests move.

```
 arrive        admit                       finish
────────► waiting ────────► running ─────────────────► ended
             │  ▲              │ ▲
      ignore │  └── requeue ───┤ │ swap_in
             ▼    (recompute)  ▼ │
           ended             swapped
```

Schedulers propose; these moves keep queues, block tables, the plan and the per-request figures
consistent, so that no policy can corrupt a count. A preempted request leaves `running` at once,
but joins `waiting` or `swapped` only when the scheduler requeues, as the engines do.

The stop test is here, too: nobody else knows how long an output becomes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from sys import maxsize
from typing import Protocol

from kvsim.engine.plan import RECOMPUTE, SWAP, Plan, Prefill
from kvsim.engine.request import (
    FINISHED,
    IGNORED,
    RUNNING,
    SWAPPED,
    WAITING,
    Request,
    Sequence,
    Stream,
)
from kvsim.engine.tables import Tables, swap_space_exhausted
from kvsim.records import transitions
from kvsim.records.tally import Tally

GiveWay = Callable[[Request], None]
"""What a scheduler does with a victim."""

Entry = tuple[Request, int, bool]
"""One entry of `Plan.entries`: the request, the number of tokens that the step takes on for it, and
whether a token is sampled."""


class Endings:
    """The stop test. No other object knows how long an output becomes."""

    def __init__(
        self,
        output_length: Callable[[int], int],
        longest_sequence: int | None = None,
        sample_lengths: Callable[[int], list[int] | None] | None = None,
    ) -> None:
        """`output_length` maps the index of a request to the most tokens that one of its
        samples generates. `longest_sequence` is the length in tokens at which every sequence ends.
        `sample_lengths` maps the index of a request to the tokens of each sample, where they
        differ."""
        self._output_length = output_length
        self._longest = longest_sequence
        self._sample_lengths = sample_lengths

    def left(self, sequence: Sequence) -> int:
        """Returns the number of tokens that a sequence has still to generate; 0 or less once it has
        its last one."""
        request = sequence.request
        length, tokens = sequence.length, self._output_length(request.index)
        if self._sample_lengths is not None:
            own = self._sample_lengths(request.index)
            # A sample that was drawn again, beyond its own end, goes on to that of the longest.
            if own is not None and length - request.input_length <= own[sequence.sample]:
                tokens = own[sequence.sample]
        end = request.input_length + tokens
        if self._longest is not None and self._longest < end:
            end = self._longest
        return end - length


class Together(Protocol):
    """The leading requests of the running queue while they only decode, handled as a group
    (`kvsim.fast.cohort`)."""

    @property
    def number(self) -> int:
        """Returns the number of requests in the group."""
        ...

    def decode(self, give_way: GiveWay | None, spare: bool, most: int) -> int:
        """Gives each of them a slot for one more token; see `Batch.decode_together`."""
        ...

    def settle(self, plan: Plan) -> list[Entry]:
        """Books their tokens of a step; see `Batch.settle_together`."""
        ...

    def run(self) -> None:
        """Puts the requests that have slots into the plan; see `Batch.run_together`."""
        ...

    def part_with(self, request: Request) -> None:
        """Removes a request from the group and brings its fields up to date."""
        ...

    def dissolve(self) -> None:
        """Dissolves the group. Its requests move to the head of `Batch.others`."""
        ...


class Batch:
    """All requests of one replica that have arrived and not ended, and the moves that change their
    state."""

    def __init__(self, blocks: Tables, endings: Endings) -> None:
        self.blocks = blocks
        self._endings = endings
        self.waiting: deque[Request] = deque()
        self.others: deque[Request] = deque()
        """Running requests that are handled one by one, in order. Those that `decode_together`
        serves are not among them; they come first in the running queue."""
        self.swapped: deque[Request] = deque()
        self.holding: deque[Request] = deque()
        """Waiting requests that own blocks already, because a connector loads into them."""
        self.ended: list[Request] = []
        """Requests that have ended since the loop last asked, in order."""
        self.aside: list[Request] = []
        """Requests that an engine keeps out of its queues for one step. They keep their blocks."""
        self.lost: list[Request] = []
        """Requests that ended without returning their blocks."""
        self._together: Together | None = None
        """The group of requests that decode together. With None, every request is handled one by
        one: the decisions are the same, with more work."""
        self.token_gaps_ns = Tally()
        """Time between consecutive tokens of a sequence in nanoseconds → how often it occurred."""
        self.tokens = 0
        """Number of tokens booked one by one so far. The loop uses it to detect progress."""
        self.transitions = transitions.Transitions()
        self.busy_until_ns = 0
        """When the last dispatched step ends. A step that is composed earlier begins only then."""
        self.plan = Plan()
        self.now_ns = 0

    def __len__(self) -> int:
        return len(self.waiting) + self.num_running + len(self.swapped) + len(self.holding)

    # -- running requests ------------------------------------------------------------------------

    @property
    def running(self) -> deque[Request]:
        """All running requests in order."""
        self.dissolve()
        return self.others

    @running.setter
    def running(self, requests: deque[Request]) -> None:
        self.dissolve()
        self.others = requests

    @property
    def num_running(self) -> int:
        """The number of running requests."""
        together = self._together
        return len(self.others) + (0 if together is None else together.number)

    @property
    def num_together(self) -> int:
        """The number of running requests that are served together and come before `others`."""
        return 0 if self._together is None else self._together.number

    def dissolve(self) -> None:
        """Moves every request out of the group, so that all running requests are handled one by
        one."""
        if self._together is not None:
            self._together.dissolve()

    def lead(self, requests: Iterable[Request]) -> None:
        """Puts requests at the head of the running queue, in this order."""
        leading = list(requests)
        if leading:
            self.running.extendleft(reversed(leading))

    def remove_ended(self) -> None:
        """Removes ended requests from the running queue; the others keep their order."""
        self.others = deque(request for request in self.others if request.finish_ns < 0)

    # -- the stop test ---------------------------------------------------------------------------

    def stopped(self, sequence: Sequence) -> bool:
        """Whether a sequence has its last token."""
        return self._endings.left(sequence) <= 0

    def stopping(self, sequence: Sequence) -> bool:
        """Whether a sequence will have its last token once the tokens in flight are known.

        An engine knows this in advance when the output length is fixed: the request sets
        `max_tokens` and `ignore_eos`, as replayed requests do.
        """
        return self._endings.left(sequence) <= sequence.placeholders

    def ending(self, sequence: Sequence) -> bool:
        """Whether the next token of a sequence is its last one; known in advance as in
        `stopping`."""
        return self._endings.left(sequence) <= 1

    # -- requests that decode together -----------------------------------------------------------

    def look_together(self, together: Together) -> None:
        """From now on, serves requests that only decode through this group."""
        self._together = together

    def decode_together(
        self, give_way: GiveWay | None = None, spare: bool = False, most: int = maxsize
    ) -> int:
        """Gives the leading requests of the running queue slots for one more token each. Returns
        how many requests it served.

        The leading requests are those before the first one for which `Scheduler.only_decodes` is
        false; `others` holds the rest. If 0 is returned, every request must be handled one by one
        and `others` holds all of them.

        `give_way` is called with each victim after it left the running queue, always at its tail.
        With None, the method returns 0 if there are too few blocks. `spare` says whether a request
        needs a free block even if its last block has room. At most `most` requests are served.
        """
        return 0 if self._together is None else self._together.decode(give_way, spare, most)

    def run_together(self) -> None:
        """Adds the requests that `decode_together` served to the step, next in the batch."""
        if self._together is not None:
            self._together.run()

    def settle_together(self, plan: Plan) -> list[Entry]:
        """Books the tokens of the requests that decoded together in a step, and tells the scheduler
        which of them got their last token.

        Returns the entries, in running order, of requests that have left the group since then.
        Their tokens are still to be booked.
        """
        return [] if self._together is None else self._together.settle(plan)

    def to_book(self, plan: Plan) -> Iterator[Entry]:
        """Yields, in batch order, the entries of a step whose tokens must be booked one by one.

        It calls `settle_together` at the place where the group stands in the batch.
        """
        yield from plan.singles[: plan.place]
        yield from self.settle_together(plan)
        yield from plan.singles[plan.place :]

    # -- moves while a step is composed ----------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """Adds a request to the end of the waiting queue."""
        self.waiting.append(request)

    def refuse(self, request: Request, reason: str) -> None:
        """Rejects a request on arrival. It never joins a queue."""
        for sequence in request.sequences:
            sequence.state = IGNORED
        request.reason = reason
        request.finish_ns = request.arrival_ns
        self.ended.append(request)

    def replace_prompt(self, request: Request, stream: Stream | None, tokens: int) -> None:
        """Replaces the prompt of an arriving request by another one of `tokens` tokens."""
        request.input_length = tokens
        request.sequences = [Sequence(request, stream)]

    def begin(self, now_ns: int, plan: Plan | None = None) -> Plan:
        """Starts to compose a step, in `plan` if the engine has plans of its own."""
        self.now_ns = now_ns
        self.plan = Plan() if plan is None else plan
        return self.plan

    def admit(self, request: Request) -> None:
        """Admits the head of the waiting queue: gives it its blocks and moves it to `running`."""
        assert self.waiting[0] is request
        self.waiting.popleft()
        self.hold(request)

    def hold(self, request: Request) -> None:
        """Gives a waiting request its blocks without moving it from its place in the queue."""
        for sequence in request.sequences:
            if sequence.state == WAITING:
                self.blocks.allocate(sequence)
                sequence.state = RUNNING
        self.scheduled(request)

    def join(self, request: Request) -> None:
        """Moves the head of the waiting queue, which already has its blocks, to the end of
        `running`."""
        assert self.waiting[0] is request
        self.waiting.popleft()
        self.others.append(request)
        if request.sequences[0].state == WAITING:
            self.scheduled(request)
        for sequence in request.sequences:
            sequence.state = RUNNING

    def grow(self, request: Request) -> None:
        """Gives a running request slots for its newest tokens. A shared block is copied first."""
        for sequence in request.sequences:
            if sequence.state == RUNNING:
                copies = self.blocks.append(sequence)
                if copies:
                    self.plan.copies.extend(copies)

    def ignore(self, request: Request, reason: str) -> None:
        """Ends a request that the engine gives up. The caller has already removed it from its
        queue.

        Blocks that it still holds are lost.
        """
        if any(sequence.table for sequence in request.sequences):
            self.lost.append(request)
        for sequence in request.sequences:
            if sequence.state != FINISHED:
                sequence.state = IGNORED
        request.reason = reason
        self.plan.ignored.append(request)
        self.finish(request)

    def preempt(self, request: Request) -> None:
        """Frees all blocks of a running request; its KV will be computed again."""
        lost = 0
        for sequence in request.sequences:
            if sequence.state == RUNNING:
                if sequence.computed > lost:
                    lost = sequence.computed
                sequence.state = WAITING
                self.blocks.free(sequence)
                sequence.computed = 0
                sequence.prompt_stage = True
        if lost > request.lost_tokens:
            request.lost_tokens = lost
        request.num_preemptions += 1
        self.plan.preempted.append((request, RECOMPUTE))
        self.note(request, transitions.PREEMPTED, lost)

    def swap_out(self, request: Request) -> list[tuple[int, int]]:
        """Moves the blocks of a running request to the CPU and returns the copies.

        Raises `EngineStopped` if the CPU pool is too small, as vLLM does.
        """
        blocks = self.blocks
        moving = [s for s in request.sequences if s.state == RUNNING]
        need = blocks.swap_need(moving, blocks.cpu)
        if need > blocks.cpu.free:
            raise swap_space_exhausted(request, need, blocks.cpu.free, blocks.swap_space_rule)
        pairs = blocks.swap_out(moving)
        for sequence in moving:
            sequence.state = SWAPPED
        request.num_preemptions += 1
        request.swapped_out_blocks += len(pairs)
        self.plan.preempted.append((request, SWAP))
        self.note(request, transitions.SWAPPED_OUT, len(pairs))
        return pairs

    def swap_in(self, request: Request) -> None:
        """Moves the head of the swapped queue back to the GPU and returns the copies."""
        assert self.swapped[0] is request
        self.swapped.popleft()
        moving = [s for s in request.sequences if s.state == SWAPPED]
        pairs = self.blocks.swap_in(moving)
        for sequence in moving:
            sequence.state = RUNNING
        request.swapped_in_blocks += len(pairs)
        self.plan.swaps_in.extend(pairs)
        self.plan.swapped_in.append(request)
        self.note(request, transitions.SWAPPED_IN, len(pairs))

    def run_prefill(self, request: Request, scheduled: int, charged: int | None = None) -> None:
        """Adds a chunk of `scheduled` known tokens to the step. Tokens that hit the prefix cache
        are not computed.

        `charged` is the number of these tokens that count against the token budget; None means all
        of them.
        """
        sequence = request.sequences[0]
        if sequence.state != RUNNING:
            sequence = next(s for s in request.sequences if s.state == RUNNING)
        before = sequence.computed
        cached, samples = self.take_on(request, sequence, scheduled)
        plan = self.plan
        plan.singles.append((request, scheduled, samples))
        if charged is None:
            charged = scheduled
        plan.prefills.append(Prefill(request, scheduled, cached, before, samples, charged))
        plan.chunks.append((scheduled - cached, before + cached))
        plan.samples += samples

    def run_decode(self, request: Request, tokens: int = 1) -> None:
        """Adds one decode token for each running sequence of a request.

        With `tokens` above 1, the step also computes lost KV of a sample again.
        """
        plan, scheduled, now_ns = self.plan, self.blocks.scheduled, self.now_ns
        plan.singles.append((request, tokens, True))
        plan.single_decodes.append(request)
        if tokens > 1:
            plan.chunks.append((tokens - 1, 0))
            self.note(request, transitions.RESUMED)
        for sequence in request.sequences:
            if sequence.state == RUNNING:
                scheduled(sequence, now_ns)
                plan.decode_seqs += 1
                plan.context_tokens += sequence.length
                plan.single_lengths.append(sequence.length)

    def run_token(self, request: Request, context_tokens: int) -> None:
        """Adds the next token of a request with one sequence. The sequence then has
        `context_tokens` tokens."""
        plan = self.plan
        plan.singles.append((request, 1, True))
        plan.single_decodes.append(request)
        plan.decode_seqs += 1
        plan.context_tokens += context_tokens
        plan.single_lengths.append(context_tokens)
        request.sequences[0].access_ns = self.now_ns

    def run_verify(self, request: Request, drafts: int, context_tokens: int) -> None:
        """Adds the next token of a request with one sequence, and `drafts` drafts behind it, which
        the step verifies. With that token, the sequence has `context_tokens` tokens."""
        plan = self.plan
        self.run_token(request, context_tokens)
        plan.singles[-1] = request, 1 + drafts, True
        plan.draft_tokens += drafts
        plan.samples += drafts

    def composed(self) -> Plan:
        """Completes the step and returns its plan."""
        self.blocks.composed()
        self.plan.samples += self.plan.decode_seqs
        return self.plan

    # -- when its time has passed ----------------------------------------------------------------

    def publish(self, plan: Plan) -> None:
        """Publishes blocks once the KV of a step exists, before its tokens are booked. Other
        requests may then share them."""
        blocks = self.blocks
        if not blocks.publish_at.computed:
            return
        computed = [(each.request, each.computed_before + each.scheduled) for each in plan.prefills]
        for request, upto in computed + [(request, 0) for request in plan.decodes]:
            for sequence in request.sequences:
                if sequence.state == RUNNING:
                    blocks.publish(sequence, upto or sequence.length)

    def compute(self, sequence: Sequence, tokens: int) -> None:
        """Books that the KV of `tokens` more tokens of a sequence exists."""
        sequence.computed += tokens
        if sequence.computed == sequence.length:
            sequence.prompt_stage = False

    def token(self, sequence: Sequence, placeholders: int = 0) -> bool:
        """Books one more token of a sequence and returns whether it is the last one.

        `placeholders` is 1 if the token was counted as one in flight.
        """
        # Of one that decodes together with others by now, the token is of a step before it joined:
        # what was true then changes, and that is what the slots of its sequence hold.
        kind, sequence.__class__ = sequence.__class__, Sequence
        sequence.placeholders -= placeholders
        self.add_token(sequence)
        sequence.__class__ = kind
        # Who decodes together with others has more to come.
        return kind is Sequence and self._endings.left(sequence) <= 0

    def further_token(self, sequence: Sequence) -> bool:
        """Books a token that the client gets in one message with the token before it, so that no
        time lies between them (`vllm bench serve` counts time between messages). Returns whether it
        is the last one."""
        sequence.length += 1
        self.tokens += 1
        return self.stopped(sequence)

    def add_token(self, sequence: Sequence) -> None:
        """Appends one token to a sequence, without the stop test."""
        now_ns = self.now_ns
        sequence.length += 1
        self.tokens += 1
        request = sequence.request
        if request.n > 1:
            request.sampled_tokens += 1
        last = sequence.last_token_ns
        if last >= 0:
            self.token_gaps_ns.add(now_ns - last)
        elif request.first_token_ns < 0:
            request.first_token_ns = now_ns
        sequence.last_token_ns = now_ns

    def fork(self, parent: Sequence, children: list[Sequence]) -> None:
        """Lets the other samples of a request share the blocks of its first sequence."""
        for child in children:
            parent.request.sequences.append(child)
            if child.state == RUNNING:
                self.blocks.fork(parent, child)

    def end_sequence(self, sequence: Sequence) -> None:
        """Ends a sequence that has all its tokens and frees its blocks."""
        sequence.state = FINISHED
        self.blocks.free(sequence)

    def finish(self, request: Request) -> None:
        """Ends a request whose sequences have all ended."""
        request.finish_ns = self.now_ns
        self.ended.append(request)

    def complete(self, request: Request) -> None:
        """Ends a request of one sequence that has all its tokens, and frees its blocks."""
        sequence = request.sequences[0]
        if sequence.member is not None:
            assert self._together is not None
            self._together.part_with(request)
        sequence.state = FINISHED
        self.blocks.free(sequence)
        request.finish_ns = self.now_ns
        self.ended.append(request)

    def lose(self, request: Request) -> None:
        """Drops a request without freeing its blocks, as an engine with a leak does."""
        for sequence in request.sequences:
            sequence.state = IGNORED
        request.reason = "lost-by-engine"
        self.lost.append(request)
        self.finish(request)

    # -- the mechanism's own -----------------------------------------------------------------

    def take_on(self, request: Request, sequence: Sequence, scheduled: int) -> tuple[int, bool]:
        """Books that a step takes on `scheduled` more known tokens of a sequence.

        Returns how many of them are prefix hits that are not computed, and whether the last known
        token is among them, so that a token is sampled.
        """
        known = self.blocks.scheduled(sequence, self.now_ns)
        before, length = sequence.computed, sequence.length
        end = before + scheduled
        cached = 0
        if known:
            cached = max(0, min(known, min(length, end) - self.blocks.full_hit.least) - before)
        samples = end >= length
        if request.num_preemptions == 0:
            request.cached_tokens += cached
            return cached, samples
        request.recached_tokens += cached
        lost = request.lost_tokens
        again = (end if end < lost else lost) - before - cached
        if again > 0:
            request.recomputed_tokens += again
        elif request.first_token_ns < 0:
            self.note(request, transitions.CAUGHT_UP)
        if samples:
            self.note(request, transitions.RESUMED)
        elif request.first_token_ns >= 0 and end == length - 1:
            self.note(request, transitions.RECOVERED)
        return cached, samples

    def scheduled(self, request: Request) -> None:
        """Books that a waiting request was given blocks."""
        if request.first_scheduled_ns < 0:
            request.first_scheduled_ns = self.now_ns
            if self.busy_until_ns > self.now_ns:
                self.note(request, transitions.SCHEDULED, 0, self.busy_until_ns)
        else:
            self.note(request, transitions.READMITTED)

    def note(self, request: Request, kind: int, value: int = 0, time_ns: int = -1) -> None:
        """Logs a transition; by default, at the start of the step being composed."""
        if time_ns < 0:
            time_ns = max(self.now_ns, self.busy_until_ns)
        self.transitions.rows += transitions.pack(request.index, kind, time_ns, value)

    def audit(self) -> None:
        """Asserts that queues, request states, block tables and pools agree."""
        queues = (self.waiting, self.holding, self.running, self.swapped, self.aside, self.lost)
        everywhere = [request for queue in queues for request in queue]
        assert len(set(everywhere)) == len(everywhere), "a request is in two queues"
        for queue, state in ((self.running, RUNNING), (self.swapped, SWAPPED)):
            for request in queue:
                assert all(s.state in (state, FINISHED) for s in request.sequences)
        self.blocks.audit(everywhere)

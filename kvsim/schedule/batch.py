"""The queues and the step being composed: the one place where requests move.

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
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvsim import transitions
from kvsim.blocks.tables import Tables, swap_space_exhausted
from kvsim.plan import RECOMPUTE, SWAP, Plan, Prefill
from kvsim.request import FINISHED, IGNORED, RUNNING, SWAPPED, WAITING, Request, Sequence
from kvsim.schedule.pace import GiveWay, Pace


class Batch:
    """All requests of one replica that have arrived and not ended."""

    def __init__(self, blocks: Tables) -> None:
        self.blocks = blocks
        self.waiting: deque[Request] = deque()
        self.behind: deque[Request] = deque()
        """Running requests that are looked at one by one: here all of them, in order."""
        self.swapped: deque[Request] = deque()
        self.ended: list[Request] = []
        """Requests that ended since the replica last looked, in order."""
        self.aside: list[Request] = []
        """Requests that an engine keeps out of its queues for a step, with their blocks."""
        self.lost: list[Request] = []
        """Requests that ended without giving their blocks back."""
        self.lingering: list[Request] = []
        """Of those that decode together, who got its last token in the step settled last, where
        the scheduler finds that out later (`Pace.lingers`)."""
        self.token_gaps_ns: dict[int, int] = {}
        """Time between consecutive tokens of a sequence → how often it occurred."""
        self.transitions = transitions.Transitions()
        self.busy_until_ns = 0
        """When the last step dispatched ends: one composed before begins only then."""
        self.plan = Plan()
        self.now_ns = 0

    def __len__(self) -> int:
        return len(self.waiting) + self.num_running + len(self.swapped)

    # -- who is running --------------------------------------------------------------------------

    @property
    def running(self) -> deque[Request]:
        """All running requests in order, with every field up to date."""
        self.dissolve()
        return self.behind

    @running.setter
    def running(self, requests: deque[Request]) -> None:
        self.dissolve()
        self.behind = requests

    @property
    def num_running(self) -> int:
        """Running requests."""
        return len(self.behind) + self.num_together

    @property
    def num_together(self) -> int:
        """Running requests before those in `behind`, which are looked at together."""
        return 0

    def dissolve(self) -> None:
        """From now on, look at every running request one by one."""

    def lead(self, requests: Iterable[Request]) -> None:
        """Put requests at the head of the running queue, in this order."""
        leading = list(requests)
        if leading:
            self.running.extendleft(reversed(leading))

    def has_more(self, request: Request) -> bool:
        """Whether a request decodes together with others and has not got its last token yet."""
        return False

    def look_at(self, request: Request) -> None:
        """From now on, look at this request by itself; its fields are up to date."""

    def length(self, request: Request) -> int:
        """Known tokens of a request of one sequence."""
        return request.sequences[0].length

    def all_together(self, pace: Pace) -> bool:
        """Whether all running requests, at least one, decode together."""
        return False

    def decode_together(self, pace: Pace, give_way: GiveWay | None, spare: bool) -> int:
        """One token for each of the leading running requests, all at once; answers how many.

        `give_way` is told of each victim, which has left the running queue: always its tail; None:
        victims are chosen otherwise. `spare`: whether a request whose last block has room is
        taken to need a free block, too. 0: it is to be done one by one, as the scheduler states
        its rules. `kvsim.schedule.lockstep` may answer more.
        """
        return 0

    def settle_together(self, plan: Plan, pace: Pace) -> list[tuple[Request, int, bool]]:
        """The tokens of `decode_together` exist, and are booked; who has its last one is told.

        Answers the entries (as `Plan.entries`) of requests that have left the cohort meanwhile, in
        running order: their tokens are to be booked one by one.
        """
        return []

    def shortcuts(self) -> dict[str, int]:
        """How often requests were looked at together; none here."""
        return {}

    def remove_ended(self) -> None:
        """Take requests that ended off the running queue, keeping the order."""
        self.behind = deque(request for request in self.behind if request.finish_ns < 0)

    # -- moves while a step is composed ----------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """Join the end of the waiting queue."""
        self.waiting.append(request)

    def refuse(self, request: Request, reason: str) -> None:
        """Turn a request away as it arrives: it never joins a queue."""
        for sequence in request.sequences:
            sequence.state = IGNORED
        request.reason = reason
        request.finish_ns = request.arrival_ns
        self.ended.append(request)

    def begin(self, now_ns: int) -> Plan:
        """Start to compose a step."""
        self.now_ns = now_ns
        self.plan = Plan()
        return self.plan

    def admit(self, request: Request) -> None:
        """Give the head of the waiting queue its blocks."""
        assert self.waiting[0] is request
        self.waiting.popleft()
        self.hold(request)

    def hold(self, request: Request) -> None:
        """Give a waiting request its blocks; it keeps its place in the queue."""
        for sequence in request.sequences:
            if sequence.state == WAITING:
                self.blocks.allocate(sequence)
                sequence.state = RUNNING
        self._scheduled(request)

    def join(self, request: Request) -> None:
        """Move the head of the waiting queue, which has its blocks, to the end of `running`."""
        assert self.waiting[0] is request
        self.waiting.popleft()
        self.behind.append(request)
        if request.sequences[0].state == WAITING:
            self._scheduled(request)
        for sequence in request.sequences:
            sequence.state = RUNNING

    def grow(self, request: Request) -> None:
        """Slots for the newest tokens of a running request; a shared block is copied first."""
        for sequence in request.sequences:
            if sequence.state == RUNNING:
                copies = self.blocks.append(sequence)
                if copies:
                    self.plan.copies.extend(copies)

    def ignore(self, request: Request, reason: str) -> None:
        """End a request that the engine gives up; the caller has taken it off its queue.

        Blocks that it still holds are lost.
        """
        if any(sequence.table for sequence in request.sequences):
            self.lost.append(request)
        for sequence in request.sequences:
            if sequence.state != FINISHED:
                sequence.state = IGNORED
        request.reason = reason
        self.plan.ignored.append(request)
        self._end(request)

    def preempt(self, request: Request) -> None:
        """Take all blocks of a running request; its tokens will be computed again."""
        lost = 0
        for sequence in request.sequences:
            if sequence.state == RUNNING:
                lost = max(lost, sequence.computed)
                sequence.state = WAITING
                self.blocks.free(sequence)
                sequence.computed = 0
                sequence.prompt_stage = True
        request.lost_tokens = max(request.lost_tokens, lost)
        request.num_preemptions += 1
        self.plan.preempted.append((request, RECOMPUTE))
        self._note(request, transitions.PREEMPTED, lost)

    def swap_out(self, request: Request) -> list[tuple[int, int]]:
        """Move the blocks of a running request to the CPU; answers the copies.

        Raises `EngineStopped` where the CPU pool is too small, as vLLM does.
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
        self._note(request, transitions.SWAPPED_OUT, len(pairs))
        return pairs

    def swap_in(self, request: Request) -> None:
        """Move the blocks of the head of the swapped queue back to the GPU."""
        assert self.swapped[0] is request
        self.swapped.popleft()
        moving = [s for s in request.sequences if s.state == SWAPPED]
        pairs = self.blocks.swap_in(moving)
        for sequence in moving:
            sequence.state = RUNNING
        request.swapped_in_blocks += len(pairs)
        self.plan.swaps_in.extend(pairs)
        self.plan.swapped_in.append(request)
        self._note(request, transitions.SWAPPED_IN, len(pairs))

    def run_prefill(self, request: Request, scheduled: int, charged: int | None = None) -> None:
        """Compute `scheduled` of the request's known tokens in this step, less prefix hits.

        `charged`: how many of them the engine charges to its token budget; None: all.
        """
        sequence = request.sequences[0]
        if sequence.state != RUNNING:
            sequence = next(s for s in request.sequences if s.state == RUNNING)
        known = self.blocks.scheduled(sequence, self.now_ns)
        before = sequence.computed
        end = min(sequence.length, before + scheduled)
        cached = max(0, min(known, end - self.blocks.full_hit.least) - before)
        samples = before + scheduled >= sequence.length
        plan = self.plan
        plan.entries.append((request, scheduled, samples))
        if charged is None:
            charged = scheduled
        plan.prefills.append(Prefill(request, scheduled, cached, before, samples, charged))
        plan.chunks.append((scheduled - cached, before + cached))
        plan.samples += samples
        if request.num_preemptions == 0:
            request.cached_tokens += cached
        else:
            request.recached_tokens += cached
            again = min(before + scheduled, request.lost_tokens) - (before + cached)
            if again > 0:
                request.recomputed_tokens += again
            elif request.first_token_ns < 0:
                self._note(request, transitions.CAUGHT_UP)
            if samples:
                self._note(request, transitions.RESUMED)
            elif request.first_token_ns >= 0 and before + scheduled == sequence.length - 1:
                self._note(request, transitions.RECOVERED)

    def run_decode(self, request: Request, tokens: int = 1) -> None:
        """Produce one more token for each running sequence of a request.

        `tokens` above 1: a sample whose lost KV is computed again on the way.
        """
        plan, scheduled, now_ns = self.plan, self.blocks.scheduled, self.now_ns
        plan.entries.append((request, tokens, True))
        plan.decodes.append(request)
        if tokens > 1:
            plan.chunks.append((tokens - 1, 0))
            self._note(request, transitions.RESUMED)
        for sequence in request.sequences:
            if sequence.state == RUNNING:
                scheduled(sequence, now_ns)
                plan.decode_seqs += 1
                plan.context_tokens += sequence.length

    def run_token(self, request: Request, context_tokens: int) -> None:
        """Produce the next token of a request of one sequence, `context_tokens` long by then."""
        plan = self.plan
        plan.entries.append((request, 1, True))
        plan.decodes.append(request)
        plan.decode_seqs += 1
        plan.context_tokens += context_tokens

    def composed(self) -> Plan:
        """The step is complete."""
        self.blocks.composed()
        self.plan.samples += self.plan.decode_seqs
        return self.plan

    # -- moves when a step's time has passed -----------------------------------------------------

    def publish(self, plan: Plan) -> None:
        """The KV of a step exists, and its tokens are not booked yet: blocks may become shared."""
        blocks = self.blocks
        if not blocks.publish_at.computed:
            return
        computed = [(each.request, each.computed_before + each.scheduled) for each in plan.prefills]
        for request, upto in computed + [(request, 0) for request in plan.decodes]:
            for sequence in request.sequences:
                if sequence.state == RUNNING:
                    blocks.publish(sequence, upto or sequence.length)

    def compute(self, sequence: Sequence, tokens: int) -> None:
        """The KV of `tokens` more tokens of a sequence exists."""
        sequence.computed += tokens
        if sequence.computed == sequence.length:
            sequence.prompt_stage = False

    def token(self, sequence: Sequence) -> None:
        """One more token of a sequence exists."""
        now_ns = self.now_ns
        sequence.length += 1
        request = sequence.request
        request.output_tokens += 1
        last = sequence.last_token_ns
        if last >= 0:
            gaps = self.token_gaps_ns
            gap = now_ns - last
            gaps[gap] = gaps.get(gap, 0) + 1
        elif request.first_token_ns < 0:
            request.first_token_ns = now_ns
        sequence.last_token_ns = now_ns

    def fork(self, parent: Sequence, children: list[Sequence]) -> None:
        """Let further samples of a request hold what its first sequence holds."""
        for child in children:
            parent.request.sequences.append(child)
            if child.state == RUNNING:
                self.blocks.fork(parent, child)

    def end_sequence(self, sequence: Sequence) -> None:
        """A sequence has all its tokens: its blocks are free."""
        sequence.state = FINISHED
        self.blocks.free(sequence)

    def finish(self, request: Request) -> None:
        """Every sequence of a request has ended."""
        self._end(request)

    def lose(self, request: Request) -> None:
        """Forget a request without freeing its blocks, as an engine with that fault does."""
        for sequence in request.sequences:
            sequence.state = IGNORED
        request.reason = "lost-by-engine"
        self.lost.append(request)
        self._end(request)

    # -------------------------------------------------------------------------------------------

    def audit(self) -> None:
        """Assert that queues, states, tables and pools agree."""
        queues = (self.waiting, self.running, self.swapped, self.aside, self.lost)
        everywhere = [request for queue in queues for request in queue]
        assert len(set(everywhere)) == len(everywhere), "a request is in two queues"
        for queue, state in ((self.running, RUNNING), (self.swapped, SWAPPED)):
            for request in queue:
                assert all(s.state in (state, FINISHED) for s in request.sequences)
        self.blocks.audit(everywhere)

    def _scheduled(self, request: Request) -> None:
        """A waiting request was given blocks."""
        if request.first_scheduled_ns < 0:
            request.first_scheduled_ns = self.now_ns
            if self.busy_until_ns > self.now_ns:
                self._note(request, transitions.SCHEDULED)
        else:
            self._note(request, transitions.READMITTED)

    def _note(self, request: Request, kind: int, value: int = 0) -> None:
        """It shows from the start of the step being composed."""
        self.transitions.note(request.index, kind, max(self.now_ns, self.busy_until_ns), value)

    def _end(self, request: Request) -> None:
        request.finish_ns = self.now_ns
        self.ended.append(request)

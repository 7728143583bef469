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

from kvsim import transitions
from kvsim.batch.queues import Queues
from kvsim.blocks.tables import swap_space_exhausted
from kvsim.plan import RECOMPUTE, SWAP, Plan, Prefill
from kvsim.request import FINISHED, IGNORED, RUNNING, SWAPPED, WAITING, Request, Sequence


class Batch(Queues):
    """All requests of one replica that have arrived and not ended, and what can happen to them."""

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
        before = sequence.computed
        cached, samples = self._take_on(request, sequence, scheduled)
        plan = self.plan
        plan.entries.append((request, scheduled, samples))
        if charged is None:
            charged = scheduled
        plan.prefills.append(Prefill(request, scheduled, cached, before, samples, charged))
        plan.chunks.append((scheduled - cached, before + cached))
        plan.samples += samples

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
        request.sequences[0].access_ns = self.now_ns
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
            self.token_gaps_ns.add(now_ns - last)
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

    def complete(self, request: Request) -> None:
        """A request of one sequence has all its tokens: its blocks are free."""
        sequence = request.sequences[0]
        sequence.state = FINISHED
        self.blocks.free(sequence)
        request.finish_ns = self.now_ns
        self.ended.append(request)

    def lose(self, request: Request) -> None:
        """Forget a request without freeing its blocks, as an engine with that fault does."""
        for sequence in request.sequences:
            sequence.state = IGNORED
        request.reason = "lost-by-engine"
        self.lost.append(request)
        self._end(request)

    # -------------------------------------------------------------------------------------------

    def _take_on(self, request: Request, sequence: Sequence, scheduled: int) -> tuple[int, bool]:
        """Book that a step takes on so many more known tokens of a sequence.

        Answers how many of them are not computed because of prefix hits, and whether they are the
        last ones, so that a token is sampled.
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
            self._note(request, transitions.CAUGHT_UP)
        if samples:
            self._note(request, transitions.RESUMED)
        elif request.first_token_ns >= 0 and end == length - 1:
            self._note(request, transitions.RECOVERED)
        return cached, samples

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
        now_ns = self.now_ns
        if self.busy_until_ns > now_ns:
            now_ns = self.busy_until_ns
        self.transitions.rows += transitions.pack(request.index, kind, now_ns, value)

    def _end(self, request: Request) -> None:
        request.finish_ns = self.now_ns
        self.ended.append(request)

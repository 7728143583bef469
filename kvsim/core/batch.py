"""The queues of an engine and its books: the one place where requests change their state.

```
 arrive        admit                       complete
────────► waiting ────────► running ─────────────────► ended
             ▲  preempt        │
             └─────────────────┘
```

Schedulers propose; these moves keep the figures of requests, the transitions and the stop test
consistent, so that no policy can corrupt a count. Nothing but the stop test knows how long an
output becomes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from librt.vecs import append, extend, vec
from mypy_extensions import i64

from kvsim.core import guard, records
from kvsim.core.blocks import BlockManager
from kvsim.core.plan import RECOMPUTE, SWAP, Plan
from kvsim.core.records import Tally
from kvsim.core.request import FINISHED, IGNORED, RUNNING, SWAPPED, WAITING, Request
from kvsim.core.vectors import EMPTY

PIECE: Final = 1 << 16
"""Gaps between tokens that are counted together."""


class Batch:
    """All requests of one engine that have arrived and not ended."""

    blocks: BlockManager
    waiting: deque[Request]
    """Those without a place in the batch, in the order in which they are served."""
    running: list[Request]
    holding: deque[Request]
    """Waiting requests that own blocks already, because a connector loads into them."""
    arriving: Request | None
    """The request that the scheduler is to take in just now (`Scheduler.arrive`)."""
    swapped: deque[Request]
    """Requests whose blocks are in the CPU pool, in the order in which they come back."""
    aside: list[Request]
    """Requests that the engine keeps out of its queues for one step. They keep their blocks."""
    lost: list[Request]
    """Requests that ended without returning their blocks."""
    ended: list[Request]
    """Requests that have ended since the loop last asked, in order."""
    tokens: i64
    """Tokens generated so far, which tell whether there is progress."""
    plan: Plan | None
    """The step being composed, or composed last."""
    now_ns: i64
    busy_until_ns: i64
    """When the last dispatched step ends. A step that is composed earlier begins only then."""
    noted: vec[i64]
    """The log of transitions (`kvsim.core.records`)."""
    token_gaps_ns: Any
    """Time between consecutive tokens of a request in nanoseconds → how often it occurred
    (`kvsim.core.records.Tally`)."""
    _plans: list[Plan]
    _gap_ns: i64
    """The gap between tokens that was noted last, and how often in a row."""
    _gaps: i64
    _gaps_ns: vec[i64]
    _times: vec[i64]
    _output_length: Callable[[int], int]
    _sample_lengths: Callable[[int], list[int] | None] | None
    _longest: i64

    def __init__(
        self,
        blocks: BlockManager,
        output_length: Callable[[int], int],
        longest_sequence: int | None = None,
        sample_lengths: Callable[[int], list[int] | None] | None = None,
    ) -> None:
        """`output_length` maps the index of a request to the tokens that each of its samples
        generates; `sample_lengths` to those of each, where they differ. `longest_sequence` is the
        length in tokens at which every sequence ends."""
        self.blocks = blocks
        self.waiting, self.holding, self.swapped = deque(), deque(), deque()
        self.running, self.aside, self.lost, self.ended = [], [], [], []
        self.tokens = self.now_ns = self.busy_until_ns = 0
        self.plan = self.arriving = None
        self._plans = []
        self.noted, self.token_gaps_ns = EMPTY, Tally()
        self._gap_ns = self._gaps = 0
        self._gaps_ns, self._times = EMPTY, EMPTY
        self._output_length, self._sample_lengths = output_length, sample_lengths
        self._longest = (1 << 60) if longest_sequence is None else longest_sequence

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.swapped) + len(self.holding)

    @property
    def num_running(self) -> int:
        """The number of running requests."""
        return len(self.running)

    # -- moves -----------------------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """Adds a request to the end of the waiting queue."""
        self.accept(request)
        self.waiting.append(request)

    def enter(self, request: Request) -> None:
        """A request has arrived. A scheduler then takes it in, or rejects it."""
        self.arriving = request
        request._end = self._end_of(request)

    def _end_of(self, sequence: Request) -> i64:
        """The length at which a sequence ends."""
        index: i64 = sequence.index
        tokens: i64 = self._output_length(index)
        if self._sample_lengths is not None:
            own = self._sample_lengths(index)
            # A sample that is drawn again, beyond its own end, goes on to that of the longest.
            if own is not None and sequence.length < sequence.input_length + own[sequence.sample]:
                tokens = own[sequence.sample]
        return min(sequence.input_length + tokens, self._longest)

    def knows(self, request: Request) -> bool:
        """Whether a request has entered."""
        return request._end > 0

    def refuse(self, request: Request, reason: str) -> None:
        """Rejects a request on arrival. It never joins a queue."""
        self.accept(request)
        request.state = IGNORED
        request.reason = reason
        request.finish_ns = request.arrival_ns
        self.ended.append(request)

    def accept(self, request: Request) -> None:
        """Notes that an arriving request was taken in or rejected, each of them once."""
        if request is not self.arriving:
            raise ValueError(
                f"{request!r} does not arrive just now; call batch.arrive or batch.refuse for the"
                " request that `arrive` is given, once"
            )
        self.arriving = None

    def replace_prompt(self, request: Request, stream: Any, tokens: int) -> None:
        """Replaces the prompt of an arriving request by another one of `tokens` tokens."""
        request.begin(stream, tokens)

    def begin(self, now_ns: i64, max_num_seqs: i64) -> Plan:
        """Begins to compose a step."""
        self.now_ns = now_ns
        # Plans have long vectors and are used again, except those of steps in flight.
        plan: Plan
        for plan in self._plans:
            if not plan.flying:
                plan.clear()
                break
        else:
            plan = Plan(max_num_seqs)
            self._plans.append(plan)
        self.plan = plan
        return plan

    def join(self, request: Request) -> None:
        """A request that was given its blocks joins the end of `running`."""
        self.running.append(request)
        request.state = RUNNING
        self.admitted(request)

    def admitted(self, request: Request) -> None:
        """Books that a waiting request was given blocks."""
        if request.first_scheduled_ns < 0:
            request.first_scheduled_ns = self.now_ns
            # Composed while another step computes, its step begins only when that one is over.
            if self.busy_until_ns > self.now_ns:
                self.note(request, records.SCHEDULED, 0, self.busy_until_ns)
        else:
            self.note(request, records.READMITTED)

    def chunk(self, plan: Plan, place: i64, sequence: Request, scheduled: i64, cached: i64) -> None:
        """Books that a step takes on `scheduled` more known tokens of a sequence, `cached` of which
        need not be computed."""
        before: i64 = sequence.computed
        end: i64 = before + scheduled
        request: Request = sequence.request
        sequence.access_ns = self.now_ns
        plan.add_chunk(place, scheduled - cached, before + cached, cached)
        yields: bool = end >= sequence.length
        if yields:
            plan.samples += 1
        plan.yields[place] = yields
        # Without a preemption, nothing is done again.
        if request.num_preemptions == 0:
            request.cached_tokens += cached
            return
        # Admitted again: what was found now is no hit of the first admission.
        request.recached_tokens += cached
        again: i64 = min(end, request.lost_tokens) - before - cached
        if again > 0:
            request.recomputed_tokens += again
        elif request.first_token_ns < 0:
            self.note(request, records.CAUGHT_UP)
        if yields:
            self.note(request, records.RESUMED)
        elif request.first_token_ns >= 0 and end == sequence.length - 1:
            self.note(request, records.RECOVERED)

    def preempt(self, sequence: Request) -> None:
        """A running sequence lost its blocks; its KV will be computed again."""
        lost: i64 = sequence.computed
        sequence.state, sequence.prompt_stage = WAITING, True
        sequence.computed = 0
        request: Request = sequence.request
        # Lost twice, a token still counts as recomputed only up to the deepest point.
        if lost > request.lost_tokens:
            request.lost_tokens = lost
        request.num_preemptions += 1
        assert self.plan is not None
        self.plan.preempted.append((request, RECOMPUTE))
        self.note(request, records.PREEMPTED, lost)

    def swap_out(self, request: Request, pairs: list[tuple[int, int]]) -> None:
        """The blocks of a running request were moved to the CPU, as (GPU block, CPU block)."""
        for sequence in request.sequences:
            # Samples that have ended keep their state.
            if sequence.state == RUNNING:
                sequence.state = SWAPPED
        request.num_preemptions += 1
        request.swapped_out_blocks += len(pairs)
        assert self.plan is not None
        self.plan.preempted.append((request, SWAP))
        self.note(request, records.SWAPPED_OUT, len(pairs))

    def swap_in(self, request: Request, pairs: list[tuple[int, int]]) -> None:
        """The blocks of a swapped request were moved back, as (CPU block, GPU block)."""
        for sequence in request.sequences:
            if sequence.state == SWAPPED:
                sequence.state = RUNNING
        request.swapped_in_blocks += len(pairs)
        assert self.plan is not None
        self.plan.swaps_in.extend(pairs)
        self.plan.swapped_in.append(request)
        self.note(request, records.SWAPPED_IN, len(pairs))

    def ignore(self, request: Request, reason: str) -> None:
        """Ends a request that the engine gives up. It is in no queue, and its blocks are lost."""
        assert self.plan is not None
        self.plan.ignored.append(request)
        self._end_early(request, reason)

    def lose(self, request: Request) -> None:
        """Drops a request without freeing its blocks, as an engine with a leak does."""
        self._end_early(request, "lost-by-engine")

    def _end_early(self, request: Request, reason: str) -> None:
        held: bool = False
        for sequence in request.sequences:
            # Its tables stay as they are, so that the audit can account for blocks that never come
            # back.
            held = held or len(sequence.tables) > 0
            if sequence.state != FINISHED:
                sequence.state = IGNORED
        if held:
            self.lost.append(request)
        request.reason = reason
        request.finish_ns = self.now_ns
        self.ended.append(request)

    def token(self, request: Request) -> bool:
        """Books one more token of a request, and returns whether it is the last one."""
        now_ns: i64 = self.now_ns
        request.length += 1
        self.tokens += 1
        last: i64 = request.last_token_ns
        if last >= 0:
            gap_ns: i64 = now_ns - last
            # Requests of one step have mostly the same gap, so runs of equal gaps are counted at
            # once.
            if gap_ns != self._gap_ns:
                self._note_gaps()
                self._gap_ns = gap_ns
            self._gaps += 1
        elif request.first_token_ns < 0:
            request.first_token_ns = now_ns
        request.last_token_ns = now_ns
        return request.length >= request._end

    def further_token(self, request: Request) -> bool:
        """Books a token that the client gets in one message with the token before it, so that no
        time lies between them (`vllm bench serve` counts time between messages). Returns whether it
        is the last one."""
        request.length += 1
        self.tokens += 1
        return request.length >= request._end

    def fork(self, sequence: Request, number: int) -> list[Request]:
        """Draws `number` further samples from a sequence, which have its tokens so far."""
        children: list[Request] = [sequence.child(sample) for sample in range(number)]
        for child in children:
            child._end = self._end_of(child)
        sequence.request.forked += children
        return children

    def stopped(self, sequence: Request) -> bool:
        """Whether a sequence has its last token."""
        return sequence.length >= sequence._end

    def ending(self, request: Request) -> bool:
        """Whether the next token of a request is its last one. An engine knows it in advance where
        clients set `max_tokens` and `ignore_eos`, as replayed requests do."""
        return request.length + 1 >= request._end

    def _note_gaps(self) -> None:
        """Another gap follows."""
        if self._gaps:
            self._gaps_ns = append(self._gaps_ns, self._gap_ns)
            self._times = append(self._times, self._gaps)
            self._gaps = 0
            if len(self._times) >= PIECE:
                self.count_gaps()

    def count_gaps(self) -> None:
        """Counts the gaps between tokens that were noted."""
        self._note_gaps()
        if len(self._times):
            self.token_gaps_ns.add(self._gaps_ns, self._times)
            self._gaps_ns, self._times = EMPTY, EMPTY

    def complete(self, request: Request) -> None:
        """Ends a request that is over and holds no blocks."""
        request.state = FINISHED
        request.finish_ns = self.now_ns
        self.ended.append(request)

    def remove_ended(self) -> None:
        """Removes ended requests from the running queue; the others keep their order."""
        running: list[Request] = self.running
        k: i64
        for k in range(len(running) - 1, -1, -1):
            if running[k].finish_ns >= 0:
                del running[k]

    def remove_waiting(self) -> None:
        """Removes ended requests from the waiting queues."""
        for queue in (self.waiting, self.holding):
            for request in [each for each in queue if each.finish_ns >= 0]:
                queue.remove(request)

    def note(self, request: Request, kind: i64, value: i64 = 0, time_ns: i64 = -1) -> None:
        """Logs a transition; by default, at the start of the step being composed."""
        if time_ns < 0:
            time_ns = max(self.now_ns, self.busy_until_ns)
        self.noted = extend(self.noted, vec[i64]([request.index, kind, time_ns, value]))

    def audit(self) -> None:
        """Asserts that queues, states of requests, block tables and the pool agree."""
        queues = (self.waiting, self.holding, self.running, self.swapped, self.aside, self.lost)
        everywhere = [request for queue in queues for request in queue]
        assert len(set(everywhere)) == len(everywhere), "a request is in two queues"
        for queue, state in ((self.running, RUNNING), (self.swapped, SWAPPED)):
            for request in queue:
                for sequence in request.sequences:
                    assert sequence.state in (state, FINISHED), "a request is in another state"
        self.blocks.audit(everywhere)


def _reordered(batch: Batch, order: Any) -> Any:
    """The waiting queue in another order."""
    queue: deque[Request] = deque(order)
    here = set(batch.waiting)
    if len(queue) != len(here) or here.symmetric_difference(queue):
        lost, new = len(here.difference(queue)), len(set(queue) - here)
        raise ValueError(
            f"batch.waiting: {lost} of {len(here)} waiting requests are missing in the new order,"
            f" {new} do not wait, and {len(queue) - len(set(queue))} are there twice; give each of"
            " them once"
        )
    return queue


guard.keep(
    Batch,
    "waiting running holding swapped aside lost ended",
    "enter accept replace_prompt join admitted chunk preempt swap_out swap_in token further_token"
    " fork stopped ending count_gaps complete lose remove_ended remove_waiting note noted"
    " token_gaps_ns",
    waiting=_reordered,
)

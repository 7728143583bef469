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

from librt.vecs import append, vec
from mypy_extensions import i64

from kvsim import guard
from kvsim.core.blocks import BlockManager
from kvsim.core.plan import RECOMPUTE, Plan
from kvsim.core.request import FINISHED, IGNORED, RUNNING, WAITING, Request
from kvsim.core.vectors import EMPTY
from kvsim.records import transitions
from kvsim.records.tally import Tally

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
    ended: list[Request]
    """Requests that have ended since the loop last asked, in order."""
    tokens: i64
    """Tokens generated so far, which tell whether there is progress."""
    plan: Plan | None
    """The step being composed, or composed last."""
    now_ns: i64
    busy_until_ns: i64
    """When the last dispatched step ends. A step that is composed earlier begins only then."""
    transitions: Any
    token_gaps_ns: Any
    """Time between consecutive tokens of a request in nanoseconds → how often it occurred
    (`kvsim.records.tally.Tally`)."""
    _plans: list[Plan]
    _gap_ns: i64
    """The gap between tokens that was noted last, and how often in a row."""
    _gaps: i64
    _gaps_ns: vec[i64]
    _times: vec[i64]
    _output_length: Callable[[int], int]
    _longest: i64

    def __init__(
        self,
        blocks: BlockManager,
        output_length: Callable[[int], int],
        longest_sequence: int | None = None,
    ) -> None:
        """`output_length` maps the index of a request to the tokens that it generates;
        `longest_sequence` is the length in tokens at which every request ends."""
        self.blocks = blocks
        self.waiting, self.holding = deque(), deque()
        self.running, self.ended = [], []
        self.tokens = self.now_ns = self.busy_until_ns = 0
        self.plan = self.arriving = None
        self._plans = []
        self.transitions, self.token_gaps_ns = transitions.Transitions(), Tally()
        self._gap_ns = self._gaps = 0
        self._gaps_ns, self._times = EMPTY, EMPTY
        self._output_length = output_length
        self._longest = (1 << 60) if longest_sequence is None else longest_sequence

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.holding)

    @property
    def num_running(self) -> int:
        """The number of running requests."""
        return len(self.running)

    @property
    def swapped(self) -> list[Request]:
        """Requests whose blocks are in the CPU pool: none."""
        return []

    @property
    def aside(self) -> list[Request]:
        """Requests that the engine keeps out of its queues for one step: none."""
        return []

    @property
    def lost(self) -> list[Request]:
        """Requests that ended without returning their blocks: none."""
        return []

    # -- moves -----------------------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """Adds a request to the end of the waiting queue."""
        self.accept(request)
        self.waiting.append(request)

    def enter(self, request: Request) -> None:
        """A request has arrived. A scheduler then takes it in, or rejects it."""
        self.arriving = request
        end: i64 = request.input_length + self._output_length(request.index)
        request._end = min(end, self._longest)

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
        if request.first_scheduled_ns < 0:
            request.first_scheduled_ns = self.now_ns
            if self.busy_until_ns > self.now_ns:
                self.note(request, transitions.SCHEDULED, 0, self.busy_until_ns)
        else:
            self.note(request, transitions.READMITTED)

    def chunk(self, plan: Plan, place: i64, request: Request, scheduled: i64, cached: i64) -> None:
        """Books that a step takes on `scheduled` more known tokens of a request, `cached` of which
        need not be computed."""
        before: i64 = request.computed
        end: i64 = before + scheduled
        request.access_ns = self.now_ns
        plan.add_chunk(place, scheduled - cached, before + cached, cached)
        yields: bool = end >= request.length
        if yields:
            plan.samples += 1
        plan.yields[place] = yields
        if request.num_preemptions == 0:
            request.cached_tokens += cached
            return
        request.recached_tokens += cached
        again: i64 = min(end, request.lost_tokens) - before - cached
        if again > 0:
            request.recomputed_tokens += again
        elif request.first_token_ns < 0:
            self.note(request, transitions.CAUGHT_UP)
        if yields:
            self.note(request, transitions.RESUMED)
        elif request.first_token_ns >= 0 and end == request.length - 1:
            self.note(request, transitions.RECOVERED)

    def preempt(self, request: Request) -> None:
        """A running request lost its blocks; its KV will be computed again."""
        lost: i64 = request.computed
        request.state = WAITING
        request.computed = 0
        if lost > request.lost_tokens:
            request.lost_tokens = lost
        request.num_preemptions += 1
        assert self.plan is not None
        self.plan.preempted.append((request, RECOMPUTE))
        self.note(request, transitions.PREEMPTED, lost)

    def ignore(self, request: Request, reason: str) -> None:
        """Ends a request that the engine gives up. It is in no queue and holds no blocks."""
        assert self.plan is not None
        request.state, request.reason = IGNORED, reason
        self.plan.ignored.append(request)
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
            self.token_gaps_ns.add_vectors(self._gaps_ns, self._times)
            self._gaps_ns, self._times = EMPTY, EMPTY

    def complete(self, request: Request) -> None:
        """Ends a request that is over and holds no blocks."""
        request.state = FINISHED
        request.finish_ns = self.now_ns
        self.ended.append(request)

    def remove_ended(self) -> None:
        """Removes ended requests from the running queue; the others keep their order."""
        self.running = [request for request in self.running if request.finish_ns < 0]

    def remove_waiting(self) -> None:
        """Removes ended requests from the waiting queues."""
        for queue in (self.waiting, self.holding):
            for request in [each for each in queue if each.finish_ns >= 0]:
                queue.remove(request)

    def note(self, request: Request, kind: int, value: int = 0, time_ns: int = -1) -> None:
        """Logs a transition; by default, at the start of the step being composed."""
        if time_ns < 0:
            time_ns = max(self.now_ns, self.busy_until_ns)
        self.transitions.rows += transitions.pack(request.index, kind, time_ns, value)

    def audit(self) -> None:
        """Asserts that queues, states of requests, block tables and the pool agree."""
        everywhere = [*self.waiting, *self.holding, *self.running]
        assert len(set(everywhere)) == len(everywhere), "a request is in two queues"
        for request in self.running:
            assert request.state in (RUNNING, FINISHED), "a running request is in another state"
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
    "waiting running holding ended",
    "enter accept replace_prompt join chunk preempt token further_token ending count_gaps complete"
    " remove_ended remove_waiting note transitions token_gaps_ns",
    waiting=_reordered,
)

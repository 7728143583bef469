"""Steps of vLLM V1 with features in which everybody decodes, with less work.

```
 compose ─┬─ somebody waits, a copy is under way, a draft ──► the scheduler composes the step
          └─ requests only decode ──► a price and a row for each step
               ─ ─ ■ ─ ─ ─ ─ ■ ─      a request is looked at where its blocks change hands
```

The tables are those of the scheduler, block by block, and so are all calls that change them. Tokens
are counted, and written to the requests before anybody looks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import gcd

from kvsim.cost import PricesDecodes, longest_asked
from kvsim.engine.batch import Batch, Endings
from kvsim.engine.loop import Progress
from kvsim.engine.plan import NOTHING_MOVED, Flight
from kvsim.engine.request import RUNNING, Request
from kvsim.engine.scheduler import Scheduler
from kvsim.engine.tables import Tables
from kvsim.engines.vllm_v1_features.connector import Connector, Worker
from kvsim.engines.vllm_v1_features.offloading import Offloading
from kvsim.engines.vllm_v1_features.plan import FeaturePlan, Move
from kvsim.engines.vllm_v1_features.scheduler import VllmV1Features, VllmV1FeaturesAsync
from kvsim.engines.vllm_v1_features.speculation import Speculation
from kvsim.engines.vllm_v1_features.timed import TimedWorker
from kvsim.engines.vllm_v1_groups.chunked import Chunked
from kvsim.engines.vllm_v1_groups.full import Full
from kvsim.engines.vllm_v1_groups.manager import GroupTables
from kvsim.engines.vllm_v1_groups.sliding import Sliding
from kvsim.fast.known import overridden
from kvsim.fast.series import Series
from kvsim.records.recorder import Recorder
from kvsim.schema import completed_row, decode_row

_SCHEDULERS = VllmV1Features, VllmV1FeaturesAsync
_GROUPS = Full, Sliding, Chunked
_PARTS = Connector, Offloading, Worker, TimedWorker


def why_not_featured(scheduler: Scheduler, blocks: Tables) -> str:
    """Returns why the scheduler has to compose every step, or an empty string."""
    if not (isinstance(scheduler, VllmV1Features) and _is_one_of(scheduler, _SCHEDULERS)):
        return "the scheduler is not listed as one whose steps can be repeated"
    if not (isinstance(blocks, GroupTables) and _is_one_of(blocks, (GroupTables,))):
        return "the block manager has rules of its own"
    if type(scheduler.speculation) is not Speculation:
        return "each step verifies drafts"
    if scheduler.pipeline_parallel_size > 1:
        return "the stages of a pipeline work on several steps"
    if not all(type(group) in _GROUPS for group in blocks.groups):
        return "layers keep states"
    if not all(_is_one_of(part, _PARTS) for part in (scheduler.connector, scheduler.worker)):
        return "the connector looks at every step"
    return ""


def _is_one_of(part: object, kinds: tuple[type, ...]) -> bool:
    """Whether a part is of one of these classes, and overrides nothing of it."""
    kind = type(part)
    return kind in kinds and not overridden(part, kind)


class _Member:
    """A request that decodes, and the steps that were written to it."""

    __slots__ = ("composed", "place", "request", "settled")

    def __init__(self, request: Request, place: int) -> None:
        self.request = request
        self.place = place
        """Its place in the running queue."""
        self.composed = self.settled = 0
        """Number of steps of the series that its fields count as composed, and as settled."""


class FeaturedSteps:
    """Takes decode steps of vLLM V1 with features."""

    def __init__(
        self,
        batch: Batch,
        scheduler: Scheduler,
        endings: Endings,
        cost: PricesDecodes,
        recorder: Recorder,
        upcoming: Callable[[], tuple[float, float]],
        listens: bool,
    ) -> None:
        """See `kvsim.fast.course.Course` and `kvsim.fast.repeat.Repeat` for the arguments."""
        assert isinstance(scheduler, VllmV1Features)
        self._batch, self._scheduler, self._endings = batch, scheduler, endings
        self._blocks = scheduler.blocks
        self._cost, self._asked = cost, longest_asked(cost)
        self._recorder, self._upcoming, self._listens = recorder, upcoming, listens
        self._flying = scheduler.in_flight - 1
        """Number of steps in flight when the next one is composed."""
        self._edges = _edges(self._blocks, self._flying)
        self._releases = any(group.released_at() for group in self._blocks.groups)
        """Whether blocks fall behind. Those of a prompt do so one step later than those of a token,
        so everybody is looked at in the first step of a series."""
        self._slots = sum(group.holds_tokens for group in self._blocks.groups)
        """Slots that a token takes, in all groups."""
        self.ended: list[Request] = []
        """The requests that ended in the last series: none."""
        self.stretches = self.repeated_steps = self.together_steps = 0
        self.composed_because: dict[str, int] = {}
        """Why the scheduler had to compose a step → how often."""
        # The series.
        self._members: list[_Member] = []
        self._due: dict[int, list[_Member]] = {}
        """Step of the series → members whose blocks change hands in it."""
        self._composed = self._settled = 0
        """Number of its steps composed, and settled."""
        self._composed_ns = self._token_ns = 0
        """When the last one was composed, and when the last settled one produced its tokens."""
        self._context = 0
        """Tokens of all members, those in flight included."""

    def repeat(self, flying: deque[Flight], now_ns: int, progress: Progress) -> bool:
        """Takes steps from `now_ns` to `Batch.now_ns`. Returns whether it took any."""
        why_not = self._hindrance()
        most = 0 if why_not else self._begin()
        if most < 1 or not self._finds_blocks():
            why_not = why_not or ("a request is about to end" if most < 1 else "blocks run short")
            self.composed_because[why_not] = self.composed_because.get(why_not, 0) + 1
            return False
        self.repeated_steps += self._stretch(flying, now_ns, most, progress)
        self.stretches += 1
        return True

    def _hindrance(self) -> str:
        """Returns why the scheduler has to compose the next step."""
        batch, scheduler = self._batch, self._scheduler
        if batch.waiting or batch.holding:
            return "requests wait"
        if not batch.others:
            return "nothing runs"
        if not scheduler.at_rest:
            return "transfers are under way"
        if not all(map(self._only_decodes, batch.others)):
            return "a prompt is under way"
        if not scheduler.connector.rests(batch.others):
            return "blocks are offered to a tier"
        return ""

    def _only_decodes(self, request: Request) -> bool:
        """Whether a running request took on one token in each step in flight, and does so again."""
        sequence, live = request.sequences[0], self._scheduler.live[request]
        coming = sequence.placeholders
        return (
            sequence.state == RUNNING
            and coming == live.fly == self._flying
            and sequence.computed == sequence.length + coming - 1
            and sequence.filled == sequence.computed != request.input_length - 1
            and not (live.stale or live.passed_over)
        )

    # -- a series --------------------------------------------------------------------------------

    def _begin(self) -> int:
        """Takes in those who run. Returns the most steps in which nobody gets its last token."""
        self._composed = self._settled = self._context = 0
        self._due, self._members = {}, []
        most = []
        for place, request in enumerate(self._batch.others):
            member, sequence = _Member(request, place), request.sequences[0]
            self._members.append(member)
            if self._releases:
                self._due.setdefault(0, []).append(member)
            else:
                self._file(member, 0)
            self._context += sequence.computed
            most.append(self._endings.left(sequence) - 1)
        return min(most)

    def _stretch(self, flying: deque[Flight], now_ns: int, most: int, progress: Progress) -> int:
        """Takes at most so many steps. Returns how many were settled."""
        batch, number, longest = self._batch, len(self._members), self._longest()
        series, cut_ns = Series(batch, progress, self._listens), min(self._upcoming())
        flight = flying.popleft() if flying else None
        batch.now_ns, self.ended = now_ns, series.ended
        while True:
            start_ns = batch.now_ns if flight is None else flight.end_ns
            end_ns = start_ns + self._compose(number, longest)
            census = self._blocks.census()
            row = decode_row(
                start_ns, end_ns, number, self._context, number, 0, 0, 0, number, *census, 0, 0
            )
            step = Flight(batch.plan, start_ns, end_ns, NOTHING_MOVED, row)
            if flight is None:
                self._settle(step)
            else:
                settle = self._settle_first if self._composed == 1 else self._settle
                settle(flight)
                flight = step
            done = series.count(1) or self._composed == most
            if done or batch.now_ns >= cut_ns or not self._finds_blocks():
                break
        for member in self._members:
            self._write(member)
        self._scheduler.repeated(batch.others, self._composed, self._settled)
        if flight is not None:
            flying.append(flight._replace(plan=self._plan()))
        batch.busy_until_ns = end_ns
        return series.close()

    def _compose(self, number: int, longest: list[int]) -> int:
        """Composes a step of `number` requests. Returns how long it takes. `longest` are the
        greatest lengths before the series, if the cost model asks for them."""
        due = self._due.pop(self._composed, [])
        self._blocks.empty_slots -= (number - len(due)) * self._slots
        if due:
            self._visit(due)
        self._context += number
        self._composed += 1
        self._composed_ns = self._batch.now_ns
        self.together_steps += 1
        lengths = [length + self._composed for length in longest]
        return self._cost.decode_ns(number, self._context, *([lengths] if lengths else []))

    def _visit(self, due: list[_Member]) -> None:
        """Lets the block manager serve members whose blocks change hands, in running order."""
        blocks, scheduler = self._blocks, self._scheduler
        blocks.begin()
        due.sort(key=_place)
        for member in due:
            self._write(member)
            request = member.request
            held = blocks.allocate_slots(
                request.sequences[0], 1, flying=scheduler.live[request].fly
            )
            assert held, "too few free blocks were left"
            self._file(member, self._composed + 1)
        scheduler.connector.grew([Move(member.request, 1) for member in due])

    def _settle_first(self, flight: Flight) -> None:
        """Settles the step that the scheduler composed, or that an earlier series left behind."""
        for member in self._members:
            self._write(member)
        self._scheduler.settle(self._batch, flight.plan, flight.end_ns)
        row = completed_row(flight.row, flight.start_ns, flight.end_ns, *flight.moved)
        self._recorder.packed(row)

    def _settle(self, flight: Flight) -> None:
        """Settles a step of the series: each member has one more token."""
        batch, number = self._batch, len(self._members)
        gaps, now_ns = batch.token_gaps_ns, flight.end_ns
        if self._settled:
            gaps.add(now_ns - self._token_ns, number)
        else:
            for member in self._members:
                gaps.add(now_ns - member.request.sequences[0].last_token_ns)
        batch.now_ns = self._token_ns = now_ns
        batch.tokens += number
        self._settled += 1
        self._recorder.packed(flight.row)

    # -- members ---------------------------------------------------------------------------------

    def _file(self, member: _Member, first: int) -> None:
        """Notes in which step, `first` or a later one, the blocks of a member change hands next."""
        computed = member.request.sequences[0].computed - member.composed + first
        step = first + min([-(computed - start) % each for start, each in self._edges])
        self._due.setdefault(step, []).append(member)

    def _write(self, member: _Member) -> None:
        """Writes to a request what was counted for all of them."""
        request = member.request
        sequence, live = request.sequences[0], self._scheduler.live[request]
        composed, settled = self._composed - member.composed, self._settled - member.settled
        sequence.computed += composed
        sequence.filled = sequence.computed
        sequence.length += settled
        sequence.placeholders += composed - settled
        live.fly += composed - settled
        if composed:
            sequence.access_ns = self._composed_ns
        if settled:
            sequence.last_token_ns = self._token_ns
        member.composed, member.settled = self._composed, self._settled

    def _finds_blocks(self) -> bool:
        """Whether the next step surely finds the blocks that it needs."""
        need = len(self._due.get(self._composed, ())) * len(self._blocks.groups)
        return need <= self._blocks.gpu.free

    def _longest(self) -> list[int]:
        """Returns the tokens of the longest members, if the cost model asks for them."""
        if not self._asked:
            return []
        lengths = [member.request.sequences[0].computed for member in self._members]
        return sorted(lengths, reverse=True)[: self._asked]

    def _plan(self) -> FeaturePlan:
        """Returns the step in flight in the form that the scheduler settles."""
        plan = FeaturePlan()
        for member in self._members:
            plan.moves.append(Move(member.request, 1))
            plan.singles.append((member.request, 1, True))
        self._batch.plan = plan
        return plan


def _edges(blocks: GroupTables, flying: int) -> list[tuple[int, int]]:
    """Returns where blocks of a decoding request may change hands: (start, each) stands for all
    numbers of computed tokens that are a multiple of `each` behind `start`."""
    groups = blocks.groups
    edges = {(0, gcd(*[group.block_size for group in groups]))}
    if not flying:
        edges.add((-1, blocks.layout.key_tokens))  # A block is published in the step that fills it.
    behind = [group.released_at() for group in groups]
    edges |= {(start + flying, each) for start, each in filter(None, behind)}
    return sorted(edges)


def _place(member: _Member) -> int:
    return member.place

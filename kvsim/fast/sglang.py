"""SGLang's steps with less work: its running batch as a count of tokens, many decode steps at once.

```
 compose ─┬─ a prompt can be taken on ──► the scheduler composes the step, request by request
          └─ decode ─┬─ memory lacks ───► the scheduler retracts
                     └─ it suffices ────► a number of steps, until somebody ends or comes
```

All requests of the running batch get one token per decode step. So tokens and slots are counted for
the batch, and written to its requests before anybody looks (`_sync`). In overlap, a step is
composed while the one before computes; who samples the end of its sequence takes part in one more.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from itertools import accumulate
from math import inf
from operator import sub
from sys import maxsize
from typing import NamedTuple

from kvsim.cost import PricesDecodes, longest_asked
from kvsim.engine.batch import Batch, Endings
from kvsim.engine.loop import Progress, composed_row
from kvsim.engine.plan import NOTHING_MOVED, Flight, Plan
from kvsim.engine.request import Request, Sequence
from kvsim.engine.scheduler import Scheduler
from kvsim.engine.tables import Tables
from kvsim.engines.sglang import Sglang, SglangOverlap
from kvsim.engines.sglang_prefill import Group, generated_tokens
from kvsim.engines.sglang_runs import SglangCounts, SglangRuns
from kvsim.fast.decodes import LONG_STEPS
from kvsim.fast.known import overridden
from kvsim.fast.series import Series
from kvsim.records.recorder import Recorder
from kvsim.schema import completed_row, decode_row, finished_row, gauge_row


class Step(NamedTuple):
    """A composed step that is not settled."""

    requests: list[Request]
    plan: Plan | None
    """What the scheduler composed; None for a decode step that is counted."""
    start_ns: int
    end_ns: int
    row: bytes
    """Its row, without finished requests."""


def why_not_sglang(scheduler: Scheduler, blocks: Tables) -> str:
    """Returns why the scheduler has to compose every step, or an empty string."""
    kind = type(scheduler)
    if kind not in (Sglang, SglangOverlap) or overridden(scheduler, kind):
        return "the scheduler is not listed as one whose steps can be repeated"
    if type(blocks) not in (SglangCounts, SglangRuns):
        return "the block manager names its blocks"
    assert isinstance(scheduler, Sglang)
    if scheduler.interval:
        return "prefill_decode_interval counts steps"
    if scheduler.mixes:
        return "prompts and decodes are mixed"
    if scheduler.preempts:
        return "a better priority may preempt"
    return ""


class SglangSteps:
    """Takes steps of SGLang. See `kvsim.fast.course.Course` for the arguments."""

    def __init__(
        self,
        batch: Batch,
        scheduler: Sglang,
        endings: Endings,
        cost: PricesDecodes,
        recorder: Recorder,
        arrivals: Callable[[int], float],
        upcoming: Callable[[], tuple[float, float]],
        listens: bool,
    ) -> None:
        assert isinstance(batch.blocks, SglangCounts)
        self._batch, self._scheduler, self._endings = batch, scheduler, endings
        self._blocks = batch.blocks
        self._size = batch.blocks.block_size
        self._cost, self._asked = cost, longest_asked(cost)
        self._recorder, self._arrivals, self._upcoming = recorder, arrivals, upcoming
        self._listens = listens
        self._overlaps = isinstance(scheduler, SglangOverlap)
        self.ended: list[Request] = []
        """The requests that ended in the last series, in order."""
        self.stretches = self.repeated_steps = self.together_steps = 0
        self.composed_because: dict[str, int] = {}
        """Why the scheduler had to compose a step → how often."""
        self._flight: Flight | None = None
        """The step in flight, as it was handed over."""
        self._step: Step | None = None
        """The same."""
        self._steps = -1
        """Number of steps of the run when it was."""
        self._taken = 0
        """Number of steps that were recorded just now."""
        # The running batch.
        self._group: list[Request] = []
        """Who decodes, in order."""
        self._sequences: list[Sequence] = []
        """Their sequences."""
        self._tokens = self._slots = 0
        """Tokens booked and slots taken for each of them, but not written to them yet."""
        self._filled = 0
        """Number of tokens of all of them that have a slot."""
        self._phases: list[int] = []
        """(Slots of a request - steps composed) modulo page size → number of requests."""
        self._composed = self._settled = 0
        """Number of its decode steps composed and settled."""
        self._filed: list[Request] = []
        """The requests that are known to be in `ends`."""
        self._ends: dict[Request, int] = {}
        """Request → number of settled steps when it has its last token."""
        self._next_end = maxsize
        self._limits: set[int] = set()
        """The values among these for requests that generate as much as they may."""
        self._newcomers: list[Request] = []
        """Requests whose previous token came at a time of their own."""
        self._token_ns = self._step_ns = 0
        """When the last settled step produced its tokens, and how long a step took."""
        self._all_alive = False
        """Whether nobody in the running batch has ended."""

    # -- the loop --------------------------------------------------------------------------------

    def repeat(self, flying: deque[Flight], now_ns: int, progress: Progress) -> bool:
        """Takes steps from `now_ns` to `Batch.now_ns`. Returns whether it took any."""
        step = self._resumed(flying[0] if flying else None, progress.steps)
        why_not = self._hindrance(step)
        if why_not:
            self.composed_because[why_not] = self.composed_because.get(why_not, 0) + 1
            return False
        flying.clear()
        steps = self._stretch(step, now_ns, progress)
        self._flight = None if self._step is None else self._handed_over(self._step)
        if self._flight is not None:
            flying.append(self._flight)
        self.stretches += 1
        self.repeated_steps += steps
        return True

    def _hindrance(self, step: Step | None) -> str:
        """Returns why the scheduler has to compose the next step. `step` is in flight."""
        scheduler = self._scheduler
        if scheduler.turned_away:
            return "a request is turned away"
        if scheduler.running.silent and scheduler.running.requests:
            return "nobody may generate a token"
        return "" if step or self._batch.others else "nothing runs"

    def _stretch(self, step: Step | None, now_ns: int, progress: Progress) -> int:
        """Takes steps until the loop or the scheduler has to act. Returns how many were settled."""
        batch, series = self._batch, Series(self._batch, progress, self._listens)
        next_ns, horizon_ns = self._upcoming()
        cut_ns = min(next_ns, horizon_ns)
        batch.now_ns, self.ended = now_ns, series.ended
        while True:
            step = self._advance(step, cut_ns)
            taken, self._taken = self._taken, 0
            if series.count(taken):
                break
            if batch.now_ns >= cut_ns:
                if batch.now_ns >= horizon_ns:
                    break
                next_ns = self._arrivals(batch.now_ns)
                cut_ns = min(next_ns, horizon_ns)
                if batch.ended:
                    break  # They were refused.
            if self._hindrance(step) or (self._overlaps and step is None):
                break
        self._sync()
        self._step = step
        batch.busy_until_ns = batch.now_ns if step is None else step.end_ns
        steps = series.close()
        self._steps = progress.steps
        return steps

    def _resumed(self, flight: Flight | None, steps: int) -> Step | None:
        """Returns the step in flight. Forgets the running batch if others took steps since."""
        if flight is self._flight and steps == self._steps:
            return self._step
        self._group, self._sequences, self._newcomers = [], [], []
        self._ends, self._filed = {}, []
        if flight is None:
            return None
        plan, start_ns, end_ns, _, row = flight
        return Step([], plan, start_ns, end_ns, completed_row(row, start_ns, end_ns))

    def _handed_over(self, step: Step) -> Flight:
        """Returns the step in flight in the form that the scheduler settles."""
        plan = step.plan
        if plan is None:
            plan = Plan()
            plan.run_together(len(step.requests), lambda: step.requests, list)
        return Flight(plan, step.start_ns, step.end_ns, NOTHING_MOVED, step.row)

    # -- one step --------------------------------------------------------------------------------

    def _advance(self, step: Step | None, cut_ns: float) -> Step | None:
        """Composes steps, and settles as many. `step` is in flight. Returns the step that is in
        flight afterwards."""
        if self._is_uniform(step) and (most := self._most()) > 0:
            return self._take(step, most, cut_ns)
        batch, scheduler = self._batch, self._scheduler
        self._sync()
        batch.begin(batch.now_ns)
        batch.busy_until_ns = batch.now_ns if step is None else step.end_ns
        group, running = scheduler.next_prefill(batch), scheduler.running
        if group is None and running.requests and not running.silent:
            dropped = self._may_finish(step) and scheduler.drop_finishing()
            self._regroup()
            if running.requests and self._fits():
                # The results of prompts in flight may be last tokens.
                known = step is None or step.plan is None
                return self._take(step, max(1, self._most()) if known else 1, cut_ns)
            if dropped:
                scheduler.full = False
            else:
                group = scheduler.decode(batch)
                self._ends, self._filed = {}, []
        following = self._complete(group)
        if not self._overlaps:
            step, following = following, None
        if step is not None:
            self._settle(step)
        return following

    def _complete(self, group: Group | None) -> Step | None:
        """Completes a step that the scheduler composed; None if nothing runs in it."""
        batch = self._batch
        start_ns = batch.busy_until_ns
        self._regroup()
        plan = self._scheduler.composed(batch, group)
        row = composed_row(batch, plan) + self._gauges()
        if plan.computes:
            end_ns = start_ns + self._cost.step_ns(plan)
            return Step([], plan, start_ns, end_ns, completed_row(row, start_ns, end_ns))
        if not plan.empty:
            self._record(completed_row(row, batch.now_ns, batch.now_ns))
        return None

    def _may_finish(self, step: Step | None) -> bool:
        """Whether the last token that a request may generate is perhaps in flight."""
        if step is None:
            return False
        if step.plan is None:
            self._file(step.requests)
            return self._settled + 1 in self._limits
        standings = self._scheduler.standings
        return any(
            generated_tokens(each) + 1 >= standings[each].limit_tokens
            for each in self._scheduler.pending[-1]
            if each.finish_ns < 0
        )

    def _settle(self, step: Step) -> None:
        """Settles a step: its tokens exist, and requests end."""
        batch, scheduler = self._batch, self._scheduler
        if step.plan is None:
            self._settle_decode(step)
        else:
            self._sync()
            scheduler.settle(batch, step.plan, step.end_ns)
            self._all_alive = self._all_alive and not batch.ended
            if step.plan.decode_seqs:
                self._ends, self._filed = {}, []
        self._record(step.row)

    def _record(self, row: bytes) -> None:
        ended = len(self._batch.ended)
        self._recorder.packed(finished_row(row, ended) if ended else row)
        self._taken += 1

    def _settle_decode(self, step: Step) -> None:
        scheduler, alive = self._scheduler, step.requests
        if alive is not self._group or not self._all_alive:
            standings = scheduler.standings
            alive = [r for r in alive if r.finish_ns < 0 and not standings[r].retracted]
        self._file(alive)
        self._book(len(alive), [step.end_ns])
        scheduler.pending.popleft()
        self._end(alive)

    def _end(self, alive: list[Request]) -> None:
        """Ends those of these requests that got their last token in the newest settled step."""
        if self._settled < self._next_end:
            return
        batch = self._batch
        self._sync()
        self._blocks.gpu.collect()
        for request in [each for each in alive if self._ends[each] == self._settled]:
            del self._ends[request]
            if request not in self._group:
                # It took part in no further step.
                sequence = request.sequences[0]
                sequence.length += 1
                sequence.last_token_ns = batch.now_ns
            self._scheduler.complete(batch, request)
        self._blocks.gpu.apply()
        batch.remove_ended()
        self._all_alive = False
        self._next_end = min(self._ends.values(), default=maxsize)

    # -- many that are alike ---------------------------------------------------------------------

    def _is_uniform(self, step: Step | None) -> bool:
        """Whether the running batch decodes next, as it did last, and nobody else is looked at."""
        scheduler, group = self._scheduler, self._group
        running = scheduler.running
        return (
            running.requests is group
            and self._all_alive
            and scheduler.last is running
            and not running.extends
            and (step is None or step.requests is group)
            and scheduler.unfinished is None
            and (scheduler.full or not self._batch.waiting)
        )

    def _most(self) -> int:
        """Returns how many decode steps are composed, with room for them, before somebody is known
        to end."""
        self._file(self._group)
        steps = self._next_end - self._settled
        if self._overlaps and self._next_end in self._limits:
            steps -= 1  # Who can only get its last token is left out of the step behind that.
        return min(steps, self._blocks.gpu.free // len(self._group) * self._size)

    def _take(self, step: Step | None, most: int, cut_ns: float) -> Step | None:
        """Takes decode steps, all composed before `cut_ns` but for the first. `step` is in flight.
        Returns the step that is in flight afterwards."""
        batch, number = self._batch, len(self._group)
        start_ns = batch.now_ns if step is None else step.end_ns
        context = self._filled + number
        # Behind a step in flight, the last step is not recorded here; a single one is the last.
        row = self._row(start_ns, 0, context) if step is None or most > 1 else b""
        ends_ns = self._price(start_ns, most, cut_ns)
        opened, evicted, ratios = self._grow(len(ends_ns))
        gauges, following = self._gauges(), None
        if step is not None:
            context += number * (len(ends_ns) - 1)
            *ends_ns, end_ns = ends_ns
            start_ns = ends_ns[-1] if ends_ns else start_ns
            last = self._row(start_ns, end_ns, context) + gauges
            following = Step(self._group, None, start_ns, end_ns, last)
            self._scheduler.pending.append(self._group)
            self._settle(step)
        if ends_ns:
            steps = len(ends_ns)
            self._book(number, ends_ns)
            self._end(self._group)
            row = finished_row(row, len(batch.ended)) + gauges
            self._recorder.decodes(row, ends_ns, opened[:steps], evicted[:steps], ratios[:steps])
            self._taken += steps
        return following

    def _price(self, now_ns: int, most: int, cut_ns: float) -> list[int]:
        """Returns when each of the next decode steps ends. The first one begins now."""
        number, context = len(self._group), self._filled + len(self._group)
        last_ns, cost = self._step_ns, self._cost
        if min(most, (cut_ns - now_ns) / last_ns if last_ns else maxsize) >= LONG_STEPS:
            within_ns = None if cut_ns == inf else int(cut_ns) - now_ns
            times = cost.decode_run_ns(number, context, most, within_ns, *self._longest(0))
            return list(accumulate(times, initial=now_ns))[1:]
        ends_ns: list[int] = []
        for step in range(most):
            start_ns = now_ns
            now_ns += cost.decode_ns(number, context + number * step, *self._longest(step))
            ends_ns.append(now_ns)
            # When the next one is composed.
            if (start_ns if self._overlaps else now_ns) >= cut_ns:
                break
        self._step_ns = now_ns - start_ns
        return ends_ns

    # -- the running batch -----------------------------------------------------------------------

    def _regroup(self) -> None:
        """Takes over who runs. The requests must be up to date."""
        requests = self._scheduler.running.requests
        self._all_alive = True
        if requests is not self._group:
            self._group = requests
            self._sequences = [each.sequences[0] for each in requests]
            slots = [each.filled for each in self._sequences]
            self._filled = sum(slots)
            self._phases = [len(slots)]
            if self._size > 1:
                phases = Counter((each - self._composed) % self._size for each in slots)
                self._phases = [phases[phase] for phase in range(self._size)]

    def _file(self, requests: list[Request]) -> None:
        """Notes when each of these requests ends. All of them are in the oldest step that is not
        settled."""
        if requests is self._filed:
            return
        ends, standings, left = self._ends, self._scheduler.standings, self._endings.left
        for request in requests:
            if request not in ends and request.finish_ns < 0:
                more = standings[request].limit_tokens - generated_tokens(request)
                tokens = left(request.sequences[0])
                if more <= tokens:
                    tokens = more
                    self._limits.add(self._settled + more)
                ends[request] = self._settled + tokens
                self._newcomers.append(request)
        self._filed, self._next_end = requests, min(ends.values(), default=maxsize)

    def _sync(self) -> None:
        """Writes to the requests what was counted for all of them."""
        tokens, slots, token_ns = self._tokens, self._slots, self._token_ns
        self._tokens = self._slots = 0
        if slots:
            for sequence in self._sequences:
                sequence.computed = sequence.filled = sequence.filled + slots
        if tokens:
            for sequence in self._sequences:
                sequence.length += tokens
                sequence.last_token_ns = token_ns

    def _fits(self) -> bool:
        """Whether each request can get one more token. Evicts for that as SGLang does."""
        self._blocks.make_room(len(self._group) * self._size)
        return self._blocks.gpu.blank >= self._opening(self._composed)

    def _opening(self, composed: int) -> int:
        """Returns the number of pages that a decode step takes after so many composed ones."""
        return self._phases[-composed % self._size]

    def _grow(self, steps: int) -> tuple[list[int], list[int], list[int]]:
        """Composes decode steps: takes slots. Returns the pages that each step takes, the pages
        with content that are lost up to each, and the new-token ratio as far as it falls."""
        number, size, blocks, pool = len(self._group), self._size, self._blocks, self._blocks.gpu
        opened = [self._opening(self._composed + step) for step in range(steps)]
        taken, evicted = sum(opened), list[int]()
        if pool.blank - taken + opened[-1] >= number:  # No step has to evict, not even the last.
            pool.lend(taken)
        else:
            before = pool.tree.pages
            for opening in opened:
                if pool.blank < number:
                    blocks.make_room(number * size)
                pool.lend(opening)
                evicted.append(before - pool.tree.pages)
            if pool.tree.pages == before:
                evicted = []
        blocks.empty_slots += taken * size - number * steps
        self._composed += steps
        self._filled += number * steps
        self._slots += steps
        self.together_steps += steps
        return opened, evicted, self._scheduler.decoded(steps)

    def _book(self, number: int, ends_ns: list[int]) -> None:
        """Books the tokens of `number` requests in steps that end at these times."""
        batch, gaps, newcomers = self._batch, self._batch.token_gaps_ns, self._newcomers
        for request in newcomers:
            gaps.add(ends_ns[0] - request.sequences[0].last_token_ns)
        if number > len(newcomers):
            gaps.add(ends_ns[0] - self._token_ns, number - len(newcomers))
        if newcomers:
            self._newcomers = []
        if len(ends_ns) > 1:
            gaps.add_each(map(sub, ends_ns[1:], ends_ns), number)
        batch.now_ns = self._token_ns = ends_ns[-1]
        batch.tokens += number * len(ends_ns)
        self._tokens += len(ends_ns)
        self._settled += len(ends_ns)

    def _longest(self, step: int) -> tuple[list[int], ...]:
        """Returns the greatest lengths in the decode step after the next `step` ones, if the cost
        model asks for them."""
        if not self._asked:
            return ()
        more = self._slots + 1 + step
        lengths = sorted([each.filled for each in self._sequences], reverse=True)
        return ([length + more for length in lengths[: self._asked]],)

    def _gauges(self) -> bytes:
        """Returns the end of a row."""
        return gauge_row(self._scheduler.gauges(self._batch))

    def _row(self, start_ns: int, end_ns: int, context_tokens: int) -> bytes:
        """Returns the row of a decode step of the running batch, without its end."""
        batch, number = self._batch, len(self._group)
        return decode_row(
            *(start_ns, end_ns, number, context_tokens, number, 0, 0),
            *(len(batch.waiting), len(batch.others)),
            *(*batch.blocks.census(), self._scheduler.blocked(batch), 0),
        )

"""Splits the time of every request, from its arrival to its end, after the run.

```
standings      arrival ── first step ── first token ── preempted ── readmitted ── ... ── end
                     waiting      prefill        decode        preempted   recompute
steps          │       │      │        │     │         │      │
sums so far    0      12     25       31    ...                 for each kind of time
```
Every spell begins and ends at a step boundary; only an arrival may fall within a step. So the time
of each kind within a spell is the difference of two running sums. No step is read separately for
each request. The meaning of the parts: `kvsim.results.ledger`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsim.core import records as kinds
from kvsim.core.schema import BLOCKED, STAGE_COLUMNS
from kvsim.results.ledger import TIME_PARTS, WAITING_FOR, standings
from kvsim.results.ledger.standings import Spells
from kvsim.results.statistics import Ints

TIMES = (
    *("link_wait", "flush", "rank_wait", "stages", "out", "in", "kernels", "alone"),
    *("interference", "drafting", "accepted_drafts", "rejected_drafts", *WAITING_FOR.values()),
)
"""Kinds of time in a step. A running request spends the waits for the link, for stores, for slower
ranks and for stages of a pipeline, the copies out and in, the kernels, and the drafter; the rest is
host time. Of the kernels, a decoding request counts those of decodes as its own, the others as
interference; of its own, drafts have a part. A waiting request waits from the start of the step to
the start of the next, for one reason (`WAITING_FOR`)."""
_LINK_WAIT, _FLUSH, _RANK_WAIT, _STAGES, _OUT, _IN, _KERNELS, _ALONE, _INTERFERENCE = range(9)
_DRAFTING, _ACCEPTED, _REJECTED = range(9, 12)
_REASONS = slice(12, len(TIMES))
_WAITS = {
    _LINK_WAIT: "link_queue_ns",
    _FLUSH: "flush_stall_ns",
    _RANK_WAIT: "rank_stall_ns",
    _STAGES: "stage_wait_ns",
}
"""Waits of a step, and the parts that they become for each request that runs in it."""

_AT_ONCE = 1 << 16
"""Begins and ends of spells that are taken in at once; a long run has too many for one array."""

_PLACES = {name: place for place, name in enumerate(TIME_PARTS)}
_OWN = {
    standings.PREFILL: "own_prefill_ns",
    standings.DECODE: "own_decode_ns",
    standings.RECOMPUTE: "recompute_ns",
}
_AWAY = {
    standings.PREEMPTED: "preempted_waiting_ns",
    standings.SWAPPED: "swapped_waiting_ns",
    standings.HELD: "waiting_tier_ns",
    standings.LOADING: "waiting_load_ns",
    standings.RELOADING: "reload_ns",
    standings.LATE: "deferred_free_ns",
}


class StepTimes(NamedTuple):
    """When each step started, and how long and why requests waited through it."""

    starts: Ints
    until: Ints
    """When the next step starts, or the run ends; nanoseconds."""
    why: Ints
    """Why requests waited through the step: index into `BLOCKED`."""


class Copies(NamedTuple):
    """Swap copies of requests over the link, one entry each."""

    request: Ints
    outward: NDArray[np.bool_]
    rows: Ints
    """The steps that they block."""

    def at(self, places: Ints | slice) -> Copies:
        """Some of them."""
        return Copies(self.request[places], self.outward[places], self.rows[places])


def reasons(blocked: Ints, prefill_seqs: Ints, in_flight: int) -> Ints:
    """Why requests waited through each step: indexes into `BLOCKED`.

    nano-vllm leaves its queue alone once a chunk has used the token budget up. It records no
    refusal, although the requests behind the chunk wait for the budget (`tokens`).
    """
    if in_flight > 1:
        return blocked
    behind = (blocked == 0) & (prefill_seqs > 0)
    found: Ints = np.where(behind, BLOCKED.index("tokens"), blocked)
    return found


def table(
    steps: Mapping[str, Ints],
    kernels: Ints,
    alone: Ints,
    others: Ints,
    drafts: Sequence[Ints | int],
) -> Ints:
    """`TIMES` of some steps, a row for each kind, without what requests wait for.

    `kernels`, `alone`, `others`: computing time in nanoseconds, all of it, that of decodes alone
    and that of prompts. `drafts`: that of the drafter, and of `alone` that of drafts which are
    accepted and of those which are not.
    """
    out_blocks, in_blocks = steps["swap_out_blocks"], steps["swap_in_blocks"]
    transfer = steps["transfer_ns"]
    out = transfer * out_blocks // np.maximum(out_blocks + in_blocks, 1)
    stages = sum(steps[name] for name in STAGE_COLUMNS if name in steps)
    waits = *(steps[name] for name in ("link_wait_ns", "flush_ns", "rank_wait_ns")), stages
    found = np.zeros((len(TIMES), len(kernels)), dtype=np.int64)
    known = *waits, out, transfer - out, kernels, alone, others, *drafts
    # The rows behind these are for what requests wait for.
    for row, ns in zip(found, known, strict=False):
        row[:] = ns
    return found


class Split:
    """`TIME_PARTS` of requests, filled while a run's steps are gone through once, in order.

    A spell adds the running sums at the step where it ends, and takes away those where it begins.
    """

    def __init__(
        self,
        spells: Spells,
        copies: Copies,
        steps: StepTimes,
        slices: Slices | None,
        number: int,
    ) -> None:
        """`slices`: of a pipeline, whose steps overlap; `number`: of requests."""
        self._spells, self._slices = spells, slices
        self._steps = steps if slices is None else slices.times
        self._parts = np.zeros((len(TIME_PARTS), number), dtype=np.int64)
        self._sums = np.zeros((len(TIMES), 1), dtype=np.int64)
        """Over all steps so far."""
        # The step before which each spell begins, then that before which each ends.
        instants = np.concatenate((spells.begin_ns, spells.end_ns))
        rows = np.searchsorted(self._steps.starts, instants, side="left")
        edges = np.argsort(rows, kind="stable")
        # Narrow, because a long run has many.
        self._rows = rows[edges].astype(np.min_scalar_type(len(self._steps.starts)))
        self._edges = edges.astype(np.min_scalar_type(len(edges)))
        """The begins of all spells, then their ends, in the order of their steps."""
        self._copies = copies.at(np.argsort(copies.rows, kind="stable"))

    def add(self, first: int, times: Ints) -> None:
        """Take in the steps from `first` on, by their `table`."""
        if self._slices is not None:
            first, times = self._slices.of(first, times)
        part = slice(first, first + times.shape[1])
        starts, until, why = (column[part] for column in self._steps)
        times[_REASONS.start + why, np.arange(len(why))] = until - starts
        sums = np.concatenate((self._sums, times), axis=1)
        np.cumsum(sums, axis=1, out=sums)
        self._add_edges(first, sums[:, :-1])
        self._sums = sums[:, -1:].copy()
        low, high = np.searchsorted(self._copies.rows, (part.start, part.stop))
        copies = self._copies.at(slice(low, high))
        _own_copies(self._parts, copies, times[:, copies.rows - first])

    def columns(self) -> dict[str, Ints]:
        """`TIME_PARTS` in nanoseconds, once all steps are added."""
        # Spells that end behind the last step.
        self._add_edges(len(self._steps.starts), self._sums)
        return dict(zip(TIME_PARTS, self._parts, strict=True))

    def _add_edges(self, first: int, sums: Ints) -> None:
        """Take in the begins and ends of spells at the steps from `first` on; `sums`: over all
        before each."""
        # Of the same type, as `searchsorted` converts the longer array otherwise.
        begin, last = (self._rows.dtype.type(row) for row in (first, first + sums.shape[1] - 1))
        low = int(np.searchsorted(self._rows, begin, side="left"))
        high = int(np.searchsorted(self._rows, last, side="right"))
        for start in range(low, high, _AT_ONCE):
            some = slice(start, min(start + _AT_ONCE, high))
            edges, rows = (each[some].astype(np.int64) for each in (self._edges, self._rows))
            self._add_spells(edges, rows, first, sums)

    def _add_spells(self, edges: Ints, rows: Ints, first: int, sums: Ints) -> None:
        """Take in the begins and ends of spells at these steps; `sums`: before each from `first`
        on."""
        parts, spells = self._parts, self._spells
        number = len(spells.request)
        over, spell = edges >= number, edges % max(number, 1)
        begin_ns, end_ns = spells.begin_ns[spell], spells.end_ns[spell]
        # Counted once, where the spell ends.
        length = np.where(over, end_ns - begin_ns, 0)
        standing = spells.standing[spell]
        there = np.flatnonzero(sums[:, -1])  # Most runs have few of the kinds.
        for each in range(standings.LATE + 1):
            here = np.flatnonzero(standing == each)
            if not len(here):
                continue
            request = spells.request[spell[here]]
            if each in _AWAY:
                _add(parts, request, _AWAY[each], length[here])
                continue
            within = np.zeros((len(sums), len(here)), dtype=np.int64)
            places, sign = rows[here] - first, np.where(over[here], 1, -1)
            for kind in there:
                np.multiply(sums[kind].take(places), sign, out=within[kind])
            if each == standings.WAITING:
                last = rows[here] - 1
                passed = over[here] & (last >= 0)
                passed[passed] = self._steps.starts[last[passed]] >= begin_ns[here][passed]
                # The last step that the request waits through may go on after the request ended.
                step = last[passed]
                beyond = self._steps.until[step] - end_ns[here][passed]
                within[_REASONS.start + self._steps.why[step], np.flatnonzero(passed)] -= beyond
                waits = within[_REASONS]
                _add(parts, request, "waiting_step_ns", length[here] - waits.sum(axis=0))
                for name, ns in zip(WAITING_FOR.values(), waits, strict=True):
                    _add(parts, request, name, ns)
            else:
                _running(parts, request, within, length[here], each)


def own_copies(transitions: Mapping[str, Ints], ends: Ints, starts: Ints) -> Copies:
    """The swap copies of each request before it ended."""
    swapped = np.isin(transitions["kind"], (kinds.SWAPPED_OUT, kinds.SWAPPED_IN))
    request, kind, time_ns = (transitions[name][swapped] for name in ("request", "kind", "time_ns"))
    rows = np.searchsorted(starts, time_ns, side="right") - 1
    # A step that the end of the run cut off has no row.
    known = (rows >= 0) & (time_ns < ends[request])
    known[known] = starts[rows[known]] == time_ns[known]
    return Copies(request[known], kind[known] == kinds.SWAPPED_OUT, rows[known])


def _running(parts: Ints, request: Ints, held: Ints, length: Ints, standing: int) -> None:
    """Add the spells of running requests in one standing."""
    own, others = held[_KERNELS], np.zeros_like(length)
    if standing == standings.DECODE:
        own, others = held[_ALONE], held[_INTERFERENCE]
    stall = held[_OUT] + held[_IN]
    rest = length - own - others - stall - held[[*_WAITS, _DRAFTING]].sum(axis=0)
    if standing == standings.DECODE:
        own = own - held[_ACCEPTED] - held[_REJECTED]
        _add(parts, request, "accepted_drafts_ns", held[_ACCEPTED])
        _add(parts, request, "rejected_drafts_ns", held[_REJECTED])
    _add(parts, request, "drafting_ns", held[_DRAFTING])
    _add(parts, request, _OWN[standing], own)
    _add(parts, request, "interference_ns", others)
    _add(parts, request, "swap_stall_ns", stall)
    for kind, part in _WAITS.items():
        _add(parts, request, part, held[kind])
    _add(parts, request, "host_overhead_ns", rest)


def _own_copies(parts: Ints, copies: Copies, held: Ints) -> None:
    """Move each request's own copies out of its waiting time and out of the copies of others.

    `held`: `TIMES` of the steps that they block.
    """
    request, outward = copies.request, copies.outward
    out, link_wait = held[_OUT, outward], held[_LINK_WAIT, outward]
    _add(parts, request[outward], "swap_out_ns", out)
    _add(parts, request[outward], "link_queue_ns", link_wait)
    # A request swapped out is away by then; one that comes back counts as running in that step.
    _add(parts, request[outward], "swapped_waiting_ns", -out - link_wait)
    _add(parts, request[~outward], "swap_in_ns", held[_IN, ~outward])
    _add(parts, request[~outward], "swap_stall_ns", -held[_IN, ~outward])


def _add(parts: Ints, request: Ints, name: str, ns: Ints) -> None:
    if ns.any():  # A part that nobody has takes no memory.
        np.add.at(parts[_PLACES[name]], request, ns)


class Slices(NamedTuple):
    """Slices of time between the first step and the end of a run, without a gap."""

    times: StepTimes
    step: Ints
    """The step to which each belongs, in order; where none is under way, the next one."""
    share: NDArray[np.float64]
    """The part of that step's time, from 0 to 1."""

    def of(self, first: int, table: Ints) -> tuple[int, Ints]:
        """The first slice of the steps from `first` on, and the kinds of time of all of theirs."""
        low, high = np.searchsorted(self.step, (first, first + table.shape[1]))
        whole, share = table[:, self.step[low:high] - first], self.share[low:high]
        part = np.floor(whole * share).astype(np.int64) - 1  # A product may be rounded up.
        return int(low), np.where(share < 1, np.maximum(part, 0), whole)


def slices(times: StepTimes, ends: Ints, run_end_ns: int) -> Slices:
    """The slices of a run whose steps start at `times.starts` and end at `ends`, both in order."""
    starts = times.starts
    instants = np.unique(np.concatenate((starts, ends, [run_end_ns])))
    begin, until = instants[:-1], instants[1:]
    last = len(starts) - 1
    # Of several steps under way, time is laid to the oldest.
    oldest = np.minimum(np.searchsorted(ends, begin, side="right"), last)
    newest = np.searchsorted(starts, begin, side="right") - 1
    under_way = (starts[oldest] <= begin) & (begin < ends[oldest])
    length = np.where(under_way, until - begin, 0)
    share = length / np.maximum(ends[oldest] - starts[oldest], 1)
    return Slices(StepTimes(begin, until, times.why[newest]), oldest, share)

"""Splits the time of every request, from its arrival to its end, after the run.

```
standings      arrival ── first step ── first token ── preempted ── readmitted ── ... ── end
                     waiting      prefill        decode        preempted   recompute
steps          │       │      │        │     │         │      │
sums so far    0      12     25       31    ...                 for each kind of time
```
Every spell begins and ends at a step boundary; only an arrival may fall within a step. So the time
of each kind within a spell is the difference of two running sums. No step is read separately for
each request. The meaning of the parts: `kvsim.ledger.parts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsim.ledger import standings
from kvsim.ledger.parts import TIME_PARTS, WAITING_FOR
from kvsim.ledger.standings import Spells
from kvsim.records import transitions as kinds
from kvsim.schema import BLOCKED

Ints = NDArray[np.int64]

TIMES = ("link_wait", "out", "in", "kernels", "alone", "interference", *WAITING_FOR.values())
"""Kinds of time in a step. A running request spends the wait for the link, the copies out and in,
and the kernels; the rest is host time. Of the kernels, a decoding request counts those of decodes
as its own, the others as interference. A waiting request waits from the start of the step to the
start of the next, for one reason (`WAITING_FOR`)."""
_LINK_WAIT, _OUT, _IN, _KERNELS, _ALONE, _INTERFERENCE = range(6)
_REASONS = slice(6, len(TIMES))

_AT_ONCE = 1 << 16
"""Spells that are split at once; a long run has too many for one array."""

_PLACES = {name: place for place, name in enumerate(TIME_PARTS)}
_OWN = {
    standings.PREFILL: "own_prefill_ns",
    standings.DECODE: "own_decode_ns",
    standings.RECOMPUTE: "recompute_ns",
}
_AWAY = {
    standings.PREEMPTED: "preempted_waiting_ns",
    standings.SWAPPED: "swapped_waiting_ns",
}


class Sums(NamedTuple):
    """Running sums of step times."""

    asked: Ints
    """Step numbers at which the sums are kept, ascending."""
    before: Ints
    """Sums over all earlier steps, of shape (asked, `TIMES`)."""

    def between(self, first: Ints, last: Ints) -> Ints:
        """Time in the steps `first .. last - 1`, of shape (entries, `TIMES`)."""
        low, high = np.searchsorted(self.asked, first), np.searchsorted(self.asked, last)
        between: Ints = self.before[high] - self.before[low]
        return between


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
    steps: Mapping[str, Ints], kernels: Ints, alone: Ints, others: Ints, until: Ints, why: Ints
) -> Ints:
    """`TIMES` of some steps, one row each.

    `kernels`, `alone`, `others`: computing time in nanoseconds, all of it, that of decodes alone
    and that of prompts. `until`: when the next step begins. `why`: what `reasons` returns.
    """
    out_blocks, in_blocks = steps["swap_out_blocks"], steps["swap_in_blocks"]
    transfer = steps["transfer_ns"]
    out = transfer * out_blocks // np.maximum(out_blocks + in_blocks, 1)
    rows = np.zeros((len(why), len(TIMES)), dtype=np.int64)
    for place, column in enumerate(
        (steps["link_wait_ns"], out, transfer - out, kernels, alone, others)
    ):
        rows[:, place] = column
    rows[np.arange(len(why)), _REASONS.start + why] = until - steps["start_ns"]
    return rows


def split_requests(
    spells: Spells, copies: Copies, steps: StepTimes, sums: Sums, number: int
) -> dict[str, Ints]:
    """`TIME_PARTS` of `number` requests, in nanoseconds."""
    parts = np.zeros((number, len(TIME_PARTS)), dtype=np.int64)
    for start in range(0, len(spells.request), _AT_ONCE):
        some = Spells(*(column[start : start + _AT_ONCE] for column in spells))
        _split_spells(parts, some, steps, sums)
    _own_copies(parts, copies, sums)
    return {name: parts[:, place] for place, name in enumerate(TIME_PARTS)}


def _split_spells(parts: Ints, spells: Spells, steps: StepTimes, sums: Sums) -> None:
    first, last = rows_of(spells, steps.starts)
    held = sums.between(first, last)
    length = spells.end_ns - spells.begin_ns
    for standing in range(standings.SWAPPED + 1):
        here = np.flatnonzero(spells.standing == standing)
        request, within = spells.request[here], held[here]
        if standing == standings.WAITING:
            # The last step that the request waits through may go on after the request ended.
            within = within[:, _REASONS]
            passed = last[here] > first[here]
            step = last[here][passed] - 1
            beyond = steps.until[step] - spells.end_ns[here][passed]
            within[np.flatnonzero(passed), steps.why[step]] -= beyond
            _add(parts, request, "waiting_step_ns", length[here] - within.sum(axis=1))
            for place, name in enumerate(WAITING_FOR.values()):
                _add(parts, request, name, within[:, place])
        elif standing in _OWN:
            _running(parts, request, within, length[here], standing)
        else:
            _add(parts, request, _AWAY[standing], length[here])


def rows_of(spells: Spells, starts: Ints) -> tuple[Ints, Ints]:
    """The steps `first .. last - 1` that begin within each spell."""
    return (
        np.searchsorted(starts, spells.begin_ns, side="left"),
        np.searchsorted(starts, spells.end_ns, side="left"),
    )


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
    own, others = held[:, _KERNELS], np.zeros_like(length)
    if standing == standings.DECODE:
        own, others = held[:, _ALONE], held[:, _INTERFERENCE]
    stall, link_wait = held[:, _OUT] + held[:, _IN], held[:, _LINK_WAIT]
    _add(parts, request, _OWN[standing], own)
    _add(parts, request, "interference_ns", others)
    _add(parts, request, "swap_stall_ns", stall)
    _add(parts, request, "link_queue_ns", link_wait)
    _add(parts, request, "host_overhead_ns", length - own - others - stall - link_wait)


def _own_copies(parts: Ints, copies: Copies, sums: Sums) -> None:
    """Move each request's own copies out of its waiting time and out of the copies of others."""
    held, outward = sums.between(copies.rows, copies.rows + 1), copies.outward
    request = copies.request
    out, link_wait = held[outward, _OUT], held[outward, _LINK_WAIT]
    _add(parts, request[outward], "swap_out_ns", out)
    _add(parts, request[outward], "link_queue_ns", link_wait)
    _add(parts, request[outward], "swapped_waiting_ns", -out - link_wait)
    _add(parts, request[~outward], "swap_in_ns", held[~outward, _IN])
    _add(parts, request[~outward], "swap_stall_ns", -held[~outward, _IN])


def _add(parts: Ints, request: Ints, name: str, ns: Ints) -> None:
    np.add.at(parts[:, _PLACES[name]], request, ns)

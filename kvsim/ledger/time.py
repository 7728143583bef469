"""Splits the time of every request, from its arrival to its end, after the run.

```
standings      arrival ── first step ── first token ── preempted ── readmitted ── ... ── end
                     waiting      prefill        decode        preempted   recompute
steps          │       │      │        │     │         │      │
sums so far    0      12     25       31    ...                 for each kind of time
```

Every spell of a standing begins and ends where a step does, except that a request arrives when it
likes. So what a spell holds of each kind of time is a difference of two sums, and no step is
looked at for one request. What the parts mean: `kvsim.ledger.parts`.
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
"""Kinds of time of a step. For who runs in it: the wait for the link, copies out and in, kernels;
for who decodes, its own kernels and what others take of its time; what is left is the host's. For
who waits through it, until the next step begins: all of it, for one reason."""
_LINK_WAIT, _OUT, _IN, _KERNELS, _ALONE, _INTERFERENCE = range(6)
_REASONS = slice(6, len(TIMES))

_AT_ONCE = 1 << 16
"""Spells that are split together: of a long run there are many."""

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
    """Time of all steps before some of them."""

    asked: Ints
    """Numbers of those steps, rising."""
    before: Ints
    """Shape (asked, `TIMES`)."""

    def between(self, first: Ints, last: Ints) -> Ints:
        """Time in the steps `first .. last - 1`, of shape (entries, `TIMES`)."""
        low, high = np.searchsorted(self.asked, first), np.searchsorted(self.asked, last)
        between: Ints = self.before[high] - self.before[low]
        return between


class Laid(NamedTuple):
    """All steps, an entry each, in nanoseconds."""

    starts: Ints
    until: Ints
    """When the next one starts, or the run ends."""
    why: Ints
    """Why requests waited through it: index into `BLOCKED`."""


class Copies(NamedTuple):
    """Moves of requests over the link, an entry each."""

    request: Ints
    outward: NDArray[np.bool_]
    rows: Ints
    """Steps that they block."""


def reasons(blocked: Ints, prefill_seqs: Ints, in_flight: int) -> Ints:
    """Why requests waited through steps: indexes into `BLOCKED`.

    An engine that stops to look at its queue once a chunk has used the budget up (nano-vllm)
    refuses nobody, and yet those behind the chunk wait for it.
    """
    if in_flight > 1:
        return blocked
    behind = (blocked == 0) & (prefill_seqs > 0)
    found: Ints = np.where(behind, BLOCKED.index("tokens"), blocked)
    return found


def table(
    steps: Mapping[str, Ints], kernels: Ints, alone: Ints, others: Ints, until: Ints, why: Ints
) -> Ints:
    """`TIMES` of some steps, a row each.

    `kernels`, `alone`, `others`: nanoseconds of their computing time; `until`: when the next step
    begins; `why`: as `reasons` gives it.
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
    spells: Spells, copies: Copies, steps: Laid, sums: Sums, number: int
) -> dict[str, Ints]:
    """`TIME_PARTS` of `number` requests, in nanoseconds."""
    parts = np.zeros((number, len(TIME_PARTS)), dtype=np.int64)
    for start in range(0, len(spells.request), _AT_ONCE):
        some = Spells(*(column[start : start + _AT_ONCE] for column in spells))
        _split_spells(parts, some, steps, sums)
    _own_copies(parts, copies, sums)
    return {name: parts[:, place] for place, name in enumerate(TIME_PARTS)}


def _split_spells(parts: Ints, spells: Spells, steps: Laid, sums: Sums) -> None:
    first, last = rows_of(spells, steps.starts)
    held = sums.between(first, last)
    length = spells.end_ns - spells.begin_ns
    for standing in range(standings.SWAPPED + 1):
        here = np.flatnonzero(spells.standing == standing)
        who, within = spells.request[here], held[here]
        if standing == standings.WAITING:
            # The last step through which it waits may have gone on beyond its end.
            within = within[:, _REASONS]
            passed = last[here] > first[here]
            step = last[here][passed] - 1
            beyond = steps.until[step] - spells.end_ns[here][passed]
            within[np.flatnonzero(passed), steps.why[step]] -= beyond
            _add(parts, who, "waiting_step_ns", length[here] - within.sum(axis=1))
            for place, name in enumerate(WAITING_FOR.values()):
                _add(parts, who, name, within[:, place])
        elif standing in _OWN:
            _running(parts, who, within, length[here], standing)
        else:
            _add(parts, who, _AWAY[standing], length[here])


def rows_of(spells: Spells, starts: Ints) -> tuple[Ints, Ints]:
    """The steps `first .. last - 1` that begin within each spell."""
    return (
        np.searchsorted(starts, spells.begin_ns, side="left"),
        np.searchsorted(starts, spells.end_ns, side="left"),
    )


def own_copies(transitions: Mapping[str, Ints], ends: Ints, starts: Ints) -> Copies:
    """The copies that requests took part in before they ended."""
    swapped = np.isin(transitions["kind"], (kinds.SWAPPED_OUT, kinds.SWAPPED_IN))
    who, kind, time_ns = (transitions[name][swapped] for name in ("request", "kind", "time_ns"))
    rows = np.searchsorted(starts, time_ns, side="right") - 1
    # A step that the end of the run cut off has no row.
    known = (rows >= 0) & (time_ns < ends[who])
    known[known] = starts[rows[known]] == time_ns[known]
    return Copies(who[known], kind[known] == kinds.SWAPPED_OUT, rows[known])


def _running(parts: Ints, who: Ints, held: Ints, length: Ints, standing: int) -> None:
    """Spells of requests that are running."""
    own, others = held[:, _KERNELS], np.zeros_like(length)
    if standing == standings.DECODE:
        own, others = held[:, _ALONE], held[:, _INTERFERENCE]
    stall, link_wait = held[:, _OUT] + held[:, _IN], held[:, _LINK_WAIT]
    _add(parts, who, _OWN[standing], own)
    _add(parts, who, "interference_ns", others)
    _add(parts, who, "swap_stall_ns", stall)
    _add(parts, who, "link_queue_ns", link_wait)
    _add(parts, who, "host_overhead_ns", length - own - others - stall - link_wait)


def _own_copies(parts: Ints, copies: Copies, sums: Sums) -> None:
    """Copies of the request itself, which were taken for waiting or for those of others."""
    held, outward = sums.between(copies.rows, copies.rows + 1), copies.outward
    who = copies.request
    out, link_wait = held[outward, _OUT], held[outward, _LINK_WAIT]
    _add(parts, who[outward], "swap_out_ns", out)
    _add(parts, who[outward], "link_queue_ns", link_wait)
    _add(parts, who[outward], "swapped_waiting_ns", -out - link_wait)
    _add(parts, who[~outward], "swap_in_ns", held[~outward, _IN])
    _add(parts, who[~outward], "swap_stall_ns", -held[~outward, _IN])


def _add(parts: Ints, who: Ints, name: str, ns: Ints) -> None:
    np.add.at(parts[:, _PLACES[name]], who, ns)

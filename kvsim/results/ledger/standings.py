"""Divides the life of every request into spells, each with one standing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsim.core import records as kinds
from kvsim.results.statistics import Ints

NAMES = (
    *("waiting", "prefill", "decode", "recompute", "preempted", "swapped out"),
    *("waiting for a store or a load of another", "loading", "loading again", "passed over"),
)
WAITING, PREFILL, DECODE, RECOMPUTE, PREEMPTED, SWAPPED, HELD, LOADING, RELOADING, LATE = range(
    len(NAMES)
)
"""The standing of a request, and its name for people: it has never run; it has no token yet; it
decodes; it recomputes lost KV; it is preempted and has no blocks; it is swapped, its blocks are on
the CPU; it waits for KV in a tier that cannot be read yet; it loads before its first step, or after
a preemption; it is passed over because blocks are released late."""
_AS_BEFORE = -1
"""Stands for the last standing but `LATE`."""
_BEFORE_FIRST_STEP = (kinds.HELD, kinds.LOOKED_UP, kinds.LOADING, kinds.LOADED)
"""Transitions of requests that have never run."""


_AT_ONCE = 1 << 16
"""Requests that are laid out at once, to bound the memory."""
_FIRST = 1 << 61
"""More than the log has entries."""


class Spells(NamedTuple):
    """Spells of all requests that were sent; those of one request leave no gap between them."""

    request: Ints
    standing: Ints
    begin_ns: Ints
    end_ns: Ints


def first_steps_ns(requests: Mapping[str, Any], transitions: Mapping[str, Ints]) -> Ints:
    """When the first step of each request began; -1 if it never ran."""
    first: Ints = np.array(requests["first_scheduled_ns"], dtype=np.int64)
    later = transitions["kind"] == kinds.SCHEDULED
    first[transitions["request"][later]] = transitions["time_ns"][later]
    return first


def ends_ns(requests: Mapping[str, Any], run_end_ns: int) -> Ints:
    """When each request ended; else the end of the run, or its arrival if it was never sent."""
    finish, arrival = requests["finish_ns"], requests["arrival_ns"]
    ends: Ints = np.where(finish >= 0, finish, np.maximum(run_end_ns, arrival))
    return np.where(arrival < 0, arrival, ends)


def lay_out(
    requests: Mapping[str, Any],
    transitions: Mapping[str, Ints],
    starts_ns: Ints,
    step_ends_ns: Ints,
    run_end_ns: int,
) -> Spells:
    """The spells of all requests of a run, without empty ones.

    `starts_ns`, `step_ends_ns`: when each step started and ended.
    """
    arrival = requests["arrival_ns"]
    first_step, first_token = first_steps_ns(requests, transitions), requests["first_token_ns"]
    times = _times(transitions, starts_ns, step_ends_ns)
    log = np.flatnonzero(_matters(transitions))
    log = log[np.argsort(transitions["request"][log], kind="stable")]
    early = np.isin(transitions["kind"][log], _BEFORE_FIRST_STEP)
    logged = _Changes(
        transitions["request"][log],
        times[log],
        _standings(transitions, times, first_token)[log],
        log - early * _FIRST,
    )
    begins = ((WAITING, arrival, -2 * _FIRST), (PREFILL, first_step, -2), (DECODE, first_token, -1))
    ends = ends_ns(requests, run_end_ns)
    pieces = []
    for first in range(0, max(len(arrival), 1), _AT_ONCE):
        last = min(first + _AT_ONCE, len(arrival))
        low, high = np.searchsorted(logged.request, (first, last))
        changes = [_Changes(*(column[low:high] for column in logged))]
        for standing, when, order in begins:
            request = first + np.flatnonzero(when[first:last] >= 0)
            # At one instant these come first, then the transitions in the order of the log; but
            # those of requests that have never run come between their arrival and their first step.
            same = (np.full(len(request), each) for each in (standing, order))
            changes.append(_Changes(request, when[request], *same))
        together = _Changes(*(np.concatenate(columns) for columns in zip(*changes, strict=True)))
        pieces.append(_spells(together, ends))
    return Spells(*(np.concatenate(columns) for columns in zip(*pieces, strict=True)))


class _Changes(NamedTuple):
    """Changes of standing, an entry each."""

    request: Ints
    time_ns: Ints
    standing: Ints
    order: Ints
    """Order among changes at the same instant."""


def _matters(transitions: Mapping[str, Ints]) -> NDArray[np.bool_]:
    """Which transitions change a standing."""
    kind = transitions["kind"]
    order = np.lexsort((np.arange(len(kind)), transitions["request"]))
    request, sorted_kind = transitions["request"][order], kind[order]
    resumed = (request[1:] == request[:-1]) & (sorted_kind[1:] == kinds.RESUMED)
    followed = np.zeros(len(kind), dtype=bool)
    followed[order] = np.append(resumed, False)[: len(kind)]
    matters: NDArray[np.bool_] = (kind != kinds.SCHEDULED) & ~((kind == kinds.RECOVERED) & followed)
    return matters


_NEVER = np.iinfo(np.int64).max


def _times(transitions: Mapping[str, Ints], starts_ns: Ints, step_ends_ns: Ints) -> Ints:
    """When each transition changes the standing: at the beginning or at the end of a step."""
    times: Ints = transitions["time_ns"].copy()
    resumed = np.flatnonzero(np.isin(transitions["kind"], (kinds.RECOVERED, kinds.RESUMED)))
    rows = np.searchsorted(starts_ns, times[resumed], side="right") - 1
    # A step that the end of the run cut off has no row, so nothing resumed in it.
    done = (rows >= 0) & (starts_ns[rows] == times[resumed]) if len(starts_ns) else rows > 0
    times[resumed] = np.where(done, step_ends_ns[rows] if len(starts_ns) else 0, _NEVER)
    return times


def _standings(transitions: Mapping[str, Ints], times: Ints, first_token: Ints) -> Ints:
    """The standing that begins with each transition."""
    started = first_token[transitions["request"]]
    running = np.where((started >= 0) & (times >= started), DECODE, PREFILL)
    constant = {
        kinds.PREEMPTED: PREEMPTED,
        kinds.SWAPPED_OUT: SWAPPED,
        kinds.READMITTED: RECOMPUTE,
        kinds.CAUGHT_UP: PREFILL,
        kinds.RECOVERED: DECODE,
        kinds.RESUMED: DECODE,
        kinds.HELD: HELD,
        kinds.LOOKED_UP: WAITING,
        kinds.LOADING: LOADING,
        kinds.LOADED: WAITING,
        kinds.RELOADING: RELOADING,
        kinds.RELOADED: PREEMPTED,
        kinds.PASSED_OVER: LATE,
        kinds.CONTINUED: _AS_BEFORE,
    }
    standings: Ints = running
    for kind, standing in constant.items():
        standings = np.where(transitions["kind"] == kind, standing, standings)
    return standings


def _spells(changes: _Changes, ends: Ints) -> Spells:
    """A spell lasts from one change of a request to its next, or to the request's end."""
    sorting = np.lexsort((changes.order, changes.time_ns, changes.request))
    request, when, what, _ = (column[sorting] for column in changes)
    # A request begins with its arrival, so it takes no standing over from the one before it.
    known = np.where((what == LATE) | (what == _AS_BEFORE), 0, np.arange(len(what)))
    what = np.where(what == _AS_BEFORE, what[np.maximum.accumulate(known)], what)
    same = np.append(request[1:] == request[:-1], False)
    following = np.where(same, np.append(when[1:], _NEVER), _NEVER)
    begin, end = np.minimum(when, ends[request]), np.minimum(following, ends[request])
    some = end > begin
    return Spells(request[some], what[some], begin[some], end[some])

"""Where the prompt tokens of a run went, and what the best eviction could have made of them.

Three numbers bound the hits of a run from above, each below the next:

* *pinned optimum*: whoever sees the future chooses what is evicted, in the schedule of the run.
  What a running request holds stays, and idle content has the room that the run left it, step by
  step.
* *optimum*: the whole pool holds content, in the order in which the run looked prompts up.
* *ceiling*: nothing is ever evicted.

The differences split `evicted_tokens` of the ledger (`kvsim.results.ledger`): lost to the
policy, to pinning and to capacity. With more hits a run would have had another schedule, so the
pinned optimum bounds this schedule only. The optimum does not depend on times.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvsim.core import records as kinds
from kvsim.explain.cachelab.curve import kept_tokens, optimum_tokens
from kvsim.workload.reuse import Chain, Counting, Reuse, Walk
from kvsim.workload.streams import SpannedStream

_ENDS = (kinds.PREEMPTED, kinds.SWAPPED_OUT)
_BEGINS = (kinds.SCHEDULED, kinds.SWAPPED_IN, kinds.READMITTED)
_NEVER_NS = 1 << 62


class Audit(NamedTuple):
    """Prompt tokens of a run's first admissions. All but `prompt_tokens` add up to it."""

    prompt_tokens: int
    hit: int
    """Found in the cache."""
    policy: int
    """Evicted, though another choice could have kept them in this schedule."""
    pinning: int
    """Evicted, because running requests held the room that the optimum would have used."""
    capacity: int
    """Evicted, and even the optimum would have had no room for them."""
    timing: int
    """An earlier request was computing them at that moment."""
    granularity: int
    """Known, but not as a whole block that may hit, the last token included."""
    other_salt: int
    """Known under another cache salt only."""
    cold: int
    """Never computed before."""
    unreached: int
    """Not computed by the end of the run."""

    @property
    def pinned_optimum(self) -> int:
        """Most tokens that could have hit in the schedule of the run."""
        return self.hit + self.policy

    @property
    def optimum(self) -> int:
        """Most tokens that could have hit with this pool and this order of look-ups."""
        return self.pinned_optimum + self.pinning

    @property
    def ceiling(self) -> int:
        """Tokens that would have hit in a pool without limit."""
        return self.optimum + self.capacity


class Recorded(NamedTuple):
    """A run with prefix caching: what `kvsim.report.files` reads, and what its prompts say."""

    summary: Mapping[str, Any]
    requests: Mapping[str, Any]
    steps: Mapping[str, Any]
    transitions: Mapping[str, Any]
    streams: Sequence[SpannedStream]
    """Of its requests (`kvsim.workload.keys.streams`)."""


class Visit(NamedTuple):
    """A time during which a request holds blocks."""

    begin_ns: int
    arrival_ns: int
    place: int
    """Of the request."""
    end_ns: int
    first: bool
    """Whether it is the first one, whose hits count."""


class Bounds(NamedTuple):
    """Prompt tokens, as they come out; see the head of this module."""

    pinned_optimum: int
    optimum: int


def audit(run: Recorded) -> Audit:
    """Split the prompt tokens of a run."""
    requests = run.requests
    admitted = np.asarray(requests["first_scheduled_ns"]) >= 0

    def total(name: str) -> int:
        return int(np.asarray(requests[name])[admitted].sum())

    hit, evicted = total("num_cached_tokens"), total("evicted_tokens")
    found = bounds(run)
    # Of requests admitted in one step the order is not known, so a bound can miss a hit among them.
    optimum = max(hit, min(found.optimum, hit + evicted))
    pinned_optimum = max(hit, min(found.pinned_optimum, optimum))
    return Audit(
        total("input_length"),
        hit,
        pinned_optimum - hit,
        optimum - pinned_optimum,
        hit + evicted - optimum,
        total("concurrent_tokens"),
        total("partial_block_tokens") + total("last_block_tokens"),
        total("other_salt_tokens"),
        total("cold_tokens"),
        total("unreached_tokens"),
    )


def bounds(run: Recorded) -> Bounds:
    """What the hits of a run cannot exceed."""
    meta, steps = run.summary["meta"], run.steps
    size, pool = meta["block_size"], meta["num_gpu_blocks"]
    visits = sorted(_visits(run))
    walk = Walk(size)
    found = [walk.step(chain) for chain in _chains(visits, run, size)]
    reuse = Reuse(Counting(size), found, walk.distinct)
    free = pool - np.asarray(steps["used_blocks"])
    room = list(zip(np.asarray(steps["start_ns"]).tolist(), free.tolist(), strict=True))
    early = meta["steps_in_flight"] > 1
    pinned = kept_tokens(found, _pinned_blocks(visits, reuse, room, early), size)
    return Bounds(pinned, *optimum_tokens(reuse, [pool]))


def _visits(run: Recorded) -> Iterator[Visit]:
    """When each request held blocks. All times but that of its end are starts of steps."""
    requests, transitions = run.requests, run.transitions
    changes: dict[int, list[tuple[int, int]]] = {}
    names = ("request", "kind", "time_ns")
    for place, kind, time_ns in zip(*(transitions[name].tolist() for name in names), strict=True):
        changes.setdefault(place, []).append((kind, time_ns))
    columns = (np.asarray(requests[n]) for n in ("first_scheduled_ns", "arrival_ns", "finish_ns"))
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for place, (begin_ns, arrival_ns, finish_ns) in enumerate(rows):
        holds, first = begin_ns >= 0, True
        for kind, time_ns in changes.get(place, ()):
            if kind in _BEGINS:
                holds, begin_ns = True, time_ns
            elif kind in _ENDS:
                yield Visit(begin_ns, arrival_ns, place, time_ns, first)
                holds = first = False
        if holds:
            end_ns = finish_ns if finish_ns >= 0 else _NEVER_NS
            yield Visit(begin_ns, arrival_ns, place, end_ns, first)


def _chains(visits: Sequence[Visit], run: Recorded, size: int) -> Iterator[Chain]:
    """What each visit leaves behind, and the tokens that a cache without limit would have found."""
    requests = run.requests
    lengths = np.asarray(requests["input_length"])
    computed = lengths + np.asarray(requests["output_tokens"]) // np.asarray(requests["n"]) - 1
    hits, evicted = (
        np.asarray(requests["num_cached_tokens"]),
        np.asarray(requests["evicted_tokens"]),
    )
    known = np.where(evicted > 0, hits + np.asarray(requests["last_block_tokens"]) + evicted, hits)
    for visit in visits:
        place = visit.place
        stream = run.streams[place]
        blocks = int(min(max(computed[place], hits[place]), stream.named_tokens)) // size
        yield Chain(stream.spans(size), blocks, int(known[place]) if visit.first else 0)


_RELEASE, _VISIT, _ROOM = range(3)
"""Order of events at one instant."""


def _pinned_blocks(
    visits: Sequence[Visit], reuse: Reuse, room: Sequence[tuple[int, int]], early: bool
) -> list[int]:
    """The leading blocks that each visit could have found, if idle content had been evicted by its
    next use.

    A block is idle from the moment when its last holder releases it. Until then it takes no room
    of others. `room`: when each step began, and how many blocks nobody held in it. `early`: whether
    steps are composed before the previous one ends. Then what is released when a step begins still
    counted as held.
    """
    idle = [0] * len(visits)
    """Idle blocks by the visit that uses them next."""
    kept = [0] * len(visits)
    furthest: list[int] = []
    total = now_ns = released = 0
    releases = [
        (until_ns, _RELEASE, user, count) for user, count, until_ns in _waits(visits, reuse, kept)
    ]
    begins = ((visit.begin_ns, _VISIT, number, 0) for number, visit in enumerate(visits))
    spaces = ((start_ns, _ROOM, free, 0) for start_ns, free in room)
    for time_ns, kind, value, count in heapq.merge(sorted(releases), begins, spaces):
        if time_ns > now_ns:
            now_ns, released = time_ns, 0
        if kind == _RELEASE:
            if not idle[value]:
                heapq.heappush(furthest, -value)
            idle[value] += count
            total += count
            released += count * early
        elif kind == _VISIT:
            total -= idle[value]
            idle[value] = 0
        while kind == _ROOM and total > value + released:
            user = -furthest[0]
            dropped = min(idle[user], total - value - released)
            idle[user] -= dropped
            kept[user] -= dropped
            total -= dropped
            if not idle[user]:
                heapq.heappop(furthest)
    return kept


def _waits(
    visits: Sequence[Visit], reuse: Reuse, kept: list[int]
) -> Iterator[tuple[int, int, int]]:
    """Idle content: who uses it next, the number of blocks, and since when it is idle.

    Fills `kept` with the blocks that each visit finds if nothing is evicted.
    """
    size = reuse.counting.block_size
    held: list[list[tuple[int, int]]] = []
    """Of each visit, until when somebody holds its blocks: (block after the last one, time). The
    beginning of a prompt is held longest."""
    for number, (visit, found) in enumerate(zip(visits, reuse.found, strict=True)):
        most = -(-found.most_tokens // size)
        mine: list[tuple[int, int]] = []
        for user, first, last, _ in found.runs:
            kept[number] = max(kept[number], min(last, most))
            begin = first
            for upto, until_ns in held[user]:
                end = min(upto, last)
                if end <= begin:
                    continue
                if begin < min(end, most) and until_ns <= visit.begin_ns:
                    yield number, min(end, most) - begin, until_ns
                if until_ns > visit.end_ns:
                    mine.append((end, until_ns))
                begin = end
        if not mine or mine[-1][0] < found.blocks:
            mine.append((found.blocks, visit.end_ns))
        held.append(mine)

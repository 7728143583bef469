"""The requests' tracks: which requests are in the batch, and which wait outside of it.

```
 in the batch    lane 1   ├ request 7: prefill │ decode ┤          ├ request 7: recompute │ decode ┤
                                                        ╲ preempted ▲
 outside         lane 1                                  ├ request 7 ┤
```
A request keeps its lane as long as it stays, so there are no more lanes than requests at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from heapq import heappop, heappush
from typing import Any, NamedTuple

from kvsim.report.tracks.events import FIRST_TRACK, Track, Window, arrow, process, span, thread
from kvsim.results.ledger import standings
from kvsim.results.ledger.standings import Spells

INSIDE, OUTSIDE = 2, 3
GROUPS = {
    INSIDE: "requests in the batch",
    OUTSIDE: "requests outside: waiting, loading, preempted, swapped",
}

_BACK = {
    standings.WAITING: "admitted",
    standings.HELD: "admitted",
    standings.LOADING: "admitted",
    standings.PREEMPTED: "admitted again",
    standings.RELOADING: "admitted again",
    standings.SWAPPED: "swapped in",
}
"""Standing outside of the batch → the name of the arrow that leads back into it."""
_LISTED = (
    *("input_length", "output_tokens", "num_cached_tokens", "num_preemptions"),
    *("recomputed_tokens", "recached_tokens", "swapped_out_blocks", "priority"),
)
"""Columns of a request that its slices list where they are not 0."""


class Stay(NamedTuple):
    """An unbroken time of a request in the batch, or outside of it."""

    request: int
    pid: int
    spells: list[tuple[int, int, int]]
    """(standing, begin, end) in nanoseconds, in order and without a gap."""

    @property
    def begin_ns(self) -> int:
        """When it begins."""
        return self.spells[0][1]

    @property
    def end_ns(self) -> int:
        """When it ends."""
        return self.spells[-1][2]


def stays_of(spells: Spells, window: Window, chosen: Collection[int] | None = None) -> list[Stay]:
    """The stays of the requests `chosen` (None: all) that the window shows, by begin."""
    stays: list[Stay] = []
    before = (-1, 0)
    for row in zip(*(column.tolist() for column in spells), strict=True):
        request, standing = row[0], row[1]
        shown = window.clip(row[2], row[3])
        if shown is None or (chosen is not None and request not in chosen):
            continue
        pid = OUTSIDE if standing in _BACK else INSIDE
        if (request, pid) != before:
            stays.append(Stay(request, pid, []))
            before = request, pid
        stays[-1].spells.append((standing, *shown))
    return sorted(stays, key=lambda stay: (stay.begin_ns, stay.request))


def request_events(stays: list[Stay], requests: Mapping[str, Any]) -> Iterator[str]:
    """The events of the requests' tracks.

    These are names of groups and lanes, a slice for each stay and each spell in it, and an arrow
    wherever a request leaves the batch before its end or comes back.
    """
    tracks = _tracks(stays)
    for pid, name in GROUPS.items():
        lanes = sorted({track for track in tracks if track.pid == pid})
        if lanes:
            yield from process(pid, name, pid)
        for number, track in enumerate(lanes, 1):
            yield from thread(track, f"lane {number}")
    last: dict[int, int] = {}
    arrows = 0
    for number, (stay, track) in enumerate(zip(stays, tracks, strict=True)):
        yield span(
            track,
            f"request {requests['id'][stay.request]}",
            stay.begin_ns,
            stay.end_ns,
            _args(requests, stay.request),
        )
        for standing, begin, end in stay.spells:
            yield span(track, standings.NAMES[standing], begin, end)
        former = last.get(stay.request)
        if former is not None:
            arrows += 1
            name = _passage(stays[former], stay)
            yield from arrow(
                arrows,
                name,
                (tracks[former], stays[former].end_ns - 1),
                (track, stay.begin_ns),
            )
        last[stay.request] = number


def _tracks(stays: list[Stay]) -> list[Track]:
    """The lane of each stay, in its group."""
    tracks: dict[int, Track] = {}
    for pid in GROUPS:
        own = [number for number, stay in enumerate(stays) if stay.pid == pid]
        lanes = pack((stays[number].begin_ns, stays[number].end_ns) for number in own)
        tracks.update(
            {
                number: Track(pid, FIRST_TRACK + lane)
                for number, lane in zip(own, lanes, strict=True)
            }
        )
    return [tracks[number] for number in range(len(stays))]


def _passage(before: Stay, after: Stay) -> str:
    """The name of the arrow between two stays: why the request moves."""
    if after.pid == OUTSIDE:
        return standings.NAMES[after.spells[0][0]]
    return _BACK[before.spells[-1][0]]


def _args(requests: Mapping[str, Any], index: int) -> dict[str, Any]:
    args: dict[str, Any] = {
        name: int(requests[name][index]) for name in _LISTED if requests[name][index]
    }
    for name in ("session", "reason"):
        if requests[name][index]:
            args[name] = str(requests[name][index])
    return args


def pack(intervals: Iterable[tuple[int, int]]) -> list[int]:
    """The lane of each interval (begin, end), numbered from 0; intervals come by rising begin.

    Each interval takes the lowest free lane. A lane is free again at the instant where its interval
    ends. The number of lanes is the largest number of intervals that overlap.
    """
    free: list[int] = []
    taken: list[tuple[int, int]] = []
    lanes: list[int] = []
    for begin, end in intervals:
        while taken and taken[0][0] <= begin:
            heappush(free, heappop(taken)[1])
        lane = heappop(free) if free else len(taken)
        heappush(taken, (end, lane))
        lanes.append(lane)
    return lanes

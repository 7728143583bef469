"""Writes a run as tracks of the Chrome trace event format, for Perfetto and chrome://tracing.

```
 engine          steps    ├ prefill and decode ┤├ decode ┤                     and counters
                 link     ├ swap out ┤
 in the batch    lane 1   ├ request 7: prefill │ decode ┤          ├ request 7: recompute │ decode ┤
                                                        ╲ preempted ▲
 outside         lane 1                                  ├ request 7 ┤
```
A request keeps its lane as long as it stays, so there are no more lanes than requests at once.

Source: "Trace Event Format" (Google). Times are microseconds; their three decimals are nanoseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from heapq import heappop, heappush
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import Raw, Struct
from msgspec.json import Encoder

from kvsim.core.rows import PIECE_ROWS
from kvsim.core.schema import BLOCKED, STEPS, Source
from kvsim.errors import OutputError
from kvsim.results.ledger import standings
from kvsim.results.ledger.standings import Spells
from kvsim.results.numerals import seconds
from kvsim.results.statistics import Ints
from kvsim.results.timeline import States, run_end_ns
from kvsim.writing import replacing_stream

FIRST_TRACK = 11
"""Track numbers begin above the numbers of the groups: Perfetto takes a track with the number of
its group for a main thread and shows it first."""


class Track(NamedTuple):
    """Where an event is shown."""

    pid: int
    """A group of tracks, which viewers call a process."""
    tid: int


class Window(NamedTuple):
    """The part of a run that is exported: simulated time from `begin_ns` to `end_ns`."""

    begin_ns: int
    end_ns: int

    def clip(self, begin_ns: int, end_ns: int) -> tuple[int, int] | None:
        """The part of a time that lies in the window; None if there is none.

        A time without duration belongs to the window that it begins in.
        """
        begin, end = max(begin_ns, self.begin_ns), min(end_ns, self.end_ns)
        instant = begin_ns == end_ns and begin == end
        return (begin, end) if begin < end or instant else None


class Event(Struct, kw_only=True, omit_defaults=True):
    """One event of the format, with its keys in the order in which they are written."""

    ph: str
    """`X`: a slice with a duration, `C`: a counter, `M`: a name, `s` and `f`: ends of an arrow."""
    bp: str | None = None
    """`e`: an arrow ends in the slice around its time, not in the next one."""
    id: int | None = None
    pid: int
    tid: int | None = None
    ts: Raw | None = None
    dur: Raw | None = None
    cat: str | None = None
    name: str
    args: Mapping[str, Any] | None = None


def _us(ns: int) -> Raw:
    """Nanoseconds as exact microseconds."""
    return Raw(f"{ns // 1000}.{ns % 1000:03d}")


def _named(kind: str, track: Track, name: str, place: int) -> Iterator[Event]:
    """The name of a `thread`, which is a track, or of a `process`, and its place from the top."""
    for what, args in (("name", {"name": name}), ("sort_index", {"sort_index": place})):
        yield Event(ph="M", pid=track.pid, tid=track.tid, name=f"{kind}_{what}", args=args)


def _group(pid: int, name: str) -> Iterator[Event]:
    return _named("process", Track(pid, 0), name, pid)


def _lane(track: Track, name: str) -> Iterator[Event]:
    return _named("thread", track, name, track.tid)


def span(
    track: Track, name: str, begin_ns: int, end_ns: int, args: Mapping[str, Any] | None = None
) -> Event:
    """A slice; one inside another is drawn below it."""
    ts, dur = _us(begin_ns), _us(end_ns - begin_ns)
    return Event(ph="X", pid=track.pid, tid=track.tid, ts=ts, dur=dur, name=name, args=args or None)


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
_OF_REQUEST = (
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


def request_events(stays: list[Stay], requests: Mapping[str, Any]) -> Iterator[Event]:
    """The events of the requests' tracks.

    These are names of groups and lanes, a slice for each stay and each spell in it, and an arrow
    wherever a request leaves the batch before its end or comes back.
    """
    tracks = _tracks(stays)
    for pid, name in GROUPS.items():
        lanes = sorted({track for track in tracks if track.pid == pid})
        if lanes:
            yield from _group(pid, name)
        for number, track in enumerate(lanes, 1):
            yield from _lane(track, f"lane {number}")
    last: dict[int, int] = {}
    arrows = 0
    for number, (stay, track) in enumerate(zip(stays, tracks, strict=True)):
        name, args = f"request {requests['id'][stay.request]}", _args(requests, stay.request)
        yield span(track, name, stay.begin_ns, stay.end_ns, args)
        for standing, begin, end in stay.spells:
            yield span(track, standings.NAMES[standing], begin, end)
        former = last.get(stay.request)
        if former is not None:
            arrows += 1
            name = _passage(stays[former], stay)
            arrow: dict[str, Any] = {"id": arrows, "cat": "preemption", "name": name}
            # A nanosecond before its end: at the end, no slice is around the arrow.
            left, left_us = tracks[former], _us(stays[former].end_ns - 1)
            yield Event(ph="s", pid=left.pid, tid=left.tid, ts=left_us, **arrow)
            back_us = _us(stay.begin_ns)
            yield Event(ph="f", bp="e", pid=track.pid, tid=track.tid, ts=back_us, **arrow)
        last[stay.request] = number


def _tracks(stays: list[Stay]) -> list[Track]:
    """The lane of each stay, in its group."""
    tracks: dict[int, Track] = {}
    for pid in GROUPS:
        own = [number for number, stay in enumerate(stays) if stay.pid == pid]
        lanes = pack((stays[number].begin_ns, stays[number].end_ns) for number in own)
        for number, lane in zip(own, lanes, strict=True):
            tracks[number] = Track(pid, FIRST_TRACK + lane)
    return [tracks[number] for number in range(len(stays))]


def _passage(before: Stay, after: Stay) -> str:
    """The name of the arrow between two stays: why the request moves."""
    if after.pid == OUTSIDE:
        return standings.NAMES[after.spells[0][0]]
    return _BACK[before.spells[-1][0]]


def _args(requests: Mapping[str, Any], index: int) -> dict[str, Any]:
    args: dict[str, Any] = {
        name: int(requests[name][index]) for name in _OF_REQUEST if requests[name][index]
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


ENGINE = 1
STEP_TRACK, LINK = Track(ENGINE, FIRST_TRACK), Track(ENGINE, FIRST_TRACK + 1)

COUNTERS = {
    "GPU blocks": {"used": "used_blocks", "cached": "cached_blocks", "free": "free_blocks"},
    "CPU blocks": {"used": "cpu_used_blocks"},
    "requests": {"running": "running", "waiting": "waiting", "swapped": "swapped"},
    "batched tokens": {"tokens": "batched_tokens"},
    "radix cache": {"protected": "protected_blocks", "evictable": "cached_blocks"},
    "new-token ratio (ppm)": {"ratio": "new_token_ratio_ppm"},
}
"""Name of a counter → series → column of `report.timeline.States`. Only SGLang has the last two."""

_OF_STEP = STEPS.names(Source.STEP, Source.KERNEL)[2:]
"""Columns of a step that its slice lists where they are not 0: all but its start and end."""


def step_events(steps: Mapping[str, Ints], window: Window) -> Iterator[Event]:
    """A slice for each step, and slices for its copies on the link.

    Copies come first in a step, out before in. A step with both divides the copying time by blocks.
    """
    names = "start_ns", "end_ns", "blocked", *_OF_STEP
    for first in range(0, len(steps["start_ns"]), PIECE_ROWS):
        rows = slice(first, first + PIECE_ROWS)
        columns = {name: steps[name][rows].tolist() for name in names}
        for number in range(len(columns["start_ns"])):
            row = {name: column[number] for name, column in columns.items()}
            yield from _step(first + number, row, window)


def counter_events(
    steps: Mapping[str, Ints], meta: Mapping[str, Any], window: Window
) -> Iterator[Event]:
    """The counters: values at the start of the window, and again at every change."""
    states = States(steps, window.end_ns, meta)
    starts = states["start_ns"]
    first = max(int(np.searchsorted(starts, window.begin_ns, side="right")) - 1, 0)
    last = int(np.searchsorted(starts, window.end_ns, side="left"))
    times = np.maximum(starts[first:last], window.begin_ns)
    for name, series in COUNTERS.items():
        if not states.keys() >= set(series.values()):
            continue
        values = np.stack([states[column][first:last] for column in series.values()], axis=1)
        if not values.any():
            continue
        # Of several states at one instant, only the last one lasts.
        lasting = np.flatnonzero(np.append(np.diff(times) > 0, True)[: len(times)])
        changed = (np.diff(values[lasting], axis=0, prepend=-1) != 0).any(axis=1)
        for row in lasting[changed]:
            held = dict(zip(series, values[row].tolist(), strict=True))
            yield Event(ph="C", pid=ENGINE, ts=_us(int(times[row])), name=name, args=held)


def _step(number: int, row: Mapping[str, int], window: Window) -> Iterator[Event]:
    start, end = row["start_ns"], row["end_ns"]
    shown = window.clip(start, end)
    if shown is None:
        return
    args: dict[str, Any] = {"step": number, **{name: row[name] for name in _OF_STEP if row[name]}}
    if row["blocked"]:
        args["head_refused_for"] = BLOCKED[row["blocked"]]
    yield span(STEP_TRACK, _kind(row), *shown, args)
    time_ns = start
    for name, length, blocks in _copies(row):
        if length and (shown := window.clip(time_ns, time_ns + length)):
            yield span(LINK, name, *shown, {"step": number, "blocks": blocks})
        time_ns += length


def _kind(row: Mapping[str, int]) -> str:
    if row["prefill_seqs"]:
        return "prefill and decode" if row["decode_seqs"] else "prefill"
    return "decode" if row["decode_seqs"] else "nothing computed"


def _copies(row: Mapping[str, int]) -> tuple[tuple[str, int, int], ...]:
    """Name, nanoseconds and blocks of each copy of a step over the link, in order."""
    out, back = row["swap_out_blocks"], row["swap_in_blocks"]
    outward = row["transfer_ns"] * out // max(out + back, 1)
    return (
        ("wait for the link", row["link_wait_ns"], out + back),
        ("flush", row["flush_ns"], 0),
        ("swap out", outward, out),
        ("swap in", row["transfer_ns"] - outward, back),
    )


encode = Encoder().encode
"""The JSON object of an event."""

_NS_PER_S = 1_000_000_000
_AT_ONCE = 4096
"""Events that are written together."""


def run_window(
    steps: Mapping[str, Ints],
    requests: Mapping[str, Any],
    begin_s: float | None,
    end_s: float | None,
) -> Window:
    """The window from `begin_s` to `end_s`; None stands for the start or the end of the run.

    Raises `OutputError` if no part of the run is in it.
    """
    whole = run_end_ns(steps, requests)
    begin = 0 if begin_s is None else _ns(begin_s)
    end = whole if end_s is None else min(_ns(end_s), whole)
    if (begin_s, end_s) != (None, None) and not 0 <= begin < end:
        last = "the end" if end_s is None else f"{end_s:g} s"
        raise OutputError(
            f"--from/--to: nothing lies between {begin_s or 0:g} s and {last};"
            f" the run goes from 0 s to {seconds(whole / _NS_PER_S)}"
        )
    return Window(begin, end)


def _ns(time_s: float) -> int:
    """Seconds as nanoseconds; -1 for NaN and infinities."""
    return round(time_s * _NS_PER_S) if math.isfinite(time_s) else -1


def events(
    summary: Mapping[str, Any],
    requests: Mapping[str, Any],
    steps: Mapping[str, Ints],
    transitions: Mapping[str, Ints],
    window: Window,
    chosen: Collection[int] | None = None,
) -> Iterator[Event]:
    """Every event of a run in the window; `chosen`: indexes of requests."""
    spells = standings.lay_out(
        requests, transitions, steps["start_ns"], steps["end_ns"], run_end_ns(steps, requests)
    )
    return chain(
        _group(ENGINE, "engine"),
        _lane(STEP_TRACK, "steps"),
        _lane(LINK, "host link (swaps)"),
        step_events(steps, window),
        counter_events(steps, summary["meta"], window),
        request_events(stays_of(spells, window, chosen), requests),
    )


def write_tracks(path: str | Path, meta: Mapping[str, Any], listed: Iterator[Event]) -> Path:
    """Write events as a Chrome trace, gzipped if the name ends in `.gz`, whole or not at all.

    Equal events give equal bytes. Raises `OutputError` naming the file.
    """
    trace = (meta.get("trace") or {}).get("sha256", "")
    known = {"kvsim": meta.get("kvsim_version", ""), "engine": meta.get("engine", "")}
    head = json.dumps({**known, "trace_sha256": trace}, ensure_ascii=False)
    with replacing_stream(path) as file:
        file.write(f'{{"displayTimeUnit":"ms","otherData":{head},"traceEvents":['.encode())
        separator = b"\n"
        while group := list(islice(listed, _AT_ONCE)):
            file.write(separator + b",\n".join(map(encode, group)))
            separator = b",\n"
        file.write(b"\n]}\n")
    return Path(path)

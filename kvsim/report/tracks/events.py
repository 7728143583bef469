"""Formats events of the Chrome trace event format, one JSON object each.

"Trace Event Format" (Google): `ph` X is a slice with a duration, C a counter, M a name, s and f the
ends of an arrow. Times are microseconds; here with three decimals, which are the nanoseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from json import dumps
from typing import Any, NamedTuple

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


def process(pid: int, name: str, place: int) -> list[str]:
    """The name of a group of tracks, and its place from the top."""
    return [
        _named("process_name", Track(pid, 0), {"name": name}),
        _named("process_sort_index", Track(pid, 0), {"sort_index": place}),
    ]


def thread(track: Track, name: str) -> list[str]:
    """The name of a track; tracks of a group are sorted by their numbers."""
    return [
        _named("thread_name", track, {"name": name}),
        _named("thread_sort_index", track, {"sort_index": track.tid}),
    ]


def span(
    track: Track, name: str, begin_ns: int, end_ns: int, args: Mapping[str, Any] | None = None
) -> str:
    """A slice; one inside another is drawn below it."""
    shown = f',"args":{_json(args)}' if args else ""
    return (
        f'{{"ph":"X","pid":{track.pid},"tid":{track.tid},"ts":{_us(begin_ns)},'
        f'"dur":{_us(end_ns - begin_ns)},"name":{_json(name)}{shown}}}'
    )


def counter(pid: int, name: str, time_ns: int, values: Mapping[str, int]) -> str:
    """A counter's values, which hold from this time on."""
    return (
        f'{{"ph":"C","pid":{pid},"ts":{_us(time_ns)},"name":{_json(name)},"args":{_json(values)}}}'
    )


def arrow(
    number: int, name: str, begin: tuple[Track, int], end: tuple[Track, int]
) -> tuple[str, str]:
    """An arrow between two (track, time in ns), which lie within slices."""
    ends = []
    for phase, (track, time_ns) in (('"s"', begin), ('"f","bp":"e"', end)):
        ends.append(
            f'{{"ph":{phase},"id":{number},"pid":{track.pid},"tid":{track.tid},'
            f'"ts":{_us(time_ns)},"cat":"preemption","name":{_json(name)}}}'
        )
    return ends[0], ends[1]


def _named(kind: str, track: Track, args: Mapping[str, Any]) -> str:
    return f'{{"ph":"M","pid":{track.pid},"tid":{track.tid},"name":"{kind}","args":{_json(args)}}}'


def _us(ns: int) -> str:
    """Nanoseconds as exact microseconds."""
    return f"{ns // 1000}.{ns % 1000:03d}"


def _json(value: Any) -> str:
    return dumps(value, ensure_ascii=False, separators=(",", ":"))

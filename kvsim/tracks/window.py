"""The part of a run that is written."""

from __future__ import annotations

from typing import NamedTuple


class Window(NamedTuple):
    """Simulated time from `begin_ns` to `end_ns`."""

    begin_ns: int
    end_ns: int

    def clip(self, begin_ns: int, end_ns: int) -> tuple[int, int] | None:
        """What of a time lies in the window; None: nothing.

        A time without duration belongs to the window that it begins in.
        """
        begin, end = max(begin_ns, self.begin_ns), min(end_ns, self.end_ns)
        instant = begin_ns == end_ns and begin == end
        return (begin, end) if begin < end or instant else None

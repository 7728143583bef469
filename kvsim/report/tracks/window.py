"""The part of a run that is exported."""

from __future__ import annotations

from typing import NamedTuple


class Window(NamedTuple):
    """Simulated time from `begin_ns` to `end_ns`."""

    begin_ns: int
    end_ns: int

    def clip(self, begin_ns: int, end_ns: int) -> tuple[int, int] | None:
        """The part of a time that lies in the window; None if there is none.

        A time without duration belongs to the window that it begins in.
        """
        begin, end = max(begin_ns, self.begin_ns), min(end_ns, self.end_ns)
        instant = begin_ns == end_ns and begin == end
        return (begin, end) if begin < end or instant else None

"""Makes a load of another length of a trace: its beginning, or several copies in a row."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from kvsim.workload.trace import ParentContent, Row, Trace


def beginning(trace: Trace, number: int | None) -> Trace:
    """The first so many requests of a trace; None: all."""
    if number is None or number >= len(trace.rows):
        return trace
    digest = hashlib.sha256(f"{trace.sha256} first {number}".encode()).hexdigest()
    return replace(trace, rows=trace.rows[:number], sha256=digest)


def repeated(trace: Trace, times: int) -> Trace:
    """The trace and `times - 1` copies of it, each sent as soon as the one before has been.

    Copies share nothing with each other: each has a cache salt of its own, so a cache finds in a
    copy what it would find in the trace, no more. Ids and sessions get the number of the copy.
    """
    rows = trace.rows
    arrivals = [row.arrival_ns for row in rows if row.arrival_ns is not None]
    # From the last request of a copy to the first of the next: the mean gap.
    span_ns = arrivals[-1] - arrivals[0] if arrivals else 0
    length_ns = span_ns + span_ns // max(len(rows) - 1, 1)
    copies = [
        _copied(row, number, number * len(rows), number * length_ns)
        for number in range(times)
        for row in rows
    ]
    digest = hashlib.sha256(f"{trace.sha256} {times} times".encode()).hexdigest()
    notes = [*trace.notes, f"sent {times} times over, each time with a cache salt of its own"]
    return replace(trace, rows=copies, sha256=digest, notes=notes)


def _copied(row: Row, number: int, places: int, later_ns: int) -> Row:
    """A row of copy `number`, moved by `places` rows and `later_ns`; copy 0 is the trace itself."""
    if number == 0:
        return row
    content = row.content
    if isinstance(content, ParentContent):
        content = replace(content, parent=content.parent + places)
    return replace(
        row,
        index=row.index + places,
        id=f"{row.id}#{number}",
        arrival_ns=None if row.arrival_ns is None else row.arrival_ns + later_ns,
        content=content,
        after=row.after if row.after < 0 else row.after + places,
        session=None if row.session is None else f"{row.session}#{number}",
        salt=f"{row.salt or ''}#{number}",
    )

"""Gathers the requests of a foreign file: drops what failed, sorts, counts time from the first.

Whatever is dropped or changed is counted and becomes a note of the trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvsim.workload.columns import column
from kvsim.workload.source import MAX_NS, MAX_TOKENS, Source, identifier, nanoseconds, shown
from kvsim.workload.trace import Row, Trace


class RowRules:
    """Checks each row against earlier rows: unique ids, ordered times, keys on all rows or none.

    `rows` and `index_of` (index of each id) grow with `append`. Every method raises `TraceError` at
    the line that the source read last.
    """

    def __init__(self, source: Source) -> None:
        self.rows: list[Row] = []
        self.index_of: dict[str, int] = {}
        self._source = source
        self.present: dict[str, bool] = {}
        """Keys that are on all rows or on none → whether they are there."""

    def id(self, table: dict[str, Any], key: str) -> str:
        """The row's id; if no row has one, its number from 0."""
        if not self._on_all_or_none(table, key):
            return str(len(self.rows))
        name = identifier(self._source, table, key)
        if name in self.index_of:
            line = self.rows[self.index_of[name]].line
            raise self._source.error(f"{shown(name)} is also on line {line}; make it unique", key)
        return name

    def arrival(self, table: dict[str, Any], key: str, unit_ns: int) -> int | None:
        """The row's time in nanoseconds; None if no row has one."""
        if not self._on_all_or_none(table, key):
            return None
        return nanoseconds(self._source, table, key, unit_ns)

    def ordered_arrival(self, table: dict[str, Any], key: str, unit_ns: int) -> int | None:
        """`arrival`, which must not be before that of the previous row."""
        arrival_ns = self.arrival(table, key, unit_ns)
        if self.rows and arrival_ns is not None and arrival_ns < (self.rows[-1].arrival_ns or 0):
            what = f"{shown(table[key])} is before the previous row's time; sort the file by {key}"
            raise self._source.error(what, key)
        return arrival_ns

    def check_total(self, input_length: int, output_length: int, key: str) -> None:
        """Refuse a request of too many tokens (`check_total`)."""
        check_total(self._source, input_length, output_length, key)

    def append(self, row: Row) -> None:
        """Append a checked row."""
        self.index_of[row.id] = row.index
        self.rows.append(row)

    def _on_all_or_none(self, table: dict[str, Any], key: str) -> bool:
        present = key in table
        if self.present.setdefault(key, present) != present:
            word = "earlier rows lack it" if present else "missing, but earlier rows have it"
            raise self._source.error(f"{word}; give it on all rows or on none", key)
        return present


def check_total(source: Source, input_length: int, output_length: int, key: str) -> None:
    """Refuse a request of more than `MAX_TOKENS` tokens, or with too long an output.

    Raises the `TraceError` of its line.
    """
    total = input_length + output_length
    if total > MAX_TOKENS:
        what = f"with the output it makes {total} tokens, above {MAX_TOKENS}; shorten it"
        raise source.error(what, key)
    if output_length > source.most_output_tokens:
        what = f"an output of {output_length:,} tokens is"
        raise source.excess(what, source.most_output_tokens)


class Gathered:
    """Requests in the order of a file, until `trace` makes rows of them.

    Every method raises `TraceError` at the line that the source read last.
    """

    def __init__(self, source: Source, format: str) -> None:
        self.rows: list[Row] = []
        """What is kept so far. Their times are the file's, and `after` is an index in this list."""
        self.source = source
        """The file that is read now; the files of a folder follow each other."""
        self._format = format
        self._dropped: Counter[str] = Counter()
        self._changed: Counter[str] = Counter()
        self._named = True

    def add(
        self,
        input_length: int,
        output_length: int,
        *,
        time_ns: int | None = None,
        id: object = None,
        session: object = None,
        model: object = None,
        **further: Any,
    ) -> Row:
        """Keep a request; `time_ns` may count from any moment, but is given for all or for none.

        An `id`, `session` or `model` that is no text counts as missing. `further`: other attributes
        of the `Row`.
        """
        if self.rows and (time_ns is None) != (self.rows[0].arrival_ns is None):
            what = "a time is missing here or on earlier rows; give it on all rows or on none"
            raise self.source.error(what)
        check_total(self.source, input_length, output_length, "")
        self._named &= isinstance(id, str)
        row = Row(
            index=len(self.rows),
            id=id if isinstance(id, str) else str(len(self.rows)),
            line=self.source.line,
            arrival_ns=time_ns,
            input_length=input_length,
            output_length=output_length,
            session=session if isinstance(session, str) else None,
            model=model if isinstance(model, str) else None,
            **further,
        )
        self.rows.append(row)
        return row

    def drop(self, why: str) -> None:
        """Leave a request out; `why` completes "3 of 40 requests left out: ..."."""
        self._dropped[why] += 1

    def change(self, what: str) -> None:
        """Note a change to a request; `what` is followed by the number of requests."""
        self._changed[what] += 1

    def trace(self, *notes: str) -> Trace:
        """The trace of all that was added; its notes begin with `notes`."""
        source = self.source
        total = len(self.rows) + sum(self._dropped.values())
        losses = [f"{n:,} of {total:,} requests left out: {w}" for w, n in self._dropped.items()]
        if not self.rows:
            what = "; ".join(["no requests in the file", *losses, "give one that has some"])
            raise source.error(what, line=0)
        if self.rows[0].arrival_ns is not None:
            start_ns = min(row.arrival_ns or 0 for row in self.rows)
            # The rows belong to nobody else yet, so they may still be changed.
            for row in self.rows:
                row.arrival_ns = (row.arrival_ns or 0) - start_ns
        if max(max(row.arrival_ns or 0, row.delay_ns) for row in self.rows) >= MAX_NS:
            what = "times are more than 146 years apart; are their units and dates right? fix them"
            raise source.error(what, line=0)
        rows, sorting = sort_rows(self.rows)
        self._changed.update(sorting)
        self._name(rows)
        changes = [f"{what} ({n:,} of {total:,} requests)" for what, n in self._changed.items()]
        facts = {"format": self._format, "file": Path(source.path).name, "sha256": source.sha256}
        return Trace(
            path=source.path,
            format=self._format,
            sha256=source.sha256,
            rows=rows,
            source=facts,
            notes=[*notes, *losses, *changes],
        )

    def _name(self, rows: Sequence[Row]) -> None:
        """Number the rows from 0 if the file does not give each a name of its own."""
        if self._named and len({row.id for row in rows}) == len(rows):
            return
        if self._named:
            self._changed["ids are not unique, so requests are numbered"] = len(rows)
        for number, row in enumerate(rows):
            row.id = str(number)


def sort_rows(rows: Sequence[Row]) -> tuple[Sequence[Row], dict[str, int]]:
    """Rows by time, those of one time as they are; and what was changed, how often.

    Changes the rows: `index`, and `after` where it names a later row, which nothing can wait for.
    """
    times = [time for time in column(rows, "arrival_ns") if time is not None]
    if times == sorted(times):
        return rows, {}
    late = sum(time < before for before, time in pairwise(times))
    rows = sorted(rows, key=lambda row: row.arrival_ns or 0)
    place = {row.index: number for number, row in enumerate(rows)}
    early = 0
    for number, row in enumerate(rows):
        row.index = number
        row.after = place.get(row.after, -1)
        if row.after >= number:
            row.after, row.delay_ns = -1, 0
            early += 1
    changes = {"rows before the row above them in time: sorted": late}
    if early:
        changes["recorded before the request that it follows: sent at its own time"] = early
    return rows, changes

"""Rules between the rows of a trace, for every format."""

from __future__ import annotations

from typing import Any

from kvsim.workload.source import MAX_TOKENS, Source, identifier, nanoseconds, shown
from kvsim.workload.trace import Row


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

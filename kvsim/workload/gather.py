"""What readers share: values of a row are checked, and the requests of a foreign file gathered.

Gathering drops what failed, sorts, and counts time from the first. Whatever is dropped or changed
is counted and becomes a note of the trace.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvsim.workload.source import MAX_NS, MAX_TOKENS, NS_PER_S, Source, shown
from kvsim.workload.trace import Row, Trace, column

_TIME = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?", re.ASCII
)
_MISSING = object()


def integer(source: Source, table: dict[str, Any], key: str, low: int) -> int:
    """`table[key]`, an integer in `low .. MAX_TOKENS` (not `true`, not `512.0`)."""
    value = table.get(key, _MISSING)
    if type(value) is int and low <= value <= MAX_TOKENS:
        return value
    if value is _MISSING:
        raise source.error(f"missing; give an integer >= {low}", key)
    if type(value) is int and value > MAX_TOKENS:
        raise source.error(f"{shown(value)} is above {MAX_TOKENS}; give less", key)
    raise source.error(f"{shown(value)} is not an integer >= {low}; give one", key)


def integers(source: Source, table: dict[str, Any], key: str, high: int) -> list[int]:
    """`table[key]`, a list of integers in `0 .. high`."""
    values = table[key]
    if not isinstance(values, list):
        raise source.error(f"{shown(values)} is not a list of integers; give one", key)
    if values and not (
        set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= high
    ):
        bad = next(v for v in values if type(v) is not int or not 0 <= v <= high)
        raise source.error(f"{shown(bad)} is not an integer in 0 .. {high}; give one", key)
    return values


def nanoseconds(source: Source, table: dict[str, Any], key: str, unit_ns: int) -> int:
    """`table[key]`, a number >= 0 of units of `unit_ns`, rounded to whole nanoseconds."""
    value = table[key]
    if type(value) is not int and type(value) is not float:
        raise source.error(f"{shown(value)} is not a number >= 0; give one", key)
    if value < 0:
        raise source.error(f"{shown(value)} is negative; count from the start of the trace", key)
    if value * unit_ns >= MAX_NS:
        raise source.error(f"{shown(value)} is too large; subtract the first time", key)
    return round(value * unit_ns)


def string(source: Source, table: dict[str, Any], key: str) -> str | None:
    """`table[key]`, a string without lone surrogates; None if the key is absent."""
    value = table.get(key, _MISSING)
    if value is _MISSING:
        return None
    if type(value) is not str:
        raise source.error(f"{shown(value)} is not a string; put it in quotes", key)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise source.error(f"{shown(value)} holds half a surrogate pair; fix it", key) from None
    return value


def identifier(source: Source, table: dict[str, Any], key: str) -> str:
    """`table[key]`, a string or an integer, as text."""
    value = table[key]
    if type(value) is int:
        return str(value)
    if type(value) is not str:
        raise source.error(f"{shown(value)} is not a string or an integer; give one", key)
    return string(source, table, key) or ""


def mapping(source: Source, table: dict[str, Any], key: str) -> dict[str, Any] | None:
    """`table[key]`, an object; None if the key is absent."""
    value = table.get(key, _MISSING)
    if value is _MISSING:
        return None
    if not isinstance(value, dict):
        raise source.error(f"{shown(value)} is not an object; give one", key)
    return value


def tokens(source: Source, field: str, value: object, low: int = 1) -> int:
    """A number of tokens >= `low`: an integer, also as text or as `512.0`."""
    number = value
    if type(value) is float and value.is_integer():
        number = int(value)
    elif isinstance(value, str):
        text = value.strip().removesuffix(".0")
        digits = text.removeprefix("-")
        if digits.isascii() and digits.isdecimal() and len(digits) <= 18:
            number = int(text)
    if type(number) is not int or number < low:
        remedy = "leave failed requests out" if value == "" else "fix it"
        raise source.error(f"{shown(value)} is not an integer >= {low}; {remedy}", field)
    if number > MAX_TOKENS:
        raise source.error(f"{shown(value)} is above {MAX_TOKENS}; give less", field)
    return number


def instant(source: Source, field: str, value: object, unit_ns: int) -> int:
    """A time in nanoseconds, of a number of units of `unit_ns`, also as text; exact."""
    try:
        # A float counts as it is written, in the shortest form, not as it is stored.
        number = Decimal(value) if isinstance(value, (int, str)) else Decimal(repr(value))
    except (InvalidOperation, ValueError):
        number = Decimal("NaN")
    if isinstance(value, bool) or not number.is_finite():
        raise source.error(f"{shown(value)} is not a number; give one", field)
    if number.copy_abs() > (MAX_NS - 1) // unit_ns:
        what = f"{shown(value)} is too large for a time; is the unit right? fix it"
        raise source.error(what, field)
    return round(number * unit_ns)


def date(source: Source, field: str, text: str) -> int:
    """Nanoseconds since 1970 of a date, exact to nine decimals; without a zone: UTC."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        what = f"{shown(text)} is not a time YYYY-MM-DD HH:MM:SS.fffffff"
        raise source.error(f"{what}; fix it", field)
    second, fraction, zone = match.groups()
    try:
        return _second(second, zone or "") * NS_PER_S + int((fraction or "0").ljust(9, "0"))
    except (ValueError, OverflowError):
        raise source.error(f"{shown(text)} is not a date; fix it", field) from None


def is_date(text: str) -> bool:
    """Whether `date` understands the form of this text."""
    return _TIME.fullmatch(text.strip()) is not None


@lru_cache(maxsize=1024)
def _second(text: str, zone: str) -> int:
    time = datetime.fromisoformat(text + zone)
    return int((time if zone else time.replace(tzinfo=UTC)).timestamp())


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

    def arrival(
        self, table: dict[str, Any], key: str, unit_ns: int, *, ordered: bool = False
    ) -> int | None:
        """The row's time in nanoseconds; None if no row has one. One that is `ordered` must not be
        before that of the previous row."""
        if not self._on_all_or_none(table, key):
            return None
        arrival_ns = nanoseconds(self._source, table, key, unit_ns)
        if ordered and self.rows and arrival_ns < (self.rows[-1].arrival_ns or 0):
            what = f"{shown(table[key])} is before the previous row's time; sort the file by {key}"
            raise self._source.error(what, key)
        return arrival_ns

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


def foreign_trace(source: Source, format: str, rows: Sequence[Row], notes: list[str]) -> Trace:
    """The trace of these rows of a foreign file, which has been read to its end."""
    digest = source.sha256
    facts = {"format": format, "file": Path(source.path).name, "sha256": digest}
    return Trace(source.path, format, digest, rows, source=facts, notes=notes)


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
        return foreign_trace(source, self._format, rows, [*notes, *losses, *changes])

    def _name(self, rows: Sequence[Row]) -> None:
        """Number the rows from 0 if the file does not give each a name of its own."""
        if self._named and len({row.id for row in rows}) == len(rows):
            return
        if self._named:
            self._changed["ids are not unique, so requests are numbered"] = len(rows)
        for number, row in enumerate(rows):
            row.id = str(number)


def next_turn(before: Row | None) -> int:
    """The number of the turn after that of a row; None: of the first one."""
    return 0 if before is None else (before.turn or 0) + 1


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

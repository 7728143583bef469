"""Reads requests from the rows of a table, CSV or Parquet, by a map of its columns.

`arrival_ms=ts,input=prompt_tokens,output=completion_tokens` says that the column `ts` holds
arrivals in milliseconds. Times without a unit must be dates; nothing is guessed. Measured times
(`ttft_ms=first_token_ms`) go to `Row.observed`, and what policies want to know
(`x_tenant=team`) to `Row.extra`.
"""

from __future__ import annotations

import csv
import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvsim.errors import ConfigError, TraceError, nearest
from kvsim.workload.gather import Gathered
from kvsim.workload.native import OWN
from kvsim.workload.source import NS_PER_S, Source, date, instant, look, separator_of, shown, tokens
from kvsim.workload.trace import Trace

UNITS_NS = {"s": NS_PER_S, "ms": 1_000_000, "us": 1000, "ns": 1}
"""Unit at the end of a role or of a column's name → nanoseconds."""
ROLES = ("arrival", *(f"arrival_{unit}" for unit in UNITS_NS), "input", "output")
OPTIONAL_ROLES = ("id", "session", "model")
MEASURED = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s", "queue": "queue_s"}
"""Role of a measured time, which needs a unit → its key in `Row.observed`, in seconds."""
FAILED = "no prompt or no output tokens, as of requests that failed"
_COMMA = re.compile(r"(-?[0-9]+),([0-9]+)")
"""A number with a decimal comma, which only files whose columns a comma does not separate have."""
_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,17})(\.[0-9]+)?([eE][+-]?[0-9]{1,2})?")
_DATE_NS = 0


@dataclass(frozen=True, slots=True)
class Columns:
    """Which column of a table is what."""

    input: str
    output: str
    arrival: str | None = None
    """None: the table has no arrivals."""
    unit_ns: int = _DATE_NS
    """Nanoseconds in a unit of `arrival`; 0: dates."""
    id: str | None = None
    session: str | None = None
    model: str | None = None
    measured: tuple[tuple[str, str, int], ...] = ()
    """Measured times: column, key of `Row.observed`, nanoseconds in a unit of the column."""
    own: tuple[tuple[str, str], ...] = ()
    """Columns for policies: column, key of `Row.extra`."""

    def used(self) -> list[str]:
        """The columns that are read."""
        every = (self.arrival, self.input, self.output, self.id, self.session, self.model)
        measured = (column for column, *_ in self.measured)
        named = (column for column in every if column is not None)
        return [*named, *measured, *(column for column, _ in self.own)]


def parse_columns(text: str) -> Columns:
    """The columns that `ROLE=COLUMN,...` names. Raises `ConfigError` naming the role."""
    given: dict[str, str] = {}
    measured: list[tuple[str, str, int]] = []
    own: list[tuple[str, str]] = []
    timed = {f"{role}_{unit}": (role, unit) for role in MEASURED for unit in UNITS_NS}
    known = (*ROLES, *OPTIONAL_ROLES, *timed)
    for pair in text.split(","):
        role, equals, column = (part.strip() for part in pair.partition("="))
        if equals and column and role.startswith(OWN) and role != OWN:
            own.append((column, role.removeprefix(OWN)))
            continue
        if not equals or not column or role not in known:
            near = nearest(role, known) if role not in known else ""
            what = f"{role!r} is not a role" if column else f"{pair.strip()!r} is not ROLE=COLUMN"
            raise ConfigError(f"--columns: {what};{near} roles: {', '.join(known)}, {OWN}NAME")
        if role in timed:
            kind, unit = timed[role]
            measured.append((column, MEASURED[kind], UNITS_NS[unit]))
            continue
        role, _, unit = role.partition("_")
        if role in given:
            raise ConfigError(f"--columns: {role} is given twice; keep one")
        given[role] = column
        if unit:
            given["unit"] = unit
    for role in ("input", "output"):
        if role not in given:
            raise ConfigError(f"--columns: no {role}; add {role}=COLUMN")
    unit_ns = UNITS_NS[given.pop("unit")] if "unit" in given else _DATE_NS
    return Columns(**given, unit_ns=unit_ns, measured=tuple(measured), own=tuple(own))


def read_table(source: Source, columns: Columns, format: str = "table") -> Trace:
    """The trace in a CSV or Parquet file. Raises `TraceError` at the first row that is wrong.

    Rows without prompt or output tokens are left out, and unsorted rows are sorted, with notes.
    """
    gathered = Gathered(source, format)
    turns: Counter[str] = Counter()
    first: tuple[int, str] | None = None
    for cells in table_cells(source, columns):
        input_length = tokens(source, columns.input, cells[columns.input], 0)
        output_length = tokens(source, columns.output, cells[columns.output], 0)
        time_ns = None
        if columns.arrival is not None:
            time_ns = _time(source, columns, cells[columns.arrival])
            if columns.unit_ns == _DATE_NS and (first is None or time_ns < first[0]):
                first = time_ns, str(cells[columns.arrival])
        if not (input_length and output_length):
            gathered.drop(FAILED)
            continue
        session = None if columns.session is None else str(cells[columns.session])
        gathered.add(
            input_length,
            output_length,
            time_ns=time_ns,
            id=None if columns.id is None else str(cells[columns.id]),
            session=session,
            turn=None if session is None else turns[session],
            model=None if columns.model is None else str(cells[columns.model]),
            observed=measured_times(source, columns, cells),
            extra={key: _plainly(cells[column]) for column, key in columns.own} or None,
        )
        if session is not None:
            turns[session] += 1
    trace = gathered.trace()
    if first is not None:
        trace.origin = first[1].replace(" ", "T")
    return _digested(trace) if look(source).is_parquet else trace


def measured_times(
    source: Source, columns: Columns, cells: Mapping[str, Any]
) -> dict[str, float] | None:
    """The measured times of a row for `Row.observed`, without those whose cell is empty."""
    return {
        key: instant(source, column, cells[column], unit_ns) / NS_PER_S
        for column, key, unit_ns in columns.measured
        if cells[column] not in (None, "")
    } or None


def _plainly(cell: Any) -> Any:
    """A cell, as a number where it is written as JSON writes one."""
    if not isinstance(cell, str) or not _NUMBER.fullmatch(cell):
        return cell
    return float(cell) if set(".eE") & set(cell) else int(cell)


def table_cells(source: Source, columns: Columns) -> Iterator[dict[str, Any]]:
    """The rows of a CSV or Parquet file: cells by name, of the columns that are used.

    Raises `TraceError` at the first row that is wrong.
    """
    return (_parquet_cells if look(source).is_parquet else _csv_cells)(source, columns)


def header_of(source: Source) -> list[str]:
    """The column names of a CSV or Parquet file, of which no row is read."""
    head = look(source)
    if not head.is_parquet:
        return list(head.columns)
    names: list[str] = _parquet(source).schema_arrow.names
    return names


def _time(source: Source, columns: Columns, value: Any) -> int:
    field = columns.arrival or ""
    if isinstance(value, _Instant):
        return int(value)
    if columns.unit_ns != _DATE_NS:
        return instant(source, field, value, columns.unit_ns)
    text = str(value)
    try:
        float(text)
    except ValueError:
        return date(source, field, text)
    roles = " or ".join(f"arrival_{unit}={field}" for unit in ("s", "ms"))
    raise source.error(f"{shown(value)} has no unit; say --columns {roles}", field)


class _Instant(int):
    """Nanoseconds since 1970 that a Parquet file stores as a time."""

    def __str__(self) -> str:
        from datetime import UTC, datetime

        return datetime.fromtimestamp(self / NS_PER_S, UTC).isoformat()


def _csv_cells(source: Source, columns: Columns) -> Iterator[dict[str, Any]]:
    lines = source.lines()
    header = next(lines)
    separator = separator_of(header)
    names = [name.strip() for name in _split(source, header, separator)]
    _check_names(source, names, columns)
    places = [(column, names.index(column)) for column in columns.used()]
    for line in lines:
        cells = _split(source, line, separator)
        if len(cells) != len(names):
            what = f"{len(cells)} cells, expected {len(names)}: {shown(','.join(names))}"
            raise source.error(f"{what}; fix the line")
        if separator != ",":
            cells = [
                cell.replace(",", ".") if _COMMA.fullmatch(cell.strip()) else cell for cell in cells
            ]
        yield {column: cells[place] for column, place in places}


def _split(source: Source, line: str, separator: str) -> list[str]:
    if '"' not in line:
        return line.split(separator)
    try:
        return next(csv.reader([line], delimiter=separator, strict=True))
    except csv.Error:
        raise source.error("a quote does not close on its line; write one row a line") from None


def _check_names(source: Source, names: Sequence[str], columns: Columns) -> None:
    """Every column that is read is there, once."""
    for column in columns.used():
        if names.count(column) != 1:
            what = "twice in the header; rename one" if column in names else "no such column;"
            found = "" if column in names else f" columns found: {shown(','.join(names))[1:-1]}"
            raise source.error(f"{what}{found}", column)


def _parquet(source: Source) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        # The name as bytes, because Arrow takes no text that is not UTF-8.
        return pyarrow.parquet.ParquetFile(pyarrow.OSFile(os.fsencode(source.path)))
    except (pyarrow.ArrowException, OSError, ValueError):
        raise source.error("not a Parquet file that can be read; write it again", line=0) from None


def _parquet_cells(source: Source, columns: Columns) -> Iterator[dict[str, Any]]:
    import pyarrow

    file = _parquet(source)
    _check_names(source, file.schema_arrow.names, columns)
    source.line = 0
    try:
        for batch in file.iter_batches(columns=columns.used()):
            lists = [_plain(batch.column(name)) for name in columns.used()]
            for cells in zip(*lists, strict=True):
                source.line += 1
                yield dict(zip(columns.used(), cells, strict=True))
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        reason = str(error).splitlines()[0][:100] if str(error) else type(error).__name__
        raise source.error(f"damaged Parquet: {reason}; write it again", line=0) from None


def _plain(column: Any) -> list[Any]:
    """The cells of a Parquet column as plain values; times as nanoseconds since 1970."""
    import pyarrow

    if not pyarrow.types.is_timestamp(column.type):
        simple = (int, float, str, bool, type(None))
        return [each if type(each) in simple else str(each) for each in column.to_pylist()]
    whole = column.cast(pyarrow.timestamp("ns", column.type.tz)).cast(pyarrow.int64())
    return [None if each is None else _Instant(each) for each in whole.to_pylist()]


def _digested(trace: Trace) -> Trace:
    """A Parquet trace with the digest of its file, which is not read as text."""
    try:
        with Path(trace.path).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise TraceError(f"{trace.path}: cannot be read: {error.strerror}; check it") from None
    return replace(trace, sha256=digest, source={**trace.source, "sha256": digest})

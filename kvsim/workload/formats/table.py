"""Tables of requests, CSV or Parquet, by a map of their columns, which may follow from their names.

`arrival_ms=ts,input=prompt_tokens,output=completion_tokens` says that the column `ts` holds
arrivals in milliseconds. Times without a unit must be dates; nothing is guessed. Measured times
(`ttft_ms=first_token_ms`) go to `Row.observed`, and what policies want to know
(`x_tenant=team`) to `Row.extra`.

`arrival_s,input_tokens,output_tokens` needs no explanation, and neither do dates. A number without
a unit does (`timestamp` may be seconds or milliseconds), and so does a table without arrivals in
which an unknown column may hold them: the file is refused with the `--columns` to add. Columns of
measured times (`ttft_ms`, `e2e_s`) need no role either. The `requests.parquet` of a run is read as
well: its times stand for measured ones.
"""

from __future__ import annotations

import csv
import hashlib
import os
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import inf
from operator import itemgetter
from pathlib import Path
from typing import Any

from kvsim.errors import ConfigError, TraceError, nearest
from kvsim.workload.formats.prompts import read_llmservingsim
from kvsim.workload.gather import Gathered, date, instant, is_date, sort_rows, tokens
from kvsim.workload.native import OWN
from kvsim.workload.source import NS_PER_S, Source, look, separator_of, shown, tables
from kvsim.workload.trace import Trace

UNITS_NS = {"s": NS_PER_S, "ms": 1_000_000, "us": 1000, "ns": 1}
"""Unit at the end of a role or of a column's name → nanoseconds."""
ROLES = ("arrival", *(f"arrival_{unit}" for unit in UNITS_NS), "input", "output")
OPTIONAL_ROLES = ("id", "session", "model")
MEASURED = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s", "queue": "queue_s"}
"""Role of a measured time, which needs a unit → its key in `Row.observed`, in seconds."""
_TIMED = (f"{role}_{unit}" for role in MEASURED for unit in UNITS_NS)
_KNOWN = (*ROLES, *OPTIONAL_ROLES, *_TIMED)
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
    unit_ns = _DATE_NS
    measured: list[tuple[str, str, int]] = []
    own: list[tuple[str, str]] = []
    for pair in text.split(","):
        role, column = _role(pair)
        name, _, unit = role.partition("_")
        if role.startswith(OWN):
            own.append((column, role.removeprefix(OWN)))
        elif name in MEASURED:
            measured.append((column, MEASURED[name], UNITS_NS[unit]))
        elif name in given:
            raise ConfigError(f"--columns: {name} is given twice; keep one")
        else:
            given[name] = column
            unit_ns = UNITS_NS.get(unit, unit_ns)
    for role in ("input", "output"):
        if role not in given:
            raise ConfigError(f"--columns: no {role}; add {role}=COLUMN")
    return Columns(**given, unit_ns=unit_ns, measured=tuple(measured), own=tuple(own))


def _role(pair: str) -> tuple[str, str]:
    """Role and column of `ROLE=COLUMN`."""
    role, _, column = (part.strip() for part in pair.partition("="))
    is_role = role in _KNOWN or (role.startswith(OWN) and role != OWN)
    if not column or not is_role:
        near = "" if role in _KNOWN else nearest(role, _KNOWN)
        what = f"{role!r} is not a role" if column else f"{pair.strip()!r} is not ROLE=COLUMN"
        raise ConfigError(f"--columns: {what};{near} roles: {', '.join(_KNOWN)}, {OWN}NAME")
    return role, column


def read_table(source: Source, columns: Columns, format: str = "table") -> Trace:
    """The trace in a CSV or Parquet file. Raises `TraceError` at the first row that is wrong.

    Rows without prompt or output tokens are left out, and unsorted rows are sorted, with notes.
    """
    gathered = Gathered(source, format)
    turns: defaultdict[str, Iterator[int]] = defaultdict(count)
    first: tuple[float, str] = (inf, "")
    for cells in table_cells(source, columns):
        input_length = tokens(source, columns.input, cells[columns.input], 0)
        output_length = tokens(source, columns.output, cells[columns.output], 0)
        time_ns = None
        if columns.arrival is not None:
            time_ns = _time(source, columns, cells[columns.arrival])
            if columns.unit_ns == _DATE_NS:
                first = min(first, (time_ns, str(cells[columns.arrival])), key=itemgetter(0))
        if not (input_length and output_length):
            gathered.drop(FAILED)
            continue
        session = _name(cells, columns.session)
        gathered.add(
            input_length,
            output_length,
            time_ns=time_ns,
            id=_name(cells, columns.id),
            session=session,
            turn=None if session is None else next(turns[session]),
            model=_name(cells, columns.model),
            observed=measured_times(source, columns, cells),
            extra={key: _plainly(cells[column]) for column, key in columns.own} or None,
        )
    trace = gathered.trace()
    if first[1]:
        trace.origin = first[1].replace(" ", "T")
    return _digested(trace) if look(source).is_parquet else trace


def _name(cells: Mapping[str, Any], column: str | None) -> str | None:
    return None if column is None else str(cells[column])


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


_NAMES = {
    role: names.split()
    for role, names in tomllib.loads(
        Path(__file__).with_name("columns.toml").read_text("utf-8")
    ).items()
}
_TIMES = {name: role for role in MEASURED for name in _NAMES[role]}
_MOST_SHOWN = 12


def read(source: Source) -> Trace:
    """The trace in a table. Raises `TraceError` where a column could mean several things."""
    return read_table(source, _guess(source, header_of(source)))


def measured_columns(names: Sequence[str]) -> tuple[tuple[str, str, int], ...]:
    """The columns of measured times among these, for `Columns.measured`; each time once."""
    found: dict[str, tuple[str, str, int]] = {}
    for name in names:
        plain, unit = _without_unit(name)
        if plain in _TIMES and unit:
            key = MEASURED[_TIMES[plain]]
            found.setdefault(key, (name, key, UNITS_NS[unit]))
    return tuple(found.values())


def _guess(source: Source, names: Sequence[str]) -> Columns:
    measured = measured_columns(names)
    if set(_NAMES["of_a_run"]) <= set(names):
        lengths = "input_length", "output_length"
        return Columns(*lengths, "arrival_ns", 1, "id", measured=measured)
    inputs, outputs = _among(names, "input"), _among(names, "output")
    arrivals = _among(names, "arrival")
    if len(inputs) != 1 or len(outputs) != 1 or len(arrivals) > 1:
        found = ", ".join(shown(name) for name in names[:_MOST_SHOWN])
        raise _ask(source, f"a table with columns {found}", arrivals, inputs, outputs)
    if not arrivals:
        known = {*inputs, *outputs, *_among(names, "no_time", *MEASURED)}
        if unknown := [name for name in names if name not in known]:
            found = ", ".join(map(shown, unknown[:_MOST_SHOWN]))
            what = f"when requests came may be in {found}"
            raise _ask(source, what, unknown, inputs, outputs)
        return Columns(input=inputs[0], output=outputs[0], measured=measured)
    arrival, unit = arrivals[0], _without_unit(arrivals[0])[1]
    if not unit and not _holds_dates(source, names.index(arrival)):
        raise _ask(source, f"{shown(arrival)} has no unit", arrivals, inputs, outputs)
    unit_ns = UNITS_NS.get(unit, 0)
    return Columns(inputs[0], outputs[0], arrival, unit_ns, measured=measured)


def _among(names: Sequence[str], *roles: str) -> list[str]:
    """Those of the names that say one of these roles."""
    return [name for name in names if any(_without_unit(name)[0] in _NAMES[role] for role in roles)]


def _without_unit(name: str) -> tuple[str, str]:
    """A name in small letters without the unit at its end, and that unit."""
    plain = name.strip().lower().replace(" ", "_").replace("-", "_")
    head, _, unit = plain.rpartition("_")
    return (head, unit) if unit in UNITS_NS else (plain, "")


def _holds_dates(source: Source, place: int) -> bool:
    head = look(source)
    if head.is_parquet:
        return True  # the reader knows the type of the column, and refuses plain numbers
    lines = [line for line in head.text.splitlines() if line.strip()][:2]
    cells = lines[-1].split(separator_of(lines[0]))
    return place < len(cells) and is_date(cells[place].strip('"'))


def _ask(
    source: Source,
    what: str,
    arrivals: Sequence[str],
    inputs: Sequence[str],
    outputs: Sequence[str],
) -> Exception:
    """The refusal with the option to paste."""

    def one(names: Sequence[str], otherwise: str) -> str:
        return names[0] if len(names) == 1 else otherwise

    arrival = one(arrivals, "COLUMN")
    csv = not look(source).is_parquet
    dated = arrival in arrivals and csv and _holds_dates(source, header_of(source).index(arrival))
    role = "arrival" if dated else "arrival_s"
    rest = f"input={one(inputs, 'COLUMN')},output={one(outputs, 'COLUMN')}"
    remedy = f"--columns {role}={arrival},{rest}"
    units = (
        "or arrival_ms, arrival_us, arrival_ns; arrival for dates; without arrivals leave it out"
    )
    return source.error(f"{what}; say which column is what: {remedy} ({units})", line=0)


def join_measured(trace: Trace, path: str) -> Trace:
    """The trace with `Row.observed` from a file: JSON Lines, CSV or Parquet with a column `id`.

    Times are columns that name them with their unit: `ttft_s`, `e2e_ms`, `tpot_ms`, `queue_s`.
    `requests.jsonl` of LLMServingSim also says when requests really came, which is then when they
    are sent. Requests without a line keep what they have; a note counts them. Raises `TraceError`
    for a file that cannot be read, or that names a request which the trace does not have.
    """
    known = {row.id for row in trace.rows}
    found: dict[str, dict[str, float] | None] = {}
    with Source(path) as source:
        if "queued_ts" in look(source).keys:
            return _joined_run(trace, source)
        for name, times in _read(source):
            if name not in known:
                what = (
                    f"{shown(name)} is not a request of {trace.path}; give the times of this trace"
                )
                raise source.error(what, "id")
            found[name] = times
    rows = [
        replace(row, observed={**(row.observed or {}), **(found.get(row.id) or {})} or None)
        for row in trace.rows
    ]
    missing = sum(row.id not in found for row in trace.rows)
    notes = [f"{path}: no measured times of {missing:,} requests"] if missing else []
    return replace(trace, rows=rows, notes=[*trace.notes, *notes])


def _joined_run(trace: Trace, source: Source) -> Trace:
    """The trace as a run of LLMServingSim's benchmark sent it, with what it measured."""
    run = read_llmservingsim(source)
    measured = {row.id.removeprefix("bench-"): row for row in run.rows}
    rows = []
    for row in trace.rows:
        own = measured.pop(row.id.removeprefix("bench-"), None)
        if own is None:
            rows.append(replace(row))
            continue
        if (own.input_length, own.output_length) != (row.input_length, row.output_length):
            what = f"{own.input_length} and {own.output_length} tokens, but {row.input_length} and"
            what += f" {row.output_length} in {trace.path}; give the run of this trace"
            raise source.error(what, f"request_id {own.id}", own.line)
        rows.append(replace(row, arrival_ns=own.arrival_ns, observed=own.observed))
    if measured:
        other = next(iter(measured.values()))
        what = f"not a request of {trace.path}; give the run of this trace"
        raise source.error(what, f"request_id {other.id}", other.line)
    missing = sum(row.observed is None for row in rows)
    notes = [f"{source.path}: no measured times of {missing:,} requests"] if missing else []
    ordered, _ = sort_rows(rows)
    return replace(trace, rows=list(ordered), notes=[*trace.notes, *run.notes, *notes])


def _read(source: Source) -> Iterator[tuple[str, dict[str, float] | None]]:
    """Id and measured times of each line."""
    if not look(source).is_json:
        columns = _columns(source, header_of(source))
        for cells in table_cells(source, columns):
            yield str(cells["id"]), measured_times(source, columns, cells)
        return
    for table in tables(source):
        columns = _columns(source, list(table))
        yield str(table["id"]), measured_times(source, columns, table)


def _columns(source: Source, names: list[str]) -> Columns:
    """The columns to read: `id` twice, because nothing else of a request is needed."""
    measured = measured_columns(names)
    if "id" not in names or not measured:
        what = "measured times need an id and one of ttft_s, e2e_s, tpot_s, queue_s (or _ms)"
        raise source.error(f"{what}; add them")
    return Columns("id", "id", measured=measured)


def _published(
    name: str,
    columns: Columns,
    further: Mapping[str, Mapping[str, Any]],
    source: Source,
) -> Trace:
    """The trace in a table of a published format. Raises `TraceError` at the first line that is
    wrong. `further`: column that only some files have → what it is in `Columns`."""
    there = look(source).columns
    for column, meaning in further.items():
        if column in there:
            columns = replace(columns, **meaning)
    return read_table(source, columns, name)


AZURE = partial(
    _published, "azure", Columns("ContextTokens", "GeneratedTokens", arrival="TIMESTAMP"), {}
)
"""Azure LLM inference traces. The files of 2023 have dates with seven decimals, no zone and CRLF
line ends; those of 2024 have six decimals and `+00:00` (Azure/AzurePublicDataset). Rows need not be
sorted. There is no content, so no prompt hits the prefix cache."""

BURSTGPT = partial(
    _published,
    "burstgpt",
    Columns("Request tokens", "Response tokens", "Timestamp", UNITS_NS["s"], model="Model"),
    {"Session ID": {"session": "Session ID"}},
)
"""BurstGPT traces. Two headers are in use: that of the first release, and a later one with `Session
ID` and `Elapsed time` (HPMLL/BurstGPT). A request with 0 response tokens failed: it is left out.
Requests of all models are kept, where `vllm bench serve` takes those to GPT-4 alone and ignores
their times. The turns of a session have no content, so they share no prefix."""

VIDUR = partial(
    _published,
    "vidur",
    Columns("num_prefill_tokens", "num_decode_tokens"),
    {"arrived_at": {"arrival": "arrived_at", "unit_ns": UNITS_NS["s"]}},
)
"""Vidur traces. Files without `arrived_at` are lengths alone (microsoft/vidur,
`data/processed_traces`). Vidur raises lengths of 0 to 1 and cuts prompts to fit its model; here
requests of 0 tokens are left out and nothing is cut."""

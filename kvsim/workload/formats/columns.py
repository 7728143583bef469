"""Tables of requests, CSV or Parquet, whose column names say what they hold.

`arrival_s,input_tokens,output_tokens` needs no explanation, and neither do dates. A number without
a unit does (`timestamp` may be seconds or milliseconds), and so does a table without arrivals in
which an unknown column may hold them: the file is refused with the `--columns` to add. Columns of
measured times (`ttft_ms`, `e2e_s`) go to `Row.observed`. The `requests.parquet` of a run is read as
well: its times stand for measured ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kvsim.workload.formats.lines import LLMSERVINGSIM
from kvsim.workload.gather import sort_rows
from kvsim.workload.source import Head, Source, is_date, look, parse, separator_of, shown
from kvsim.workload.table import (
    MEASURED,
    UNITS_NS,
    Columns,
    header_of,
    measured_times,
    read_table,
    table_cells,
)
from kvsim.workload.trace import Trace


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


INPUTS = _names(
    "input input_tokens input_length input_len prompt_tokens prompt_length prompt_len prompt"
    " num_prompt_tokens n_input_tokens context_tokens"
)
OUTPUTS = _names(
    "output output_tokens output_length output_len completion_tokens generated_tokens completion"
    " num_output_tokens response_tokens"
)
ARRIVALS = _names(
    "arrival arrival_time timestamp time ts arrived_at start_time request_time created_at date"
    " datetime start"
)
"""Column names, in small letters and without a unit at their end, that say what they hold."""
TIMES = {
    "ttft": "ttft",
    "time_to_first_token": "ttft",
    "tpot": "tpot",
    "time_per_output_token": "tpot",
    "e2e": "e2e",
    "e2el": "e2e",
    "e2e_latency": "e2e",
    "request_latency": "e2e",
    "queue": "queue",
    "queue_time": "queue",
}
"""Names of columns with measured times → role. Such columns always need a unit."""
NO_TIMES = {"", "id", "index", "request_id", "session", "session_id", "conversation_id", "user"}
NO_TIMES |= {"user_id", "model", "model_name", "total_tokens", *TIMES}
"""Names of columns that do not say when a request came. Any other may, in words unknown here."""
_MOST_SHOWN = 12
_OF_A_RUN = {"input_length", "output_length", "output_tokens", "arrival_ns", "first_scheduled_ns"}
"""Columns that tell the `requests.parquet` or `requests.csv` of a run."""


def recognises(head: Head) -> bool:
    """Whether this is a table: its second line has as many cells as the first, and more than 1."""
    if head.is_parquet:
        return True
    lines = [line for line in head.text.splitlines() if line.strip()]
    if head.is_json or len(head.columns) < 2 or len(lines) < 2:
        return False
    return lines[1].count(separator_of(lines[0])) == lines[0].count(separator_of(lines[0]))


def read(source: Source) -> Trace:
    """The trace in a table. Raises `TraceError` where a column could mean several things."""
    return read_table(source, _guess(source, header_of(source)))


def measured_columns(names: Sequence[str]) -> tuple[tuple[str, str, int], ...]:
    """The columns of measured times among these, for `Columns.measured`; each time once."""
    found: dict[str, tuple[str, str, int]] = {}
    for name in names:
        plain, unit = _without_unit(name)
        if plain in TIMES and unit:
            key = MEASURED[TIMES[plain]]
            found.setdefault(key, (name, key, UNITS_NS[unit]))
    return tuple(found.values())


def _guess(source: Source, names: Sequence[str]) -> Columns:
    measured = measured_columns(names)
    if _OF_A_RUN.issubset(names):
        lengths = "input_length", "output_length"
        return Columns(*lengths, "arrival_ns", 1, "id", measured=measured)
    plain = {name: _without_unit(name) for name in names}
    inputs = [name for name in names if plain[name][0] in INPUTS]
    outputs = [name for name in names if plain[name][0] in OUTPUTS]
    arrivals = [name for name in names if plain[name][0] in ARRIVALS]
    if len(inputs) != 1 or len(outputs) != 1 or len(arrivals) > 1:
        found = ", ".join(shown(name) for name in names[:_MOST_SHOWN])
        raise _ask(source, f"a table with columns {found}", arrivals, inputs, outputs)
    if not arrivals:
        unknown = [n for n in names if n not in (*inputs, *outputs) and plain[n][0] not in NO_TIMES]
        if unknown:
            found = ", ".join(map(shown, unknown[:_MOST_SHOWN]))
            what = f"when requests came may be in {found}"
            raise _ask(source, what, unknown, inputs, outputs)
        return Columns(input=inputs[0], output=outputs[0], measured=measured)
    arrival, unit = arrivals[0], plain[arrivals[0]][1]
    if not unit and not _holds_dates(source, names.index(arrival)):
        raise _ask(source, f"{shown(arrival)} has no unit", arrivals, inputs, outputs)
    unit_ns = UNITS_NS.get(unit, 0)
    return Columns(inputs[0], outputs[0], arrival, unit_ns, measured=measured)


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
    run = LLMSERVINGSIM.read(source)
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
    for line in source.lines():
        table: dict[str, Any] = parse(source, line)
        columns = _columns(source, list(table))
        yield str(table["id"]), measured_times(source, columns, table)


def _columns(source: Source, names: list[str]) -> Columns:
    """The columns to read: `id` twice, because nothing else of a request is needed."""
    measured = measured_columns(names)
    if "id" not in names or not measured:
        what = "measured times need an id and one of ttft_s, e2e_s, tpot_s, queue_s (or _ms)"
        raise source.error(f"{what}; add them")
    return Columns("id", "id", measured=measured)


class Published(NamedTuple):
    """A published format, known by its columns."""

    name: str
    columns: Columns
    further: Mapping[str, Mapping[str, Any]] = {}
    """Column that only some files have → what it is in `Columns`."""
    least: int = 2
    """How many of the two columns of lengths have to be there."""

    def recognises(self, head: Head) -> bool:
        """Whether the columns are those of this format."""
        return len({self.columns.input, self.columns.output} & set(head.columns)) >= self.least

    def read(self, source: Source) -> Trace:
        """The trace in a table. Raises `TraceError` at the first line that is wrong."""
        columns, there = self.columns, look(source).columns
        for column, meaning in self.further.items():
            if column in there:
                columns = replace(columns, **meaning)
        return read_table(source, columns, self.name)


AZURE = Published(
    "azure", Columns("ContextTokens", "GeneratedTokens", arrival="TIMESTAMP"), least=1
)
"""Azure LLM inference traces. The files of 2023 have dates with seven decimals, no zone and CRLF
line ends; those of 2024 have six decimals and `+00:00` (Azure/AzurePublicDataset). Rows need not be
sorted. There is no content, so no prompt hits the prefix cache."""

BURSTGPT = Published(
    "burstgpt",
    Columns("Request tokens", "Response tokens", "Timestamp", UNITS_NS["s"], model="Model"),
    {"Session ID": {"session": "Session ID"}},
)
"""BurstGPT traces. Two headers are in use: that of the first release, and a later one with `Session
ID` and `Elapsed time` (HPMLL/BurstGPT). A request with 0 response tokens failed: it is left out.
Requests of all models are kept, where `vllm bench serve` takes those to GPT-4 alone and ignores
their times. The turns of a session have no content, so they share no prefix."""

VIDUR = Published(
    "vidur",
    Columns("num_prefill_tokens", "num_decode_tokens"),
    {"arrived_at": {"arrival": "arrived_at", "unit_ns": UNITS_NS["s"]}},
)
"""Vidur traces. Files without `arrived_at` are lengths alone (microsoft/vidur,
`data/processed_traces`). Vidur raises lengths of 0 to 1 and cuts prompts to fit its model; here
requests of 0 tokens are left out and nothing is cut."""

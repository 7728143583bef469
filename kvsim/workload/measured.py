"""Joins measured times from a file of their own to the requests of a trace, by id."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvsim.workload.formats.columns import measured_columns
from kvsim.workload.head import look
from kvsim.workload.source import Source, parse, shown
from kvsim.workload.table import Columns, header_of, measured_times, table_cells
from kvsim.workload.trace import Trace


def join_measured(trace: Trace, path: str) -> Trace:
    """The trace with `Row.observed` from a file: JSON Lines, CSV or Parquet with a column `id`.

    Times are columns that name them with their unit: `ttft_s`, `e2e_ms`, `tpot_ms`, `queue_s`.
    Requests without a line keep what they have; a note counts them. Raises `TraceError` for a file
    that cannot be read, or that names a request which the trace does not have.
    """
    known = {row.id for row in trace.rows}
    found: dict[str, dict[str, float] | None] = {}
    with Source(path) as source:
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

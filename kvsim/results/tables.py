"""Converts results to Arrow tables and back. The columns: `kvsim.core.schema`.

Times are kept twice: as exact integer nanoseconds, and as seconds. Seconds count from the start of
the run; `queue_s`, `ttft_s`, `tpot_s` and `e2el_s` are durations. Null: the event never happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvsim.core.records import part_of, rows_in
from kvsim.core.schema import REQUESTS, STEPS, TEXT, Column, Table
from kvsim.results.blockmap import STATES, BlockMap, Groups
from kvsim.results.statistics import Floats, Ints, durations_ns, ints

if TYPE_CHECKING:
    import pyarrow as pa


def texts(column: Iterable[Any]) -> pa.Array:
    """Texts, none of them null."""
    import pyarrow as pa

    # Columns are made of buffers here: `pa.array` imports pandas.
    written = [*map(str, column)]
    joined = "".join(written)
    # Lengths are in bytes.
    parts = written if joined.isascii() else [text.encode() for text in written]
    ends = np.cumsum([0, *map(len, parts)])
    assert ends[-1] < 1 << 31, "a column of texts holds at most 2 GiB"
    buffers = [None, pa.py_buffer(ends.astype(np.int32)), pa.py_buffer(joined.encode())]
    return pa.Array.from_buffers(pa.string(), len(parts), buffers)


def numbers(values: NDArray[Any], missing: NDArray[np.bool_] | None = None) -> pa.Array:
    """Integers or floats of 64 bits; null where `missing`."""
    import pyarrow as pa

    kind = pa.int64() if values.dtype == np.int64 else pa.float64()
    known = _bits(~missing) if missing is not None and missing.any() else None
    buffers = [known, pa.py_buffer(np.ascontiguousarray(values))]
    return pa.Array.from_buffers(kind, len(values), buffers)


def optional(values: Sequence[float | None], *, whole: bool) -> pa.Array:
    """Integers, if `whole`, or floats; None is null."""
    known = [0 if value is None else value for value in values]
    missing = np.array([value is None for value in values], dtype=bool)
    return numbers(np.array(known, dtype=np.int64 if whole else np.float64), missing)


def truths(values: Sequence[bool]) -> pa.Array:
    """Booleans."""
    import pyarrow as pa

    return pa.Array.from_buffers(pa.bool_(), len(values), [None, _bits(np.array(values, bool))])


def _bits(values: NDArray[np.bool_]) -> pa.Buffer:
    import pyarrow as pa

    return pa.py_buffer(np.packbits(values, bitorder="little"))


NS_PER_S = 1e9
PIECE = 1 << 14
"""Rows that are written at once: a row group of Parquet."""


def arrow_table(
    table: Table, columns: Mapping[str, Any], column_of: Callable[[str], Any] | None = None
) -> pa.Table:
    """The columns of `table` that `columns` has, or must have; `column_of`: a part of each."""
    import pyarrow as pa

    written = table.expected(columns)
    arrays = [_array(column, column_of or columns.__getitem__) for column in written]
    fields = [
        pa.field(column.name, array.type, nullable=column.null)
        for column, array in zip(written, arrays, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def requests_table(requests: Mapping[str, Any]) -> pa.Table:
    """One row per request in trace order."""
    durations = {f"{name}_ns": values for name, values in durations_ns(requests).items()}
    return arrow_table(REQUESTS, durations | dict(requests))


def requests_tables(requests: Mapping[str, Any]) -> Iterator[pa.Table]:
    """Tables of at most `PIECE` requests each; a run without requests gives one empty table."""
    for first in range(0, max(len(requests["id"]), 1), PIECE):
        yield requests_table(
            {name: column[first : first + PIECE] for name, column in requests.items()}
        )


def steps_table(steps: Mapping[str, Any], first: int = 0, last: int | None = None) -> pa.Table:
    """One row per step, for the steps `first .. last - 1`; None: to the end."""

    def column(name: str) -> Ints:
        return ints(part_of(steps, name, first, rows_in(steps) if last is None else last))

    return arrow_table(STEPS, steps, column)


def steps_tables(steps: Mapping[str, Any]) -> Iterator[pa.Table]:
    """Tables of at most `PIECE` steps each; a run without steps gives one empty table."""
    number = rows_in(steps)
    for first in range(0, max(number, 1), PIECE):
        yield steps_table(steps, first, min(first + PIECE, number))


def block_map_columns(block_map: BlockMap) -> dict[str, Any]:
    """The columns of a block map: one row per sample and group of blocks."""
    samples, groups = block_map.owner.shape
    return {
        "time_ns": np.repeat(block_map.time_ns, groups),
        "on_cpu": np.tile(block_map.groups.device, samples),
        "first_block": np.tile(block_map.groups.first, samples),
        "blocks": np.tile(block_map.groups.blocks, samples),
        **{f"{name}_blocks": block_map.counts[:, :, i].ravel() for i, name in enumerate(STATES)},
        "owner": block_map.owner.ravel(),
        "owner_blocks": block_map.owner_blocks.ravel(),
    }


def block_map_of(columns: Mapping[str, Ints]) -> BlockMap:
    """The block map with these columns."""
    time_ns = columns["time_ns"]
    groups = int(np.count_nonzero(time_ns == time_ns[0])) if len(time_ns) else 1
    first = slice(0, groups if len(time_ns) else 0)
    counts = np.stack([columns[f"{name}_blocks"] for name in STATES], axis=-1)
    return BlockMap(
        Groups(*(columns[name][first] for name in ("on_cpu", "first_block", "blocks"))),
        time_ns[::groups],
        counts.reshape(-1, groups, len(STATES)).astype(np.int32),
        columns["owner"].reshape(-1, groups).astype(np.int32),
        columns["owner_blocks"].reshape(-1, groups).astype(np.int32),
    )


def misfit(layout: pa.Schema, table: Table) -> str:
    """The first column of a file that differs from `table`, in words; empty if all fit."""
    for column in table.expected(layout.names):
        place = layout.get_field_index(column.name)
        found = "missing" if place < 0 else str(layout.field(place).type)
        if found != str(_arrow_type(column)):
            return f"column {column.name} is {found}, expected {_arrow_type(column)}"
    return ""


def without_formulas(table: pa.Table) -> pa.Table:
    """The table for a spreadsheet: texts that it would run as formulas begin with an apostrophe.

    Source: OWASP, "CSV Injection".
    """
    from pyarrow import compute

    for place, column in enumerate(table.columns):
        if column.type == TEXT:
            safe = compute.replace_substring_regex(column, r"\A([=+\-@\t\r])", r"'\1")
            table = table.set_column(place, table.column_names[place], safe)
    return table


def missing(read: pa.Table, table: Table) -> str:
    """The first column with a null that it cannot have, in words; empty if there is none."""
    for column in table.columns:
        if not column.null and column.name in read.column_names and read[column.name].null_count:
            return f"column {column.name}: a value is missing"
    return ""


def columns_of(table: pa.Table) -> dict[str, Any]:
    """The columns that a table was made from."""
    return {
        name: column.to_pylist() if column.type == TEXT else column.fill_null(-1).to_numpy()
        for name, column in zip(table.column_names, table.columns, strict=True)
    }


def _array(column: Column, column_of: Callable[[str], Any]) -> pa.Array:
    if column.type == TEXT:
        return texts(column_of(column.name))
    if column.derived:
        return _seconds(np.asarray(column_of(f"{column.name.removesuffix('_s')}_ns")))
    values = ints(column_of(column.name))
    return numbers(values, values < 0 if column.null else None)


def _arrow_type(column: Column) -> pa.DataType:
    import pyarrow as pa

    return getattr(pa, column.type)()


def _seconds(values_ns: Ints | Floats) -> pa.Array:
    # Neither -1 nor NaN is a time.
    return numbers(values_ns / NS_PER_S, ~(values_ns >= 0))

"""Gives results their shape on disk: Arrow tables, and back.

Times are kept twice: as integer nanoseconds, which are exact, and as seconds from the start of the
run or, for `queue_s`, `ttft_s`, `tpot_s`, `e2el_s`, as durations. Null: it never happened.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvsim.blockmap.blockmap import STATES, BlockMap, Groups
from kvsim.ledger.parts import KERNELS, PROMPT_PARTS, TIME_PARTS
from kvsim.packed import Ints, PackedColumns
from kvsim.recorder import STEP_COLUMNS
from kvsim.report import phases
from kvsim.report.phases import Floats
from kvsim.transitions import TRANSITION_COLUMNS

if TYPE_CHECKING:
    import pyarrow as pa

TEXTS = ("id", "session", "status", "reason")
INSTANTS = ("released", "arrival", "first_scheduled", "first_token", "finish")
"""Columns `*_ns` of a request; -1 in memory, null on disk, where it never happened."""

COUNTS = (
    "index",
    "input_length",
    "output_length",
    "output_tokens",
    "priority",
    "n",
    "client_queue_ns",
    "num_preemptions",
    "num_cached_tokens",
    "recached_tokens",
    "recomputed_tokens",
    "swapped_out_blocks",
    "swapped_in_blocks",
    "blocked_steps",
)
DURATIONS = ("queue", "ttft", "tpot", "e2el")
NS_PER_S = 1e9
PIECE = 1 << 17
"""Steps that are written together: a row group of Parquet."""


def requests_table(requests: Mapping[str, Any]) -> pa.Table:
    """One row per request in trace order."""
    import pyarrow as pa

    durations = phases.durations_ns(requests)
    columns: dict[str, Any] = {name: _texts(requests[name]) for name in TEXTS}
    for name in INSTANTS:
        columns[f"{name}_s"] = _seconds(_ints(requests[f"{name}_ns"]))
    for name in DURATIONS:
        columns[f"{name}_s"] = _numbers(durations[name] / NS_PER_S, np.isnan(durations[name]))
    columns["client_queue_s"] = _seconds(_ints(requests["client_queue_ns"]))
    for name in COUNTS:
        columns[name] = _numbers(_ints(requests[name]))
    for name in INSTANTS:
        values = _ints(requests[f"{name}_ns"])
        columns[f"{name}_ns"] = _numbers(values, values < 0)
    for name in _kept(_LEDGER, requests):
        columns[name] = _numbers(_ints(requests[name]))
    order = [*_ORDER, *_kept(_LEDGER, requests)]
    return pa.Table.from_arrays([columns[name] for name in order], order)


def steps_table(steps: Mapping[str, Any], first: int = 0, last: int | None = None) -> pa.Table:
    """One row per step: `start_s`, `end_s`, the columns of `recorder.STEP_COLUMNS` and `KERNELS`.

    Of the steps `first .. last - 1`; None: to the end.
    """
    import pyarrow as pa

    def column(name: str) -> Ints:
        if isinstance(steps, PackedColumns):
            return steps.part(name, first, steps.rows if last is None else last)
        return _ints(steps[name][first:last])

    seconds = [_seconds(column("start_ns")), _seconds(column("end_ns"))]
    names = [*STEP_COLUMNS, *_kept(KERNELS, steps)]
    counts = [_numbers(column(name)) for name in names]
    return pa.Table.from_arrays([*seconds, *counts], ["start_s", "end_s", *names])


def steps_tables(steps: Mapping[str, Any]) -> Iterator[pa.Table]:
    """The same in pieces of at most `PIECE` rows; one without rows where there is no step."""
    number = steps.rows if isinstance(steps, PackedColumns) else len(steps["start_ns"])
    for first in range(0, max(number, 1), PIECE):
        yield steps_table(steps, first, min(first + PIECE, number))


def requests_columns(table: pa.Table) -> dict[str, Any]:
    """What `requests_table` was made from. Raises `KeyError` for a column that is missing."""
    columns: dict[str, Any] = {name: table[name].to_pylist() for name in TEXTS}
    for name in (*COUNTS, *(f"{name}_ns" for name in INSTANTS)):
        columns[name] = table[name].fill_null(-1).to_numpy()
    for name in _kept(_LEDGER, table.column_names):
        columns[name] = table[name].to_numpy()
    return columns


def steps_columns(table: pa.Table) -> dict[str, Ints]:
    """What `steps_table` was made from. Raises `KeyError` for a column that is missing."""
    names = (*STEP_COLUMNS, *_kept(KERNELS, table.column_names))
    return {name: table[name].to_numpy() for name in names}


def transitions_table(transitions: Mapping[str, Any]) -> pa.Table:
    """One row per transition: the columns of `transitions.TRANSITION_COLUMNS`."""
    import pyarrow as pa

    columns = [_numbers(_ints(transitions[name])) for name in TRANSITION_COLUMNS]
    return pa.Table.from_arrays(columns, list(TRANSITION_COLUMNS))


def transitions_columns(table: pa.Table) -> dict[str, Ints]:
    """What `transitions_table` was made from. Raises `KeyError` for a column that is missing."""
    return {name: table[name].to_numpy() for name in TRANSITION_COLUMNS}


def block_map_table(block_map: BlockMap) -> pa.Table:
    """One row per sample and group of blocks: when; which blocks, on which device; how many of
    them are in each of `blockmap.STATES`; who owns most of those that are owned, and how many."""
    import pyarrow as pa

    samples, groups = block_map.owner.shape
    columns = {
        "time_ns": np.repeat(block_map.time_ns, groups),
        "on_cpu": np.tile(block_map.groups.device, samples),
        "first_block": np.tile(block_map.groups.first, samples),
        "blocks": np.tile(block_map.groups.blocks, samples),
        **{f"{name}_blocks": block_map.counts[:, :, i].ravel() for i, name in enumerate(STATES)},
        "owner": block_map.owner.ravel(),
        "owner_blocks": block_map.owner_blocks.ravel(),
    }
    return pa.Table.from_arrays(
        [_numbers(_ints(column)) for column in columns.values()], list(columns)
    )


def block_map_columns(table: pa.Table) -> BlockMap:
    """What `block_map_table` was made from. Raises `KeyError` for a column that is missing."""

    def column(name: str) -> Ints:
        values: Ints = table[name].to_numpy()
        return values

    time_ns = column("time_ns")
    groups = int(np.count_nonzero(time_ns == time_ns[0])) if len(time_ns) else 1
    first = slice(0, groups if len(time_ns) else 0)
    counts = np.stack([column(f"{name}_blocks") for name in STATES], axis=-1)
    return BlockMap(
        Groups(*(column(name)[first] for name in ("on_cpu", "first_block", "blocks"))),
        time_ns[::groups],
        counts.reshape(-1, groups, len(STATES)).astype(np.int32),
        column("owner").reshape(-1, groups).astype(np.int32),
        column("owner_blocks").reshape(-1, groups).astype(np.int32),
    )


def _kept(names: Iterable[str], columns: Container[str]) -> list[str]:
    """Those of `names` that results have; only runs have a ledger, and not of everything."""
    return [name for name in names if name in columns]


_LEDGER = (*TIME_PARTS, *PROMPT_PARTS[1:])
"""What a ledger adds; the first of `PROMPT_PARTS` is among `COUNTS`."""
_ORDER = (
    *("id", "index", "session", "status", "reason"),
    *("released_s", "client_queue_s", "arrival_s", "first_scheduled_s", "first_token_s"),
    *("finish_s", "input_length", "output_length", "output_tokens", "priority", "n"),
    *("queue_s", "ttft_s", "tpot_s", "e2el_s"),
    *("num_preemptions", "num_cached_tokens", "recached_tokens", "recomputed_tokens"),
    *("swapped_out_blocks", "swapped_in_blocks", "blocked_steps"),
    *("released_ns", "client_queue_ns", "arrival_ns", "first_scheduled_ns", "first_token_ns"),
    "finish_ns",
)


# The arrays are made of their buffers, because `pyarrow.array` imports pandas.


def _texts(column: Any) -> pa.Array:
    import pyarrow as pa

    encoded = [str(text).encode() for text in column]
    ends = np.cumsum([0, *map(len, encoded)])
    assert ends[-1] < 1 << 31, "a column of texts holds at most 2 GiB"
    buffers = [None, pa.py_buffer(ends.astype(np.int32)), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)


def _numbers(values: Ints | Floats, missing: NDArray[np.bool_] | None = None) -> pa.Array:
    """Integers or floats; null where `missing`."""
    import pyarrow as pa

    kind = pa.int64() if values.dtype == np.int64 else pa.float64()
    known = None
    if missing is not None and missing.any():
        known = pa.py_buffer(np.packbits(~missing, bitorder="little"))
    buffers = [known, pa.py_buffer(np.ascontiguousarray(values))]
    return pa.Array.from_buffers(kind, len(values), buffers)


def _seconds(values_ns: Ints) -> pa.Array:
    return _numbers(values_ns / NS_PER_S, values_ns < 0)


def _ints(column: Any) -> Ints:
    return np.asarray(column, dtype=np.int64)

"""Gives results their shape on disk: Arrow tables, and back.

Times are kept twice: as integer nanoseconds, which are exact, and as seconds from the start of the
run or, for `queue_s`, `ttft_s`, `tpot_s`, `e2el_s`, as durations. Null: it never happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.recorder import STEP_COLUMNS
from kvsim.report import phases

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


def requests_table(requests: Mapping[str, Any]) -> pa.Table:
    """One row per request in trace order."""
    import pyarrow as pa

    durations = phases.durations_ns(requests)
    columns: dict[str, Any] = {name: pa.array(_texts(requests[name])) for name in TEXTS}
    for name in INSTANTS:
        columns[f"{name}_s"] = _seconds(requests[f"{name}_ns"])
    for name in DURATIONS:
        columns[f"{name}_s"] = pa.array(durations[name] / NS_PER_S, from_pandas=True)
    columns["client_queue_s"] = _seconds(requests["client_queue_ns"])
    for name in COUNTS:
        columns[name] = pa.array(_ints(requests[name]))
    for name in INSTANTS:
        values = _ints(requests[f"{name}_ns"])
        columns[f"{name}_ns"] = pa.array(values, mask=values < 0)
    return pa.table(columns).select(_ORDER)


def steps_table(steps: Mapping[str, Any]) -> pa.Table:
    """One row per step: `start_s`, `end_s` and the columns of `recorder.STEP_COLUMNS`."""
    import pyarrow as pa

    columns: dict[str, Any] = {
        "start_s": _seconds(steps["start_ns"]),
        "end_s": _seconds(steps["end_ns"]),
    }
    for name in STEP_COLUMNS:
        columns[name] = pa.array(_ints(steps[name]))
    return pa.table(columns)


def requests_columns(table: pa.Table) -> dict[str, Any]:
    """What `requests_table` was made from. Raises `KeyError` for a column that is missing."""
    columns: dict[str, Any] = {name: table[name].to_pylist() for name in TEXTS}
    for name in (*COUNTS, *(f"{name}_ns" for name in INSTANTS)):
        columns[name] = table[name].fill_null(-1).to_numpy()
    return columns


def steps_columns(table: pa.Table) -> dict[str, np.ndarray[Any, np.dtype[np.int64]]]:
    """What `steps_table` was made from. Raises `KeyError` for a column that is missing."""
    return {name: table[name].to_numpy() for name in STEP_COLUMNS}


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


def _texts(column: Any) -> list[str]:
    return [str(text) for text in column]


def _ints(column: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.asarray(column, dtype=np.int64)


def _seconds(column: Any) -> pa.Array:
    import pyarrow as pa

    values = _ints(column)
    return pa.array(values / NS_PER_S, mask=values < 0)

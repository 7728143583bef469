"""Lays a run out in time: which state of the engine held from when to when.

A step row gives the state as of composing; it holds until the next step is composed. While nothing
runs (before the first step, between steps, after the last) no batch is under way, and once every
running request has ended its blocks are no longer in use:

```
step 0          step 1   idle            step 2
├──────────────┼────────┼──────────────┼────────► time
```
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Columns = Mapping[str, NDArray[Any]]
Ints = NDArray[np.int64]

HELD = (
    "waiting",
    "running",
    "swapped",
    "used_blocks",
    "cached_blocks",
    "free_blocks",
    "cpu_used_blocks",
    "empty_slots",
    "stranded_blocks",
    "blocked",
)
"""Columns that describe the engine until the next step is composed."""

UNDER_WAY = ("prefill_seqs", "prefill_tokens", "cached_tokens", "decode_seqs", "batched_tokens")
"""Columns that describe the batch only while its step lasts."""


def run_end_ns(steps: Columns, requests: Mapping[str, Any]) -> int:
    """The last instant at which anything happened, counted from the start of the client."""
    instants = (steps["end_ns"], requests["finish_ns"], requests["arrival_ns"])
    return max((int(np.max(column)) for column in instants if len(column)), default=0)


def states(steps: Columns, end_ns: int, meta: Mapping[str, Any]) -> dict[str, Ints]:
    """Rows of constant state that cover `0 .. end_ns` without a gap.

    Returns `start_ns` and, per row, the columns of `HELD` and `UNDER_WAY`; a row holds until the
    next one starts, the last until `end_ns`. Rows may have no duration.

    Blocks of requests that ended before an idle time count as cached where prefix caching is on,
    though their last, partial blocks are in truth free.
    """
    columns = {
        name: np.concatenate(([0], steps[name]))
        for name in ("start_ns", "end_ns", "finished", *HELD, *UNDER_WAY)
    }
    columns["free_blocks"][0] = meta.get("num_gpu_blocks") or 0
    start = columns["start_ns"]
    following = np.append(start[1:], end_ns)
    idles = columns["end_ns"] < following

    row = np.repeat(np.arange(len(start)), 1 + idles)
    idle = np.zeros(len(row), dtype=bool)
    idle[np.cumsum(1 + idles)[idles] - 1] = True
    laid: dict[str, Ints] = {"start_ns": np.where(idle, columns["end_ns"][row], start[row])}
    for name in HELD:
        laid[name] = columns[name][row]
    for name in UNDER_WAY:
        laid[name] = np.where(idle, 0, columns[name][row])
    empty = idle & (columns["running"][row] == columns["finished"][row]) & (laid["swapped"] == 0)
    _release(laid, empty, "cached_blocks" if meta.get("prefix_caching") else "free_blocks")
    return laid


def durations_ns(rows: Mapping[str, Ints], end_ns: int) -> Ints:
    """How long each row of `states` holds."""
    return np.diff(np.append(rows["start_ns"], end_ns))


def _release(rows: dict[str, Ints], where: NDArray[np.bool_], to: str) -> None:
    """Take the blocks of ended requests out of use in the rows `where`."""
    rows[to] = rows[to] + np.where(where, rows["used_blocks"], 0)
    for name in ("used_blocks", "empty_slots", "running"):
        rows[name] = np.where(where, 0, rows[name])

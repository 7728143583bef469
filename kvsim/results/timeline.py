"""Lays a run out in time: which state of the engine held from when to when.

A step row gives the state at composing, which holds until the next step is composed. While nothing
runs (before the first step, between steps, after the last) no batch is under way. Once every
running request has ended, its blocks are no longer in use:
```
step 0          step 1   idle            step 2
├──────────────┼────────┼──────────────┼────────► time
```
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.core.records import part_of, rows_in
from kvsim.core.schema import STEPS, Source
from kvsim.results.statistics import Ints

Columns = Mapping[str, NDArray[Any]]

HELD = STEPS.names(Source.STATE, Source.SGLANG)
"""Columns that describe the engine until the next step is composed."""

UNDER_WAY = ("prefill_seqs", "prefill_tokens", "cached_tokens", "decode_seqs", "batched_tokens")
"""Columns that describe the batch, and hold only while its step lasts."""


def run_end_ns(steps: Columns, requests: Mapping[str, Any]) -> int:
    """The last instant at which anything happened, counted from the start of the client."""
    instants = (steps["end_ns"], requests["finish_ns"], requests["arrival_ns"])
    # Not before the start: an instant of what never happened is -1.
    return max(int(np.max(column, initial=0)) for column in instants)


_AT_ONCE = 1 << 16
"""Rows of a column that are worked out at once, to bound the memory."""


class States(Mapping[str, Ints]):
    """Rows of constant state that cover `0 .. end_ns` without a gap.

    `States` has `start_ns` and, per row, the columns of `HELD` and `UNDER_WAY`. Each column is made
    on access, because a long run has many rows. A row holds until the next one starts, the last
    until `end_ns`. Rows may have no duration.

    With prefix caching, blocks of requests that ended before an idle time count as cached, although
    their last, partial blocks are in fact free.
    """

    def __init__(self, steps: Columns, end_ns: int, meta: Mapping[str, Any]) -> None:
        self._steps = steps
        self._pool = int(meta.get("num_gpu_blocks") or 0)
        self._freed = "cached_blocks" if meta.get("prefix_caching") else "free_blocks"
        """The column that counts the blocks of ended requests."""
        start, end = self._from_zero("start_ns"), self._from_zero("end_ns")
        # Where the next step begins later, another row says what held until then.
        idles = end < np.append(start[1:], end_ns)
        before = np.flatnonzero(idles)
        # Narrow, because a long run has many steps.
        kind = np.min_scalar_type(len(start))
        self._row = np.repeat(np.arange(len(start), dtype=kind), 1 + idles)
        self._idle = np.zeros(len(self._row), dtype=bool)
        self._idle[before + np.arange(1, 1 + len(before))] = True
        self._start_ns: Ints = start[self._row]
        self._start_ns[self._idle] = end[before]
        del start, end
        over = self._from_zero("running") == self._from_zero("finished")
        over &= self._from_zero("swapped") == 0
        self._empty = self._idle & over[self._row]

    def __getitem__(self, name: str) -> Ints:
        if name == "start_ns":
            return self._start_ns
        column = np.empty(len(self._row), dtype=np.int64)
        for first in range(0, len(column), _AT_ONCE):
            some = slice(first, first + _AT_ONCE)
            column[some] = self.part(name, first, first + _AT_ONCE)
        return column

    def part(self, name: str, first: int, last: int) -> Ints:
        """Rows `first .. last - 1` of a column, of which no more is made."""
        if name == "start_ns":
            return self._start_ns[first:last]
        row = self._row[first:last].astype(np.intp)
        low, high = (int(row[0]), int(row[-1]) + 1) if len(row) else (0, 0)
        column: Ints = self._from_zero(name, low, high)[row - low if low else row]
        if name in UNDER_WAY:
            column[self._idle[first:last]] = 0
            return column
        empty = self._empty[first:last]
        if name in ("used_blocks", "protected_blocks", "empty_slots", "running"):
            column[empty] = 0
        elif name == self._freed:
            column[empty] += self._from_zero("used_blocks", low, high)[row[empty] - low]
        return column

    def __iter__(self) -> Iterator[str]:
        return iter(("start_ns", *(name for name in HELD if name in self._steps), *UNDER_WAY))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _from_zero(self, name: str, low: int = 0, high: int | None = None) -> Ints:
        """Entries of a column of the steps, preceded by the state before the first one."""
        last = rows_in(self._steps) if high is None else high - 1
        column = part_of(self._steps, name, max(low - 1, 0), max(last, 0))
        if low:
            return column
        return np.concatenate(([self._before(name)], column))

    def _before(self, name: str) -> int:
        """The value of a column before the first step."""
        if name == "new_token_ratio_ppm" and rows_in(self._steps):
            return int(part_of(self._steps, name, 0, 1)[0])
        return self._pool if name == "free_blocks" else 0


def durations_ns(rows: Mapping[str, Ints], end_ns: int) -> Ints:
    """How long each row of `States` holds."""
    return np.diff(np.append(rows["start_ns"], end_ns))

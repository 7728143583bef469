"""Finds out what the hash ids of a foreign trace stand for: their block size, rounding and kind.

The files do not say, but the number of ids on every row does. The ceil rule bounds the size by
`L/n <= size < L/(n-1)`, the floor rule by `L/(n+1) < size <= L/n`.
"""

from __future__ import annotations

from fractions import Fraction
from math import inf
from typing import NoReturn

import numpy as np

from kvsim.errors import TraceError
from kvsim.workload import chain
from kvsim.workload.columns import column, hash_runs
from kvsim.workload.source import Source
from kvsim.workload.trace import Row, Trace


def settle_blocks(source: Source, trace: Trace, size: int, remedy: str) -> None:
    """Find the rounding and the kind of the hash ids of a trace, if it has any.

    Sets `block_size` (to `size` tokens), `partial_hash` and `hash_kind`, with a note where they are
    unusual. Raises `TraceError` where the number of ids on some row does not fit `size`: it names
    the sizes that would, and ends with `remedy`.
    """
    runs = hash_runs(trace.rows)
    if not runs.ends:
        return
    trace.block_size = size
    lengths = np.array(column(trace.rows, "input_length"))[list(runs.rows)]
    numbers = np.diff(np.append(0, np.cumsum(runs.counts))[runs.ends], prepend=0)
    if (numbers == -(-lengths // size)).all():
        trace.partial_hash = True
    elif (numbers == lengths // size).all():
        trace.partial_hash = False
        trace.notes.append("hash_ids of full blocks only: the partial last block has none")
    else:
        rows = (trace.rows[place] for place in runs.rows)
        _refuse_size(source, size, list(zip(rows, numbers.tolist(), strict=True)), remedy)
    settle_kind(trace)


def settle_kind(trace: Trace) -> None:
    """Find out whether ids stand for a block and all before it, or for the block alone (a note)."""
    trace.hash_kind = "prefix"
    conflict = chain.first_conflict(trace)
    if conflict is not None:
        trace.hash_kind = "content"
        row, what = conflict
        where = f"line {row.line}" if row.line else f"request {row.id}"
        trace.notes.append(
            f"hash_ids stand for a block alone, not for all before it ({where}: {what})"
        )


def _refuse_size(source: Source, size: int, counts: list[tuple[Row, int]], remedy: str) -> NoReturn:
    """Refuse `size`, naming the sizes that fit every row, or the first row that does not fit."""
    low = max(Fraction(row.input_length, max(n, 1)) for row, n in counts)
    high = min((Fraction(row.input_length, n - 1) for row, n in counts if n > 1), default=inf)
    if low < high and all(n for _, n in counts):
        raise _misfit(source, size, f"[{float(low):g}, {float(high):g})", remedy)
    low = max(Fraction(row.input_length, n + 1) for row, n in counts)
    high = min((Fraction(row.input_length, n) for row, n in counts if n), default=inf)
    if low < high:
        raise _misfit(source, size, f"({float(low):g}, {float(high):g}]", remedy)
    row, n = next((row, n) for row, n in counts if n != -(-row.input_length // size))
    expected = f"{-(-row.input_length // size)} = ceil({row.input_length}/{size})"
    raise source.error(f"{n} ids, expected {expected}; fix the ids", "hash_ids", row.line)


def _misfit(source: Source, size: int, admitted: str, remedy: str) -> TraceError:
    what = f"block size {size} does not fit: the id counts admit {admitted}"
    return source.error(f"{what}; {remedy}", "hash_ids", line=0)

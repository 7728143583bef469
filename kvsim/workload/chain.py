"""Chains of hash ids: numbers each id together with all before it, and checks that an id alone
stands for everything up to the end of its block."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import inf
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import TraceError
from kvsim.workload.source import Source
from kvsim.workload.trace import Row, Trace, column, hash_runs

_Ints = NDArray[np.int64]


class Chains:
    """The hash ids of a trace in pieces, row after row: runs are cut wherever a run of their scope
    begins or ends, so that two pieces are the same ids or have none in common."""

    def __init__(self, trace: Trace) -> None:
        self.rows, self._starts, self.counts, self._pieces = _cut(trace.rows)
        """For each piece: the place of its row, its first id, how many it has, and a number for
        these."""
        places = np.arange(len(self.rows))
        begins = np.diff(self.rows, prepend=-1) != 0
        self._depths = places - np.maximum.accumulate(np.where(begins, places, 0))
        """Pieces before each in its row."""
        counted = np.cumsum(self.counts) - self.counts
        self.before: _Ints = counted - counted[places - self._depths]
        """Ids before each piece in its row."""

    def nodes(self) -> tuple[_Ints, _Ints]:
        """For each piece the number of its first id together with all before it, in order of
        appearance, and the place of the row that had them first."""
        labels, hop = self._pieces, 1
        first, before = _first(labels), self._earlier(labels, 1)
        while (before != before[first]).any():
            # A label stands for 1, 2, 4, ... pieces up to here, until equal ones tell all before.
            pairs = (self._earlier(labels, hop) + 1) * (labels.max() + 1) + labels
            labels, hop = np.unique(pairs, return_inverse=True)[1], 2 * hop
            first, before = _first(labels), self._earlier(labels, 1)
        fresh = np.where(first == np.arange(len(first)), self.counts, 0)
        return (np.cumsum(fresh) - fresh)[first], self.rows[first]

    def first_conflict(self, trace: Trace) -> tuple[Row, str] | None:
        """The first row whose ids contradict an earlier one's, and how; None if all are chained.

        Within a scope each id has one predecessor (a prompt's start counts as one), output ids
        included, and the id of a partial block always has the same number of tokens.
        """
        first = _first(self._pieces)
        before, tails = self._earlier(self._pieces, 1), self._tails(trace)
        wrong = (before != before[first]) | (tails != tails[first])
        if not wrong.any():
            return None
        here = int(np.argmax(wrong))
        there = int(first[here])
        row = trace.rows[self.rows[here]]
        if before[here] != before[there]:
            one, other = self._predecessor(here), self._predecessor(there)
            return row, f"id {self._starts[here]} follows {one} and elsewhere {other}"
        what = f"id {self._last(here)} is a partial block of"
        if tails[here] and tails[there]:
            return row, f"{what} {tails[here]} and {tails[there]} tokens"
        return row, f"{what} {max(tails[here], tails[there])} tokens and elsewhere a full one"

    def _tails(self, trace: Trace) -> _Ints:
        """Tokens in the last block of each piece; 0: it is full."""
        tails = np.zeros(len(self.rows), np.int64)
        if trace.partial_hash:
            lengths = np.array(column(trace.rows, "input_length"))[self.rows]
            last = np.diff(self.rows, append=-1) != 0
            tails[last] = lengths[last] % (trace.block_size or 1)
        return tails

    def _last(self, piece: int) -> int:
        return int(self._starts[piece]) + int(self.counts[piece]) - 1

    def _predecessor(self, piece: int) -> str:
        """The id before those of a piece in its row."""
        return str(self._last(piece - 1)) if self._depths[piece] else "the start"

    def _earlier(self, labels: _Ints, hop: int) -> _Ints:
        """The label `hop` pieces before each in its row, or -1."""
        return np.where(self._depths >= hop, np.roll(labels, hop), -1)


def _cut(rows: Sequence[Row]) -> tuple[_Ints, NDArray[np.uint64], _Ints, _Ints]:
    """The pieces of all runs: rows, first ids, counts, and a number for the ids of each."""
    runs = hash_runs(rows)
    starts, counts = np.array(runs.starts, np.uint64), np.array(runs.counts, np.int64)
    owners = np.repeat(np.array(runs.rows, np.int64), np.diff(runs.ends, prepend=0))
    # A cut is known by the id before it; id 0 has none, wraps, and is told apart by `inside`.
    before = np.concatenate((starts - 1, starts + (counts - 1).astype(np.uint64)))
    inside = np.concatenate((starts > 0, np.ones(len(starts), bool)))
    names = column(rows, "scope")
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    keys: list[NDArray[Any]] = [before, inside]
    if len(numbers) > 1:
        keys.append(np.tile(np.array([*map(numbers.__getitem__, names)], np.int64)[owners], 2))
    order = np.lexsort(keys)
    new = np.zeros(len(order), bool)
    new[:1] = True
    for key in keys:
        new[1:] |= key[order[1:]] != key[order[:-1]]
    cuts, rank = before[order[new]], np.empty(len(order), np.int64)
    rank[order] = np.cumsum(new) - 1
    low, high = np.split(rank, 2)
    number = high - low
    # Between the cut before a run and the one at its end lie the pieces of the run.
    pieces = np.arange(number.sum()) + np.repeat(high - np.cumsum(number), number)
    counted = (cuts[pieces + 1] - cuts[pieces]).astype(np.int64)
    return np.repeat(owners, number), cuts[pieces] + 1, counted, pieces


def _first(labels: _Ints) -> _Ints:
    """For each entry the place of the first one with its label."""
    # Set from the last entry to the first, so that the first one stays.
    first = np.empty(labels.max(initial=-1) + 1, np.int64)
    first[labels[::-1]] = np.arange(len(labels))[::-1]
    return first[labels]


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
    conflict = Chains(trace).first_conflict(trace)
    if conflict is not None:
        trace.hash_kind = "content"
        row, what = conflict
        where = f"line {row.line}" if row.line else f"request {row.id}"
        trace.notes.append(
            f"hash_ids stand for a block alone, not for all before it ({where}: {what})"
        )


def _refuse_size(source: Source, size: int, counts: list[tuple[Row, int]], remedy: str) -> NoReturn:
    """Refuse `size`, naming the sizes that fit every row, or the first row that does not fit."""
    low, high = _sizes([(row.input_length, n - 1) for row, n in counts])
    if low < high and all(n for _, n in counts):
        raise _misfit(source, size, f"[{float(low):g}, {float(high):g})", remedy)
    low, high = _sizes([(row.input_length, n) for row, n in counts])
    if low < high:
        raise _misfit(source, size, f"({float(low):g}, {float(high):g}]", remedy)
    row, n = next((row, n) for row, n in counts if n != -(-row.input_length // size))
    expected = f"{-(-row.input_length // size)} = ceil({row.input_length}/{size})"
    raise source.error(f"{n} ids, expected {expected}; fix the ids", "hash_ids", row.line)


def _sizes(counts: list[tuple[int, int]]) -> tuple[Fraction, Fraction | float]:
    """The bounds of the block sizes that split so many tokens into so many blocks and a part of
    one."""
    low = max(Fraction(tokens, max(blocks + 1, 1)) for tokens, blocks in counts)
    high = min((Fraction(tokens, blocks) for tokens, blocks in counts if blocks > 0), default=inf)
    return low, high


def _misfit(source: Source, size: int, admitted: str, remedy: str) -> TraceError:
    what = f"block size {size} does not fit: the id counts admit {admitted}"
    return source.error(f"{what}; {remedy}", "hash_ids", line=0)

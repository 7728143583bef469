"""Chains of hash ids: numbers each id together with all before it, and checks that an id alone
stands for everything up to the end of its block."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import inf
from operator import itemgetter
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import TraceError
from kvsim.workload.source import Source
from kvsim.workload.trace import HashContent, Row, Runs, Trace, column, hash_runs, runs_of

_ROOT = -1
"""Predecessor of a prompt's first id. It is 0 - 1, so a first id 0 counts as inside a run."""

_Spans = list[tuple[int, int, Row]]
"""First id, last id, and a row that has them."""
_Ints = NDArray[np.int64]


class Chains:
    """The hash ids of a trace in pieces, row after row: runs are cut wherever a run of their scope
    begins or ends, so that two pieces are the same ids or have none in common."""

    def __init__(self, trace: Trace) -> None:
        self.rows, self.counts, self._pieces = _cut(trace.rows)
        """For each piece: the place of its row, how many ids it has, and a number for these."""
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
        first = _first(labels)
        while not _agree(self._earlier(labels, 1), first):
            # What a label says of the pieces up to here goes back twice as far each time.
            pairs = (self._earlier(labels, hop) + 1) * (labels.max() + 1) + labels
            labels, hop = np.unique(pairs, return_inverse=True)[1], 2 * hop
            first = _first(labels)
        fresh = np.where(first == np.arange(len(first)), self.counts, 0)
        return (np.cumsum(fresh) - fresh)[first], self.rows[first]

    def are_prefixes(self, trace: Trace) -> bool:
        """Whether each id has one predecessor, and always as many tokens."""
        first = _first(self._pieces)
        tails = np.zeros(len(first), np.int64)
        if trace.partial_hash:
            lengths = np.array(column(trace.rows, "input_length"))[self.rows]
            last = np.diff(self.rows, append=-1) != 0
            tails[last] = lengths[last] % (trace.block_size or 1)
        return _agree(self._earlier(self._pieces, 1), first) and _agree(tails, first)

    def _earlier(self, labels: _Ints, hop: int) -> _Ints:
        """The label `hop` pieces before each in its row, or -1."""
        return np.where(self._depths >= hop, np.roll(labels, hop), -1)


def _cut(rows: Sequence[Row]) -> tuple[_Ints, _Ints, _Ints]:
    """The pieces of all runs: rows, counts, and a number for the ids of each."""
    runs = hash_runs(rows)
    starts, counts = np.array(runs.starts, np.uint64), np.array(runs.counts, np.int64)
    owners = np.repeat(np.array(runs.rows, np.int64), np.diff(runs.ends, prepend=0))
    # A cut is known by the id before it, which the first id of all has not.
    before = np.concatenate((starts - 1, starts + (counts - 1).astype(np.uint64)))
    inside = np.concatenate((starts > 0, np.ones(len(starts), bool)))
    names = column(rows, "scope")
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    scopes = np.tile(np.array([*map(numbers.__getitem__, names)], np.int64)[owners], 2)
    order = np.lexsort((before, inside, scopes))
    new = np.zeros(len(order), bool)
    new[:1] = True
    for key in (before[order], inside[order], scopes[order]):
        new[1:] |= key[1:] != key[:-1]
    cuts, rank = before[order[new]], np.empty(len(order), np.int64)
    rank[order] = np.cumsum(new) - 1
    low, high = np.split(rank, 2)
    number = high - low
    pieces = np.arange(number.sum()) + np.repeat(high - np.cumsum(number), number)
    return np.repeat(owners, number), (cuts[pieces + 1] - cuts[pieces]).astype(np.int64), pieces


def _first(labels: _Ints) -> _Ints:
    """For each entry the place of the first one with its label."""
    first = np.full(labels.max(initial=-1) + 1, len(labels))
    np.minimum.at(first, labels, np.arange(len(labels)))
    return first[labels]


def _agree(facts: _Ints, first: _Ints) -> bool:
    """Whether all entries say what the first one of their label says."""
    return bool((facts == facts[first]).all())


@dataclass(slots=True)
class _Scope:
    heads: dict[int, int] = field(default_factory=dict)
    """Ids whose predecessor is not the number before them → that predecessor."""
    inside: _Spans = field(default_factory=list)
    """Ids whose predecessor is the number before them."""
    partial: dict[int, int] = field(default_factory=dict)
    """Ids of partial last blocks → the tokens in them."""
    full: _Spans = field(default_factory=list)
    """Ids of full blocks."""


def first_conflict(trace: Trace) -> tuple[Row, str] | None:
    """A row whose ids contradict an earlier row's, and how; None if all ids are chained.

    Within a scope each id has one predecessor (a prompt's start counts as one), output ids
    included, and the id of a partial block always has the same number of tokens. The check works on
    runs of consecutive ids: inside a run, the predecessor is the number before.
    """
    if Chains(trace).are_prefixes(trace):
        return None
    scopes: dict[str | None, _Scope] = defaultdict(_Scope)
    for row in trace.rows:
        if isinstance(row.content, HashContent):
            conflict = _add(scopes[row.scope], row, row.content, trace)
            if conflict is not None:
                return row, conflict
    for name, scope in scopes.items():
        rows = (row for row in trace.rows if row.scope == name)
        found = _covered(scope.heads, scope.inside)
        if found is not None:
            one, other = found
            row = next(row for row in rows if _begins_run(row, one))
            return _later(row, other), _two_predecessors(one, scope.heads[one], one - 1)
        found = _covered(scope.partial, scope.full)
        if found is not None:
            one, other = found
            row = next(row for row in rows if _ends_partial(row, one, trace))
            tokens = scope.partial[one]
            what = f"id {one} is a partial block of {tokens} tokens and elsewhere a full one"
            return _later(row, other), what
    return None


def _add(scope: _Scope, row: Row, content: HashContent, trace: Trace) -> str | None:
    before = _ROOT
    for start, count in runs_of(content):
        last = start + count - 1
        if start == before + 1:
            scope.inside.append((start, last, row))
        else:
            known = scope.heads.setdefault(start, before)
            if known != before:
                return _two_predecessors(start, before, known)
            if count > 1:
                scope.inside.append((start + 1, last, row))
        scope.full.append((start, last, row))
        before = last
    tokens = row.input_length % (trace.block_size or 1)
    if not (trace.partial_hash and tokens):
        return None
    start, last, _ = scope.full.pop()
    if start < last:
        scope.full.append((start, last - 1, row))
    known = scope.partial.setdefault(last, tokens)
    return (
        None if known == tokens else f"id {last} is a partial block of {tokens} and {known} tokens"
    )


def _runs(row: Row) -> Runs:
    return runs_of(row.content) if isinstance(row.content, HashContent) else ()


def _begins_run(row: Row, one: int) -> bool:
    """Whether a run of the row's ids begins with `one`, after another number than that before."""
    befores = (_ROOT, *(start + count - 1 for start, count in _runs(row)))
    return any(
        start == one != before + 1 for before, (start, _) in zip(befores, _runs(row), strict=False)
    )


def _ends_partial(row: Row, one: int, trace: Trace) -> bool:
    """Whether `one` is the id of the row's partial last block."""
    runs = _runs(row)
    return bool(runs and row.input_length % (trace.block_size or 1) and sum(runs[-1]) - 1 == one)


def _covered(points: Iterable[int], spans: _Spans) -> tuple[int, Row] | None:
    """The smallest of `points` inside one of `spans`, and the row of that."""
    spans.sort(key=itemgetter(0, 1))
    reach, owner, i = -1, None, 0
    for point in sorted(points):
        while i < len(spans) and spans[i][0] <= point:
            if spans[i][1] > reach:
                _, reach, owner = spans[i]
            i += 1
        if owner is not None and point <= reach:
            return point, owner
    return None


def _two_predecessors(one: int, before: int, known: int) -> str:
    def name(predecessor: int) -> str:
        return "the start" if predecessor == _ROOT else str(predecessor)

    return f"id {one} follows {name(before)} and elsewhere {name(known)}"


def _later(row: Row, other: Row) -> Row:
    return max(row, other, key=lambda r: r.index)


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
    conflict = first_conflict(trace)
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

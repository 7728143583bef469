"""Checks that hash ids are chained: an id stands for everything up to the end of its block."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import itemgetter

from kvsim.workload.runs import runs_of
from kvsim.workload.trace import HashContent, Row, Runs, Trace

_ROOT = -1
"""Predecessor of a prompt's first id. It is 0 - 1, so a first id 0 counts as inside a run."""

_Spans = list[tuple[int, int, Row]]
"""First id, last id, and a row that has them."""


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

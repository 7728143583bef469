"""Identity of blocks: equal keys mean the same tokens in a block and in everything before it.

The key of a block is decided by its last position p in the request's stream (prompt, then
output). What a row says about its tokens, except for real token ids, becomes spans of
positions with `key = p + offset`, so the keys of consecutive blocks are a `range`:

| what holds position p | key |
|---|---|
| hash ids of H tokens | `node * H + p % H`; `node` numbers the id together with all before it |
| a named segment | its place in a region given to (scope, segments before it, name) |
| the first `keep` tokens of a parent | the parent's key at p |
| nothing known (unique rest, output without ids) | its place in the row's own region |
| real tokens | chained xxh64, see `TokenStream` |

Regions never overlap: hash ids and segments are positive, unique content is negative, digests lie
above all. A salt moves every key of a row away from those of other salts.
"""

from __future__ import annotations

from array import array
from dataclasses import fields
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from librt.vecs import vec
from mypy_extensions import i64

from kvsim.core.vectors import numbers
from kvsim.workload.chain import Chains
from kvsim.workload.streams import (
    ENDLESS,
    REGION,
    HashSpans,
    SpannedStream,
    SpanStream,
    Streams,
    TokenStream,
    unique_offset,
)
from kvsim.workload.trace import (
    HashContent,
    ParentContent,
    Row,
    Rows,
    SegmentContent,
    TokenContent,
    Trace,
    column,
    hash_runs,
)

_SEGMENTS = 1 << 57
"""First key of segments, above the keys of all hash ids."""
_SALT = 0x9E3779B97F4A7C15F39D
"""Distance of two salts, more than the span of all keys of one; odd, so that hash values of two
salts rarely meet."""


class KeyedTrace(Trace):
    """A trace for several runs in one process: its streams are made once. Do not change its
    rows."""

    @cached_property
    def streams(self) -> Streams:
        """The stream of every row, made when a run first needs keys."""
        return _made(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process makes its streams itself: they are as quickly made as sent.
        return KeyedTrace, tuple(getattr(self, each.name) for each in fields(self))


def keyed(trace: Trace) -> KeyedTrace:
    """The same trace, for several runs."""
    return KeyedTrace(**{each.name: getattr(trace, each.name) for each in fields(trace)})


def streams(trace: Trace) -> Streams:
    """The stream of every row, in order; keys are comparable within this sequence."""
    return trace.streams if isinstance(trace, KeyedTrace) else _made(trace)


def _made(trace: Trace) -> Streams:
    rows = trace.rows
    lengths = array("q", column(rows, "input_length"))
    found = Streams(len(rows), lengths, _hash_spans(trace, trace.block_size or 1))
    if not isinstance(rows, Rows):
        builder = _Builder(found, len(rows))
        for row in rows:
            builder.add(row)
    return found


def _hash_spans(trace: Trace, unit: int) -> HashSpans:
    """Chained ids as spans, and which of them rows share."""
    chains, number = Chains(trace), len(trace.rows)
    (nodes, owners), rows = chains.nodes(), chains.rows
    offsets = (nodes - chains.before) * unit
    stops = (chains.before + chains.counts) * unit
    # Pieces that another row had first: both rows share all up to their ends.
    shared, twice = np.zeros(number, np.int64), owners != rows
    np.maximum.at(shared, rows[twice], stops[twice])
    np.maximum.at(shared, owners[twice], stops[twice])
    # Without output ids, the keys of a partial last block end with the prompt.
    most = np.array(column(trace.rows, "input_length"), np.int64)
    most[list(hash_runs(trace.rows).open)] = ENDLESS
    # Pieces of one row whose keys go on are one span, up to the last of them.
    last = (np.diff(rows, append=-1) != 0) | (np.diff(offsets, append=0) != 0)
    ends, every = np.searchsorted(rows[last], np.arange(number + 1)), np.arange(number)
    columns = (
        # Behind the spans of each row comes its own region, which has no end.
        np.insert(np.minimum(stops, most[rows])[last], ends[1:], ENDLESS),
        np.insert(offsets[last], ends[1:], -(every + 1) * REGION),
        ends + np.arange(number + 1),
        np.minimum(shared, most),
    )
    return HashSpans(*[numbers(each.tolist()) for each in columns])


class _Builder:
    """Sets the streams that other things than plain hash ids identify; numbers what rows may share:
    salts, segments, tokens."""

    def __init__(self, streams: Streams, rows: int) -> None:
        self._streams, self._rows = streams, rows
        self._salts: dict[str | tuple[str, str | None] | None, int] = {None: 0}
        self._segments: dict[tuple[object, str], int] = {}
        """(preceding segment or scope, name) → number of the region."""
        self._numbers: dict[int, int] = {}
        """Digest of a block → its number."""

    def add(self, row: Row) -> None:
        """Set the stream of the next row."""
        # An adapter keeps rows of equal content apart: it computes other KV.
        apart = (row.lora, row.salt) if row.lora else row.salt
        salt = -_SALT * self._salts.setdefault(apart, len(self._salts))
        index, rows, length = row.index, self._rows, row.input_length
        stream: SpannedStream
        match row.content:
            case None | HashContent():
                if not salt:
                    return
                stream = self._streams.by_ids(index, salt)
            case TokenContent(prompt, output):
                stream = TokenStream(
                    prompt, output or (), row=index, rows=rows, salt=salt, numbers=self._numbers
                )
            case ParentContent(parent, keep):
                base = self._streams.inherited(parent, keep)
                stream = SpanStream(index, rows, length, salt=salt, base=base, keep=keep)
            case SegmentContent():
                stops, offsets = self._segment_spans(row, row.content)
                stream = SpanStream(index, rows, length, stops, offsets, salt)
        self._streams.put(index, stream)

    def _segment_spans(self, row: Row, content: SegmentContent) -> tuple[vec[i64], vec[i64]]:
        before: object = ("scope", row.scope)
        offsets: list[int] = []
        for name, length in content.segments:
            number = self._segments.setdefault((before, name), len(self._segments))
            offsets.append(_SEGMENTS + number * REGION)
            before = (number, length)
        stops = accumulate(length for _, length in content.segments)
        return numbers([*stops, ENDLESS]), numbers([*offsets, unique_offset(row.index)])

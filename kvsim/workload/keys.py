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
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import cached_property
from itertools import accumulate, chain
from sys import maxsize
from typing import NamedTuple, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh64_intdigest

from kvsim.workload.chain import Chains
from kvsim.workload.streams import Piece, Span, block_spans, joined, span_pieces
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

SpannedStream: TypeAlias = "SpanStream | TokenStream"
"""A stream in which most keys follow from the key before."""
IntT = TypeVar("IntT", int, NDArray[np.int64])
_REGION = (1 << 24) + 0x9E3779
"""Width of the region of one row or segment. It exceeds the longest stream, and regions differ in
their low bits too, which hash tables look at first."""
_SEGMENTS = 1 << 57
"""First key of segments, above the keys of all hash ids."""
_ALL_UNIQUE = ((maxsize,), ())
"""The spans of a stream without content: one, which has no end."""
_DIGESTS = 1 << 64
"""First key of digests, above all other keys."""
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


def keyed(trace: Trace) -> KeyedTrace:
    """The same trace, for several runs."""
    return KeyedTrace(**{each.name: getattr(trace, each.name) for each in fields(trace)})


def streams(trace: Trace) -> Streams:
    """The stream of every row, in order; keys are comparable within this sequence."""
    return trace.streams if isinstance(trace, KeyedTrace) else _made(trace)


class _HashSpans(NamedTuple):
    """The hash ids of all rows as spans (`SpanStream`), row after row."""

    stops: array[int]
    offsets: array[int]
    ends: array[int]
    """Where the spans of each row begin, and where the last ones end. The last span of each is in
    its own region."""
    shared: array[int]
    """Leading tokens of each row with hash ids that another row has, too."""


class Streams(Sequence["SpannedStream"]):
    """Streams in the order of their rows. One that plain hash ids or nothing identifies is kept as
    numbers and made at each access, because those of a long trace would fill the memory."""

    def __init__(self, rows: int, lengths: array[int], spans: _HashSpans) -> None:
        """`rows`: how many the trace has. `lengths`: of the prompts."""
        self._rows, self._lengths, self._spans = rows, lengths, spans
        self._made: dict[int, SpannedStream] = {}

    def put(self, index: int, stream: SpannedStream) -> None:
        """Set the stream of a row that something else identifies."""
        self._made[index] = stream

    def picked(self, indexes: Iterable[int]) -> Streams:
        """The streams of some rows, numbered anew."""
        made = {place: self[index] for place, index in enumerate(indexes)}
        lengths = array("q", [stream.input_length for stream in made.values()])
        some = Streams(self._rows, lengths, _HashSpans(*[array("q")] * 4))
        some._made = made
        return some

    def inherited(self, index: int, tokens: int) -> SpannedStream:
        """A stream, to begin another one with so many of its tokens."""
        stream = self._made.setdefault(index, self[index])
        stream.inherit(tokens)
        return stream

    @property
    def salted(self) -> bool:
        """Whether any stream has a salt."""
        return any(stream.salt for stream in self._made.values())

    def alone(self, number: int) -> list[bool]:
        """Which of the first `number` streams share nothing with another one of them, as their
        first token is theirs alone."""
        ends, offsets = self._spans.ends[:number], self._spans.offsets
        keys = dict(enumerate(map(offsets.__getitem__, ends)))
        for index, stream in self._made.items():
            if index < number and stream.shared_tokens:
                keys[index] = stream.pieces(1)[0].key
        users = Counter(keys.values())
        return [index not in keys or users[keys[index]] == 1 for index in range(number)]

    def __len__(self) -> int:
        return len(self._lengths)

    @overload
    def __getitem__(self, index: int) -> SpannedStream: ...
    @overload
    def __getitem__(self, index: slice) -> list[SpannedStream]: ...
    def __getitem__(self, index: int | slice) -> SpannedStream | list[SpannedStream]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self._lengths)
        return self._made.get(index) or self.by_ids(index)

    def by_ids(self, index: int, salt: int = 0) -> SpanStream:
        """The stream that the hash ids of a row make, or nothing."""
        stops, offsets, ends, shared = self._spans
        first, last = ends[index], ends[index + 1]
        return SpanStream(
            index,
            self._rows,
            self._lengths[index],
            (stops[first:last], offsets[first:last]),
            salt=salt,
            shared=None if salt else shared[index],
        )


class SpanStream:
    """A stream whose keys are spans of consecutive numbers.

    Its first `keep` tokens are those of `base`. From there on, `spans` (stop position, offset)
    identify the tokens; tokens outside all spans are in the region of `row` alone. `rows` is the
    number of streams in use: samples take regions above theirs.
    """

    __slots__ = (
        "_base",
        "_keep",
        "_offsets",
        "_row",
        "_rows",
        "_stops",
        "input_length",
        "knows_tokens",
        "named_tokens",
        "salt",
        "shared_tokens",
    )

    def __init__(
        self,
        row: int,
        rows: int,
        input_length: int,
        spans: tuple[Sequence[int], Sequence[int]] = _ALL_UNIQUE,
        *,
        begin: tuple[SpannedStream | None, int] = (None, 0),
        salt: int = 0,
        shared: int | None = None,
    ) -> None:
        """`spans`: stops and offsets; the last is in the region of the row and has no end. `begin`:
        `base`, `keep`. `shared`: tokens before the last span that other streams have; None: maybe
        all."""
        stops, offsets = spans
        base, keep = begin
        self._row = row
        self._rows = rows
        self.input_length = input_length
        self._stops = stops
        self._offsets = offsets or (_unique_offset(row),)
        self.named_tokens = named = stops[-2] if len(stops) > 1 else keep
        """Tokens behind which all blocks are in the region of the row."""
        self.shared_tokens = named if shared is None else shared
        """Tokens behind which no block ends that another stream has."""
        self._base = base
        self.knows_tokens: bool = base is not None and base.knows_tokens
        self._keep = keep
        self.salt = salt
        """Offset of every key; 0 without a salt."""

    def keys(self, first: int, last: int, block_size: int) -> list[int]:
        """Keys of the blocks `first .. last - 1` of `block_size` tokens."""
        return _salted(self.content_keys(first, last, block_size), self.salt)

    def contents(self, first: int, last: int, block_size: int) -> list[int]:
        """Keys: tokens are known by their prefix only."""
        return self.keys(first, last, block_size)

    def spans(self, block_size: int) -> list[Span]:
        """All blocks by the arithmetic of their keys, in order; the last span has no end."""
        if self._base is None:
            return block_spans(0, maxsize, block_size, self._stops, self._offsets, self.salt)
        found: list[Span] = []
        last = maxsize
        stream: SpannedStream | None = self
        while isinstance(stream, SpanStream) and last:
            own = stream._keep // block_size
            if own < last:
                found[:0] = block_spans(own, last, block_size, stream._stops, stream._offsets)
                last = own
            stream = stream._base
        if isinstance(stream, TokenStream) and last:
            found[:0] = stream.content_spans(last, block_size)
        return joined(found, self.salt)

    def inherit(self, tokens: int) -> None:
        """Note that another stream begins with the first `tokens` tokens of this one."""
        self.named_tokens = max(self.named_tokens, tokens)
        self.shared_tokens = max(self.shared_tokens, tokens)

    def sample(self, index: int) -> SpanStream:
        """A sample `index` > 0: the same prompt with an output of its own."""
        return _sample_of(self, index, self._row, self._rows, self.input_length, self.salt)

    def content_keys(self, first: int, last: int, block_size: int) -> list[int]:
        """Keys of the blocks `first .. last - 1` of `block_size` tokens, without the salt."""
        parts: list[list[int]] = []
        stream: SpannedStream | None = self
        while isinstance(stream, SpanStream) and first < last:
            own = max(first, stream._keep // block_size)
            if own < last:
                parts.append(stream._own_keys(own, last, block_size))
                last = own
            stream = stream._base
        if stream is not None and first < last:
            parts.append(stream.content_keys(first, last, block_size))
        return parts[0] if len(parts) == 1 else list(chain.from_iterable(reversed(parts)))

    def pieces(self, length: int) -> list[Piece]:
        """The first `length` tokens, in order."""
        parts: list[list[Piece]] = []
        stream: SpannedStream | None = self
        while isinstance(stream, SpanStream) and length > 0:
            if stream._keep < length:
                parts.append(span_pieces(stream._keep, length, stream._stops, stream._offsets))
                length = stream._keep
            stream = stream._base
        if stream is not None and length > 0:
            parts.append(stream.pieces(length))
        return list(chain.from_iterable(reversed(parts)))

    def _own_keys(self, first: int, last: int, block_size: int) -> list[int]:
        stops, offsets = self._stops, self._offsets
        position, end = (first + 1) * block_size - 1, last * block_size
        keys: list[int] = []
        span = -1
        while position < end:
            span = bisect_right(stops, position, span + 1)
            stop, offset = min(stops[span], end), offsets[span]
            keys += range(position + offset, stop + offset, block_size)
            position += -(-(stop - position) // block_size) * block_size
        return keys


class TokenStream:
    """A stream of real token ids.

    The digest of a block is xxh64 over the digest of the block before (8 bytes, little-endian, left
    out for the first block) and its token ids as int64 (nano-vllm, `engine/block_manager.py`,
    `compute_hash`); the key is 2**64 more. `output` holds the generated tokens, as far as known, or
    is a function from their index (0 for the first) to the token. Blocks with an unknown token are
    in the region of `row` alone, of `rows` streams in use.
    """

    __slots__ = (
        "_inherited",
        "_keys",
        "_next_token",
        "_numbers",
        "_row",
        "_rows",
        "_tokens",
        "input_length",
        "salt",
    )

    knows_tokens = True

    def __init__(
        self,
        prompt: Sequence[int],
        output: Sequence[int] | Callable[[int], int] = (),
        *,
        row: int = 0,
        rows: int = 1,
        salt: int = 0,
        numbers: dict[int, int] | None = None,
    ) -> None:
        """`numbers`: of the streams that are compared, digest of a block → its number in the order
        in which blocks are first asked for (`spans`)."""
        self._tokens = array("q", prompt)
        self._numbers = {} if numbers is None else numbers
        self._inherited = 0
        self._next_token: Callable[[int], int] | None = None
        if callable(output):
            self._next_token = output
        else:
            self._tokens.extend(output)
        self.input_length = len(prompt)
        self._keys: dict[int, list[int]] = {}
        """Block size → keys of the leading blocks."""
        self._row = row
        self._rows = rows
        self.salt = salt

    def keys(self, first: int, last: int, block_size: int) -> list[int]:
        """Keys of the blocks `first .. last - 1` of `block_size` tokens."""
        return _salted(self.content_keys(first, last, block_size), self.salt)

    def sample(self, index: int) -> SpanStream:
        """A sample `index` > 0: the same prompt with an unknown output of its own."""
        return _sample_of(self, index, self._row, self._rows, self.input_length, self.salt)

    def content_keys(self, first: int, last: int, block_size: int) -> list[int]:
        """Keys of the blocks `first .. last - 1` of `block_size` tokens, without the salt."""
        known = min(last, self._known(last * block_size) // block_size)
        keys = self._keys.setdefault(block_size, [])
        for block in range(len(keys), known):
            tokens = self._tokens[block * block_size : (block + 1) * block_size].tobytes()
            if block:
                tokens = (keys[-1] - _DIGESTS).to_bytes(8, "little") + tokens
            keys.append(_DIGESTS + xxh64_intdigest(tokens))
        return [*keys[first:known], *self._own(max(first, known), last, block_size)]

    def spans(self, block_size: int) -> list[Span]:
        """All blocks by the arithmetic of numbers that stand for their digests, in order; the last
        span has no end. Streams without shared `numbers` cannot be compared."""
        return joined(self.content_spans(maxsize, block_size), self.salt)

    def content_spans(self, last: int, block_size: int) -> list[Span]:
        """The first `last` blocks as `spans`, without the salt, neighbours not joined."""
        assert self._next_token is None, "some tokens are not known yet"
        known = min(last, len(self._tokens) // block_size)
        numbers, found = self._numbers, list[Span]()
        for block, key in enumerate(self.content_keys(0, known, block_size)):
            number = numbers.setdefault(key, len(numbers))
            found.append((block, block + 1, _DIGESTS + (number - block) * block_size))
        if known < last:
            found.append((known, last, _unique_offset(self._row) - 1 + block_size))
        return found

    def inherit(self, tokens: int) -> None:
        """Note that another stream begins with the first `tokens` tokens of this one."""
        self._inherited = max(self._inherited, tokens)

    @property
    def named_tokens(self) -> int:
        """Tokens behind which all blocks are in the region of the row."""
        return maxsize if self._next_token else max(len(self._tokens), self._inherited)

    @property
    def shared_tokens(self) -> int:
        """Tokens behind which no block ends that another stream has."""
        return self.named_tokens

    def pieces(self, length: int) -> list[Piece]:
        """The first `length` tokens, in order, one piece per known token."""
        known = min(length, self._known(length))
        digests = self.content_keys(0, known, 1)
        found = [Piece(key, place, place + 1) for place, key in enumerate(digests)]
        if known < length:
            found.append(Piece(known + _unique_offset(self._row), known, length))
        return found

    def contents(self, first: int, last: int, block_size: int) -> list[int]:
        """Identities of the tokens of the blocks `first .. last - 1`, whatever precedes them.

        nano-vllm of August 2025 accepts a stale entry if its block holds the same tokens.
        """
        known = min(last, self._known(last * block_size) // block_size)
        digests = [
            _DIGESTS
            + xxh64_intdigest(self._tokens[block * block_size : (block + 1) * block_size].tobytes())
            for block in range(first, known)
        ]
        return [*digests, *self._own(max(first, known), last, block_size)]

    def _own(self, first: int, last: int, block_size: int) -> range:
        """Keys of blocks with an unknown token, in the region of the row."""
        own = _unique_offset(self._row) - 1
        return range(own + (first + 1) * block_size, own + last * block_size + 1, block_size)

    def _known(self, length: int) -> int:
        """Number of known tokens, after asking for up to `length`."""
        if self._next_token is not None:
            while len(self._tokens) < length:
                self._tokens.append(self._next_token(len(self._tokens) - self.input_length))
        return len(self._tokens)


def _made(trace: Trace) -> Streams:
    rows = trace.rows
    lengths = array("q", column(rows, "input_length"))
    found = Streams(len(rows), lengths, _hash_spans(trace, trace.block_size or 1))
    if not isinstance(rows, Rows):
        builder = _Builder(found, len(rows))
        for row in rows:
            builder.add(row)
    return found


def _hash_spans(trace: Trace, unit: int) -> _HashSpans:
    """Chained ids as spans, and which of them rows share."""
    chains, number = Chains(trace), len(trace.rows)
    (nodes, owners), rows = chains.nodes(), chains.rows
    offsets = (nodes - chains.before) * unit
    stops = (chains.before + chains.counts) * unit
    shared, twice = np.zeros(number, np.int64), owners != rows
    np.maximum.at(shared, rows[twice], stops[twice])
    np.maximum.at(shared, owners[twice], stops[twice])
    # Without output ids, the keys of a partial last block end with the prompt.
    most = np.array(column(trace.rows, "input_length"), np.int64)
    most[list(hash_runs(trace.rows).open)] = maxsize
    last = (np.diff(rows, append=-1) != 0) | (np.diff(offsets, append=0) != 0)
    ends, every = np.searchsorted(rows[last], np.arange(number + 1)), np.arange(number)
    columns = (
        np.insert(np.minimum(stops, most[rows])[last], ends[1:], maxsize),
        np.insert(offsets[last], ends[1:], _unique_offset(every)),
        ends + np.arange(number + 1),
        np.minimum(shared, most),
    )
    return _HashSpans(*(array("q", each.astype(np.int64).tobytes()) for each in columns))


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
                begin = (self._streams.inherited(parent, keep), keep)
                stream = SpanStream(index, rows, length, begin=begin, salt=salt)
            case SegmentContent():
                spans = self._segment_spans(row, row.content)
                stream = SpanStream(index, rows, length, spans, salt=salt)
        self._streams.put(index, stream)

    def _segment_spans(self, row: Row, content: SegmentContent) -> tuple[list[int], list[int]]:
        before: object = ("scope", row.scope)
        offsets: list[int] = []
        for name, length in content.segments:
            number = self._segments.setdefault((before, name), len(self._segments))
            offsets.append(_SEGMENTS + number * _REGION)
            before = (number, length)
        stops = accumulate(length for _, length in content.segments)
        return [*stops, maxsize], [*offsets, _unique_offset(row.index)]


def _unique_offset(row: IntT) -> IntT:
    return -(row + 1) * _REGION


def _sample_of(
    base: SpannedStream, index: int, row: int, rows: int, input_length: int, salt: int
) -> SpanStream:
    begin = (base, input_length)
    return SpanStream(row + index * rows, rows, input_length, begin=begin, salt=salt)


def _salted(keys: list[int], salt: int) -> list[int]:
    return [key + salt for key in keys] if salt else keys

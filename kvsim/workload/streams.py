"""What identifies the tokens of a request: keys of its blocks, one by one or in spans."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Sequence as Seq
from itertools import chain
from sys import maxsize
from typing import Final, Protocol, TypeAlias, overload

from librt.vecs import append, vec
from mypy_extensions import i64, mypyc_attr
from xxhash import xxh64_intdigest

from kvsim.core.vectors import EMPTY

REGION = (1 << 24) + 0x9E3779
"""Width of the region of one row or segment. It exceeds the longest stream, and regions differ in
their low bits too, which hash tables look at first."""
ENDLESS: Final = (1 << 63) - 1
"""Where a span stops that has no end."""
ALL: Final = append(EMPTY, ENDLESS)
"""The stops of a stream without content."""
_DIGESTS = 1 << 64
"""First key of digests, above all other keys."""

Span = tuple[int, int, int]
"""Consecutive full blocks `first .. last - 1` of a stream. The key of block d is d * block_size +
`offset`. Neighbouring blocks have another offset."""


class Stream(Protocol):
    """Identity of the blocks of one token stream (prompt, then output)."""

    @property
    def knows_tokens(self) -> bool:
        """Whether `contents` may tell more than `keys`."""
        ...

    def keys(self, first: int, last: int, block_size: int) -> Seq[int]:
        """Keys of the full blocks `first .. last - 1` of `block_size` tokens.

        Equal keys mean: the same tokens in this block *and* in everything before it.
        """
        ...

    def contents(self, first: int, last: int, block_size: int) -> Seq[int]:
        """Contents of the same blocks. Equal contents mean the same tokens, whatever precedes them.

        Where tokens are known only by their prefix, these are the keys.
        """
        ...

    def sample(self, index: int) -> Stream:
        """A stream (`index` > 0) with the same prompt and another output, for `n > 1`."""
        ...


def block_spans(
    first: i64, last: i64, block_size: i64, stops: vec[i64], offsets: vec[i64], salt: int = 0
) -> list[Span]:
    """The blocks `first .. last - 1` of a stream, by the spans of tokens that hold them, of which
    the last one has no end (`maxsize`).

    The key of a block is that of its last token.
    """
    found: list[Span] = []
    begin: i64 = first
    before: i64 = 0
    k: i64
    for k in range(len(stops)):
        stop: i64 = stops[k]
        # A block belongs where its last token is. No block ends a span that has no end.
        end: i64 = last if stop == ENDLESS else min(stop // block_size, last)
        if end > begin:
            offset: i64 = offsets[k] + block_size - 1
            if found and offset == before:
                begin = found.pop()[0]
            found.append((begin, end, salt + int(offset)))  # of any size
            begin, before = end, offset
    return found


def joined(spans: Iterable[Span], salt: int = 0) -> list[Span]:
    """Consecutive spans with `salt` added to their keys, and neighbours of one offset made one."""
    found: list[Span] = []
    for first, last, offset in spans:
        if found and found[-1][2] == offset + salt:
            first = found.pop()[0]
        found.append((first, last, offset + salt))
    return found


class HashSpans:
    """The hash ids of all rows as spans (`SpanStream`), row after row."""

    stops: vec[i64]
    offsets: vec[i64]
    ends: vec[i64]
    """Where the spans of each row begin, and where the last ones end. The last span of each is in
    its own region."""
    shared: vec[i64]
    """Leading tokens of each row with hash ids that another row has, too."""

    def __init__(
        self, stops: vec[i64], offsets: vec[i64], ends: vec[i64], shared: vec[i64]
    ) -> None:
        self.stops, self.offsets, self.ends, self.shared = stops, offsets, ends, shared


SpannedStream: TypeAlias = "SpanStream | TokenStream"
"""A stream in which most keys follow from the key before."""


class Streams(Sequence["SpannedStream"]):
    """Streams in the order of their rows. One that plain hash ids or nothing identifies is kept as
    numbers and made at each access, because those of a long trace would fill the memory."""

    def __init__(self, rows: int, lengths: array[int], spans: HashSpans) -> None:
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
        picked = Streams(self._rows, lengths, HashSpans(EMPTY, EMPTY, EMPTY, EMPTY))
        picked._made = made
        return picked

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
        ends, offsets = self._spans.ends, self._spans.offsets
        known = range(min(number, len(ends)))
        keys: dict[int, int] = {index: offsets[ends[index]] for index in known}
        for index, stream in self._made.items():
            if index < number and stream.shared_tokens:
                keys[index] = stream.content_keys(0, 1, 1)[0]
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
        spans: HashSpans = self._spans
        first: i64 = spans.ends[index]
        last: i64 = spans.ends[index + 1]
        stops, offsets = spans.stops[first:last], spans.offsets[first:last]
        length: i64 = self._lengths[index]
        stream: SpanStream = SpanStream(index, self._rows, length, stops, offsets, salt)
        if not salt:
            stream.shared_tokens = spans.shared[index]
        return stream


class SpanStream:
    """A stream whose keys are spans of consecutive numbers.

    Its first `keep` tokens are those of `base`. From there on, `spans` (stop position, offset)
    identify the tokens; tokens outside all spans are in the region of `row` alone. `rows` is the
    number of streams in use: samples take regions above theirs.
    """

    input_length: i64
    named_tokens: i64
    """Tokens behind which all blocks are in the region of the row."""
    shared_tokens: i64
    """Tokens behind which no block ends that another stream has."""
    knows_tokens: bool
    salt: int
    """Offset of every key; 0 without a salt."""
    _row: i64
    _rows: i64
    _stops: vec[i64]
    _offsets: vec[i64]
    _base: SpannedStream | None
    _keep: i64

    def __init__(
        self,
        row: i64,
        rows: i64,
        input_length: i64,
        stops: vec[i64] = ALL,
        offsets: vec[i64] = EMPTY,
        salt: int = 0,
        base: SpannedStream | None = None,
        keep: i64 = 0,
    ) -> None:
        """The last of the spans is in the region of the row and has no end."""
        self._row, self._rows, self.input_length = row, rows, input_length
        self._stops = stops
        self._offsets = offsets if len(offsets) else append(EMPTY, unique_offset(row))
        self.named_tokens = stops[len(stops) - 2] if len(stops) > 1 else keep
        self.shared_tokens = self.named_tokens
        self._base, self._keep, self.salt = base, keep, salt
        self.knows_tokens = base is not None and base.knows_tokens

    def keys(self, first: int, last: int, block_size: int) -> list[int]:
        """Keys of the blocks `first .. last - 1` of `block_size` tokens."""
        return _salted(self.content_keys(first, last, block_size), self.salt)

    def contents(self, first: int, last: int, block_size: int) -> list[int]:
        """Keys: tokens are known by their prefix only."""
        return self.keys(first, last, block_size)

    def spans(self, block_size: int) -> list[Span]:
        """All blocks by the arithmetic of their keys, in order; the last span has no end."""
        if self._base is None:
            return block_spans(0, ENDLESS, block_size, self._stops, self._offsets, self.salt)
        found: list[Span] = []
        last: i64 = ENDLESS
        stream: SpannedStream | None = self
        # From the end to the beginning. A block that the end of what is kept divides is the
        # stream's own, as its last token is.
        while isinstance(stream, SpanStream) and last:
            own: i64 = stream._keep // block_size
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

    def _own_keys(self, first: i64, last: i64, block_size: i64) -> list[int]:
        position: i64 = (first + 1) * block_size - 1
        end: i64 = last * block_size
        keys: list[int] = []
        span: i64 = 0
        while position < end:
            while self._stops[span] <= position:
                span += 1
            stop: i64 = min(self._stops[span], end)
            offset: i64 = self._offsets[span]
            while position < stop:
                keys.append(position + offset)
                position += block_size
        return keys


@mypyc_attr(allow_interpreted_subclasses=True)
class TokenStream:
    """A stream of real token ids.

    The digest of a block is xxh64 over the digest of the block before (8 bytes, little-endian, left
    out for the first block) and its token ids as int64 (nano-vllm, `engine/block_manager.py`,
    `compute_hash`); the key is 2**64 more. `output` holds the generated tokens, as far as known, or
    is a function from their index (0 for the first) to the token. Blocks with an unknown token are
    in the region of `row` alone, of `rows` streams in use.
    """

    input_length: int
    salt: int
    _tokens: array[int]
    _numbers: dict[int, int]
    _inherited: int
    _next_token: Callable[[int], int] | None
    _keys: dict[int, list[int]]
    """Block size → keys of the leading blocks."""
    _row: int
    _rows: int

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
        self._next_token = None
        if callable(output):
            self._next_token = output
        else:
            self._tokens.extend(output)
        self.input_length = len(prompt)
        self._keys = {}
        self._row = row
        self._rows = rows
        self.salt = salt

    @property
    def knows_tokens(self) -> bool:
        """Its contents tell more than its keys."""
        return True

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
                # The digest alone, as nano-vllm chains it; the offset sets keys of digests apart.
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
            found.append((known, last, unique_offset(self._row) - 1 + block_size))
        return found

    def inherit(self, tokens: int) -> None:
        """Note that another stream begins with the first `tokens` tokens of this one."""
        self._inherited = max(self._inherited, tokens)

    @property
    def named_tokens(self) -> int:
        """Tokens behind which all blocks are in the region of the row."""
        # Any token may still become known.
        return maxsize if self._next_token else max(len(self._tokens), self._inherited)

    @property
    def shared_tokens(self) -> int:
        """Tokens behind which no block ends that another stream has."""
        return self.named_tokens

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
        own = unique_offset(self._row) - 1
        return range(own + (first + 1) * block_size, own + last * block_size + 1, block_size)

    def _known(self, length: int) -> int:
        """Number of known tokens, after asking for up to `length`."""
        if self._next_token is not None:
            while len(self._tokens) < length:
                self._tokens.append(self._next_token(len(self._tokens) - self.input_length))
        return len(self._tokens)


def unique_offset(row: int) -> int:
    """Offset of the region of a row, which holds what only this row has."""
    return -(row + 1) * REGION


def _sample_of(
    base: SpannedStream, index: int, row: int, rows: int, input_length: int, salt: int
) -> SpanStream:
    number = row + index * rows
    return SpanStream(number, rows, input_length, ALL, EMPTY, salt, base, input_length)


def _salted(keys: list[int], salt: int) -> list[int]:
    return [key + salt for key in keys] if salt else keys

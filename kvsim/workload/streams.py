"""What identifies the tokens of a request: keys of its blocks, one by one or in spans."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from collections.abc import Sequence as Seq
from sys import maxsize
from typing import NamedTuple, Protocol

Span = tuple[int, int, int]
"""Consecutive full blocks `first .. last - 1` of a stream. The key of block d is d * block_size +
`offset`. Neighbouring blocks have another offset."""


class Piece(NamedTuple):
    """Consecutive tokens of a stream, without the cache salt.

    Pieces of two streams with equal keys begin with the same token after the same tokens. They
    agree up to the end of the shorter one.
    """

    key: int
    """Key of the first token, computed as for a block of one token."""
    first: int
    """Position of the first token in the stream."""
    last: int
    """Position after the last token."""


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


def span_pieces(first: int, last: int, stops: Sequence[int], offsets: Sequence[int]) -> list[Piece]:
    """Pieces of the tokens `first .. last - 1`, by the spans that hold them (`SpanStream`)."""
    pieces: list[Piece] = []
    span = -1
    while first < last:
        span = bisect_right(stops, first, span + 1)
        stop = min(stops[span], last)
        pieces.append(Piece(first + offsets[span], first, stop))
        first = stop
    return pieces


def block_spans(
    first: int,
    last: int,
    block_size: int,
    stops: Sequence[int],
    offsets: Sequence[int],
    salt: int = 0,
) -> list[Span]:
    """The blocks `first .. last - 1` of a stream, by the spans of tokens that hold them, of which
    the last one has no end (`maxsize`).

    The key of a block is that of its last token.
    """
    found: list[Span] = []
    begin, further = first, salt + block_size - 1
    for stop, offset in zip(stops, offsets, strict=True):
        end = last if stop == maxsize else stop // block_size
        if end > last:
            end = last
        if end > begin:
            if found and found[-1][2] == offset + further:
                begin = found.pop()[0]
            found.append((begin, end, offset + further))
            begin = end
    return found


def joined(spans: Iterable[Span], salt: int = 0) -> list[Span]:
    """Consecutive spans with `salt` added to their keys, and neighbours of one offset made one."""
    found: list[Span] = []
    for first, last, offset in spans:
        if found and found[-1][2] == offset + salt:
            first = found.pop()[0]
        found.append((first, last, offset + salt))
    return found

"""Consecutive tokens, or blocks, whose identity a stream knows as a whole."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from sys import maxsize

from kvsim.workload.streams import Piece, Span


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

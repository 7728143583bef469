"""Consecutive tokens, or blocks, whose identity a stream knows as a whole."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from math import inf

from kvsim.engine.request import Piece, Span


def span_pieces(
    first: int, last: int, stops: Sequence[float], offsets: Sequence[int]
) -> list[Piece]:
    """Pieces of the tokens `first .. last - 1`, by the spans that hold them (`SpanStream`)."""
    pieces: list[Piece] = []
    span = -1
    while first < last:
        span = bisect_right(stops, first, span + 1)
        stop = int(min(stops[span], last))
        pieces.append(Piece(first + offsets[span], first, stop))
        first = stop
    return pieces


def block_spans(
    first: int, last: int, block_size: int, stops: Sequence[float], offsets: Sequence[int]
) -> list[Span]:
    """The blocks `first .. last - 1` of a stream, by the spans of tokens that hold them.

    The key of a block is that of its last token.
    """
    found: list[Span] = []
    for stop, offset in zip(stops, offsets, strict=True):
        end = last if stop == inf else min(int(stop) // block_size, last)
        if end > first:
            found.append((first, end, offset + block_size - 1))
            first = end
    return found


def joined(spans: Iterable[Span], salt: int = 0) -> list[Span]:
    """Consecutive spans with `salt` added to their keys, and neighbours of one offset made one."""
    found: list[Span] = []
    for first, last, offset in spans:
        if found and found[-1][2] == offset + salt:
            first = found.pop()[0]
        found.append((first, last, offset + salt))
    return found

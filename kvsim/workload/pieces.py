"""Tokens in a row of which a stream knows the identity as a whole."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """Consecutive tokens of a stream, salts apart.

    Pieces of two streams that have the same key begin with the same token, behind the same tokens;
    they agree as far as the shorter one reaches.
    """

    key: int
    """Of the first token, as of a block of one token."""
    first: int
    """Its place in the stream."""
    last: int
    """The place behind the last token."""


def span_pieces(
    first: int, last: int, stops: Sequence[float], offsets: Sequence[int]
) -> list[Piece]:
    """The tokens `first .. last - 1`, by the spans that hold them (`keys.SpanStream`)."""
    pieces: list[Piece] = []
    span = -1
    while first < last:
        span = bisect_right(stops, first, span + 1)
        stop = int(min(stops[span], last))
        pieces.append(Piece(first + offsets[span], first, stop))
        first = stop
    return pieces

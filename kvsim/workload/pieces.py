"""Consecutive tokens whose identity a stream knows as a whole."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """Consecutive tokens of a stream, without regard to salts.

    Pieces of two streams with equal keys begin with the same token after the same tokens. They
    agree up to the end of the shorter one.
    """

    key: int
    """Key of the first token, as of a block of one token."""
    first: int
    """Position of the first token in the stream."""
    last: int
    """Position after the last token."""


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

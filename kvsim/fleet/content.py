"""What a router sees of a prompt: characters and keys, made from its token stream."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property

import numpy as np

from kvsim.fleet.routers.router import TOKEN_CHARACTERS, Asked
from kvsim.workload.keys import SpanStream, TokenStream
from kvsim.workload.trace import Row

_FIRST, _NUMBER = np.uint32(0xE0000), np.uint32(0x30000)
"""Code points of the characters that stand for tokens, far from surrogates."""
_MIXER, _BITS = np.uint64(0x9E3779B97F4A7C15), 0xFFFF_FFFF_FFFF_FFFF


class StreamContent:
    """Content of a request of a trace, whose tokens are known by identity only.

    A token is `TOKEN_CHARACTERS` of the text. Which ones follows from the token and all before it,
    so prompts that begin alike have texts that begin alike.
    """

    def __init__(self, stream: SpanStream | TokenStream, input_length: int) -> None:
        self._stream, self._length = stream, input_length

    @cached_property
    def text(self) -> str:
        parts = [
            (np.uint64(key & _BITS) + np.arange(end - first, dtype=np.uint64)) * _MIXER
            for key, first, end in self._stream.pieces(self._length)
        ]
        codes = (np.concatenate(parts) >> np.uint64(40)).astype("<u4")
        codes = _FIRST + codes % _NUMBER
        return str(codes.repeat(TOKEN_CHARACTERS).data, "utf-32-le")

    def keys(self, block_size: int) -> Sequence[Hashable]:
        return self._stream.keys(0, self._length // block_size, block_size)


def asked_of(row: Row, stream: SpanStream | TokenStream) -> Asked:
    """A request as a router is shown it; `stream`: what its row says."""
    return Asked(row.id, row.input_length, StreamContent(stream, row.input_length), row.session)

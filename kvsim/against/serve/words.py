"""A stand-in for a tokenizer: plain, the same everywhere, and none of a real model.

A token is a word of at most six letters with the space before it, up to three digits, white space,
or any other character: about as many as real tokenizers make of English. Its id is a hash of its
text. Outputs are words of four letters, each of them one token, so that an answer that comes back
in the next turn is known by the tokens that were generated.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from xxhash import xxh32_intdigest

VOCABULARY = 1 << 17
"""Ids are below."""
_PIECE = re.compile(r"\s?[A-Za-z]{1,6}|\s?\d{1,3}|\s+|.", re.DOTALL)
_SYLLABLES = [first + second for first in "bdfgklmnprstvwyz" for second in "aeio"]


@lru_cache(1 << 16)
def _id_of(piece: str) -> int:
    return xxh32_intdigest(piece.encode(errors="surrogatepass")) % VOCABULARY


def tokens_of(text: str) -> list[int]:
    """The tokens of a text."""
    return [*map(_id_of, _PIECE.findall(text))]


def tokens_of_chat(messages: Iterable[tuple[str, str]], *, opens: bool = True) -> list[int]:
    """The tokens of a conversation, as (role, text): each turn begins with a token for its role and
    ends with one. `opens`: it ends where the answer begins."""
    found: list[int] = []
    for role, text in messages:
        found += [_id_of(f"<|{role}|>"), *tokens_of(text), _id_of("<|end|>")]
    return [*found, _id_of("<|assistant|>")] if opens else found


_MIX = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)
_FILLER = [f" {first}{second}" for first in _SYLLABLES for second in _SYLLABLES]
_FILLER_TEXTS = np.array(_FILLER, "S")
_FILLER_IDS = np.array([*map(_id_of, _FILLER)], np.int64)
WORD_BYTES = _FILLER_TEXTS.itemsize
"""Of the text of each token of an output."""


def filler(request: int, length: int) -> tuple[bytes, array[int]]:
    """The output of a request: its text, and the ids of its tokens. No two requests begin alike, as
    far as chance goes."""
    # splitmix64, whose numbers no version of a library changes.
    mixed = (np.arange(1, length + 1, dtype=np.uint64) + np.uint64(request << 24)) * _MIX[0]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[1]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[2]
    places = (mixed >> np.uint64(52)).astype(np.int64)
    return _FILLER_TEXTS[places].tobytes(), array("q", _FILLER_IDS[places].tobytes())

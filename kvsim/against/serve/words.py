"""A stand-in for a tokenizer: plain, the same everywhere, and none of a real model.

A token is a word of at most six letters with the space before it, up to three digits, white space,
or any other character: about as many as real tokenizers make of English. Its id is a hash of its
text. Outputs are words of four letters, each of them one token, so that an answer that comes back
in the next turn is known by the tokens that were generated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from xxhash import xxh32_intdigest, xxh64_intdigest

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


FILLER = [f" {first}{second}" for first in _SYLLABLES for second in _SYLLABLES]
"""The words of outputs."""
_FILLER_IDS = [*map(_id_of, FILLER)]


def filler(request: int, length: int) -> tuple[Sequence[int], Sequence[int]]:
    """The output of a request: places in `FILLER`, and the ids of these tokens. No two requests
    begin alike, as far as chance goes."""
    state, places = xxh64_intdigest(request.to_bytes(8, "little")), []
    for _ in range(length):
        state = (state * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        places.append(state >> 52)
    return places, [_FILLER_IDS[place] for place in places]

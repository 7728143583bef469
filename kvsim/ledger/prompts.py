"""Splits the prompt of every request by where its cache hits went, after the run.

The order of admissions and releases says what had been computed when a request was admitted.
Streams are compared as pieces of tokens rather than as blocks. Each known piece has an entry that
says how far it is known. So a prompt costs as many look-ups as it has pieces, and a prefix that
ends within a block is seen. The meaning of the parts: `kvsim.ledger.parts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.request import Request
from kvsim.ledger.parts import PROMPT_PARTS
from kvsim.records import transitions as kinds
from kvsim.workload.keys import SpanStream, TokenStream
from kvsim.workload.pieces import Piece

Ints = NDArray[np.int64]

_RELEASE, _ADMISSION = range(2)
"""Order of events at one instant: blocks are released before requests are admitted."""


class Rules(NamedTuple):
    """What decides which tokens of a prompt can be hit at all."""

    block_size: int
    withheld: int
    """Tokens at the end that are not looked up (`blocks.sharing.FullHit`)."""


class Known:
    """The tokens that have been computed so far, each known together with all tokens before it."""

    def __init__(self) -> None:
        self._upto: dict[tuple[int, int], int] = {}
        """(salt, key of a piece) → the place behind the last token known of it."""

    def add(self, salt: int, pieces: Iterable[Piece]) -> None:
        """Note that these leading tokens of a stream are known."""
        upto = self._upto
        for key, _, last in pieces:
            if upto.get((salt, key), 0) < last:
                upto[salt, key] = last

    def prefix(self, salt: int, pieces: Iterable[Piece]) -> int:
        """How many leading tokens of a stream are known."""
        known = 0
        for key, first, last in pieces:
            known = max(first, min(last, self._upto.get((salt, key), 0)))
            if known < last:
                break
        return known


def split_prompts(
    requests: Sequence[Request], transitions: Mapping[str, Ints], rules: Rules
) -> dict[str, Ints]:
    """`PROMPT_PARTS` of each request, in tokens; 0 for one that was never admitted."""
    parts = np.zeros((len(requests), len(PROMPT_PARTS)), dtype=np.int64)
    past, coming, anywhere = Known(), Known(), Known()
    lost = _first_losses(transitions)
    salted = any(_stream(request).salt for request in requests)
    for _, kind, place, tokens in sorted(_events(requests, transitions, rules.block_size)):
        request = requests[place]
        stream = _stream(request)
        if kind == _RELEASE:
            pieces = stream.pieces(tokens)
            past.add(stream.salt, pieces)
            if salted:
                anywhere.add(0, pieces)
            continue
        pieces = stream.pieces(request.input_length)
        known = past.prefix(stream.salt, pieces)
        held = coming.prefix(stream.salt, pieces)
        elsewhere = anywhere.prefix(0, pieces) if salted else 0
        coming.add(stream.salt, pieces)
        whole = classify(request.input_length, request.cached_tokens, known, held, elsewhere, rules)
        parts[place] = cut_off(whole, _reached(request, lost))
    return {name: parts[:, place] for place, name in enumerate(PROMPT_PARTS)}


def classify(
    length: int, hit: int, past: int, coming: int, elsewhere: int, rules: Rules
) -> tuple[int, ...]:
    """`PROMPT_PARTS` of a prompt of `length` tokens, the first `hit` of which were found.

    `past`: leading tokens that were computed before. `coming`: leading tokens that an earlier
    admitted request had computed or was about to compute. `elsewhere`: leading tokens that were
    computed under any cache salt.
    """
    size = rules.block_size
    looked_up = (length - rules.withheld) // size * size
    # The part of a block that was found and still had to be computed.
    begin = min(-(-hit // size) * size, length)
    known = max(begin, min(past, length), min(coming, length))
    whole = max(begin, known // size * size)
    last_block = begin - hit
    if begin >= looked_up:
        last_block += whole - begin
        begin = whole
    evicted = max(0, min(past // size * size, whole) - begin)
    concurrent = whole - begin - evicted
    other_salt = max(0, min(elsewhere, length) // size * size - known)
    cold = length - known - other_salt
    return hit, last_block, evicted, concurrent, known - whole, other_salt, cold, 0


def cut_off(parts: tuple[int, ...], reached: int) -> tuple[int, ...]:
    """Cut the parts off after the first `reached` tokens; the last part takes the rest."""
    kept = []
    for tokens in parts[:-1]:
        kept.append(min(tokens, reached))
        reached -= kept[-1]
    return *kept, sum(parts) - sum(kept)


def _events(
    requests: Sequence[Request], transitions: Mapping[str, Ints], block_size: int
) -> Iterator[tuple[tuple[int, int, int], int, int, int]]:
    """(order, kind, index, tokens that are computed) of each admission and release."""
    for place, request in enumerate(requests):
        if request.first_scheduled_ns >= 0:
            order = request.first_scheduled_ns, _ADMISSION, request.arrival_ns
            yield order, _ADMISSION, place, 0
            if request.finish_ns >= 0:
                yield (request.finish_ns, _RELEASE, 0), _RELEASE, place, _computed(request)
    losing = np.isin(transitions["kind"], (kinds.PREEMPTED, kinds.SWAPPED_OUT))
    columns = (transitions[name][losing].tolist() for name in kinds.TRANSITION_COLUMNS)
    for place, kind, time_ns, value in zip(*columns, strict=True):
        tokens = value * block_size if kind == kinds.SWAPPED_OUT else value
        yield (time_ns, _RELEASE, 0), _RELEASE, place, min(tokens, _computed(requests[place]))


def _first_losses(transitions: Mapping[str, Ints]) -> dict[int, tuple[int, int]]:
    """Request → when it lost its blocks for the first time, and the tokens computed by then."""
    losses: dict[int, tuple[int, int]] = {}
    preempted = transitions["kind"] == kinds.PREEMPTED
    columns = (transitions[name][preempted].tolist() for name in ("request", "time_ns", "value"))
    for place, time_ns, value in zip(*columns, strict=True):
        losses.setdefault(place, (time_ns, value))
    return losses


def _reached(request: Request, losses: Mapping[int, tuple[int, int]]) -> int:
    """Prompt tokens computed or found before the request lost its blocks or the run ended.

    The progress of an incomplete prompt is unknown; then only its hits are counted.
    """
    first = request.first_token_ns
    if request.index in losses:
        time_ns, tokens = losses[request.index]
        if first < 0 or first > time_ns:
            return max(request.cached_tokens, min(tokens, request.input_length))
    return request.input_length if first >= 0 else request.cached_tokens


def _computed(request: Request) -> int:
    """Tokens of the first sample whose KV existed in the end: all but the newest."""
    return max(0, request.input_length + request.output_tokens // request.n - 1)


def _stream(request: Request) -> SpanStream | TokenStream:
    stream: Any = request.sequences[0].identities(0)
    return stream  # type: ignore[no-any-return]

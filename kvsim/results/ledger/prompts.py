"""Splits the prompt of every request by where its cache hits went, after the run.

The order of admissions and releases says what had been computed when a request was admitted.
Streams are compared as spans of tokens rather than as blocks. Each known span has an entry that
says how far it is known. So a prompt costs as many look-ups as it has spans, and a prefix that ends
within a block is seen. The meaning of the parts: `kvsim.results.ledger`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsim.core import records as kinds
from kvsim.results.ledger import PROMPT_PARTS
from kvsim.results.ledger.account import check_sums
from kvsim.results.statistics import Ints
from kvsim.workload.streams import Span, SpannedStream, Streams

Bools = NDArray[np.bool_]

_RELEASE, _ADMISSION = range(2)
"""Order of events at one instant: blocks are released before requests are admitted."""
_COLD = PROMPT_PARTS.index("cold_tokens")


class Rules(NamedTuple):
    """What decides which tokens of a prompt can be hit at all."""

    block_size: int
    withheld: int
    """Tokens at the end that are not looked up (`blocks.sharing.FullHit`)."""


class Known:
    """The tokens that have been computed so far, each known together with all tokens before it."""

    def __init__(self) -> None:
        self._upto: dict[int, int] = {}
        """Key of the first token of a span → the place behind the last token known of it."""

    def add(self, spans: Iterable[Span], tokens: int, salt: int = 0) -> None:
        """Note that the first `tokens` tokens of a stream are known, with `salt` taken off their
        keys."""
        for first, last, offset in spans:
            if first >= tokens:
                break
            key, last = first + offset - salt, min(last, tokens)
            if self._upto.get(key, 0) < last:
                self._upto[key] = last

    def prefix(self, spans: Iterable[Span], tokens: int, salt: int = 0) -> int:
        """How many of the first `tokens` tokens of a stream are known."""
        known = 0
        for first, last, offset in spans:
            last = min(last, tokens)
            if known < first or first >= last:
                break
            known = max(first, min(last, self._upto.get(first + offset - salt, 0)))
        return known


def account_prompts(
    streams: Streams, requests: Mapping[str, Any], transitions: Mapping[str, Ints], rules: Rules
) -> dict[str, Ints]:
    """`PROMPT_PARTS` of the requests of a run with prefix caching, in tokens; 0 for one that was
    never admitted.

    `streams`: of the requests, in order, and maybe more; `requests`: their columns. A prompt whose
    first token no other stream has is all cold; only the others are compared.
    """
    lengths, reached = requests["input_length"], _reached(requests, transitions)
    parts = np.zeros((len(lengths), len(PROMPT_PARTS)), dtype=np.int64, order="F")
    alone, salted = np.array(streams.alone(len(lengths)), dtype=bool), streams.salted
    admitted = requests["first_scheduled_ns"] >= 0
    cold = alone & admitted & (requests["num_cached_tokens"] == 0)
    parts[cold, _COLD] = lengths[cold]
    past, coming, anywhere = Known(), Known(), Known()
    events = _events(requests, transitions, rules.block_size, ~cold)
    hits = requests["num_cached_tokens"]
    made: dict[int, SpannedStream] = {}
    for _, kind, place, tokens in sorted(events):
        stream = made.get(place) or made.setdefault(place, streams[place])
        # No other stream has what lies behind these.
        spans, shared = stream.spans(1), min(tokens, stream.shared_tokens)
        if kind == _RELEASE:
            past.add(spans, shared)
            if salted:
                anywhere.add(spans, shared, stream.salt)
            continue
        known, held = past.prefix(spans, shared), coming.prefix(spans, shared)
        elsewhere = anywhere.prefix(spans, shared, stream.salt) if salted else 0
        coming.add(spans, shared)
        parts[place] = classify(tokens, int(hits[place]), known, held, elsewhere, rules)
    cut_off(parts, reached)
    found = {name: parts[:, place] for place, name in enumerate(PROMPT_PARTS)}
    check_sums("a prompt", found, PROMPT_PARTS, np.where(admitted, lengths, 0))
    return found


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
    # All that is looked up was hit. What else is known lies in the last block.
    if begin >= looked_up:
        last_block += whole - begin
        begin = whole
    evicted = max(0, min(past // size * size, whole) - begin)
    concurrent = whole - begin - evicted
    other_salt = max(0, min(elsewhere, length) // size * size - known)
    cold = length - known - other_salt
    return hit, last_block, evicted, concurrent, known - whole, other_salt, cold, 0


def cut_off(parts: Ints, reached: Ints) -> None:
    """Cut the parts of each prompt, a row, off after its first `reached` tokens, in place; the last
    part takes the rest."""
    left, rest = reached.copy(), parts[:, -1]
    for tokens in parts.T[:-1]:
        kept = np.minimum(tokens, left)
        left -= kept
        rest += tokens - kept
        tokens[:] = kept


def _events(
    requests: Mapping[str, Ints], transitions: Mapping[str, Ints], block_size: int, asked: Bools
) -> Iterator[tuple[tuple[int, int, int], int, int, int]]:
    """(order, kind, index, tokens) of each admission and release of the requests that are `asked`
    about; the tokens are those of the prompt, or those that are computed."""
    # Of the first sample: the newest token has no KV yet.
    computed = requests["input_length"] + requests["output_tokens"] // requests["n"] - 1
    computed = np.maximum(0, computed)
    chosen = np.flatnonzero(asked & (requests["first_scheduled_ns"] >= 0))
    names = ("first_scheduled_ns", "arrival_ns", "finish_ns", "input_length")
    columns = (requests[name][chosen].tolist() for name in names)
    for place, start_ns, arrival_ns, finish_ns, length in zip(
        chosen.tolist(), *columns, strict=True
    ):
        yield (start_ns, _ADMISSION, arrival_ns), _ADMISSION, place, length
        if finish_ns >= 0:
            yield (finish_ns, _RELEASE, 0), _RELEASE, place, int(computed[place])
    losing = np.isin(transitions["kind"], (kinds.PREEMPTED, kinds.SWAPPED_OUT))
    losing &= asked[transitions["request"]]
    columns = (transitions[name][losing].tolist() for name in kinds.TRANSITION_COLUMNS)
    for place, kind, time_ns, value in zip(*columns, strict=True):
        tokens = value * block_size if kind == kinds.SWAPPED_OUT else value
        yield (time_ns, _RELEASE, 0), _RELEASE, place, min(tokens, int(computed[place]))


def _reached(requests: Mapping[str, Ints], transitions: Mapping[str, Ints]) -> Ints:
    """Prompt tokens of each request computed or found before it lost its blocks or the run ended.

    The progress of an incomplete prompt is unknown; then only its hits are counted.
    """
    lengths, cached = requests["input_length"], requests["num_cached_tokens"]
    firsts_ns = requests["first_token_ns"]
    reached: Ints = np.where(firsts_ns >= 0, lengths, cached)
    lost = transitions["kind"] == kinds.PREEMPTED
    request, time_ns, tokens = (transitions[name][lost] for name in ("request", "time_ns", "value"))
    request, first = np.unique(request, return_index=True)  # The first loss of each.
    early = (firsts_ns[request] < 0) | (firsts_ns[request] > time_ns[first])
    request, tokens = request[early], tokens[first][early]
    reached[request] = np.maximum(cached[request], np.minimum(tokens, lengths[request]))
    return reached

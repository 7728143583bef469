"""Gives requests without content shared prefixes, so that an assumed share of tokens hits."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from random import Random

from kvsim.errors import ConfigError
from kvsim.workload.keys import streams
from kvsim.workload.reuse import ceiling_tokens
from kvsim.workload.synthetic import made_trace
from kvsim.workload.trace import Row, SegmentContent, Trace

PREFIXES = 16
_HALVINGS = 24


def assume_hit_rate(
    trace: Trace, hit_rate: float, block_size: int, *, prefixes: int = PREFIXES, seed: int = 0
) -> Trace:
    """A copy of the trace in which `hit_rate` of the prompt tokens hit an unlimited cache.

    Each request begins with one of `prefixes` shared texts; the k-th is chosen 1/k times as often
    as the first. The same share of every prompt is shared text. That share is chosen to give the
    hit rate, at blocks of `block_size` tokens and one request at a time. A real engine hits less:
    it evicts blocks, and requests that are admitted together do not hit each other.

    Raises `ConfigError` if the trace has content of its own, or if no share is enough.
    """
    if any(row.content is not None for row in trace.rows):
        raise ConfigError(
            "--hit-rate: the trace says what its requests share; leave it out, the hit rate follows"
        )
    if not 0 < hit_rate < 1:
        raise ConfigError(f"--hit-rate: {hit_rate:g} is not between 0 and 1")
    random = Random(f"kvsim hit rate {seed}")
    weights = [1 / (k + 1) for k in range(prefixes)]
    chosen = random.choices(range(prefixes), weights, k=len(trace.rows))
    share = _share(trace, chosen, hit_rate, block_size)
    rows = _shared(trace.rows, chosen, share)
    shared = dataclasses.replace(trace, rows=rows)
    reached = _share_of_tokens(rows, ceiling_tokens(rows, streams(shared), block_size))
    note = (
        f"assumed: {100 * share:.1f} % of every prompt is one of {prefixes} shared beginnings;"
        f" {100 * reached:.1f} % of the prompt tokens hit a cache without limit"
    )
    made = made_trace(trace.path, rows, f"{trace.path} --hit-rate {hit_rate:g}", note)
    return dataclasses.replace(made, path=trace.path, notes=[*trace.notes, note])


def _share(trace: Trace, chosen: Sequence[int], hit_rate: float, block_size: int) -> float:
    """The least share of every prompt that reaches the hit rate, by bisection."""
    most = _rate(trace.rows, chosen, 1.0, block_size)
    if most < hit_rate:
        raise ConfigError(
            f"--hit-rate: {hit_rate:g} cannot be reached with {len(set(chosen))} prefixes and"
            f" blocks of {block_size} tokens, at most {most:.3f}; take fewer --prefixes"
        )
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        reached = _rate(trace.rows, chosen, middle, block_size)
        low, high = (low, middle) if reached >= hit_rate else (middle, high)
    return high


def _shared(rows: Sequence[Row], chosen: Sequence[int], share: float) -> list[Row]:
    """Rows whose prompts share their first part, of length `share`, within each choice."""
    return [
        dataclasses.replace(row, content=_content(number, round(row.input_length * share)))
        for row, number in zip(rows, chosen, strict=True)
    ]


def _content(number: int, tokens: int) -> SegmentContent | None:
    return SegmentContent(((f"prefix-{number}", tokens),)) if tokens else None


def _rate(rows: Sequence[Row], chosen: Sequence[int], share: float, block_size: int) -> float:
    """The share of the prompt tokens that would hit a cache without limit: of each prompt the whole
    blocks of shared text that were there before, but never its last token."""
    known, hits = defaultdict[object, int](int), 0
    for row, number in zip(rows, chosen, strict=True):
        text = number, row.scope, row.lora or None, row.salt
        blocks = round(row.input_length * share) // block_size
        hits += min(blocks, known[text], (row.input_length - 1) // block_size) * block_size
        known[text] = max(known[text], blocks)
    return _share_of_tokens(rows, hits)


def _share_of_tokens(rows: Sequence[Row], tokens: int) -> float:
    return tokens / sum(row.input_length for row in rows)

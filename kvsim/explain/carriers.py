"""Finds the requests and the blocks in which two runs differ most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from kvsim.explain.attribution import part_ns, time_parts
from kvsim.explain.pairing import Pairs
from kvsim.results.ledger.parts import PROMPT_LABELS
from kvsim.results.phases import ints

LISTED = 15

BLOCKS = {
    **{part: f"prompt: {label}" for part, label in PROMPT_LABELS.items()},
    "recached_tokens": "found again after a preemption",
    "recomputed_tokens": "computed again after a preemption",
    "swapped_out_blocks": "swapped out",
    "swapped_in_blocks": "swapped in",
}
"""Column of requests → what happened to these tokens or blocks."""


class Carrier(NamedTuple):
    """One request and its change."""

    id: str
    e2el_ns: tuple[int, int]
    part: str
    """The part of its time that changed most."""
    part_ns: int
    """By how much: other minus first."""
    preemptions: tuple[int, int]


class Share(NamedTuple):
    """How a difference is spread over requests."""

    half: int
    """Number of requests, from the most changed down, that carry half of all change."""
    changed: int
    """Number of requests that changed at all."""
    total: int


class Blocks(NamedTuple):
    """Blocks with one fate, in both runs, and the request in which their number changed most."""

    column: str
    blocks: tuple[float, float]
    id: str
    change: float


def carriers(
    pairs: Pairs, first: Mapping[str, Any], other: Mapping[str, Any]
) -> tuple[Share, list[Carrier]]:
    """How the change of E2EL is spread, and the requests that changed most."""
    before, after = (
        (ints(requests["finish_ns"]) - ints(requests["arrival_ns"]))[rows]
        for requests, rows in ((first, pairs.first_rows), (other, pairs.other_rows))
    )
    changes = after - before
    order = np.argsort(-np.abs(changes), kind="stable")
    sizes = np.abs(changes)[order]
    half = int(np.searchsorted(np.cumsum(sizes) * 2, sizes.sum())) + 1 if sizes.any() else 0
    names = time_parts(first, other)
    table = np.array(
        [
            part_ns(other, part)[pairs.other_rows] - part_ns(first, part)[pairs.first_rows]
            for part in names
        ]
    )
    listed = []
    for i in map(int, order[:LISTED]):
        if changes[i]:
            most = int(np.abs(table[:, i]).argmax())
            listed.append(
                Carrier(
                    str(first["id"][pairs.first_rows[i]]),
                    (int(before[i]), int(after[i])),
                    names[most],
                    int(table[most, i]),
                    (
                        int(first["num_preemptions"][pairs.first_rows[i]]),
                        int(other["num_preemptions"][pairs.other_rows[i]]),
                    ),
                )
            )
    return Share(half, int((changes != 0).sum()), len(changes)), listed


def blocks(
    pairs: Pairs, first: Mapping[str, Any], other: Mapping[str, Any], block_size: int
) -> list[Blocks]:
    """Blocks by fate, where their number changed; tokens count as blocks of the first run."""
    found = []
    for column in BLOCKS:
        if column not in first or column not in other:
            continue
        scale = 1 if column.endswith("_blocks") else block_size
        before = ints(first[column])[pairs.first_rows] / scale
        after = ints(other[column])[pairs.other_rows] / scale
        changes = after - before
        if changes.any():
            most = int(np.abs(changes).argmax())
            id = str(first["id"][pairs.first_rows[most]])
            sums = float(before.sum()), float(after.sum())
            found.append(Blocks(column, sums, id, float(changes[most])))
    return found

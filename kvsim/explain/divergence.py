"""Finds where two runs diverge: the first step that their schedulers decided differently, and why.

Until that step both runs saw the same and decided the same. So their state at that step (free
blocks, the head of the queue, the preempted requests) is the cause of everything that follows.
Times may differ before, because another device takes other times for the same decisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from kvsim.core.schema import BLOCKED
from kvsim.explain.attribution import Pairs
from kvsim.results.metrics import BLOCKED_BY
from kvsim.results.numerals import count, plural, seconds

DECISIONS = (
    "preempted_recompute",
    "preempted_swap",
    "swapped_in",
    "swap_out_blocks",
    "swap_in_blocks",
    "blocked",
    "prefill_seqs",
    "cached_tokens",
    "prefill_tokens",
    "decode_seqs",
    "batched_tokens",
    "context_tokens",
    "copied_blocks",
    "ignored",
    "finished",
)
"""Columns of a step that hold decisions of the scheduler, the most telling first."""

STATES = ("waiting", "running", "swapped", "used_blocks", "cached_blocks", "free_blocks")
"""Columns of a step that hold the state after composing it."""

Row = dict[str, int]


class Divergence(NamedTuple):
    """The first step that differs."""

    step: int
    """Number of the step, from 0, the same in both runs."""
    rows: tuple[Row, Row]
    """Its columns in both runs; empty for a run that had ended."""
    before: tuple[Row, Row]
    """Columns of the step before it; empty if it is the first."""
    columns: tuple[str, ...]
    """Columns of `DECISIONS` that differ; empty if only one run goes on."""
    slower_from: int | None
    """The first earlier step with another duration or another start, if there is one."""


def first_divergence(first: Mapping[str, Any], other: Mapping[str, Any]) -> Divergence | None:
    """The first step that differs; None if all steps of both runs hold the same decisions."""
    lengths = len(first["start_ns"]), len(other["start_ns"])
    common = min(lengths)
    different = _differing(first, other, DECISIONS, common)
    step = int(different.argmax()) if different.any() else common
    if step == common and lengths[0] == lengths[1]:
        return None
    timed = _differing(first, other, ("start_ns", "end_ns"), step)
    rows = _row(first, step), _row(other, step)
    return Divergence(
        step,
        rows,
        (_row(first, step - 1), _row(other, step - 1)),
        tuple(name for name in DECISIONS if all(rows) and rows[0][name] != rows[1][name]),
        int(timed.argmax()) if timed.any() else None,
    )


class Concerned(NamedTuple):
    """The first request that was scheduled at different times."""

    id: str
    instants_ns: tuple[int, int]
    """When it was first scheduled, in each run."""


def first_concerned(
    pairs: Pairs, first: Mapping[str, Any], other: Mapping[str, Any]
) -> Concerned | None:
    """The first request completed by both runs that was scheduled at different times, if any."""
    before = np.asarray(first["first_scheduled_ns"])[pairs.first_rows]
    after = np.asarray(other["first_scheduled_ns"])[pairs.other_rows]
    (different,) = np.nonzero(before != after)
    if not len(different):
        return None
    i = int(different[np.minimum(before, after)[different].argmin()])
    id = str(first["id"][pairs.first_rows[i]])
    return Concerned(id, (int(before[i]), int(after[i])))


def concerned_words(found: Concerned | None, names: tuple[str, str]) -> list[str]:
    """The request and its times, in a sentence."""
    if found is None:
        return []
    instants = [
        f"after {ns / 1e9:,.3f} s in {name}"
        for ns, name in zip(found.instants_ns, names, strict=True)
    ]
    return [
        f"Request {found.id} is the first that was scheduled at another time:"
        f" {' and '.join(instants)}."
    ]


def divergence_words(
    found: Divergence | None, names: tuple[str, str], pools: tuple[Any, Any]
) -> list[str]:
    """Where the runs diverge and why, in sentences; `pools`: numbers of GPU blocks."""
    if found is None:
        return ["Both runs made the same decisions from the first step to the last."]
    first, other = names
    if not all(found.rows):
        longer = names[0 if found.rows[0] else 1]
        return [f"All {plural(found.step, 'step')} were the same; then {longer} went on alone."]
    instants = [seconds(row["start_ns"] / 1e9) for row in found.rows]
    when = instants[0] if instants[0] == instants[1] else f"{instants[0]} and {instants[1]}"
    until = f"The first {plural(found.step, 'step')} made the same decisions. " * bool(found.step)
    did = [_decided(row, found.columns) for row in found.rows]
    sentences = [
        f"{until}At step {count(found.step)} (after {when}) {first} {did[0]}; {other} {did[1]}.",
        " ".join(_holdings(n, r, p) for n, r, p in zip(names, found.rows, pools, strict=True)),
    ]
    if found.slower_from is not None:
        sentences.append(
            f"Times differ from step {count(found.slower_from)} on, before any decision did."
        )
    return sentences


def _differing(
    first: Mapping[str, Any], other: Mapping[str, Any], names: tuple[str, ...], length: int
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    different = np.zeros(length, dtype=bool)
    for name in names:
        different |= np.asarray(first[name])[:length] != np.asarray(other[name])[:length]
    return different


def _row(steps: Mapping[str, Any], step: int) -> Row:
    if not 0 <= step < len(steps["start_ns"]):
        return {}
    return {name: int(column[step]) for name, column in steps.items()}


def _decided(row: Row, columns: tuple[str, ...]) -> str:
    """What a step did, as far as it differs from the other run's step."""
    words = []
    preempted = row["preempted_recompute"] + row["preempted_swap"]
    if {"preempted_recompute", "preempted_swap"} & set(columns):
        mode = "swap" if row["preempted_swap"] else "recompute"
        victims = f"{plural(preempted, 'request')} by {mode}" if preempted else "none"
        words.append(f"preempted {victims}")
    if "swapped_in" in columns:
        words.append(f"swapped {plural(row['swapped_in'], 'request')} in")
    if "blocked" in columns:
        reason = BLOCKED_BY.get(BLOCKED[row["blocked"]])
        words.append(
            f"refused the head of the queue ({reason})" if reason else "refused no request"
        )
    if "cached_tokens" in columns:
        words.append(f"found {plural(row['cached_tokens'], 'prompt token')} in the cache")
    if {"prefill_seqs", "prefill_tokens"} & set(columns):
        requests, tokens = row["prefill_seqs"], row["prefill_tokens"]
        words.append(
            f"computed {plural(tokens, 'prompt token')} of {plural(requests, 'request')}"
            if requests
            else "computed no prompt"
        )
    if "decode_seqs" in columns:
        words.append(f"decoded {plural(row['decode_seqs'], 'sequence')}")
    if not words:
        name = columns[0]
        words.append(f"had {count(row[name])} {name.replace('_', ' ')}")
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def _holdings(name: str, row: Row, pool: Any) -> str:
    reusable = f", {count(row['cached_blocks'])} reusable" if row["cached_blocks"] else ""
    of = f" of {count(pool)}" if pool else ""
    return (
        f"{name} then had {count(row['free_blocks'])}{of} blocks free{reusable},"
        f" {count(row['running'])} requests running and {count(row['waiting'])} waiting."
    )

"""Runs of consecutive hash ids, in which a prompt of thousands of ids is a handful of runs."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter

from kvsim.workload.trace import HashContent, Runs

_count = itemgetter(1)


def collapse(ids: Iterable[int]) -> Runs:
    """The longest runs that spell out `ids`."""
    runs: list[tuple[int, int]] = []
    start = end = -1
    for one in ids:
        if one == end:
            end += 1
        else:
            if end > start:
                runs.append((start, end - start))
            start, end = one, one + 1
    if end > start:
        runs.append((start, end - start))
    return tuple(runs)


def merge(runs: Iterable[tuple[int, int]]) -> Runs:
    """Join adjacent runs into the longest runs of the same ids."""
    merged: list[tuple[int, int]] = []
    for start, count in runs:
        if merged and start == merged[-1][0] + merged[-1][1]:
            merged[-1] = (merged[-1][0], merged[-1][1] + count)
        else:
            merged.append((start, count))
    return tuple(merged)


def runs_of(content: HashContent) -> Runs:
    """The ids of a prompt and its output, in the longest runs."""
    alone = len(content.prompt) == 1 and not content.output
    return content.prompt if alone else merge(content.prompt + content.output)


def total(runs: Runs) -> int:
    """Number of ids in all runs."""
    return sum(map(_count, runs))

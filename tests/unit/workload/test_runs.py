"""Runs spell out the same ids."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvsim.workload.trace import collapse, merge, total

ids_lists = st.lists(st.integers(0, 4))


def expanded(runs: tuple[tuple[int, int], ...]) -> list[int]:
    return [start + k for start, count in runs for k in range(count)]


@given(ids_lists)
def test_collapsing_keeps_the_ids_in_the_longest_runs(ids: list[int]) -> None:
    runs = collapse(ids)
    assert expanded(runs) == ids
    assert total(runs) == len(ids)
    breaks = sum(after != before + 1 for before, after in itertools.pairwise(ids))
    assert len(runs) == (breaks + 1 if ids else 0)


@given(st.lists(ids_lists.map(collapse)))
def test_merging_is_collapsing_what_the_runs_spell(
    parts: list[tuple[tuple[int, int], ...]],
) -> None:
    runs = [run for part in parts for run in part]
    assert merge(runs) == collapse(expanded(tuple(runs)))

"""Marks what only runs with `pytest -m long`, as in CI: slow tests, many of many cases."""

from __future__ import annotations

import os
from typing import Any

import pytest

long = pytest.mark.long
WHOLE = bool(os.environ.get("KVSIM_WHOLE"))
"""Everything is to be tested, however long it takes."""
whole = pytest.mark.skipif(not WHOLE, reason="takes minutes; KVSIM_WHOLE=1 runs it")


def examples(most: int) -> int:
    """How many examples a random test draws: `most` with KVSIM_WHOLE=1, each time a part."""
    return most if WHOLE else max(4, most // 4)


def mostly_long(groups: int, *, quick: int) -> list[Any]:
    """The numbers of `groups` groups of random cases as parameters: the first `quick` run each
    time, half of all with `-m long`, the others with KVSIM_WHOLE=1, too."""
    most = groups if WHOLE else max(quick, groups // 2)
    return [*range(quick), *(pytest.param(group, marks=long) for group in range(quick, most))]

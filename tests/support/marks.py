"""Marks what only runs with `pytest -m long`, as in CI: slow tests, most of many cases."""

from __future__ import annotations

from typing import Any

import pytest

long = pytest.mark.long


def mostly_long(groups: int, *, quick: int) -> list[Any]:
    """The numbers of `groups` groups of cases as parameters: the first `quick` run each time."""
    return [*range(quick), *(pytest.param(group, marks=long) for group in range(quick, groups))]

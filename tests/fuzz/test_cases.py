"""Random configurations and random policies of outsiders: the fast run equals its twin.

`KVSIM_FUZZ_CASES` asks for more cases of each kind; `many.py` runs many outside of pytest. A case
that fails prints its kind, its seed and its settings.
"""

import os

import pytest
from fuzz.cases import KINDS

CASES = int(os.environ.get("KVSIM_FUZZ_CASES", "320"))
GROUPS = 8
FAILING = {"configurations": {2, 3, 5}, "policies": {0, 2, 3, 4, 5, 6, 7}, "scratch": set()}
"""Groups that have a case that fails on the core as it is, as long as CASES is as above."""


def groups() -> list[object]:
    """Every (kind, group)."""
    fails = pytest.mark.xfail(strict=True, reason="the fast path and its twin part")
    return [
        pytest.param(kind, group, marks=[fails] * (group in FAILING[kind]))
        for kind in KINDS
        for group in range(GROUPS)
    ]


@pytest.mark.parametrize(("kind", "group"), groups())
def test_any_case_runs_as_its_twin(kind: str, group: int) -> None:
    for seed in range(group, CASES, GROUPS):
        KINDS[kind](seed)

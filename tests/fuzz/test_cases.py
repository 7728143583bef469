"""Random configurations and random policies of outsiders: the fast run equals its twin.

`KVSIM_FUZZ_CASES` asks for more cases of each kind; `many.py` runs many outside of pytest. A case
that fails prints its kind, its seed and its settings.
"""

import os

import pytest
from fuzz.cases import KINDS

CASES = int(os.environ.get("KVSIM_FUZZ_CASES", "320"))
GROUPS = 8


@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize("kind", KINDS)
def test_any_case_runs_as_its_twin(kind: str, group: int) -> None:
    for seed in range(group, CASES, GROUPS):
        KINDS[kind](seed)

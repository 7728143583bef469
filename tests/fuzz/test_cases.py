"""Random configurations, fleets and policies of outsiders end, balance, and are the same when done
again; wider worlds obey laws.

A part of the cases runs each time, the others with `-m long`. `KVSIM_FUZZ_CASES` asks for more of
each kind; `many.py` runs many outside of pytest. A case that fails prints its kind, its seed and
its settings.
"""

import os

import pytest
from fuzz.cases import KINDS
from marks import mostly_long

CASES = int(os.environ.get("KVSIM_FUZZ_CASES", "320"))
GROUPS = 16


@pytest.mark.parametrize("group", mostly_long(GROUPS, quick=1))
@pytest.mark.parametrize("kind", KINDS)
def test_any_case_is_right(kind: str, group: int) -> None:
    for seed in range(group, CASES, GROUPS):
        KINDS[kind](seed)

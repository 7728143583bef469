"""Malformed files and flags, and kills: a part of the cases each time, the others with `-m long`.

`KVSIM_FUZZ_CASES` asks for more; `many.py` runs many outside of pytest. A case that fails prints
its kind and its seed.
"""

import os
import sys

import pytest
from fuzz.inputs import INPUTS
from fuzz.kills import check_kill
from marks import long, mostly_long

CASES = int(os.environ.get("KVSIM_FUZZ_CASES", "240"))
GROUPS = 48


@pytest.mark.parametrize("group", mostly_long(GROUPS, quick=1))
@pytest.mark.parametrize("kind", INPUTS)
def test_any_input_is_refused_or_taken_as_it_says(kind: str, group: int) -> None:
    for seed in range(group, CASES, GROUPS):
        try:
            INPUTS[kind](seed)
        except Exception as error:
            error.add_note(f"{kind} {seed}")
            raise


@long
@pytest.mark.skipif(sys.platform != "linux", reason="no /proc here")
@pytest.mark.parametrize("seed", [0, 1, 1016])
def test_a_kill_leaves_nothing_half_done(seed: int) -> None:
    check_kill(seed)

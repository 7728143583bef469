"""Random configurations of every engine and manager: the fast run equals its twin.

`KVSIM_FUZZ_CASES` asks for more cases; `many.py` runs many outside of pytest. A failing case prints
its seed and its settings.
"""

import os

import pytest
from fuzz.cases import check_configuration

CASES = int(os.environ.get("KVSIM_FUZZ_CASES", "480"))
GROUPS = 16


@pytest.mark.parametrize("group", range(GROUPS))
def test_any_configuration_runs_as_its_twin(group: int) -> None:
    for seed in range(group, CASES, GROUPS):
        check_configuration(seed)

"""SGLang 0.5.23 decides what the real engine decided, and what its rules say: every field.

Recorded cases, random cases recorded elsewhere, and random cases against a dull twin.
"""

from pathlib import Path

import pytest
from exact.conformance.corpus import (
    CORPUS,
    WHOLE,
    assert_equal,
    check,
    recorded_case,
    recorded_folders,
    recorded_lines,
)
from exact.conformance.generate_sglang import make_case
from marks import long, mostly_long
from shared import needs_shared
from twins import sglang as twin

from kvsim.conform.builders import run_case

ENGINE = "sglang"
SEEDS = range(6000 if WHOLE else 500)
GROUPS = 5

RECORDED = [
    pytest.param(folder, id=folder.name)
    for folder in recorded_folders(ENGINE, CORPUS / "sglang" / "cases")
]


@needs_shared("conformance")
@pytest.mark.parametrize("folder", RECORDED)
def test_recorded_cases(folder: Path) -> None:
    check(ENGINE, recorded_case(ENGINE, folder))


@needs_shared("conformance")
@pytest.mark.parametrize("kind", ["", "-hard", "-small"])
def test_recorded_random_cases(kind: str) -> None:
    path = CORPUS / "sglang" / "fuzz" / f"sglang{kind}.jsonl.gz"
    for case in recorded_lines(ENGINE, path, every=10):
        check(ENGINE, case)


@long
@needs_shared("conformance")
@pytest.mark.parametrize("folder", RECORDED)
def test_the_twin_follows_the_recorded_cases(folder: Path) -> None:
    case = recorded_case(ENGINE, folder)
    assert case.recorded is not None
    assert_equal(case.recorded, twin.step_log(case.config, case.trace), folder.name)


@pytest.mark.parametrize("group", mostly_long(GROUPS, quick=1))
def test_random_cases_against_the_twin(group: int) -> None:
    for seed in SEEDS[group::GROUPS]:
        config, trace = make_case(seed)
        expected = twin.step_log(config, trace)
        log = list(run_case(ENGINE, config, trace, audit=seed % 5 == 0))
        assert_equal(expected, log, f"seed {seed}: twin | kvsim")

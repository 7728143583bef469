"""vLLM 0.6.3 decides what the real engine decided: recorded cases and random ones, every field.

`KVSIM_WHOLE=1` runs all of them, with the books audited after every step.
"""

import os
from pathlib import Path

import pytest
from shared import SHARED, needs_shared

from kvsim.conform.builders import run_case
from kvsim.conform.cases import Case, read_cases
from kvsim.conform.compare import first_divergence

CORPUS = SHARED / "conformance"
WHOLE = bool(os.environ.get("KVSIM_WHOLE"))
pytestmark = needs_shared("conformance")


def cases(path: Path, every: int) -> list[Case]:
    if not path.exists():
        return []
    found = [case for case in read_cases(path, "vllm-0.6.3") if case.recorded is not None]
    return found if WHOLE else found[::every]


def check(case: Case, audit: bool) -> None:
    log = list(run_case("vllm-0.6.3", case.config, case.trace, audit))
    assert case.recorded is not None
    divergence = first_divergence(case.recorded, log)
    assert divergence is None, f"{case.name}: recorded | kvsim: {divergence}"


@pytest.mark.parametrize("case", cases(CORPUS / "cases", 1), ids=lambda case: case.name)
def test_recorded_cases(case: Case) -> None:
    if len(case.trace) > 1000 and not WHOLE:
        pytest.skip("5,000 requests; KVSIM_WHOLE=1 runs them")
    check(case, audit=len(case.trace) < 1000)


@pytest.mark.parametrize("name", ["v063", "v063-hard"])
def test_random_cases(name: str) -> None:
    for case in cases(CORPUS / "fuzz" / f"{name}.jsonl.gz", 5):
        check(case, audit=True)

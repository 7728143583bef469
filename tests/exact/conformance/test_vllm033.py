"""vLLM 0.3.3 decides what the real engine decided, and what its rules say: every field.

Recorded cases, random cases recorded elsewhere, and random cases against a dull twin.
"""

from collections import Counter
from pathlib import Path

import pytest
from exact.conformance.corpus import (
    CORPUS,
    WHOLE,
    check,
    check_random,
    check_twin,
    recorded_case,
    recorded_folders,
    recorded_lines,
)
from exact.conformance.generate_vllm033 import make_case
from marks import long, mostly_long, whole
from shared import needs_shared
from twins.vllm033 import step_log

ENGINE = "vllm-0.3.3"
FOLDER = CORPUS / "vllm-0.3.3"
SEEDS = range(6000 if WHOLE else 700)
GROUPS = 5

recorded = pytest.mark.parametrize(
    "folder", recorded_folders(ENGINE, FOLDER / "cases"), ids=lambda folder: folder.name
)


@needs_shared("conformance/vllm-0.3.3")
@recorded
def test_recorded_cases(folder: Path) -> None:
    check(ENGINE, recorded_case(ENGINE, folder))


@needs_shared("conformance/vllm-0.3.3")
@pytest.mark.parametrize("every", [40, pytest.param(2, marks=long)])
def test_recorded_random_cases(every: int) -> None:
    for case in recorded_lines(ENGINE, FOLDER / "fuzz.jsonl.gz", every):
        check(ENGINE, case)


@long
@whole
@needs_shared("conformance/vllm-0.3.3")
@recorded
def test_the_twin_follows_the_recorded_cases(folder: Path) -> None:
    check_twin(step_log, recorded_case(ENGINE, folder))


@pytest.mark.parametrize("group", mostly_long(GROUPS, quick=1))
def test_random_cases_against_the_twin(group: int) -> None:
    check_random(ENGINE, make_case, step_log, SEEDS[group::GROUPS])


@long
def test_random_cases_reach_the_rare_rules() -> None:
    seen: Counter[str] = Counter()
    for seed in range(300):
        log = step_log(*make_case(seed))
        seen[log[-1].get("error", "end")] += 1
        for record in log[:-1]:
            seen.update(mode for _, mode in record["preempted"])
            seen["back"] += len(record["swapped_in"])
            seen["copies"] += record["blocks_to_copy"]
            seen["ignored"] += len(record["ignored"])
            seen["prefix"] += sum(cached > 0 for _, _, cached, _, _ in record["prefill"])
    common = ("recompute", "swap", "back", "copies", "ignored", "prefix", "end", "deadlock")
    assert min(seen[kind] for kind in common) > 20, seen
    assert min(seen[kind] for kind in ("ValueError: double free", "AssertionError")) > 2, seen

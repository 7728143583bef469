"""vLLM 0.6.3 decides what the real engine decided, and what its rules say: every field.

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
from exact.conformance.generate_vllm063 import make_case
from marks import long, mostly_long, whole
from shared import needs_shared
from twins.vllm063 import step_log

ENGINE = "vllm-0.6.3"
FUZZ = pytest.mark.parametrize("name", ["v063", "v063-hard"])
FOLDERS = pytest.mark.parametrize(
    "folder", recorded_folders(ENGINE, CORPUS / "cases"), ids=lambda folder: folder.name
)
SEEDS = range(16_000 if WHOLE else 500)
GROUPS = 5
ONE_SAMPLE_LEFT = (1541, 6171, 10104, 11053, 11443)
"""A request is down to one sample, not its first, which waits for blocks again."""


@needs_shared("conformance")
@FOLDERS
def test_recorded_cases(folder: Path) -> None:
    check(ENGINE, recorded_case(ENGINE, folder))


@needs_shared("conformance")
@FUZZ
@pytest.mark.parametrize("every", [100, pytest.param(5, marks=long)])
def test_recorded_random_cases(name: str, every: int) -> None:
    for case in recorded_lines(ENGINE, CORPUS / "fuzz" / f"{name}.jsonl.gz", every):
        check(ENGINE, case)


@long
@whole
@needs_shared("conformance")
@FOLDERS
def test_the_twin_follows_the_recorded_cases(folder: Path) -> None:
    check_twin(step_log, recorded_case(ENGINE, folder))


@long
@whole
@needs_shared("conformance")
@FUZZ
def test_the_twin_follows_the_recorded_random_cases(name: str) -> None:
    for case in recorded_lines(ENGINE, CORPUS / "fuzz" / f"{name}.jsonl.gz", every=10):
        check_twin(step_log, case)


@pytest.mark.parametrize("group", mostly_long(GROUPS, quick=1))
def test_random_cases_against_the_twin(group: int) -> None:
    check_random(ENGINE, make_case, step_log, (*SEEDS, *ONE_SAMPLE_LEFT)[group::GROUPS])


@long
def test_random_cases_reach_the_rare_rules() -> None:
    seen: Counter[str] = Counter()
    for seed in range(400):
        log = step_log(*make_case(seed))
        seen["engine errors" if "S:" in log[-1].get("error", "") else "others"] += 1
        for record in log:
            seen.update(means for _, means in record.get("preempted", ()))
            seen["swapped in"] += len(record.get("swapped_in", ()))
            seen["copied"] += record.get("blocks_to_copy", 0)
            seen["ignored"] += len(record.get("ignored", ()))
            for _, _, cached, _, samples in record.get("prefill", ()):
                seen["hits"] += cached > 0
                seen["chunks"] += not samples
    assert seen["engine errors"] > 20
    assert min(seen[kind] for kind in ("recompute", "copied", "hits", "chunks")) > 100
    assert min(seen[kind] for kind in ("swap", "swapped in", "ignored")) > 30

"""nano-vllm decides what the real engine decided, and what its rules say: every field.

Recorded cases, random cases recorded elsewhere, and random cases against a dull twin.
"""

from functools import partial
from pathlib import Path

import pytest
from exact.conformance.corpus import (
    CORPUS,
    WHOLE,
    StepLog,
    check,
    check_random,
    check_twin,
    recorded_case,
    recorded_folders,
    recorded_lines,
)
from exact.conformance.generate_nano import make_case
from marks import long, mostly_long, whole
from shared import needs_shared
from twins.nano import step_log

from kvsim.against.conform.cases import run_case

HEAD, OLD = "nano-vllm", "nano-vllm-2025-08"
FUZZ = {HEAD: "nano", OLD: "nano_aug2025"}
ENGINES = pytest.mark.parametrize("engine", [HEAD, OLD])
SEEDS = range(6000 if WHOLE else 500)
GROUPS = 5

RECORDED = [
    pytest.param(engine, folder, id=f"{engine}-{folder.name}")
    for engine in (HEAD, OLD)
    for folder in recorded_folders(engine, CORPUS / "cases")
]


@ENGINES
def test_several_samples_are_refused_by_an_engine_that_draws_one(engine: str) -> None:
    row = {"id": "a", "arrival": 0.0, "prompt_token_ids": [1, 2], "output_lens": [1, 2], "n": 2}
    (record,) = run_case(engine, {"block_size": 4, "num_gpu_blocks": 4}, [row])
    assert "n = 1" in record["error"]


def by_the_rules(engine: str) -> StepLog:
    return partial(step_log, version_2025=engine == OLD)


@needs_shared("conformance")
@pytest.mark.parametrize(("engine", "folder"), RECORDED)
def test_recorded_cases(engine: str, folder: Path) -> None:
    check(engine, recorded_case(engine, folder))


@needs_shared("conformance")
@ENGINES
@pytest.mark.parametrize("kind", ["", "-hard"])
@pytest.mark.parametrize("every", [100, pytest.param(5, marks=long)])
def test_recorded_random_cases(engine: str, kind: str, every: int) -> None:
    for case in recorded_lines(engine, CORPUS / "fuzz" / f"{FUZZ[engine]}{kind}.jsonl.gz", every):
        check(engine, case)


@long
@whole
@needs_shared("conformance")
@pytest.mark.parametrize(("engine", "folder"), RECORDED)
def test_the_twin_follows_the_recorded_cases(engine: str, folder: Path) -> None:
    check_twin(by_the_rules(engine), recorded_case(engine, folder))


@ENGINES
@pytest.mark.parametrize("group", mostly_long(GROUPS, quick=1))
def test_random_cases_against_the_twin(engine: str, group: int) -> None:
    check_random(engine, make_case, by_the_rules(engine), SEEDS[group::GROUPS])


@long
@ENGINES
def test_random_cases_reach_the_rare_rules(engine: str) -> None:
    hits = preemptions = deaths = chunks = nothing_to_compute = 0
    for seed in range(300):
        log = by_the_rules(engine)(*make_case(seed))
        deaths += log[-1].get("error") == "AssertionError"
        for record in log:
            preemptions += len(record.get("preempted", ()))
            for _, scheduled, cached, _, samples in record.get("prefill", ()):
                hits += cached > 0
                chunks += not samples
                nothing_to_compute += scheduled == 0
    assert min(hits, preemptions, deaths) > 50
    assert (chunks if engine == HEAD else nothing_to_compute) > 50

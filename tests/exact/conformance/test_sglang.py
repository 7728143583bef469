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
    check_random,
    check_twin,
    recorded_case,
    recorded_folders,
    recorded_lines,
)
from exact.conformance.generate_sglang import make_case
from marks import long, mostly_long, whole
from shared import needs_shared
from twins.sglang import step_log

from kvsim.against.conform.cases import run_case

ENGINE = "sglang"
SEEDS = range(6000 if WHOLE else 500)
GROUPS = 5

SLOW = ("20_serving", "21_chunk_overcommit")

RECORDED = [
    pytest.param(folder, id=folder.name, marks=[long] if folder.name in SLOW else [])
    for folder in recorded_folders(ENGINE, CORPUS / "sglang" / "cases")
]


@needs_shared("conformance")
@pytest.mark.parametrize("folder", RECORDED)
def test_recorded_cases(folder: Path) -> None:
    check(ENGINE, recorded_case(ENGINE, folder))


@needs_shared("conformance")
@pytest.mark.parametrize("kind", ["", "-hard", "-small"])
@pytest.mark.parametrize("every", [200, pytest.param(1, marks=long)])
def test_recorded_random_cases(kind: str, every: int) -> None:
    path = CORPUS / "sglang" / "fuzz" / f"sglang{kind}.jsonl.gz"
    for case in recorded_lines(ENGINE, path, every):
        check(ENGINE, case)


@long
@whole
@needs_shared("conformance")
@pytest.mark.parametrize("folder", RECORDED)
def test_the_twin_follows_the_recorded_cases(folder: Path) -> None:
    check_twin(step_log, recorded_case(ENGINE, folder))


@pytest.mark.parametrize("group", mostly_long(GROUPS, quick=1))
def test_random_cases_against_the_twin(group: int) -> None:
    check_random(ENGINE, make_case, step_log, SEEDS[group::GROUPS])


@pytest.mark.parametrize(
    "seed", [pytest.param(1181, id="what is reserved is all that memory has left")]
)
def test_crossings_that_few_cases_meet(seed: int) -> None:
    check_random(ENGINE, make_case, step_log, (seed,))


def test_memory_that_ends_between_two_chunks_costs_the_only_running_request() -> None:
    """r0 decodes in six steps between two chunks of r1, which is not running yet and keeps what it
    has: nobody else can be retracted, and r0 is given up."""
    config = {
        "max_total_num_tokens": 34,
        "page_size": 1,
        "context_len": 8000,
        "max_running_requests": 4,
        "chunked_prefill_size": 12,
        "max_prefill_tokens": 16384,
        "schedule_policy": "fcfs",
        "schedule_conservativeness": 0.01,
        "init_new_token_ratio": 0.05,
        "prefill_decode_interval": 6,
        "max_steps": 80,
    }
    rows = [
        {"id": "r0", "arrival": 0, "prompt_token_ids": [1] * 8, "output_len": 20},
        {"id": "r1", "arrival": 0, "prompt_token_ids": [2] * 16, "output_len": 1},
    ]
    for row in rows:
        row["max_new_tokens"] = row["output_len"]
    log = list(run_case(ENGINE, config, rows, audit_every=1))
    given_up = [record for record in log if record["aborted"]]
    assert [(each["aborted"], each["running"]) for each in given_up] == [(["r0"], 0)]
    assert_equal(step_log(config, rows), log, "twin | kvsim")

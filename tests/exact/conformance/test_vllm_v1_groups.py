"""KV cache groups of vLLM V1: windows, chunks and states decide what the real engine decided.

Recorded cases, random cases recorded elsewhere, and random cases against a dull twin: every field.
"""

from pathlib import Path
from typing import Any

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
from exact.conformance.generate_v1_groups import make_case
from marks import long, mostly_long, whole
from shared import needs_shared
from twins.steps import generated
from twins.vllm_v1_features import step_log

from kvsim.against.conform.cases import run_case

ENGINE = "vllm-v1"
FEATURES = CORPUS / "vllm-v1-features"
FUZZ = pytest.mark.parametrize("name", ["hybrid", "mamba", "mamba_export"])
FOLDERS = [
    folder
    for folder in recorded_folders(ENGINE, FEATURES / "cases")
    if folder.name.startswith(("hyb", "mam"))
]
SEEDS = range(10_000 if WHOLE else 180)
PARTS = 6

FULL = {"type": "full", "block_size": 4}
WINDOW = {"type": "sliding", "window": 8, "block_size": 4}
STATE = {"type": "mamba", "block_size": 4}


@needs_shared("conformance/vllm-v1-features")
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_recorded_cases(folder: Path) -> None:
    check(ENGINE, recorded_case(ENGINE, folder))


@needs_shared("conformance/vllm-v1-features")
@FUZZ
def test_recorded_random_cases(name: str) -> None:
    for case in recorded_lines(ENGINE, FEATURES / "fuzz" / f"{name}.jsonl.gz", every=12):
        check(ENGINE, case)


@long
@whole
@needs_shared("conformance/vllm-v1-features")
@FUZZ
def test_the_twin_follows_the_recorded_cases(name: str) -> None:
    for case in recorded_lines(ENGINE, FEATURES / "fuzz" / f"{name}.jsonl.gz", every=10):
        check_twin(step_log, case)


@pytest.mark.parametrize("part", mostly_long(PARTS, quick=1))
def test_random_cases_against_the_twin(part: int) -> None:
    check_random(ENGINE, make_case, step_log, SEEDS[part::PARTS])


@long
def test_random_cases_reach_the_rare_rules() -> None:
    seen = dict.fromkeys(("hits", "chunks", "preempted", "drafts", "blocks behind windows"), 0)
    for seed in range(150):
        for record in step_log(*make_case(seed)):
            seen["preempted"] += len(record.get("preempted", ()))
            seen["drafts"] += len(record.get("spec", ()))
            for _, tokens, cached, before, samples in record.get("prefill", ()):
                seen["hits"] += cached > 0
                seen["chunks"] += not samples
                seen["blocks behind windows"] += before > 20 and tokens > 0
    assert min(seen.values()) > 5, seen


# -- one rule at a time ----------------------------------------------------------------------------


def trace(*prompts: list[int], every: float = 3.0, output_len: int = 1) -> list[dict[str, Any]]:
    """Requests r0, r1, ... with these prompts, one after the other."""
    return [
        {
            "id": f"r{i}",
            "arrival": every * i,
            "prompt_token_ids": prompt,
            "output_len": output_len,
        }
        for i, prompt in enumerate(prompts)
    ]


def log_of(
    rows: list[dict[str, Any]], *groups: dict[str, Any], **settings: Any
) -> list[dict[str, Any]]:
    """Under 40 usable blocks of 4 tokens, unless set otherwise."""
    config = {
        "block_size": 4,
        "num_gpu_blocks": 41,
        "max_model_len": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "enable_prefix_caching": True,
        "kv_groups": list(groups),
        **settings,
    }
    return list(run_case(ENGINE, config, rows, audit_every=1))


def hits(log: list[dict[str, Any]]) -> dict[str, int]:
    """Request → tokens that it hit when it was admitted."""
    return {entry[0]: entry[2] for record in log for entry in record["prefill"] if not entry[3]}


def test_a_window_gives_blocks_back_while_the_request_runs() -> None:
    """24 tokens take 6 blocks of a table. The window of 8 keeps tokens 17 to 24: with the chunk
    that brings token 25, the first 4 blocks go, and one comes."""
    log = log_of(trace(list(range(24)), output_len=3), WINDOW, enable_prefix_caching=False)
    assert [record["free_gpu_blocks"] for record in log] == [34, 37, 37]


def test_a_prompt_longer_than_the_pool_runs_in_a_window() -> None:
    """7 usable blocks hold 28 tokens. A window and a step need ceil((7 + 12) / 4) + 1 = 6."""
    settings = {"num_gpu_blocks": 8, "max_num_batched_tokens": 12, "enable_prefix_caching": False}
    log = log_of(trace(list(range(50))), WINDOW, **settings)
    assert log[-1]["finished"] == ["r0"]
    assert log_of(trace(list(range(50))), FULL, **settings)[-1]["error"] == "deadlock"


def test_equal_groups_take_turns_in_one_pool() -> None:
    log = log_of(trace(list(range(8))), FULL, WINDOW, WINDOW)
    assert log[0]["free_gpu_blocks"] == 40 - 3 * 2


def test_only_the_end_of_a_prompt_stays_in_a_window() -> None:
    """r1 goes on from the answer of r0, of 8 tokens: 16 tokens of the prompt are hit, none of the
    answer. With interval `none` (null in a log), whatever windows kept is there: 20 tokens."""
    first = trace(list(range(17)), output_len=8)
    answer = [generated("r0", number) for number in range(7)]
    second = {"id": "r1", "arrival": 20.0, "prompt_token_ids": [*range(17), *answer]}
    rows = [*first, {**second, "output_len": 1}]
    assert hits(log_of(rows, FULL, WINDOW))["r1"] == 16
    assert hits(log_of(rows, FULL, WINDOW, prefix_cache_retention_interval=None))["r1"] == 20


def test_a_shared_beginning_counts_from_the_third_request_on() -> None:
    """The window of r0 ends far behind the beginning that all share. r1 finds that out and keeps
    the end of the beginning; r2 hits it."""
    beginning = list(range(16))
    prompts = [[*beginning, *range(100 * i, 100 * i + 20)] for i in range(1, 4)]
    assert hits(log_of(trace(*prompts), FULL, WINDOW)) == {"r0": 0, "r1": 0, "r2": 16}
    assert hits(log_of(trace(*prompts), FULL)) == {"r0": 0, "r1": 16, "r2": 16}


def test_chunks_alone_hit_what_was_never_computed() -> None:
    """Nothing before the last chunk is looked up."""
    log = log_of(trace(list(range(21))), {"type": "chunked", "chunk": 8, "block_size": 4})
    assert hits(log) == {"r0": 16}


def test_a_state_is_kept_where_a_chunk_ends() -> None:
    """The 10 tokens are cut at 8, so that the state after 8 tokens stays; r1 goes on from there."""
    rows = trace(list(range(10)), [*range(10), 50, 51])
    log = log_of(rows, FULL, STATE)
    assert [record["prefill"] for record in log[:2]] == [
        [["r0", 8, 0, 0, 0]],
        [["r0", 2, 0, 8, 1]],
    ]
    assert hits(log)["r1"] == 8


def test_a_layer_that_saves_states_needs_no_cut() -> None:
    saves = {**STATE, "checkpoint": True}
    log = log_of(trace(list(range(13)), [*range(13), 50]), FULL, saves)
    assert log[0]["prefill"] == [["r0", 13, 0, 0, 1]]
    assert hits(log)["r1"] == 12


def test_a_state_of_the_same_step_stops_admission() -> None:
    """r1 has the beginning of r0 and comes with it: its state does not exist yet."""
    rows = trace(list(range(12)), [*range(8), 50, 51], [90], every=0.0)
    log = log_of(rows, FULL, STATE)
    assert [entry[0] for entry in log[0]["prefill"]] == ["r0"]
    assert [entry[:3] for entry in log[1]["prefill"]][1:] == [["r1", 2, 8], ["r2", 1, 0]]


def test_states_without_a_cache_take_one_block_each() -> None:
    state = {"type": "mamba", "block_size": 64}
    log = log_of(trace(list(range(20))), FULL, state, state, enable_prefix_caching=False)
    assert log[0]["free_gpu_blocks"] == 40 - 5 - 2


def test_several_block_sizes_hit_at_common_multiples() -> None:
    wide = {"type": "sliding", "window": 8, "block_size": 8}
    rows = trace(list(range(14)), [*range(14), 50, 51, 52])
    assert hits(log_of(rows, FULL, wide))["r1"] == 8
    assert hits(log_of(rows, FULL, WINDOW))["r1"] == 12

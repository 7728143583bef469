"""vLLM V1 decides what the real engine decided, and what its rules say: every field.

Recorded cases, random cases recorded elsewhere, and random cases against a dull twin.
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
from exact.conformance.generate_v1 import make_case
from marks import long, mostly_long, whole
from shared import needs_shared
from twins.vllm_v1 import step_log

from kvsim.against.conform.cases import run_case

ENGINE = "vllm-v1"
FUZZ = pytest.mark.parametrize("name", ["v1", "v1-hard"])
FOLDERS = recorded_folders(ENGINE, CORPUS / "cases")
SEEDS = range(10_000 if WHOLE else 600)
GROUPS = 5


def trace(*rows: tuple[float, int, int], priorities: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """Requests r0, r1, ... as (arrival, input length, output length), no two with equal tokens."""
    return [
        {
            "id": f"r{i}",
            "arrival": arrival,
            "prompt_token_ids": [i] * length,
            "output_len": output,
            "priority": priorities[i] if priorities else 0,
        }
        for i, (arrival, length, output) in enumerate(rows)
    ]


def log_of(rows: list[dict[str, Any]], **settings: Any) -> list[dict[str, Any]]:
    """Under 5 usable blocks of 4 tokens, unless set otherwise."""
    config = {
        "block_size": 4,
        "num_gpu_blocks": 6,
        "max_model_len": 32,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        **settings,
    }
    return list(run_case(ENGINE, config, rows, audit_every=1))


@needs_shared("conformance")
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_recorded_cases(folder: Path) -> None:
    check(ENGINE, recorded_case(ENGINE, folder))


@needs_shared("conformance")
@FUZZ
@pytest.mark.parametrize("every", [60, pytest.param(3, marks=long)])
def test_recorded_random_cases(name: str, every: int) -> None:
    for case in recorded_lines(ENGINE, CORPUS / "fuzz" / f"{name}.jsonl.gz", every):
        check(ENGINE, case)


@long
@whole
@needs_shared("conformance")
@FUZZ
def test_the_twin_follows_the_recorded_cases(name: str) -> None:
    for case in recorded_lines(ENGINE, CORPUS / "fuzz" / f"{name}.jsonl.gz", every=10):
        check_twin(step_log, case)


@pytest.mark.parametrize("group", mostly_long(GROUPS, quick=1))
def test_random_cases_against_the_twin(group: int) -> None:
    check_random(ENGINE, make_case, step_log, SEEDS[group::GROUPS])


@long
def test_random_cases_reach_the_rare_rules() -> None:
    seen = dict.fromkeys(("hits", "chunks", "preempted", "ended in the queue", "refused"), 0)
    for seed in range(300):
        waiting: set[str] = set()
        for record in step_log(*make_case(seed)):
            seen["refused"] += len(record.get("ignored", ()))
            seen["preempted"] += len(record.get("preempted", ()))
            waiting |= {name for name, _ in record.get("preempted", ())}
            for name, _, cached, _, samples in record.get("prefill", ()):
                seen["hits"] += cached > 0
                seen["chunks"] += not samples
                waiting.discard(name)
            seen["ended in the queue"] += len(waiting & set(record.get("finished", ())))
    assert min(seen.values()) > 5, seen


def test_the_tail_gives_way_and_nobody_is_admitted_in_that_step() -> None:
    """r0 and r1 hold 2 of 5 blocks each; r0 takes the fifth, r1 finds none for its ninth token."""
    log = log_of(trace((0, 8, 3), (0, 8, 3), (1, 1, 1)))
    assert [p[0] for p in log[0]["prefill"]] == ["r0", "r1"]
    assert log[1]["decode"] == ["r0"]
    assert log[1]["preempted"] == [["r1", "recompute"]]
    assert (log[1]["free_gpu_blocks"], log[1]["waiting"]) == (2, 2)
    # r1 comes before r2 again; its 9 tokens need 3 blocks, so it waits for r0, and r2 for it.
    assert [len(record["prefill"]) for record in log[2:4]] == [0, 2]


def test_the_worst_priority_gives_way_even_if_it_was_scheduled_in_this_step() -> None:
    """Both run in 5 blocks; at time 2, r0 has its token when r1 finds no block for its ninth."""
    log = log_of(trace((0, 8, 4), (1, 8, 3), priorities=(1, 0)), policy="priority")
    assert (log[1]["decode"], log[1]["free_gpu_blocks"]) == (["r0"], 0)
    assert log[2]["preempted"] == [["r0", "recompute"]]
    assert log[2]["decode"] == ["r1"]
    assert log[2]["batched_tokens"] == 1


def test_a_prompt_without_room_for_a_token_is_refused_at_the_door() -> None:
    log = log_of(trace((0, 8, 1), (0, 7, 9)), max_model_len=8)
    assert (log[0]["ignored"], log[0]["added"]) == (["r0"], 1)
    assert log[0]["finished"] == ["r1"]  # of 9 tokens it gets one: max_model_len


def test_two_steps_are_in_flight_and_the_last_result_is_drained() -> None:
    log = log_of(trace((0, 4, 2)), v1_async=True)
    assert [record["time"] for record in log] == [0.0, 0.0, 1.0, 2.0, 3.0]
    assert [record.get("decode") for record in log] == [[], ["r0"], [], [], None]
    assert [record["finished"] for record in log] == [[], [], ["r0"], [], []]
    assert log[-1]["drain"]


def test_requests_admitted_in_one_step_share_blocks_and_compute() -> None:
    rows = trace((0, 9, 1), (0, 9, 1))
    rows[1]["prompt_token_ids"] = rows[0]["prompt_token_ids"]
    log = log_of(rows, enable_prefix_caching=True)
    assert log[0]["prefill"] == [["r0", 9, 0, 0, 1], ["r1", 1, 8, 0, 1]]
    assert log[0]["free_gpu_blocks"] == 1  # 2 shared blocks, and one each for the ninth token


def test_requests_beyond_the_active_ones_wait_though_there_are_places() -> None:
    log = log_of(trace((0, 4, 2), (0, 4, 1)), max_num_active_seqs=1)
    assert [[p[0] for p in record["prefill"]] for record in log] == [["r0"], [], ["r1"]]
    assert log[1]["finished"] == ["r0"]
    refused = log_of(trace((0, 4, 2)), max_num_active_seqs=9)
    assert refused[0]["error"].startswith("ValueError: max_num_active_seqs (9) is above")


def test_a_step_computes_no_more_than_the_scheduled_tokens() -> None:
    """8 + 8 prompt tokens, 6 a step: 6; 2 and 4; then the ninth token of r0 and the last 4."""
    log = log_of(trace((0, 8, 2), (0, 8, 1)), max_num_scheduled_tokens=6)
    assert [record["batched_tokens"] for record in log] == [6, 6, 5]
    assert log[1]["prefill"] == [["r0", 2, 0, 6, 1], ["r1", 4, 0, 0, 0]]


def prompts(log: list[dict[str, Any]]) -> list[list[str]]:
    """Who computes a part of a prompt, by step."""
    return [[each[0] for each in record.get("prefill", ())] for record in log]


PLENTY = {"num_gpu_blocks": 40, "prefill_schedule_interval": 3}


def test_prompts_wait_while_others_decode_until_the_interval_is_over() -> None:
    """r0 comes in step 1, so the next prompt is due in step 4; r1 takes it, though r2 came with it
    only in step 5, and waits until step 7. By then r0 is over; r1 still decodes."""
    log = log_of(trace((0, 4, 5), (1, 4, 9), (4, 4, 1)), **PLENTY)
    assert prompts(log)[:7] == [["r0"], [], [], ["r1"], [], [], ["r2"]]
    assert [record["waiting"] for record in log[:7]] == [0, 1, 1, 0, 1, 1, 0]
    assert prompts(log_of(trace((0, 4, 5), (1, 4, 9)), num_gpu_blocks=40))[1] == ["r1"]


def test_nobody_waits_for_an_interval_while_nobody_decodes() -> None:
    """r0 is over after a step, and r1 takes three for its prompt, with nobody else there."""
    log = log_of(trace((0, 4, 1), (1, 12, 1)), **PLENTY, max_num_batched_tokens=8)
    assert prompts(log) == [["r0"], ["r1"], ["r1"]]


def test_a_prompt_in_the_middle_waits_and_its_next_chunk_begins_an_interval() -> None:
    """r1 has 4 of 12 tokens in step 4 and the others in steps 7 and 10: the threshold cuts it."""
    log = log_of(trace((0, 4, 20), (1, 12, 1)), **PLENTY, long_prefill_token_threshold=4)
    found = [number for number, names in enumerate(prompts(log), 1) if "r1" in names]
    assert found == [4, 7, 10]


def test_no_interval_holds_what_a_step_could_not_take() -> None:
    """Of 8 tokens, step 4 has one for r0, 4 for r1 and 3 for r2, and none for r3, so that nobody
    waits in step 5: one each for r0 and r1, 5 for r2, and one for r3. That has taken all, so the
    other 3 of r3 wait until step 8, with 2 of r4, and the last 2 of r4 until step 11."""
    sent = trace((0, 4, 20), (1, 4, 20), (1, 8, 20), (1, 4, 20), (6, 4, 20))
    log = log_of(sent, **PLENTY, max_num_batched_tokens=8)
    assert prompts(log)[:5] == [["r0"], [], [], ["r1", "r2"], ["r2", "r3"]]
    assert prompts(log)[5:11] == [[], [], ["r3", "r4"], [], [], ["r4"]]


def test_a_whole_hit_is_no_prompt() -> None:
    """The last token of r1 alone is computed, as of one that decodes. It begins no interval."""
    rows = trace((0, 5, 20), (1, 5, 20), (2, 4, 20))
    rows[1]["prompt_token_ids"] = rows[0]["prompt_token_ids"]
    log = log_of(rows, **PLENTY, enable_prefix_caching=True)
    assert prompts(log)[:4] == [["r0"], ["r1"], [], ["r2"]]


def test_a_hit_of_all_but_two_tokens_is_a_prompt() -> None:
    """r1 waits for step 4, and its two tokens begin an interval: r2 waits until step 7."""
    rows = trace((0, 5, 20), (1, 6, 20), (4, 4, 20))
    rows[1]["prompt_token_ids"] = [0] * 6
    log = log_of(rows, **PLENTY, enable_prefix_caching=True)
    assert prompts(log)[:7] == [["r0"], [], [], ["r1"], [], [], ["r2"]]
    assert log[3]["prefill"] == [["r1", 2, 4, 0, 1]]


def test_an_adaptive_threshold_leaves_everybody_a_fair_share() -> None:
    """Two requests share 12 tokens: 6 each, where the threshold alone allows 2. Then r0 is alone,
    and takes the 8 that it lacks."""
    settings = {
        "num_gpu_blocks": 9,
        "max_num_batched_tokens": 12,
        "long_prefill_token_threshold": 2,
    }
    rows = trace((0, 14, 1), (0, 4, 1))
    log = log_of(rows, **settings, long_prefill_token_threshold_adaptive=True)
    assert [p[1] for p in log[0]["prefill"]] == [6, 4]
    assert [p[1] for p in log[1]["prefill"]] == [8]
    assert [p[1] for p in log_of(rows, **settings)[0]["prefill"]] == [2, 2]
    settings["long_prefill_token_threshold"] = 9
    wide = log_of(rows, **settings, long_prefill_token_threshold_adaptive=True)
    assert [p[1] for p in wide[0]["prefill"]] == [9, 3]

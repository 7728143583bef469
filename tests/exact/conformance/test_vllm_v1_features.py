"""vLLM V1 with features decides what the real engine decided, and what its rules say.

Recorded cases, random cases recorded elsewhere, random cases against a dull twin, and the rules
that surprise people, each in a handful of requests.
"""

from functools import partial
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
from exact.conformance.generate_v1_features import FAMILIES, make_case
from marks import long, whole
from shared import needs_shared
from twins.vllm_v1_features import step_log

from kvsim.against.conform.cases import run_case

ENGINE = "vllm-v1"
FEATURES = CORPUS / "vllm-v1-features"
FILES = ("all", "misc", "offload", "pd", "pp", "simple", "spec")
QUICK = ("misc05", "off06", "off15", "pd08", "pp03", "sim04", "spec09", "spec11")
"""Recorded cases that always run."""
SEEDS = 1000 if WHOLE else 60
Record = dict[str, Any]


def folders() -> list[Any]:
    found = recorded_folders(ENGINE, FEATURES / "cases")
    quick = [folder for folder in found if folder.name.startswith(QUICK)]
    return [*quick, *(pytest.param(each, marks=long) for each in found if each not in quick)]


@needs_shared("conformance")
@pytest.mark.parametrize("folder", folders(), ids=lambda folder: folder.name)
def test_recorded_cases(folder: Path) -> None:
    check(ENGINE, recorded_case(ENGINE, folder))


@needs_shared("conformance")
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("every", [120, pytest.param(1, marks=long)])
def test_recorded_random_cases(name: str, every: int) -> None:
    for case in recorded_lines(ENGINE, FEATURES / "fuzz" / f"{name}.jsonl.gz", every):
        check(ENGINE, case)


@long
@whole
@needs_shared("conformance")
@pytest.mark.parametrize("name", FILES)
def test_the_twin_follows_the_recorded_cases(name: str) -> None:
    for case in recorded_lines(ENGINE, FEATURES / "fuzz" / f"{name}.jsonl.gz", every=20):
        check_twin(step_log, case)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_cases_against_the_twin(family: str) -> None:
    check_random(ENGINE, partial(make_case, family), step_log, range(6))


@pytest.mark.parametrize(
    ("family", "seed"),
    [
        pytest.param("pp", 41, id="full attention in blocks of two sizes, beside a window"),
        pytest.param("offload", 101, id="a load of nothing ends, and the request still waits"),
        pytest.param("mixed", 76, id="the same, behind a limit of adapters"),
        pytest.param("simple", 8, id="a block that left the window is stored by its content"),
    ],
)
def test_crossings_that_few_cases_meet(family: str, seed: int) -> None:
    check_random(ENGINE, partial(make_case, family), step_log, (seed,))


@long
@pytest.mark.parametrize("family", FAMILIES)
def test_more_random_cases_against_the_twin(family: str) -> None:
    check_random(ENGINE, partial(make_case, family), step_log, range(6, SEEDS))


def of_windows(family: str, seed: int) -> tuple[Record, list[Record]]:
    """Under two windows in blocks of two sizes, and no full attention."""
    config, trace = make_case(family, seed)
    size = config["block_size"]
    narrow = {"type": "sliding", "block_size": size, "window": 2 * size}
    wide = {"type": "sliding", "block_size": 2 * size, "window": 3 * size}
    return config | {"kv_groups": [narrow, wide]}, trace


@pytest.mark.parametrize("family", ["misc", "offload"])
def test_windows_alone_against_the_twin(family: str) -> None:
    check_random(ENGINE, partial(of_windows, family), step_log, range(12))


def row(name: str, arrival: float, tokens: list[int], output: int, **wishes: Any) -> Record:
    return {
        "id": name,
        "arrival": arrival,
        "prompt_token_ids": tokens,
        "output_len": output,
        **wishes,
    }


def log_of(rows: list[Record], **settings: Any) -> list[Record]:
    """Under 11 usable blocks of 4 tokens, unless set otherwise."""
    config = {
        "block_size": 4,
        "num_gpu_blocks": 12,
        "max_model_len": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "enable_prefix_caching": True,
        **settings,
    }
    return list(run_case(ENGINE, config, rows, audit_every=1))


def offload(**settings: Any) -> Record:
    return {"kv_connector": "offloading", "offload": {"cpu_chunks": 20, **settings}}


def test_a_lora_limit_passes_requests_over() -> None:
    """r1 waits for a place of its adapter; r2, behind it, does not."""
    rows = [row("r0", 0, [0] * 4, 3, lora="A"), row("r1", 0, [1] * 4, 1, lora="B")]
    log = log_of([*rows, row("r2", 0, [2] * 4, 1, lora="A")], max_loras=1)
    assert [entry[0] for entry in log[0]["prefill"]] == ["r0", "r2"]
    assert [entry[0] for entry in log[3]["prefill"]] == ["r1"]


def test_samples_are_requests_of_their_own_that_share_the_prompt() -> None:
    log = log_of([row("r", 0, [7] * 9, 1, n=2)])
    assert log[0]["prefill"] == [["0_r", 9, 0, 0, 1], ["1_r", 1, 8, 0, 1]]


def test_equal_prompts_with_other_salts_share_nothing() -> None:
    rows = [row("r0", 0, [7] * 9, 1, cache_salt="x"), row("r1", 0, [7] * 9, 1, cache_salt="y")]
    assert [entry[2] for entry in log_of(rows)[0]["prefill"]] == [0, 0]


def test_an_abort_frees_at_once_and_a_grammar_delays_admission() -> None:
    rows = [row("r0", 0, [0] * 8, 30, abort=2.0), row("r1", 0, [1] * 8, 1, grammar_ready=1.5)]
    log = log_of(rows)
    assert (log[2]["aborted"], log[1]["free_gpu_blocks"]) == (["r0"], 8)
    assert log[2]["prefill"] == [["r1", 8, 0, 0, 1]]
    assert log[2]["free_gpu_blocks_end"] == 11


def chats() -> list[Record]:
    """A prompt of two blocks, others that evict it, and the same prompt again."""
    rows = [row("a0", 0, [1] * 9, 1)]
    rows += [row(f"b{i}", 4 + 3 * i, [10 + i] * 40, 1) for i in range(2)]
    return [*rows, row("a1", 20, [1] * 9, 1)]


def test_an_evicted_prefix_comes_back_from_the_cpu_tier() -> None:
    log = log_of(chats(), **offload(cpu_chunks=40))
    assert log[0]["stores"][0][:4] == [0, "a0", 2, 2]
    (load,) = [record for record in log if record["loads"]]
    assert (load["time"], load["loads"][0][:4]) == (20.0, [3, "a1", 2, 2])
    assert (load["holding"], load["prefill"]) == (1, [])
    (again,) = [record for record in log if record["time"] == 22.0]
    assert again["prefill"] == [["a1", 1, 8, 0, 1]]


def test_a_store_that_lacks_room_is_refused_as_a_whole() -> None:
    """Of the ten blocks of b0, eight would fit."""
    log = log_of(chats()[1:2], **offload(cpu_chunks=8))
    assert not any(record["stores"] for record in log)
    assert {tuple(record["cpu"]) for record in log} == {(8, 0, 0)}


def test_only_prompts_are_stored_unless_asked_otherwise() -> None:
    rows = [row("r", 0, [1] * 8, 12)]
    blocks = {
        only: sum(store[2] for record in log for store in record["stores"])
        for only in (True, False)
        if (log := log_of(rows, **offload(offload_prompt_only=only)))
    }
    assert blocks == {True: 2, False: 4}


def test_a_hit_on_a_chunk_that_is_still_written_makes_the_request_wait() -> None:
    """With the prefix cache off, a1 finds the chunks of a0 in the tier only, and not ready."""
    rows = [row("a0", 0, [1] * 9, 1), row("a1", 1, [1] * 9, 1)]
    log = log_of(rows, enable_prefix_caching=False, **offload(store_steps=6))
    (first,) = [record for record in log if record["loads"]]
    assert (first["time"], log[1]["waiting"]) == (8.0, 1)


def test_reuse_of_a_block_waits_for_the_store_that_reads_it() -> None:
    log = log_of(chats()[:2], num_gpu_blocks=12, **offload(store_steps=30))
    (flushed,) = [record for record in log if record["flush"]]
    assert (flushed["time"], flushed["flush"]) == (4.0, [0])
    assert flushed["xdone"] == [0]


def test_a_victim_in_flight_is_not_preempted_where_a_connector_loads() -> None:
    """In asynchronous mode, its blocks would be released too late to help this step."""
    rows = [row(f"r{i}", 0, [i] * 11, 20) for i in range(3)]
    plain = log_of(rows, v1_async=True)
    connected = log_of(rows, v1_async=True, **offload())
    first = next(record for record in plain if record.get("preempted"))
    same = connected[first["step"]]
    assert (same["preempted"], len(same["decode"])) == ([], len(first["decode"]))


def test_a_preemption_waits_for_all_transfers_of_the_simple_tier() -> None:
    rows = [row(f"r{i}", 0, [i] * 16, 20) for i in range(2)]
    log = log_of(rows, kv_connector="simple", simple={"cpu_blocks": 20, "store_steps": 20})
    (step,) = [record for record in log if record["preempted"]][:1]
    assert step["flush"] == [1]
    assert step["xdone"][:1] == ["S0"]


def test_a_prefill_side_keeps_its_blocks_until_they_are_read() -> None:
    rows = [row("r", 0, [1] * 8, 1, pd="prefill")]
    log = log_of(rows, kv_connector="nixl", kv_role="kv_producer", nixl={"send_steps": 3})
    assert log[1]["sends"] == ["r"]
    assert [record["free_gpu_blocks_end"] for record in log] == [9, 9, 9, 9, 11]


def test_a_decode_side_pulls_the_whole_prompt_and_computes_its_last_token() -> None:
    rows = [row("r", 0, [1] * 10, 2, pd="decode")]
    log = log_of(rows, kv_connector="nixl", kv_role="kv_consumer", nixl={"load_steps": 2})
    assert log[0]["loads"][0][:4] == [0, "r", 3, 1]
    assert log[3]["prefill"] == [["r", 1, 9, 0, 1]]


def test_a_threshold_below_the_drafts_kills_the_engine() -> None:
    rows = [row("r0", 0, [1] * 9, 9), row("r1", 3, [1] * 9, 9)]
    drafts = {"num_spec_tokens": 4, "method": "ngram", "accept": 0}
    alive = log_of(rows, spec=drafts, long_prefill_token_threshold=5)
    dead = log_of(rows, spec=drafts, long_prefill_token_threshold=4)
    assert "error" not in alive[-1]
    assert dead[-1]["error"].startswith("AssertionError")


def test_a_request_takes_part_in_every_second_batch_of_two_stages() -> None:
    """An empty batch takes a place in the pipeline, too."""
    rows = [row("r0", 0, [0] * 4, 3), row("r1", 1, [1] * 4, 3)]
    log = log_of(rows, pipeline_parallel_size=2)
    moves = [record["decode"] + [p[0] for p in record["prefill"]] for record in log[:-1]]
    assert moves == [["r0"], [], ["r0", "r1"], [], ["r0", "r1"], [], ["r1"], [], []]
    assert log[-1]["drain"]

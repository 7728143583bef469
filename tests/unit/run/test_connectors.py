"""Connectors by vLLM's own tables: what is built, what is refused, and tiers of one's own."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from command import run_here
from marks import long
from places import ROOT
from tiered import AGAIN, SMALL, check, prompts, random_run, run, ttft_ms

from kvsim.engines.vllm_v1.offloading import Offloading
from kvsim.engines.vllm_v1.simple import SimpleOffload
from kvsim.errors import ConfigError
from kvsim.report import read_results
from kvsim.run.assembly import assemble
from kvsim.run.connectors import Offload
from kvsim.settings.config import make_config
from kvsim.workload import ParentContent

GIB = 1 << 30
BLOCK_BYTES = 16 * 12_288
SIMPLE = {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both"}
TIERED = {"spec_name": "TieringOffloadingSpec"}


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs/examples"))


def offload(**settings: Any) -> Offload:
    found = assemble(make_config({**SMALL, **settings})).offload
    assert found is not None
    return found


def native(**extra: Any) -> dict[str, Any]:
    table = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    return {"kv_transfer_config": {**table, "kv_connector_extra_config": extra}}


def test_the_size_and_the_table_build_the_same_tier() -> None:
    short = offload(kv_offloading_size=1.0).connector
    table = offload(**native(cpu_bytes_to_use=GIB)).connector
    for each in (short, table):
        assert isinstance(each, Offloading)
        assert each.tier.capacity == GIB // BLOCK_BYTES


def test_a_chunk_can_be_given_in_tokens() -> None:
    connector = offload(**native(cpu_bytes_to_use=GIB, block_size=64)).connector
    assert isinstance(connector, Offloading)
    assert connector.blocks_per_chunk == 4


def test_the_simple_tier_has_8_gib_unless_something_is_said() -> None:
    connector = offload(kv_transfer_config=SIMPLE).connector
    assert isinstance(connector, SimpleOffload)
    assert connector.capacity_blocks == 8 * GIB // BLOCK_BYTES - 1
    table = {**SIMPLE, "kv_connector_extra_config": {"num_cpu_blocks": 40, "lazy_offload": True}}
    connector = offload(kv_transfer_config=table).connector
    assert connector.describe() == {"capacity_blocks": 39, "lazy_offload": True}


@pytest.mark.parametrize("lazy", [False, True])
def test_the_simple_tier_loads_what_the_gpu_lost(lazy: bool) -> None:
    """A lazy tier copies what is about to be evicted: 2 x 2 blocks of a budget of 32 tokens ahead.

    Both copy while nothing else happens, so the prompt that comes again waits for two blocks."""
    table = {**SIMPLE, "kv_connector_extra_config": {"lazy_offload": lazy}}
    settings = {"gib": 0, "kv_transfer_config": table, "max_num_batched_tokens": 32}
    result = run(AGAIN, **settings)
    assert [int(n) for n in result.requests["tier1_hit_tokens"]] == [0, 0, 32]
    assert int(result.requests["waiting_load_ns"][2]) == 400_000


def test_a_preemption_waits_for_all_copies_of_the_simple_tier() -> None:
    """Two prompts fill the pool; while they grow, the blocks of both are copied for 24 ms."""
    rows = prompts((1, 70), (2, 70)).rows
    trace = replace(AGAIN, rows=[replace(row, arrival_ns=0, output_length=30) for row in rows])
    result = run(trace, gib=0, block_us=3000, kv_transfer_config=SIMPLE)
    assert result.requests["num_preemptions"].sum() > 0
    assert result.steps["flush_ns"].any()
    assert any("waited for all copies under way" in note for note in result.meta["notes"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}},
            "choose one",
        ),
        ({"kv_transfer_config": {"kv_connector": "OffloadingConnector"}}, "use kv_both"),
        ({"kv_transfer_config": {"connector": "x"}}, "unknown key 'connector'"),
        ({"kv_transfer_config": {**SIMPLE, "kv_role": "both"}}, "kv_transfer_config: kv_role"),
        (native(), "needs 'cpu_bytes_to_use'"),
        (native(cpu_bytes_to_use=GIB, block_size=24), "not a number of blocks"),
        (native(cpu_bytes_to_use=GIB, block_size=32, blocks_per_chunk=2), "give one of them"),
        (native(cpu_bytes_to_use=GIB, secondary_tiers=[{"type": "fs"}]), "have no effect without"),
        (native(cpu_bytes_to_use=GIB, secondary_tiers=[{"type": "fs"}], **TIERED), "subclass of"),
        (native(cpu_bytes_to_use=GIB, secondary_tiers=[{}, {}], **TIERED), "give one"),
        ({"kv_offloading_size": 1.0, "kv_offloading_backend": "lmcache"}, "use native"),
        (
            {"kv_offloading_size": 1.0, "kv_transfer_config": {"kv_connector": "a:B"}},
            "does not obey it",
        ),
        (
            {"kv_transfer_config": {"kv_connector": "pathlib:Path", "kv_role": "kv_both"}},
            "not a connector",
        ),
        (
            {"kv_transfer_config": {**SIMPLE}, "engine": "vllm-0.6.3", "async_scheduling": None},
            "no",
        ),
        (
            {
                "kv_transfer_config": {
                    **SIMPLE,
                    "kv_connector_extra_config": {"cpu_bytes_to_use": 9},
                }
            },
            "room for 0",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        assemble(make_config({**SMALL, **settings}))
    assert "\n" not in str(error.value)


def test_a_storage_of_ones_own_brings_back_what_the_cpu_lost() -> None:
    """CPU memory has room for 11 blocks, so the second prompt evicts the first one there, too.

    The head of the first prompt is still there. To read its tail, LRU gives up the head, which is
    then read, too, each in 0.028 ms while the request waits. Then both are loaded in 0.4 ms."""
    tier = {"type": "Ssd", "module_path": "ssd_tier", "capacity_gib": 1}
    size = 11 * BLOCK_BYTES / GIB
    extra = {**TIERED, "secondary_tiers": [tier]}
    result = run(AGAIN, gib=size, kv_connector_extra_config=extra)
    assert [int(n) for n in result.requests["tier2_hit_tokens"]] == [0, 0, 32]
    assert not result.requests["tier1_hit_tokens"].any()
    read_ns = 2 * round(BLOCK_BYTES / 7.0)
    assert int(result.requests["waiting_tier_ns"][2]) == read_ns
    assert int(result.requests["waiting_load_ns"][2]) == 400_000
    assert ttft_ms(result)[2] == (read_ns + 1_400_000) / 1e6
    moved = result.meta["kv_offload"]
    assert (moved["storage"], moved["written_chunks"], moved["read_chunks"]) == ("Ssd", 12, 2)
    plain = run(AGAIN, gib=size)
    assert [int(n) for n in plain.requests["num_cached_tokens"]] == [0, 0, 16]


def test_a_drive_that_is_full_loses_what_was_written_first() -> None:
    tier = {"type": "ssd_tier:Ssd", "capacity_gib": 4 * BLOCK_BYTES / GIB}
    extra = {**TIERED, "secondary_tiers": [tier]}
    result = run(AGAIN, gib=11 * BLOCK_BYTES / GIB, kv_connector_extra_config=extra)
    assert [int(n) for n in result.requests["tier1_hit_tokens"]] == [0, 0, 16]
    assert not result.requests["tier2_hit_tokens"].any()


def test_a_connector_of_ones_own() -> None:
    """It stores all prompts, and loads hits of 32 tokens or more."""
    table = {"kv_connector": "PromptStore", "kv_connector_module_path": "prompt_store"}
    table |= {"kv_role": "kv_both"}
    for least, hits in ((32, 32), (48, 0)):
        extra = {"kv_connector_extra_config": {"min_tokens": least}}
        result = run(AGAIN, gib=0, kv_transfer_config={**table, **extra})
        assert [int(n) for n in result.requests["tier1_hit_tokens"]] == [0, 0, hits]
    assert result.meta["kv_offload"]["connector"] == "PromptStore"


def test_the_command_line_takes_vllms_json(tmp_path: Path) -> None:
    table = native(cpu_bytes_to_use=GIB, blocks_per_chunk=2)["kv_transfer_config"]
    words = ["run", "--trace", str(ROOT / "traces/chat.jsonl"), "--num-prompts", "3"]
    words += ["--model", "small", "--hardware", "h100", "--out", "out"]
    done = run_here([*words, "--kv-transfer-config", json.dumps(table)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "tiers: stored" in done.stdout
    summary = read_results(tmp_path / "out")[0]
    assert summary["meta"]["config"]["kv_transfer_config"] == table
    assert summary["meta"]["kv_offload"]["blocks_per_chunk"] == 2
    assert "Tiers" in (tmp_path / "out/report.html").read_text()
    for text, why in (("{", "not JSON"), ("[1]", "expected a table")):
        done = run_here([*words, "--kv-transfer-config", text], tmp_path)
        assert done.returncode == 2 and f"--kv-transfer-config: {why}" in done.stderr


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, "1 follow-up prompts found no stored answer"),
        ({"offload_prompt_only": False}, ""),
    ],
)
def test_a_prompt_that_goes_on_from_an_answer_is_remarked_upon(
    extra: dict[str, Any], words: str
) -> None:
    """The answer is 20 tokens; the next prompt is prompt, answer and 12 tokens more."""
    rows = prompts((1, 32), (2, 160), (1, 64)).rows
    first, other = (
        replace(rows[0], output_length=20),
        replace(rows[2], content=ParentContent(0, 52)),
    )
    trace = replace(AGAIN, rows=[first, rows[1], other])
    notes = " ".join(run(trace, kv_connector_extra_config=extra).meta["notes"])
    assert (words in notes) if words else ("found no stored answer" not in notes)


def test_an_offer_without_room_is_remarked_upon() -> None:
    result = run(AGAIN, gib=9.5 * BLOCK_BYTES / GIB)
    assert any("found no room and stored nothing" in note for note in result.meta["notes"])
    assert result.meta["kv_offload"]["refused_stores"] > 0


@long
def test_a_search_for_the_size_goes_by_two_names(tmp_path: Path) -> None:
    words = ["size", "--trace", str(ROOT / "traces/agents.jsonl"), "--num-prompts", "8"]
    words += ["--model", "llama-3.1-8b", "--hardware", "h100", "--num-gpu-blocks-override", "2000"]
    words += ["--max-model-len", "30000", "--slo", "p99_ttft<60s", "--seeds", "1", "--jobs", "1"]
    words += ["--from", "1", "--to", "4", "--find", "kv_offloading_size"]
    done = run_here(words, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "kv_offloading_size" in done.stdout and "1 GiB" in done.stdout.replace("\xa0", " ")


def with_connector(kind: str, seed: int) -> dict[str, Any]:
    """Settings of a random run with another connector than the native one, or with a storage."""
    rng = Random(seed)
    if kind == "ssd":
        size, drive = rng.choice([2.2, 5, 30]), rng.choice([20 * BLOCK_BYTES / GIB, 1.0])
        tier = {"type": "ssd_tier:Ssd", "capacity_gib": drive}
        return {
            "gib": size * BLOCK_BYTES / GIB,
            "kv_connector_extra_config": {**TIERED, "secondary_tiers": [tier]},
        }
    if kind == "own":
        table = {"kv_connector": "prompt_store:PromptStore", "kv_role": "kv_both"}
        extra: dict[str, Any] = {"min_tokens": 16}
    else:
        table = SIMPLE
        extra = {"num_cpu_blocks": rng.choice([4, 20, 400]), "lazy_offload": kind == "lazy"}
    return {"gib": 0, "kv_transfer_config": {**table, "kv_connector_extra_config": extra}}


@pytest.mark.parametrize("kind", ["eager", "lazy", "ssd", "own"])
@pytest.mark.parametrize(
    "seeds", [range(3), pytest.param(range(3, 40), marks=long)], ids=["some", "many"]
)
def test_random_runs_end_and_add_up(kind: str, seeds: range) -> None:
    for seed in seeds:
        trace, settings = random_run(seed)
        extra = settings.pop("kv_connector_extra_config")
        other = with_connector(kind, seed)
        if kind == "ssd":
            other["kv_connector_extra_config"] |= extra
        result = run(trace, **(settings | other))
        assert result.meta["outcome"]["kind"] == "finished", f"seed {seed}"
        check(result)

"""A tier in CPU memory under `kvsim run`: its size, its time, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
from made import make_trace
from marks import mostly_long
from tiered import AGAIN, MS, SMALL, prompts, random_run, run, ttft_ms

from kvsim.core.batch import Batch
from kvsim.engines.vllm_v1.cpu_tier import Access, CpuTier, Lru
from kvsim.engines.vllm_v1.scheduler import VllmV1
from kvsim.errors import ConfigError
from kvsim.run.assembly import assemble
from kvsim.settings.config import make_config
from kvsim.workload import TokenContent


def test_a_load_takes_the_time_of_its_copy_and_saves_the_computation() -> None:
    """Two blocks in 0.4 ms while the request waits, then a step of 1 ms."""
    result = run(AGAIN)
    assert ttft_ms(result) == [1.0, 1.0, 1.4]
    assert list(result.requests["num_cached_tokens"]) == [0, 0, 32]
    moved = result.meta["kv_offload"]
    assert (moved["stored_blocks"], moved["loaded_blocks"]) == (12, 2)
    assert (moved["stored_copy_s"], moved["loaded_copy_s"]) == (0.0024, 0.0004)
    assert moved["loaded_bytes"] == 2 * 16 * 12_288  # 12 KiB a token


def test_without_a_tier_the_prefix_is_computed_again() -> None:
    assert list(run(AGAIN, gib=0).requests["num_cached_tokens"]) == [0, 0, 0]


def test_a_load_within_the_step_makes_it_wait() -> None:
    result = run(AGAIN, kv_connector_extra_config={"sync_load_budget_bytes": 1 << 30})
    assert ttft_ms(result) == [1.0, 1.0, 1.4]
    assert max(result.steps["link_wait_ns"]) == 0.4 * MS


def test_reuse_of_a_block_waits_for_its_store() -> None:
    """The store of ten blocks begins after the step of 1 ms and takes 1 s; at 1 s, the next prompt
    needs these blocks."""
    result = run(prompts((1, 160), (2, 160)), block_us=100_000)
    assert result.meta["kv_offload"]["flushed_jobs"] == 1
    assert ttft_ms(result) == [1.0, 2.0]


def test_a_request_that_arrives_during_a_load_is_served_at_once() -> None:
    """The prompt that comes back at 20 s is loaded until 21.4 s; another one arrives at 21 s."""
    rows = prompts((1, 40), (2, 172), (1, 40), every_s=10).rows
    late = replace(prompts((3, 9)).rows[0], index=3, id="late", arrival_ns=21_000 * MS)
    result = run(replace(AGAIN, rows=[*rows, late]), block_us=700_000)
    assert ttft_ms(result) == [1.0, 1.0, 1401.0, 1.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"engine": "vllm-0.6.3", "async_scheduling": None},
            "kv_offloading_size: vllm-0.6.3 has no such setting",
        ),
        ({"kv_offloading_size": 1e-6}, "a chunk takes 196,608 bytes, more than"),
        ({"kv_offloading_size": 0.0}, ""),
        (
            {"kv_connector_extra_config": {"eviction": "lru"}},
            "takes no 'eviction'; did you mean 'eviction_policy'?",
        ),
        ({"kv_connector_extra_config": {"blocks_per_chunk": 0}}, "of at least 1"),
        (
            {"kv_offloading_size": 0.0, "kv_connector_extra_config": {"store_threshold": 2}},
            "there is no KV offload; set --kv-offloading-size",
        ),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    table = {**SMALL, "kv_offloading_size": 1.0, **settings}
    if not message:
        assert assemble(make_config(table)).offload is None
        return
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        assemble(make_config(table))


def test_a_tier_no_larger_than_the_pool_is_remarked_upon() -> None:
    size = 5 * 16 * 12_288 / (1 << 30)
    notes = assemble(make_config({**SMALL, "kv_offloading_size": size})).notes
    assert any("room for 5 blocks, and the GPU for 11" in note for note in notes)


def test_tails_are_evicted_before_heads_and_offers_are_all_or_nothing() -> None:
    tier, first, second = CpuTier(4), Access(), Access()
    keys = [0, 1, 2]
    first.position = {key: 16 * (key + 1) for key in keys}
    assert tier.offer(keys, first) == {0: 0, 1: 1, 2: 2}
    tier.stored(keys)
    tier.ended(first)
    new = [*range(10, 15)]
    second.position = {key: key for key in new}
    assert tier.offer(new, second) is None
    assert tier.offer(new[:2], second) == {10: 3, 11: 2}
    assert [tier.look_up(key) for key in keys] == [0, 0, None]


class Strict(VllmV1):
    """Gives up whoever has a place in the step that is composed and four tokens."""

    def before_admissions(self, batch: Batch, now_ns: int) -> None:
        for request in [*batch.running]:
            if request.output_tokens >= 4:
                self.abort(batch, request)


def test_who_is_given_up_while_a_step_is_composed_has_nothing_to_store_for_it() -> None:
    trace = make_trace([(40, 10, TokenContent((token,) * 40)) for token in (1, 2, 1)])
    result = run(trace, engine=f"{__name__}:Strict", async_scheduling=None)
    assert list(result.requests["output_tokens"]) == [4, 4, 4]
    assert result.meta["outcome"]["kind"] == "finished"
    assert result.meta["kv_offload"]["stored_blocks"] == 4


@pytest.mark.parametrize("seed", mostly_long(80, quick=12))
def test_random_runs_end_add_up_and_repeat(seed: int) -> None:
    """The ledger asserts that all times and tokens add up."""
    trace, settings = random_run(seed)
    first, second = run(trace, **settings), run(trace, **settings)
    assert first.meta["outcome"]["kind"] == "finished"
    assert list(first.requests["finish_ns"]) == list(second.requests["finish_ns"])
    assert first.meta["kv_offload"] == second.meta["kv_offload"]
    requests = first.requests
    assert (requests["tier1_hit_tokens"] <= requests["num_cached_tokens"]).all()
    assert not requests["tier2_hit_tokens"].any()


def test_an_offer_of_nothing_gives_a_request_no_place_among_the_others() -> None:
    """Recency is the first access, which an empty offer is not."""
    first, second, lru = Access(), Access(), Lru(2)
    lru.inserted([], first)
    for access, key in ((second, 2), (first, 1)):
        access.position[key] = 4
        lru.inserted([key], access)
    assert lru.evict(1, lambda key: True) == [2]

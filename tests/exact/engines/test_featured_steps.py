"""Repeated decode steps of vLLM V1 with features: taken where they can be, equal to the twin."""

from dataclasses import replace
from typing import Any

import pytest
from fuzz.draw import layered_models
from fuzz.equal import assert_equal_runs
from hypothesis import given, settings
from hypothesis import strategies as st
from made import make_trace
from tiered import AGAIN, MS, SMALL, cost, random_run

from kvsim.assembly import assemble
from kvsim.config import make_config
from kvsim.engines.vllm_v1_features.offloading import Offloading
from kvsim.engines.vllm_v1_features.scheduler import VllmV1FeaturesAsync
from kvsim.engines.vllm_v1_features.timed import TimedWorker
from kvsim.engines.vllm_v1_groups.manager import GroupTables
from kvsim.fast.featured import why_not_featured
from kvsim.workload.trace import Trace

TIER = {**SMALL, "cost": cost(200), "kv_offloading_size": 1.0}
LONG = {"max_model_len": 2000, "num_gpu_blocks_override": 1000}


def layered(kind: str) -> str:
    """The path of a small model with layers of a kind."""
    return next(path for path in layered_models() if kind in path)


def chats(number: int, **fields: Any) -> Trace:
    """Requests that decode 150 tokens, all of them together for most of the time."""
    trace = make_trace([(20 + 7 * n, 150, None) for n in range(number)])
    return replace(trace, rows=[replace(row, arrival_ns=0, **fields) for row in trace.rows])


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("given", "layers"),
    [
        ({"kv_offloading_size": 1.0}, None),
        ({"enable_lora": True, "max_loras": 1}, None),
        ({"model": "gpt-oss-20b", "max_num_seqs": 64}, None),
        ({"kv_offloading_size": 1.0}, "chunks"),
    ],
    ids=["tier", "adapters", "windows", "chunks with a tier"],
)
def test_steps_in_which_everybody_decodes_are_repeated(
    given: dict[str, Any], layers: str | None, ahead: bool
) -> None:
    table = {**SMALL, **LONG, "cost": cost(1), "async_scheduling": ahead, **given}
    if layers:
        table["model"] = layered(layers)
    lora = {"lora": "a"} if "max_loras" in given else {}
    result = assert_equal_runs(chats(5, **lora), table, "chats").result
    assert result is not None
    taken = result.meta["fast_path"]["repeated_steps"]
    assert taken > 0.9 * result.meta["outcome"]["step"]


def test_a_client_that_gives_up_ends_a_series() -> None:
    """Steps of 1 ms: who gives up after 40.5 ms ends before the next step is composed."""
    trace = chats(3)
    rows = [replace(trace.rows[0], abort_after_ns=40 * MS + MS // 2), *trace.rows[1:]]
    table = {**SMALL, **LONG, "cost": cost(1)}
    result = assert_equal_runs(replace(trace, rows=rows), table, "one gives up").result
    assert result is not None
    assert result.requests["finish_ns"].tolist() == [41 * MS, 150 * MS, 150 * MS]
    assert result.meta["fast_path"]["repeated_steps"] > 100


@settings(max_examples=12)
@given(seed=st.integers(0, 10**6))
def test_any_run_with_a_tier_equals_its_twin(seed: int) -> None:
    trace, drawn = random_run(seed)
    link = cost(drawn.pop("block_us"))
    table = {**SMALL, **drawn, "cost": link, "kv_offloading_size": drawn["gib"]}
    del table["gib"]
    assert_equal_runs(trace, table, f"seed {seed}")


@pytest.mark.parametrize(
    ("part", "kind", "method"),
    [
        ("scheduler", VllmV1FeaturesAsync, "settle"),
        ("blocks", GroupTables, "allocate_slots"),
        ("connector", Offloading, "build_connector_meta"),
        ("worker", TimedWorker, "collect"),
    ],
)
def test_nothing_that_is_overridden_is_passed_over(part: str, kind: type, method: str) -> None:
    parts = assemble(make_config({**TIER, "async_scheduling": True}))
    scheduler: Any = parts.scheduler
    assert why_not_featured(scheduler, parts.blocks) == ""
    own = type("Own", (kind,), {method: lambda self, *args, **more: None})
    changed = {"scheduler": scheduler, "blocks": parts.blocks}.get(part)
    changed = getattr(scheduler, part) if changed is None else changed
    changed.__class__ = own
    assert why_not_featured(scheduler, parts.blocks)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2,
                                 "acceptance_rate": 0.5}}, "each step verifies drafts"),
        ({"kv_transfer_config": {"kv_connector": "SimpleCPUOffloadConnector"}},
         "the connector looks at every step"),
    ],
)  # fmt: skip
def test_a_run_says_why_no_step_is_repeated(given: dict[str, Any], why: str) -> None:
    result = assert_equal_runs(AGAIN, {**TIER, **given}, why).result
    assert result is not None
    fast = result.meta["fast_path"]
    assert fast["repeated_steps"] == 0
    assert fast["composed_because"] == {why: result.meta["outcome"]["step"]}

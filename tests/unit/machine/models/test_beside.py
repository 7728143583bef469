"""What drafters and slots for adapters take of a GPU, by hand and from what is published."""

from math import ceil
from typing import Any

import pytest

from kvsim.machine import Budget, load_model
from kvsim.machine.memory import Drafter, adapter_bytes, drafter_of
from kvsim.report.pages.run import memory_panel
from kvsim.run.assembly import assemble
from kvsim.settings.config import make_config

LLAMA = {"model": "llama-3.1-8b", "hardware": "h100", "max_model_len": 8192}
H, QKV, MLP = 4096, 4096 + 2 * 1024, 3 * 4096 * 14336


def memory(**keys: Any) -> Budget:
    return assemble(make_config({**LLAMA, **keys})).memory


def drafts(method: str, **keys: Any) -> dict[str, Any]:
    table = {"num_speculative_tokens": 3, "method": method, "acceptance_rate": 0.5, **keys}
    return {"speculative_config": table}


@pytest.mark.parametrize(
    ("method", "further"),
    [("eagle", 2 * H * H), ("mtp", 2 * H * H), ("eagle3", 3 * H * H + H * QKV + 32_000 * H)],
)
def test_one_layer_of_the_model_and_its_projections(method: str, further: int) -> None:
    layer = H * QKV + H * H + MLP + 2 * H
    found, alone = memory(**drafts(method)), memory()
    assert found.drafter_bytes == 2 * (layer + further)
    assert found.block_bytes == alone.block_bytes * 33 // 32
    assert found.kv_bytes == alone.kv_bytes - found.drafter_bytes
    assert found.num_gpu_blocks == found.kv_bytes // found.block_bytes < alone.num_gpu_blocks


def test_a_draft_model_has_its_weights_and_layers() -> None:
    found, alone = memory(**drafts("draft_model", model="llama-3.2-1b")), memory()
    drafting = load_model("llama-3.2-1b").shard(1)
    assert found.drafter_bytes == drafting.weight_bytes("bfloat16")
    assert found.block_bytes == alone.block_bytes + 16 * drafting.token_bytes("bfloat16")
    named = {"num_speculative_tokens": 3, "model": "llama-3.2-1b", "acceptance_rate": 0.5}
    assert memory(speculative_config=named) == found


@pytest.mark.parametrize("method", ["ngram", "dflash"])
def test_what_takes_nothing_or_is_not_known_changes_no_block(method: str) -> None:
    parts = assemble(make_config({**LLAMA, **drafts(method)}))
    assert parts.memory == memory()
    said = any("not part of the memory budget" in note for note in parts.notes)
    assert said == (method == "dflash")


def test_quantised_weights_are_those_of_the_checkpoint_alone() -> None:
    keys = {"quantization": "fp8"}
    whole, small = memory(**drafts("mtp")), memory(**drafts("mtp"), **keys)
    assert small.drafter_bytes < 0.8 * whole.drafter_bytes
    eagle = drafts("eagle")
    assert memory(**eagle, **keys).drafter_bytes == memory(**eagle).drafter_bytes


def test_drafters_are_divided_as_the_model_is() -> None:
    both, one = memory(**drafts("eagle"), tensor_parallel_size=2), memory(**drafts("eagle"))
    assert both.block_bytes * 2 == one.block_bytes
    # Norms and the projection before the layer are on every GPU.
    replicated = 2 * (2 * H * H + 2 * H)
    assert (both.drafter_bytes - replicated) * 2 == one.drafter_bytes - replicated


def test_the_layer_of_a_drafter_joins_the_cache_groups() -> None:
    """Five groups of gemma's 29 windows and 5 other layers have six layers with a sixth. On two RTX
    3090, Qwen3.6-27B with MTP had blocks of 16 layers and one more: 426 of them in what was printed
    as 11.05 GiB (github.com/noonghunna/club-3090/issues/642)."""
    alone, found = (memory(model="gemma-3-4b", **keys) for keys in ({}, drafts("eagle")))
    assert alone.block_bytes * 6 == found.block_bytes * 5
    keys = {"model": "qwen3.6-27b", "tensor_parallel_size": 2, "kv_cache_dtype": "fp8"}
    given = {"kv_cache_memory_bytes": int(11.054 * (1 << 30)), "vllm_version": "0.24.0"}
    assert memory(**keys, **given, **drafts("qwen3_5_mtp")).num_gpu_blocks == 426


def test_kv_of_a_draft_model_beside_cache_groups_is_not_counted_and_said() -> None:
    keys = {"model": "gemma-3-4b", **drafts("draft_model", model="gemma-3-270m")}
    parts, alone = assemble(make_config({**LLAMA, **keys})), memory(model="gemma-3-4b")
    assert parts.memory.block_bytes == alone.block_bytes
    assert any("the KV of the drafter is not part" in note for note in parts.notes)


def test_slots_hold_an_adapter_of_every_linear_layer() -> None:
    """41,943,040: the trainable parameters that fine-tuning reports for rank 16 on all linear
    layers of Llama 3.1 8B."""
    shard = load_model("llama-3.1-8b").shard(1)
    assert adapter_bytes(shard, "bfloat16", range(32), 1, 16) == 2 * 41_943_040
    found, alone = memory(enable_lora=True, max_loras=3, max_lora_rank=64), memory()
    assert found.adapter_bytes == 3 * 4 * 2 * 41_943_040
    assert found.kv_bytes == alone.kv_bytes - found.adapter_bytes
    assert memory(enable_lora=True).adapter_bytes == 2 * 41_943_040
    assert memory(max_loras=3).adapter_bytes == 0


def test_slots_are_divided_on_the_side_that_the_model_divides() -> None:
    one, two = (load_model("llama-3.1-8b").shard(n) for n in (1, 2))
    inputs, outputs = 3 * H + 2 * H, 2 * H  # of qkv and gate_up; of o and down
    kept = 2 * 16 * (inputs + outputs)
    whole, half = (adapter_bytes(each, "bfloat16", range(1), 1, 16) for each in (one, two))
    assert (half - kept) * 2 == whole - kept
    assert half < whole


def test_each_expert_has_its_slots() -> None:
    """Qwen3 30B A3B: 128 experts of 768 columns."""
    shard = load_model("qwen3-30b-a3b").shard(1)
    hidden, qkv = 2048, (32 + 2 * 4) * 128
    attention = 3 * hidden + qkv + 32 * 128 + hidden
    experts = 128 * (2 * (hidden + 768) + 768 + hidden)
    router = hidden + 128
    numbers = attention + experts + router
    assert adapter_bytes(shard, "bfloat16", range(1), 1, 8) == 2 * 8 * numbers


def test_what_is_set_wins_and_the_breakdown_names_both() -> None:
    keys = {**drafts("eagle"), "enable_lora": True}
    parts = assemble(make_config({**LLAMA, **keys, "num_gpu_blocks_override": 5000}))
    assert parts.memory.num_gpu_blocks == 5000
    assert "drafter" in str(parts.memory) and "adapters" in str(parts.memory)
    shown = memory_panel({"memory": parts.memory.describe()})
    assert "drafter" in shown and "slots for adapters" in shown
    assert "drafter" not in memory_panel({"memory": memory().describe()})


def test_a_stage_has_the_slots_of_its_layers() -> None:
    found = memory(enable_lora=True, pipeline_parallel_size=2)
    assert found.adapter_bytes == 41_943_040


def test_drafters_of_no_name() -> None:
    shard = load_model("llama-3.1-8b").shard(1)
    assert drafter_of(shard, {}, "auto", "bfloat16") == Drafter()
    assert drafter_of(shard, {"method": 5, "model": []}, "auto", "bfloat16") == Drafter()
    assert ceil(drafter_of(shard, {"model": "x/EAGLE3-y"}, "auto", "fp8").token_bytes) == 2 * 1024

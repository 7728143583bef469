"""Settings of memory, from a configuration to the objects of a run."""

import re
from typing import Any

import pytest
from places import ROOT
from shared import SHARED, needs_shared

import kvsim
from kvsim.errors import ConfigError
from kvsim.report.pages.run import memory_panel, provenance_panels
from kvsim.run.assembly import Parts, assemble
from kvsim.settings.config import make_config

CONSTANT = {"model": "constant", "step_us": 1000}


def parts(**keys: Any) -> Parts:
    return assemble(make_config({"cost": CONSTANT, **keys}))


@pytest.mark.parametrize(
    ("engine", "version", "share"),
    [
        ("vllm-0.3.3", "0.3.3", 0.9),
        ("vllm-0.6.3", "0.6.3", 0.9),
        ("vllm-v1", "0.33.0", 0.92),
        ("nano-vllm", None, 0.9),
    ],
)
def test_defaults_of_the_engine(engine: str, version: str | None, share: float) -> None:
    formula = "nano-vllm" if engine == "nano-vllm" else "vllm"
    found = parts(engine=engine, memory_formula=formula)
    assert found.config.vllm_version == found.memory.vllm_version == version
    assert found.config.gpu_memory_utilization == found.memory.gpu_memory_utilization == share


def test_another_release_of_the_same_engine() -> None:
    found = parts(engine="vllm-v1", vllm_version="0.19.0")
    assert found.memory.gpu_memory_utilization == 0.9
    assert found.memory.cudagraph_bytes == 0


LLAMA = {"model": "llama-3.1-8b", "hardware": "l40s", "engine": "vllm-v1"}


def test_the_longest_that_fits_is_named_and_taken() -> None:
    keys = {**LLAMA, "num_gpu_blocks_override": 1000}
    with pytest.raises(ConfigError) as caught:
        parts(**keys)
    message = str(caught.value)
    assert message.startswith("max_model_len: 131072 tokens do not fit into the KV cache of 16000")
    assert "use --max-model-len 16000 or less" in message
    assert message.endswith("or raise --num-gpu-blocks-override")
    assert "\n" not in message
    for text in ("auto", -1):
        assert parts(**keys, max_model_len=text).config.max_model_len == 16_000
    assert parts(**keys, max_model_len=16_000).config.max_model_len == 16_000
    with pytest.raises(ConfigError, match=r"blocks of 16\) beside weights of 14\.96 GiB; use"):
        parts(**{**LLAMA, "hardware": "rtx-4090"})
    with pytest.raises(ConfigError, match="16001 tokens do not fit"):
        parts(**keys, max_model_len=16_001)


@pytest.mark.parametrize(
    ("caching", "drafts", "longest"),
    [(False, 0, 97 * 784), (True, 0, 94 * 784), (True, 3, 85 * 800)],
)
def test_states_take_blocks_of_the_longest_that_fits(
    caching: bool, drafts: int, longest: int
) -> None:
    """Three groups of states: one block each, with a prefix cache two, and one for each draft
    (vLLM 0.33.0, v1/kv_cache_interface.py, `MambaSpec.max_memory_usage_bytes`)."""
    drafter = {"method": "mtp", "num_speculative_tokens": drafts, "acceptance_rate": 0.5}
    found = parts(
        model="qwen3.5-27b",
        hardware="a100-sxm-80gb",
        engine="vllm-v1",
        num_gpu_blocks_override=100,
        max_model_len="auto",
        enable_prefix_caching=caching,
        speculative_config=drafter if drafts else {},
    )
    assert found.config.max_model_len == longest


@pytest.mark.parametrize(("version", "steps"), [("0.25.0", 1), ("0.26.0", 2)])
def test_windows_reserve_the_tokens_of_steps_in_flight_since_0_26(version: str, steps: int) -> None:
    """github.com/vllm-project/vllm/issues/49878: Gemma 4 needs more there."""
    window = -(-(1023 + steps * 8192) // 16) + 1
    found = parts(
        model="gemma-4-31b",
        hardware="h100",
        engine="vllm-v1",
        vllm_version=version,
        num_gpu_blocks_override=9_000,
        max_model_len="auto",
        max_num_batched_tokens=8192,
        async_scheduling=True,
    )
    assert found.config.max_model_len == (9_000 - 5 * window) * 32


def test_the_longest_that_fits_is_at_most_the_models_own_limit() -> None:
    found = parts(**LLAMA, num_gpu_blocks_override=100_000, max_model_len="auto")
    assert found.config.max_model_len == 131_072
    assert found.scheduler.longest_sequence == 131_072


def test_the_schedulers_limit_is_the_one_that_fits() -> None:
    found = parts(**LLAMA, num_gpu_blocks_override=1000, max_model_len="auto")
    assert found.scheduler.longest_sequence == 16_000


def test_kv_cache_memory_bytes_counts_the_blocks() -> None:
    found = parts(**LLAMA, kv_cache_memory_bytes="20G", max_model_len="32K")
    assert found.memory.num_gpu_blocks == 20 * 512
    assert found.blocks.gpu.size == 20 * 512 - 1  # V1 keeps one block for itself
    assert found.config.max_model_len == 32_768


@pytest.mark.parametrize(
    "keys",
    [
        {"vllm_version": "0.6.3"},
        {"kv_cache_memory_bytes": 10**10},
        {"cpu_offload_gb": 1},
        {"pipeline_parallel_size": 2},
        {"data_parallel_size": 2},
        {"enable_expert_parallel": True},
    ],
)
def test_what_is_vllms_is_refused_elsewhere(keys: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=f"^{next(iter(keys))}: only for vLLM; leave it out with nano-vllm"
    ):
        parts(engine="nano-vllm", memory_formula="nano-vllm", **keys)


def test_quantised_weights_leave_more_room() -> None:
    whole, small = parts(), parts(quantization="fp8")
    assert small.memory.weight_bytes < 0.57 * whole.memory.weight_bytes
    assert small.memory.num_gpu_blocks > whole.memory.num_gpu_blocks
    with pytest.raises(ConfigError, match=r"^quantization: .*'awk'.*awq"):
        parts(quantization="awk")


@needs_shared("models/published")
def test_a_checkpoint_with_scales_for_an_fp8_cache_has_one() -> None:
    model = str(SHARED / "models" / "published" / "nvidia--MiniMax-M2.7-NVFP4" / "config.json")
    keys = {"model": model, "hardware": "b200", "engine": "vllm-v1", "tensor_parallel_size": 4}
    found, wide = parts(**keys), parts(**keys, kv_cache_dtype="bfloat16")
    assert found.config.kv_cache_dtype == "fp8"
    assert found.assumed["kv_cache_dtype"].source == "the checkpoint of nvidia--MiniMax-M2.7-NVFP4"
    assert 2 * found.memory.block_bytes == wide.memory.block_bytes
    assert "kv_cache_dtype" not in wide.assumed
    assert parts(**keys, vllm_version="0.13.0").config.kv_cache_dtype == "auto"


def test_a_server_that_starts_with_flashinfer_alone_is_simulated_and_said() -> None:
    """39 bytes for each of 1,024 x 151,936 logits leave 4.4 GiB for 8 GiB of KV."""
    keys = {"model": "qwen3-32b", "hardware": "h100", "engine": "vllm-v1", "max_model_len": 32768}
    found = parts(**keys, vllm_version="0.11.0")
    assert found.memory.least
    assert found.memory.num_gpu_blocks >= 32768 // 16
    [note] = [note for note in found.notes if note.startswith("memory: ")]
    assert "FlashInfer" in note
    assert "--startup-log" in note
    with pytest.raises(ConfigError, match="32768 tokens do not fit into the KV cache"):
        parts(**keys, vllm_version="0.11.1")
    short = parts(**{**keys, "max_model_len": 16384}, vllm_version="0.11.0")
    assert not short.memory.least
    assert not any(note.startswith("memory: ") for note in short.notes)


def test_expert_weights_are_divided_among_replicas() -> None:
    keys = {"model": "qwen3-30b-a3b", "max_model_len": 4096}
    alone, shared = parts(**keys), parts(**keys, data_parallel_size=2)
    assert shared.memory.weight_bytes < 0.6 * alone.memory.weight_bytes
    placed = parts(**keys, data_parallel_size=2, enable_expert_parallel=True)
    assert placed.memory.weight_bytes == shared.memory.weight_bytes


def test_a_version_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"^vllm_version: 'new' is not a version"):
        parts(vllm_version="new")


CHAT = str(ROOT / "traces/chat.jsonl")


def test_what_is_not_simulated_is_in_the_result_and_in_the_report() -> None:
    keys = {"num_prompts": 3, "pipeline_parallel_size": 2, "enforce_eager": True}
    meta = kvsim.simulate(CHAT, keys).meta
    assert [note.split()[0] for note in meta["notes"]] == [
        "pipeline_parallel_size",
        "enforce_eager:",
    ]
    assert meta["memory"]["num_hidden_layers"] == 16
    assert meta["memory"]["communication_bytes"] > 0
    page = provenance_panels(meta)
    assert "Notes" in page
    assert "times of stages are ESTIMATED" in page
    assert "communication, estimated" in memory_panel(meta)


@pytest.mark.parametrize(
    ("keys", "flag"),
    [
        ({"kv_cache_memory_bytes": "1G"}, "--kv-cache-memory-bytes"),
        ({"gpu_memory_utilization": 0.5}, "--gpu-memory-utilization"),
        (
            {"kv_cache_memory_bytes": "1G", "num_gpu_blocks_override": 9},
            "--num-gpu-blocks-override",
        ),
    ],
)
def test_what_made_the_pool_too_small_is_what_is_to_be_raised(
    keys: dict[str, Any], flag: str
) -> None:
    with pytest.raises(ConfigError, match=f"do not fit into the KV cache.* raise {flag}$"):
        parts(**LLAMA, **keys)


def test_the_budget_shows_the_pool_that_is_used() -> None:
    """50 blocks of 2 MiB, and 80,000 of them, which are more than the GPU has."""
    few, many = (
        memory_panel(
            {"memory": parts(max_model_len=16, num_gpu_blocks_override=n).memory.describe()}
        ).replace("\u00a0", " ")
        for n in (50, 80_000)
    )
    assert "KV blocks: 100.0 MiB" in few and "left to others: " in few
    assert "<h3>Budget of one GPU, 79.2 GiB</h3>" in few
    assert "KV blocks: 156.2 GiB" in many and "left to others" not in many
    assert re.search(r"GPU, 79\.2 GiB; num_gpu_blocks_override takes \d+\.\d GiB more<", many)


def test_nothing_is_said_where_everything_is_simulated() -> None:
    meta = kvsim.simulate(CHAT, {"engine": "vllm-0.6.3", "num_prompts": 3}).meta
    assert meta["notes"] == []
    assert "Notes" not in provenance_panels(meta)
    shown = memory_panel(meta)
    for term in ("communication", "CUDA graphs", "sampler"):
        assert f"{term}, estimated" not in shown

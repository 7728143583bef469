"""Settings of KV cache groups: defaults by release, and what is refused, in one line each."""

from typing import Any

import pytest

from kvsim.engines.vllm_v1.groups import Sliding
from kvsim.engines.vllm_v1.manager import KVCacheManager
from kvsim.errors import ConfigError
from kvsim.run.assembly import Parts, assemble
from kvsim.settings.config import make_config
from kvsim.settings.server import server_settings


def parts(model: str, **keys: Any) -> Parts:
    table = {"engine": "vllm-v1", "hardware": "h100-sxm", "max_model_len": 8192}
    cost = {"model": "constant", "step_us": 1000}
    return assemble(make_config({**table, "model": model, "cost": cost, **keys}))


def groups(found: Parts) -> list[str]:
    assert isinstance(found.blocks, KVCacheManager)
    return [type(group).__name__ for group in found.blocks.groups]


def test_the_model_decides_the_groups() -> None:
    assert groups(parts("gpt-oss-20b")) == ["Sliding", "Full"]
    assert groups(parts("gemma-3-27b")) == ["Sliding"] * 6 + ["Full"]
    next_80b = parts("qwen3-next-80b-a3b", tensor_parallel_size=4)
    assert groups(next_80b) == ["AlignedMamba"] * 3 + ["Full"]
    assert parts("llama-3-8b").block_manager == "vllm-v1-prefix-caching"


def test_one_group_of_windows_has_a_window_whatever_is_disabled() -> None:
    found = parts("mistral-7b-v0.1", disable_hybrid_kv_cache_manager=True)
    (group,) = found.blocks.groups
    assert isinstance(group, Sliding)
    assert (group.block_size, group.window) == (16, 4096)


def test_without_a_cache_states_need_one_block_each() -> None:
    found = parts("qwen3-next-80b-a3b", tensor_parallel_size=4, enable_prefix_caching=False)
    assert isinstance(found.blocks, KVCacheManager)
    assert [group.block_size for group in found.blocks.groups] == [8192] * 3 + [272]
    assert found.config.block_size == 272
    assert "block_size" in found.assumed


@pytest.mark.parametrize(
    ("version", "number", "interval"),
    [
        ("0.33.0", 2, 0),
        ("0.29.0", 2, 0),
        ("0.24.0", 2, "none"),
        ("0.9.0", 1, None),
    ],
)
def test_defaults_by_release(version: str, number: int, interval: int | str | None) -> None:
    found = parts("gpt-oss-20b", vllm_version=version)
    assert len(groups(found)) == number
    assert found.config.prefix_cache_retention_interval == interval
    assert isinstance(found.blocks, KVCacheManager)
    if number > 1:
        assert found.blocks.layout.retention == (-1 if interval == "none" else interval)


def test_a_scheduler_of_ones_own_keeps_the_groups() -> None:
    found = parts("gpt-oss-20b", engine="kvsim.engines:VllmV1")
    assert groups(found) == ["Sliding", "Full"]
    assert any("KV cache groups share the pool" in note for note in found.notes)


def test_full_attention_is_one_group() -> None:
    found = parts("llama-3-8b")
    assert groups(found) == ["Full"]
    assert [group.block_size for group in found.blocks.groups] == [16]


def test_the_longest_sequence_counts_the_blocks_of_all_groups() -> None:
    """gpt-oss with 1,000 blocks of 16 and steps of 1,024 tokens, two in flight: a window of 128
    takes at most ceil((127 + 2048) / 16) + 1 = 137 blocks, which leaves 863 for 13,808 tokens."""
    keys = {
        "num_gpu_blocks_override": 1000,
        "max_num_batched_tokens": 1024,
        "max_num_seqs": 64,
    }
    assert parts("gpt-oss-20b", **keys, max_model_len="auto").config.max_model_len == 13_808
    with pytest.raises(ConfigError, match="use --max-model-len 13808 or less"):
        parts("gpt-oss-20b", **keys, max_model_len=13_809)


@pytest.mark.parametrize(
    ("model", "keys", "says"),
    [
        ("llama-3-8b", {"engine": "vllm-0.6.3", "mamba_cache_mode": "align"}, "vllm-v1"),
        ("llama-3-8b", {"prefix_cache_retention_interval": 64}, "has no effect; leave it out"),
        ("gpt-oss-20b", {"prefix_cache_retention_interval": 40}, "40 is no multiple of the block"),
        (
            "qwen3-next-80b-a3b",
            {"tensor_parallel_size": 4, "disable_hybrid_kv_cache_manager": True},
            "need block tables of their own; leave it out",
        ),
        (
            "qwen3-next-80b-a3b",
            {"tensor_parallel_size": 4, "mamba_cache_mode": "none"},
            "or use --no-enable-prefix-caching",
        ),
        (
            "gpt-oss-20b",
            {"block_manager_args": {"publish_at": "computed"}},
            "takes no 'publish_at'",
        ),
    ],
)
def test_what_cannot_be_is_refused(model: str, keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parts(model, **keys)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_servers_command_line() -> None:
    line = (
        "vllm serve openai/gpt-oss-20b --prefix-cache-retention-interval 512"
        " --mamba-cache-mode align"
    )
    assert server_settings(vllm=line).settings["prefix_cache_retention_interval"] == 512
    dense = server_settings(vllm="vllm serve m --prefix-cache-retention-interval none")
    assert dense.settings["prefix_cache_retention_interval"] == "none"
    disabled = server_settings(vllm="vllm serve m --disable-hybrid-kv-cache-manager")
    assert disabled.settings["disable_hybrid_kv_cache_manager"] is True


@pytest.mark.parametrize(
    ("hardware", "given", "kept", "bytes_each"),
    [
        ("h200", {"kv_cache_dtype": "fp8"}, "fp8_ds_mla", 512 + 16 + 128),
        ("h200", {"kv_cache_dtype": "fp8_ds_mla"}, "fp8_ds_mla", 656),
        ("h200", {}, "auto", 2 * 576),
        ("b200", {"kv_cache_dtype": "fp8"}, "fp8", 576),
        ("b200", {"kv_cache_dtype": "fp8", "vllm_version": "0.17.1"}, "fp8_ds_mla", 656),
        ("rtx-pro-6000", {}, "fp8_ds_mla", 656),
        ("rtx-pro-6000", {"kv_cache_dtype": "bfloat16"}, "bfloat16", 2 * 576),
    ],
)
def test_vectors_of_sparse_attention(
    hardware: str, given: dict[str, Any], kept: str, bytes_each: int
) -> None:
    """656 bytes a token and layer in FP8: vllm.ai/blog/2025-09-29-deepseek-v3-2. The indexer's key
    takes 128 and a scale of 4."""
    settings = {"tensor_parallel_size": 8, "kv_cache_memory_bytes": 2**34, **given}
    found = parts("deepseek-v3.2", hardware=hardware, **settings)
    assert found.config.kv_cache_dtype == kept
    block = 61 * 16 * (bytes_each + 132)
    assert found.blocks.gpu.size + 1 == 2**34 // block
    said = found.assumed.get("kv_cache_dtype")
    assert (said is not None) == (kept != given.get("kv_cache_dtype", "auto"))


def test_other_models_have_no_such_vectors() -> None:
    assert parts("deepseek-r1", kv_cache_dtype="fp8", tensor_parallel_size=16)
    with pytest.raises(ConfigError, match="fp8_ds_mla is for latent vectors"):
        parts("deepseek-r1", kv_cache_dtype="fp8_ds_mla", tensor_parallel_size=16)

"""The public `config.json`s beside the checkout: parameters, weights and KV bytes of each."""

import json
from pathlib import Path

import pytest
from shared import SHARED, needs_shared

from kvsim.errors import ConfigError
from kvsim.models import load_model

FOLDER = SHARED / "models"

EXPECTED = {
    # (billions of parameters, GiB of weights, KV bytes of a token at 16 bits with all layers kept)
    # Parameters and weights as published; of DeepSeek-R1 without the layer that predicts a second
    # token, which is in its checkpoint (688 GB in all) and which engines leave out.
    "DeepSeek-R1": (671, 627, 61 * (512 + 64) * 2),
    "Llama-3.1-70B-Instruct": (70.6, 131.4, 80 * 2 * 8 * 128 * 2),
    "Llama-3.3-70B-FP8": (70.6, 68, 80 * 2 * 8 * 128 * 2),
    "Mistral-7B-v0.1": (7.24, 13.5, 32 * 2 * 8 * 128 * 2),
    "Mistral-Small-3.2-24B": (24.0, 44.7, 40 * 2 * 8 * 128 * 2),
    "Qwen2.5-14B": (14.8, 27.5, 48 * 2 * 8 * 128 * 2),
    "Qwen2.5-7B-AWQ": (7.62, 5.2, 28 * 2 * 4 * 128 * 2),
    "Qwen3-1.7B": (1.72, 3.2, 28 * 2 * 8 * 128 * 2),
    "Qwen3-14B": (14.8, 27.5, 40 * 2 * 8 * 128 * 2),
    "Qwen3-30B-A3B": (30.5, 57, 48 * 2 * 4 * 128 * 2),
    "Qwen3-8B": (8.19, 15.3, 36 * 2 * 8 * 128 * 2),
    "gemma-2-9b": (9.24, 17.2, 42 * 2 * 8 * 256 * 2),
    "gemma-3-27b-it": (27.4, 51, 62 * 2 * 16 * 128 * 2),
    "gpt-oss-120b": (116.8, 60.8, 36 * 2 * 8 * 64 * 2),
    "gpt-oss-20b": (20.9, 12.8, 24 * 2 * 8 * 64 * 2),
    "phi-4": (14.7, 27.3, 40 * 2 * 10 * 128 * 2),
}

SHIPPED = {
    "DeepSeek-R1": "deepseek-r1",
    "Mistral-7B-v0.1": "mistral-7b-v0.1",
    "Mistral-Small-3.2-24B": "mistral-small-3.2-24b",
    "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "gemma-2-9b": "gemma-2-9b",
    "gemma-3-27b-it": "gemma-3-27b",
    "gpt-oss-120b": "gpt-oss-120b",
    "phi-4": "phi-4",
}
"""Public file → the shipped model that has to be the same."""


@needs_shared("models")
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_public_config(name: str) -> None:
    model = load_model(str(FOLDER / name))
    billions, gib, token_bytes = EXPECTED[name]
    assert model.parameters == pytest.approx(billions * 1e9, rel=0.01)
    assert model.weight_bytes("auto") == pytest.approx(gib * 2**30, rel=0.02)
    assert model.shard(1).token_bytes("bfloat16") == token_bytes


@needs_shared("models")
def test_every_public_config_is_expected() -> None:
    assert {path.parent.name for path in FOLDER.glob("*/config.json")} == set(EXPECTED)


@needs_shared("models")
@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_a_shipped_model_equals_its_public_config(name: str) -> None:
    read, shipped = load_model(str(FOLDER / name)), load_model(SHIPPED[name])
    assert read.shard(2).kv_groups == shipped.shard(2).kv_groups
    assert read.max_position_embeddings == shipped.max_position_embeddings
    assert read.weight_bytes("bfloat16", 2) == pytest.approx(
        shipped.weight_bytes("bfloat16", 2), rel=1e-3
    )
    assert read.quantization == shipped.quantization


@needs_shared("models")
def test_a_null_where_a_key_may_be_missing_means_the_same(tmp_path: Path) -> None:
    config = json.loads((FOLDER / "Qwen3-8B" / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "text_config": None, "quantization_config": None}))
    assert load_model(str(path)).parameters == load_model("qwen3-8b").parameters


PUBLISHED = FOLDER / "published"

REFUSED = {
    # The words that say why: keys that shape layers, or sizes that are missing.
    "MiniMaxAI--MiniMax-M3": "sparse_attention_config",
    "Qwen--Qwen3.5-397B-A17B": "intermediate_size: missing",
    "XiaomiMiMo--MiMo-V2-Flash": "hybrid_layer_pattern",
    "deepseek-ai--DeepSeek-V4-Flash": "compress_ratios",
    "google--gemma-4-26B-A4B": "global_head_dim",
    "moonshotai--Kimi-K3": "linear_attn_config",
    "nvidia--DeepSeek-V3.2-NVFP4": "index_head_dim",
    "nvidia--DeepSeek-V4-Pro-NVFP4": "compress_ratios",
    "nvidia--GLM-5.1-NVFP4": "index_head_dim",
    "nvidia--Gemma-4-26B-A4B-NVFP4": "num_global_key_value_heads",
    "nvidia--Llama-3_3-Nemotron-Super-49B-v1": "block_configs",
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "hybrid_override_pattern",
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8": "Infinity is not a number of JSON",
    "nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": "layers_block_type",
    "nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-NVFP4": "layers_block_type",
    "nvidia--Nemotron-H-56B-Base-8K": "Infinity is not a number of JSON",
    "nvidia--Qwen3.5-122B-A10B-NVFP4": "intermediate_size: missing",
    "sgl-project--DeepSeek-V4-Flash-FP8": "compress_ratios",
    "zai-org--GLM-5": "index_head_dim",
    "zai-org--GLM-5.1": "index_head_dim",
    "zai-org--GLM-5.2": "index_head_dim",
}


@needs_shared("models/published")
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_published_config_that_is_not_read_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_model(str(PUBLISHED / name))
    assert REFUSED[name] in str(refused.value)


@needs_shared("models/published")
def test_published_configs_that_are_read_have_the_parameters_of_transformers() -> None:
    counts = json.loads((PUBLISHED / "parameters.json").read_text())
    folders = {path.parent.name for path in PUBLISHED.glob("*/config.json")}
    read = folders - REFUSED.keys()
    assert folders > REFUSED.keys()
    for name in sorted(read & counts.keys()):
        parameters = load_model(str(PUBLISHED / name)).parameters
        assert parameters == pytest.approx(counts[name], rel=0.02), name

"""The public `config.json`s beside the checkout: parameters, weights and KV bytes of each."""

import json
from pathlib import Path

import pytest
from shared import SHARED, needs_shared

from kvsim.errors import ConfigError
from kvsim.machine import load_model

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
    # Of gpt-oss as engines load it: 65.97 GiB in a log, 63.4 GB on disk.
    "gpt-oss-120b": (116.8, 65.97, 36 * 2 * 8 * 64 * 2),
    "gpt-oss-20b": (20.9, 13.7, 24 * 2 * 8 * 64 * 2),
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

KEPT = {
    # (bytes that all layers keep of a token at 16 bits, bytes of the states of a sequence), by hand
    "MiniMaxAI--MiniMax-M2.5": (62 * 2 * 8 * 128 * 2, 0),
    "MiniMaxAI--MiniMax-M3": ((60 * 2 * 4 + 57) * 128 * 2, 0),
    "Qwen--Qwen3-VL-8B-Instruct": (36 * 2 * 8 * 128 * 2, 0),
    "Qwen--Qwen3.5-27B": (
        16 * 2 * 4 * 256 * 2,
        48 * (48 * 128 * 128 * 4 + 3 * (2 * 16 + 48) * 128 * 2),
    ),
    "Qwen--Qwen3.5-397B-A17B": (
        15 * 2 * 2 * 256 * 2,
        45 * (64 * 128 * 128 * 4 + 3 * (2 * 16 + 64) * 128 * 2),
    ),
    "XiaomiMiMo--MiMo-V2-Flash": ((9 * 4 + 39 * 8) * (192 + 128) * 2, 0),
    "deepseek-ai--DeepSeek-V3": (61 * 576 * 2, 0),
    # 584 bytes a vector, 132 a key of the indexer; 21 layers keep one of 4, 20 one of 128.
    "deepseek-ai--DeepSeek-V4-Flash": (-(-(21 * (584 + 132) * 32 + 20 * 584) // 128), 0),
    "google--gemma-4-26B-A4B": ((25 * 8 * 256 + 5 * 2 * 512) * 2 * 2, 0),
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": (48 * 2 * 8 * 128 * 2, 0),
    "moonshotai--Kimi-K3": (
        24 * 576 * 2,
        69 * (96 * 128 * 128 * 4 + 3 * 3 * 96 * 128 * 2),
    ),
    "nvidia--DeepSeek-V3.2-NVFP4": (61 * (576 * 2 + 132), 0),
    "nvidia--Llama-3_3-Nemotron-Super-49B-v1": (49 * 2 * 8 * 128 * 2, 0),
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (
        6 * 2 * 2 * 128 * 2,
        23 * (64 * 64 * 128 * 4 + 3 * (64 * 64 + 2 * 8 * 128) * 2),
    ),
    "nvidia--Nemotron-H-56B-Base-8K": (
        10 * 2 * 8 * 128 * 2,
        54 * (256 * 64 * 256 * 4 + 3 * (256 * 64 + 2 * 8 * 256) * 2),
    ),
    "stepfun-ai--Step-3.7-Flash": (45 * 2 * 8 * 128 * 2, 0),
    # A log of its FP8 checkpoint: 100,145 bytes.
    "zai-org--GLM-5.1": (78 * (576 * 2 + 132), 0),
    "zai-org--GLM-5.2": (78 * 576 * 2 + 21 * 132, 0),
}


@needs_shared("models/published")
@pytest.mark.parametrize("name", sorted(KEPT))
def test_what_a_published_model_keeps(name: str) -> None:
    shard = load_model(str(PUBLISHED / name)).shard(1)
    assert (shard.token_bytes("bfloat16"), shard.state_bytes) == KEPT[name]


@needs_shared("models/published")
def test_published_configs_have_the_parameters_of_transformers() -> None:
    counts = json.loads((PUBLISHED / "parameters.json").read_text())
    for path in sorted(PUBLISHED.glob("*/config.json")):
        parameters, name = load_model(str(path)).parameters, path.parent.name
        assert parameters == pytest.approx(counts.get(name, parameters), rel=1e-3), name


@needs_shared("models/published")
def test_shipped_models_keep_what_their_published_config_says() -> None:
    compared = 0
    for path in sorted(PUBLISHED.glob("*/config.json")):
        read = load_model(str(path))
        try:
            shipped = load_model(path.parent.name.partition("--")[2])
        except ConfigError:
            continue
        compared += 1
        assert read.shard(1).kv_groups == shipped.shard(1).kv_groups, path
        assert read.parameters == pytest.approx(shipped.parameters, rel=1e-3), path
    assert compared >= 40


@needs_shared("models/published")
@pytest.mark.parametrize(
    ("name", "gib"),
    [
        # Experts at 4.5 bits, all else at 16, or at 8 where the file says so.
        ("nvidia--DeepSeek-V4-Pro-NVFP4", (1545.4e9 * 4.5 + 22.0e9 * 8 + 5.4e9 * 16) / 8 / 2**30),
        ("nvidia--GLM-5.1-NVFP4", (724.8e9 * 4.5 + 19.1e9 * 16) / 8 / 2**30),
        ("deepseek-ai--DeepSeek-V4-Flash", (277.0e9 * 4.25 + 6.1e9 * 8 + 1.3e9 * 16) / 8 / 2**30),
    ],
)
def test_weights_of_parts_that_are_stored_differently(name: str, gib: float) -> None:
    model = load_model(str(PUBLISHED / name))
    assert model.weight_bytes("auto") / 2**30 == pytest.approx(gib, rel=0.02)


@needs_shared("models/published")
def test_a_side_car_says_how_weights_are_stored(tmp_path: Path) -> None:
    config = (PUBLISHED / "nvidia--DeepSeek-V3.2-NVFP4" / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    spared = ["lm_head", "model.layers.*.self_attn*"]
    said = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": spared}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    stored = load_model(str(tmp_path)).quantization
    assert stored is not None
    assert (stored.method, stored.bits, stored.parts) == ("modelopt_fp4", 4.5, ("mlp", "experts"))
    assert stored.kv_cache_dtype == "fp8"

"""Geometry: parameter counts against published totals, shares of GPUs, Hugging Face files."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.errors import ConfigError
from kvsim.library import names
from kvsim.models import Model, from_hugging_face, load_model

LLAMA = {
    "model_type": "llama",
    "_name_or_path": "meta-llama/Meta-Llama-3-8B",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama-3-8b", 8.03e9),
        ("llama-3.1-8b", 8.03e9),
        ("llama-2-7b", 6.74e9),
        ("qwen2.5-7b", 7.62e9),
        ("qwen2.5-0.5b", 0.494e9),
        ("qwen3-32b", 32.8e9),
        ("llama-3-70b", 70.6e9),
    ],
)
def test_parameters_are_the_published_totals(name: str, published: float) -> None:
    assert load_model(name).parameters == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize(
    ("name", "tensors"),
    [  # element counts of the published safetensors files
        ("llama-3-8b", 8_030_261_248),
        ("llama-2-7b", 6_738_415_616),
        ("qwen2.5-7b", 7_615_616_512),  # with query, key and value biases
        ("qwen2.5-0.5b", 494_032_768),  # with tied embeddings
        ("qwen3-32b", 32_762_123_264),  # with normalised queries and keys
        ("llama-3-70b", 70_553_706_496),
    ],
)
def test_parameters_are_exact(name: str, tensors: int) -> None:
    assert load_model(name).parameters == tensors


def test_every_shipped_model_is_named_like_its_file_and_states_its_source() -> None:
    for name in names("models"):
        model = load_model(name)
        assert model.name == name
        assert model.source


def test_longest_sequences() -> None:
    assert load_model("llama-3-8b").max_position_embeddings == 8192
    assert load_model("llama-3.1-8b").max_position_embeddings == 131072


def test_weight_bytes_follow_the_dtype() -> None:
    model = load_model("llama-3-8b")
    assert model.weight_bytes("auto") == model.weight_bytes("bfloat16") == 16_060_522_496
    assert model.weight_bytes("float32") == 2 * model.weight_bytes("float16")


def test_auto_turns_a_float32_checkpoint_into_float16() -> None:
    model = from_hugging_face({**LLAMA, "torch_dtype": "float32"}, "config.json")
    assert model.dtype("auto") == "float16"
    assert model.dtype("float32") == "float32"


def test_key_value_heads_are_divided_then_replicated() -> None:
    model = load_model("llama-3-8b")
    assert [model.shard(tp).kv_heads for tp in (1, 2, 4, 8, 16)] == [8, 4, 2, 1, 1]
    assert [model.shard(tp).heads for tp in (1, 2, 4, 8, 16)] == [32, 16, 8, 4, 2]


@pytest.mark.parametrize("tp", [3, 5, 64])
def test_heads_must_divide(tp: int) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: .*use one of 1, 2, 4, 8, 16, 32"):
        load_model("llama-3-8b").shard(tp)


@given(st.sampled_from(names("models")), st.integers(1, 64))
def test_shards_cover_the_model_and_replicate_only_norms_and_heads(name: str, tp: int) -> None:
    model = load_model(name)
    try:
        shard = model.shard(tp)
    except ConfigError:
        return
    assert shard.heads * tp == model.num_attention_heads
    assert shard.kv_heads * tp >= model.num_key_value_heads
    assert tp * shard.parameters >= model.parameters
    if tp <= model.num_key_value_heads:
        assert tp * shard.linear_parameters == model.shard(1).linear_parameters


def test_hugging_face_config_equals_the_shipped_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    shipped = load_model("llama-3-8b")
    for given_path in (path, tmp_path):
        model = load_model(str(given_path))
        assert model.parameters == shipped.parameters
        assert model.shard(1).kv_heads == 8
        assert (model.head_dim, model.name) == (128, "Meta-Llama-3-8B")


def test_defaults_of_a_hugging_face_config() -> None:
    table = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "torch_dtype")}
    model = from_hugging_face(table, "folder/config.json")
    assert model.num_key_value_heads == 32
    assert model.torch_dtype == "float32"


def test_head_dim_is_not_derived_where_it_is_given() -> None:
    table = {**LLAMA, "model_type": "qwen3", "head_dim": 64}
    model = from_hugging_face(table, "config.json")
    assert model.head_dim == 64
    assert model.qk_norm


def test_decoder_of_a_multimodal_config() -> None:
    outer = {"model_type": "llava", "torch_dtype": "float16", "text_config": LLAMA}
    model = from_hugging_face(outer, "llava/config.json")
    assert model.parameters == 8_030_261_248
    assert "text_config only" in model.source


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_lora_rank": 512}, "kv_lora_rank: multi-head latent attention"),
        ({"num_local_experts": 8}, "num_local_experts: a mixture of experts"),
        ({"num_experts": 128}, "mixture of experts"),
        ({"n_routed_experts": 64}, "mixture of experts"),
        ({"sliding_window": 4096}, "sliding_window: 4096 of 8192"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"model_type": "gpt2"}, "model_type: 'gpt2'"),
    ],
)
def test_other_geometries_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_hugging_face({**LLAMA, **change}, "config.json")


@pytest.mark.parametrize(
    "change", [{"sliding_window": None}, {"sliding_window": 4096, "use_sliding_window": False}]
)
def test_unused_sliding_windows_are_accepted(change: dict[str, object]) -> None:
    assert from_hugging_face({**LLAMA, **change}, "config.json").num_hidden_layers == 32


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "vocab_size"])
def test_missing_keys_are_named(key: str) -> None:
    table = {k: v for k, v in LLAMA.items() if k != key}
    with pytest.raises(ConfigError, match=f"config.json: {key}: missing"):
        from_hugging_face(table, "config.json")


def test_unknown_name_has_a_near_miss_and_the_list() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'llama-3-8b'\?.*qwen3-32b.*tiny"):
        load_model("Llama3-8B")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("m.toml", "name = 1 2", r"m\.toml: not TOML: .*line 1"),
        ("m.toml", 'nam = "x"', r"m\.toml: unknown key 'nam'; did you mean 'name'"),
        ("m.toml", 'name = "x"', r"m\.toml: .*missing required field"),
        ("m.json", '{"model_type": ', r"m\.json: not JSON: .*line 1"),
        ("m.json", "[]", r"m\.json: expected a table"),
        ("m.json", '{"model_type": "llama", "hidden_size": 1e999}', r"not a finite number"),
    ],
)
def test_bad_files_give_one_line(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        load_model(str(path))
    assert "\n" not in str(caught.value)


def test_negative_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="hidden_size"):
        from_hugging_face({**LLAMA, "hidden_size": -1, "head_dim": 128}, "config.json")


def test_models_are_values() -> None:
    assert load_model("tiny") == load_model("tiny")
    assert isinstance(load_model("tiny"), Model)

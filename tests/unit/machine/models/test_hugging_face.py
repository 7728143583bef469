"""Reading a `config.json`: families, defaults, quantised checkpoints, towers, and bad files."""

import json
from pathlib import Path
from typing import Any

import pytest
from parameters import active_parameters

from kvsim.errors import ConfigError
from kvsim.machine import Model, load_model
from kvsim.machine.models.hugging_face import from_hugging_face

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


def test_auto_turns_a_float32_checkpoint_into_float16() -> None:
    model = from_hugging_face({**LLAMA, "torch_dtype": "float32"}, "config.json")
    assert model.dtype("auto") == "float16"
    assert model.dtype("float32") == "float32"


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
    """The parameters of Meta-Llama-3-8B: half the bytes of its published checkpoint."""
    outer = {"model_type": "llava", "torch_dtype": "float16", "text_config": LLAMA}
    model = from_hugging_face(outer, "llava/config.json")
    assert model.parameters == 8_030_261_248
    assert model.source == "llava/config.json (text_config)"
    assert model.notes == ("llava/config.json: only the weights under text_config are counted",)


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


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("m.toml", "name = 1 2", r"m\.toml: not TOML: .*line 1"),
        ("m.toml", 'nam = "x"', r"m\.toml: unknown key 'nam'; did you mean 'name'"),
        ("m.toml", 'name = "x"', r"m\.toml: .*missing required field"),
        ("m.json", '{"model_type": ', r"m\.json: not JSON: .*line 1"),
        ("m.json", "[]", r"m\.json: expected a table"),
        ("m.json", '{"model_type": "llama", "hidden_size": 1e999}', r"a number is too large"),
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


def read(**changes: Any) -> Model:
    return from_hugging_face({**LLAMA, **changes}, "folder/config.json")


def test_missing_keys_take_the_defaults_of_their_family_and_say_so() -> None:
    """The defaults of `Gemma3TextConfig` in transformers."""
    gemma = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
    model = from_hugging_face(
        {**gemma, "num_hidden_layers": 34, "sliding_window": 1024}, "g/c.json"
    )
    assert (model.num_attention_heads, model.num_key_value_heads, model.head_dim) == (8, 4, 256)
    assert (model.vocab_size, model.tie_word_embeddings) == (262_208, True)
    assert "vocab_size 262208" in model.notes[0]


def test_an_unknown_family_is_read_as_a_plain_decoder_and_says_so() -> None:
    model = read(model_type="mystery")
    assert model.parameters == 8_030_261_248
    assert "model_type 'mystery' is not known" in model.notes[0]


@pytest.mark.parametrize(
    "keys",
    [
        {"attn_layer_period": 8, "mamba_d_state": 16},
        {"attn_layer_indices": [3, 11]},
        {"layer_group_size": 8},
        {"cla_share_factor": 2},
    ],
)
@pytest.mark.parametrize("model_type", ["mystery", "llama", None])
def test_keys_that_shape_layers_and_are_not_read_are_named(
    keys: dict[str, Any], model_type: str | None
) -> None:
    with pytest.raises(ConfigError) as refused:
        read(model_type=model_type, **keys)
    line = str(refused.value)
    assert line.startswith("folder/config.json: ") and "\n" not in line
    for key in keys:
        assert key in line
    assert "hidden_size" not in line


def test_keys_that_shape_layers_do_not_matter_without_a_value() -> None:
    unused = {"mamba_num_heads": None, "num_kv_shared_layers": 0, "index_topk_pattern": None}
    assert read(model_type="mystery", **unused).parameters == 8_030_261_248


def test_layers_of_an_unknown_type_are_refused() -> None:
    with pytest.raises(ConfigError, match="layer_types: 'hyena' is not simulated"):
        read(layer_types=["full_attention", "hyena"] * 16)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "'t5' is an encoder with a decoder"),
        ({"model_type": "whisper", "encoder_layers": 4}, "'whisper' is an encoder with a decoder"),
        ({"model_type": "bert", "type_vocab_size": 2}, "'bert' is an encoder, which generates"),
        ({"architectures": ["XLMRobertaForMaskedLM"]}, "is an encoder, which generates nothing"),
        ({"model_type": "mystery", "hidden_act": "relu2"}, "hidden_act 'relu2' is not known"),
        (
            {"hybrid_override_pattern": "M*", "mamba_num_heads": 8},
            "missing required field `mamba_head_dim`",
        ),
        ({"linear_attn_config": {"full_attn_layers": [4]}}, "missing required field"),
    ],
)
def test_what_is_no_decoder_is_refused_as_what_it_is(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(**keys)
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"sliding_window": 4096}, {"sliding_attention": 32}),
        ({"sliding_window": 8192}, {"full_attention": 32}),  # no sequence is longer
        (
            {"model_type": "gemma2", "sliding_window": 4096},
            {"sliding_attention": 16, "full_attention": 16},
        ),
        (
            {"model_type": "gemma3_text", "sliding_window": 512},
            {"sliding_attention": 27, "full_attention": 5},
        ),
        (
            {"sliding_window": 512, "sliding_window_pattern": 4},
            {"sliding_attention": 24, "full_attention": 8},
        ),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 512,
                "use_sliding_window": True,
                "max_window_layers": 20,
            },
            {"full_attention": 20, "sliding_attention": 12},
        ),
        ({"model_type": "qwen2", "sliding_window": 512}, {"full_attention": 32}),
        ({"model_type": "mistral", "sliding_window": None}, {"full_attention": 32}),
        (
            {"layer_types": ["full_attention", "sliding_attention"] * 16, "sliding_window": 9},
            {"full_attention": 16, "sliding_attention": 16},
        ),
    ],
)
def test_which_layers_have_a_window(changes: dict[str, Any], kinds: dict[str, int]) -> None:
    groups = read(**changes).shard(1).kv_groups
    assert {group.kind: group.layers for group in groups} == kinds


def test_qwen3_next_has_linear_layers() -> None:
    """Its config.json, but for keys that do not matter here."""
    config = {
        "model_type": "qwen3_next",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "intermediate_size": 5120,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "decoder_sparse_step": 1,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "torch_dtype": "bfloat16",
    }
    model, shipped = from_hugging_face(config, "c.json"), load_model("qwen3-next-80b-a3b")
    assert model.parameters == shipped.parameters
    assert model.shard(2).kv_groups == shipped.shard(2).kv_groups


def test_llama_4_scout() -> None:
    """Published: 109 B parameters, 17 B of them active."""
    text = {
        "model_type": "llama4_text",
        "hidden_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "attention_chunk_size": 8192,
        "max_position_embeddings": 10485760,
        "vocab_size": 202048,
    }
    tower = {"model_type": "llama4_vision_model", "hidden_size": 1408, "num_hidden_layers": 34}
    config = {"model_type": "llama4", "text_config": text, "vision_config": tower}
    model = from_hugging_face(config, "c.json")
    assert model.parameters == pytest.approx(109e9, rel=0.01)
    assert active_parameters(model) == pytest.approx(17e9, rel=0.08)
    assert {g.kind: g.layers for g in model.shard(1).kv_groups} == {
        "chunked_attention": 36,
        "full_attention": 12,
    }


def test_an_mlp_of_two_matrices() -> None:
    """tiiuae/falcon-40b: 41.8 B parameters in its safetensors, of which 0.5 B the head repeats."""
    config = {
        "model_type": "falcon",
        "hidden_size": 8192,
        "num_attention_heads": 128,
        "num_hidden_layers": 60,
        "num_kv_heads": 8,
        "new_decoder_architecture": True,
        "multi_query": True,
        "vocab_size": 65024,
        "torch_dtype": "bfloat16",
    }
    model = from_hugging_face(config, "c.json")
    assert model.parameters == pytest.approx(41.3e9, rel=0.01)
    assert model.num_key_value_heads == 8
    assert model.special == ("an MLP without gate",)


LAYERS = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
"""Weights of the matrix products of the layers of Llama 3 8B."""


@pytest.mark.parametrize(
    ("stored", "bits"),
    [
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 128**2),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, 4 + 20 / 128),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": False}, 4 + 16 / 64),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32}, 8 + 24 / 32),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 4 + 20 / 128),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"quant_method": "compressed-tensors"}, 8),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 128}}
                },
            },
            4 + 16 / 128,
        ),
        ({"quant_method": "mystery"}, 16),
    ],
)
def test_bits_of_quantised_checkpoints(stored: dict[str, Any], bits: float) -> None:
    others = read().parameters - LAYERS
    found = read(quantization_config=stored).weight_bytes("auto")
    assert found == pytest.approx(LAYERS * bits / 8 + 2 * others, abs=2)


def _packed(type: str, group_size: int, bits: int = 4) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": type, "group_size": group_size}
    return {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": weights}}}


@pytest.mark.parametrize(
    ("stored", "weights"),
    [
        (None, "bfloat16"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": False}, "int4"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32}, None),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, None),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4"}}},
            "mxfp4",
        ),
        (_packed("int", 32), "int4"),
        (_packed("float", 16), "nvfp4"),
        (_packed("float", 32), "mxfp4"),
        (_packed("int", 128, bits=8), None),
    ],
)
def test_how_kernels_know_the_weights_of_experts(
    stored: dict[str, Any] | None, weights: str | None
) -> None:
    """Integers and floats of 4 bits may take the same bits."""
    assert read(quantization_config=stored).expert_weights == weights


FP8_SCHEME = {"dynamic": False, "num_bits": 8, "type": "float"}


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        ({"quant_method": "modelopt", "kv_cache_scheme": FP8_SCHEME}, "fp8"),
        ({"quant_method": "modelopt", "kv_cache_scheme": {**FP8_SCHEME, "num_bits": 4}}, None),
        ({"quant_method": "modelopt", "kv_cache_scheme": {**FP8_SCHEME, "dynamic": True}}, None),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, None),
        ({"quant_method": "modelopt"}, None),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}, "fp8"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, None),
        ({"quant_method": "fp8", "kv_cache_scheme": FP8_SCHEME}, None),
    ],
)
def test_the_kv_cache_for_which_a_checkpoint_has_scales(
    stored: dict[str, Any], dtype: str | None
) -> None:
    found = read(quantization_config={"quant_algo": "NVFP4", **stored}).quantization
    assert found is not None
    assert found.kv_cache_dtype == dtype


def test_an_unknown_method_is_an_upper_bound_and_says_so() -> None:
    notes = read(quantization_config={"quant_method": "mystery"}).notes
    assert notes == (
        "folder/config.json: quantization_config: method 'mystery' is not known; weights are"
        " counted as unquantised, an upper bound",
    )


@pytest.mark.parametrize(
    ("spared", "parts"),
    [
        (["lm_head"], ("attention", "mlp", "experts")),
        (["model.layers.*.self_attn"], ("mlp", "experts")),
        ([f"model.layers.{i}.self_attn.q_proj" for i in range(32)], ("mlp", "experts")),
        (["model.layers.0.self_attn.q_proj"], ("attention", "mlp", "experts")),
        (["re:.*mlp.gate$", "re:.*self_attn.*"], ("mlp", "experts")),
    ],
)
def test_modules_that_are_not_quantised(spared: list[str], parts: tuple[str, ...]) -> None:
    model = read(quantization_config={"quant_method": "fp8", "ignore": spared})
    assert model.quantization is not None
    assert model.quantization.parts == parts

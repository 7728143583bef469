"""Geometry: parameters and weights against published ones, shares of GPUs, KV bytes by group."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from parameters import active_parameters

from kvsim.errors import ConfigError
from kvsim.machine import Model, load_model
from kvsim.settings.library import convert, names

PUBLISHED = {
    # Billions of parameters: of the safetensors files on Hugging Face, of the model's report, or of
    # `transformers` built without weights.
    "deepseek-ocr": 3.34,
    "deepseek-r1": 671,
    "deepseek-r1-distill-llama-70b": 70.6,
    "deepseek-r1-distill-llama-8b": 8.03,
    "deepseek-r1-distill-qwen-14b": 14.8,
    "deepseek-r1-distill-qwen-32b": 32.8,
    "deepseek-r1-distill-qwen-7b": 7.62,
    "deepseek-v2": 235.7,
    "deepseek-v2-lite": 15.7,
    "deepseek-v3": 671,
    "deepseek-v3.2": 671.9,
    "deepseek-v4-flash": 284.3,
    "deepseek-v4-pro": 1573,
    "devstral-2-123b": 125,
    "ernie-4.5-21b-a3b": 21.8,
    "ernie-4.5-300b-a47b": 300,
    "ernie-4.5-vl-28b-a3b": 29.4,
    "gemma-2-27b": 27.2,
    "gemma-2-2b": 2.61,
    "gemma-2-9b": 9.24,
    "gemma-3-12b": 12.2,
    "gemma-3-1b": 1.0,
    "gemma-3-270m": 0.268,
    "gemma-3-27b": 27.4,
    "gemma-3-4b": 4.3,
    "gemma-4-26b-a4b": 25.81,
    "gemma-4-31b": 31.3,
    "gemma-4-e2b": 5.1,
    "gemma-4-e4b": 8,
    "glm-4-32b-0414": 32.57,
    "glm-4-9b-0414": 9.4,
    "glm-4.5": 353,
    "glm-4.5-air": 106.8,
    "glm-4.5v": 107.7,
    "glm-4.6": 353,
    "glm-4.6v": 107.7,
    "glm-4.7-flash": 30,
    "glm-5": 743.9,
    "glm-5.1": 743.9,
    "glm-5.2": 743.4,
    "gpt-oss-120b": 116.8,
    "gpt-oss-20b": 20.9,
    "hunyuan-a13b": 80.4,
    "hy3": 295,
    "kimi-k2": 1026,
    "kimi-k2-thinking": 1026,
    "kimi-k2.5": 1027,
    "kimi-k3": 2780,
    "kimi-linear-48b-a3b": 49.1,
    "lfm2.5-1.2b": 1.17,
    "lfm2.5-350m": 0.354,
    "lfm2.5-8b-a1b": 8.47,
    "lfm2.5-vl-1.6b": 1.6,
    "lfm2.5-vl-450m": 0.45,
    "llama-2-13b": 13.0,
    "llama-2-70b": 69.0,
    "llama-2-7b": 6.74,
    "llama-3-70b": 70.6,
    "llama-3-8b": 8.03,
    "llama-3.1-405b": 406,
    "llama-3.1-70b": 70.6,
    "llama-3.1-8b": 8.03,
    "llama-3.2-1b": 1.24,
    "llama-3.2-3b": 3.21,
    "llama-3.3-70b": 70.6,
    "llama-3.3-nemotron-super-49b": 49.9,
    "llama-4-maverick-17b-128e": 401.6,
    "llama-4-scout-17b-16e": 107.8,
    "mimo-v2-flash": 308.8,
    "minimax-m2": 228.7,
    "minimax-m3": 426.2,
    "ministral-3-14b": 13.9,
    "ministral-3-3b": 3.85,
    "ministral-3-8b": 8.9,
    "mistral-7b-v0.1": 7.24,
    "mistral-7b-v0.2": 7.24,
    "mistral-7b-v0.3": 7.25,
    "mistral-large-3-675b": 675,
    "mistral-nemo-12b": 12.25,
    "mistral-small-24b": 23.6,
    "mistral-small-3.1-24b": 24.0,
    "mistral-small-3.2-24b": 24.0,
    "mistral-small-4-119b": 119,
    "mixtral-8x22b": 141,
    "mixtral-8x7b": 46.7,
    "moonlight-16b-a3b": 15.96,
    "nemotron-3-nano-30b-a3b": 31.58,
    "nemotron-3-super-120b-a12b": 120.7,
    "nemotron-3-ultra-550b-a55b": 549.3,
    "nemotron-h-56b": 56.32,
    "nemotron-nano-12b-v2": 12.31,
    "nemotron-nano-9b-v2": 8.89,
    "phi-3-mini-128k": 3.82,
    "phi-3-mini-4k": 3.82,
    "phi-4": 14.7,
    "phi-4-mini": 3.84,
    "phi-4-multimodal": 5.57,
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-1.5b": 1.54,
    "qwen2.5-1.5b-instruct": 1.54,
    "qwen2.5-14b": 14.8,
    "qwen2.5-14b-instruct": 14.8,
    "qwen2.5-32b": 32.8,
    "qwen2.5-32b-instruct": 32.8,
    "qwen2.5-3b": 3.09,
    "qwen2.5-72b": 72.7,
    "qwen2.5-72b-instruct": 72.7,
    "qwen2.5-7b": 7.62,
    "qwen2.5-7b-instruct": 7.62,
    "qwen2.5-vl-32b": 33.45,
    "qwen2.5-vl-3b": 3.75,
    "qwen2.5-vl-72b": 73.4,
    "qwen2.5-vl-7b": 8.29,
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.72,
    "qwen3-14b": 14.8,
    "qwen3-235b-a22b": 235,
    "qwen3-235b-a22b-2507": 235,
    "qwen3-30b-a3b": 30.5,
    "qwen3-30b-a3b-2507": 30.5,
    "qwen3-32b": 32.8,
    "qwen3-4b": 4.02,
    "qwen3-4b-2507": 4.02,
    "qwen3-8b": 8.19,
    "qwen3-coder-480b-a35b": 480.1,
    "qwen3-next-80b-a3b": 80,
    "qwen3-omni-30b-a3b": 31.7,
    "qwen3-vl-235b-a22b": 235.7,
    "qwen3-vl-2b": 2.13,
    "qwen3-vl-30b-a3b": 31.07,
    "qwen3-vl-32b": 33.36,
    "qwen3-vl-4b": 4.44,
    "qwen3-vl-8b": 8.767,
    "qwen3.5-0.8b": 0.75,
    "qwen3.5-122b-a10b": 122.1,
    "qwen3.5-27b": 26.9,
    "qwen3.5-35b-a3b": 34.7,
    "qwen3.5-397b-a17b": 396.3,
    "qwen3.5-4b": 4.2,
    "qwen3.5-9b": 9,
    "seed-oss-36b": 36.15,
    "smollm3-3b": 3.075,
    "step-3.5-flash": 197,
    "step-3.7-flash": 197.8,
    "step3-vl-10b": 10.1,
}


@pytest.mark.parametrize("name", sorted(set(names("models")) - {"small", "tiny"}))
def test_parameters_are_the_published_totals(name: str) -> None:
    assert load_model(name).parameters == pytest.approx(PUBLISHED[name] * 1e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("deepseek-r1", 37),
        ("qwen3-30b-a3b", 3.3),
        ("qwen3-235b-a22b", 22),
        ("mixtral-8x7b", 12.9),
        ("mixtral-8x22b", 39),
        ("gpt-oss-120b", 5.1 + 0.58),  # its report leaves out the embeddings
        ("gpt-oss-20b", 3.6 + 0.58),
    ],
)
def test_active_parameters_are_the_published_ones(name: str, billions: float) -> None:
    assert active_parameters(load_model(name)) == pytest.approx(billions * 1e9, rel=0.02)


@pytest.mark.parametrize(
    ("name", "tensors"),
    [  # element counts of the published safetensors files
        ("llama-3-8b", 8_030_261_248),
        ("llama-2-7b", 6_738_415_616),
        ("qwen2.5-7b", 7_615_616_512),  # with query, key and value biases
        ("qwen2.5-0.5b", 494_032_768),  # with tied embeddings
        ("qwen3-32b", 32_762_123_264),  # with normalised queries and keys
        ("llama-3-70b", 70_553_706_496),
        ("gemma-2-9b", 9_241_705_984),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-30b-a3b", 30_532_122_624),
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
    """`total_size` in the index of the published Meta-Llama-3-8B's safetensors."""
    model = load_model("llama-3-8b")
    assert model.weight_bytes("auto") == model.weight_bytes("bfloat16") == 16_060_522_496
    assert model.weight_bytes("float32") == 2 * model.weight_bytes("float16")


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
    if tp <= model.num_key_value_heads and model.experts is None:
        assert tp * shard.linear_parameters == model.shard(1).linear_parameters


def test_models_are_values() -> None:
    assert load_model("tiny") == load_model("tiny")
    assert isinstance(load_model("tiny"), Model)


@pytest.mark.parametrize(
    ("name", "tp", "groups"),
    [
        ("llama-3-8b", 1, [("full_attention", 32, 2048, None)]),
        ("llama-3-8b", 16, [("full_attention", 32, 256, None)]),  # one replicated head
        ("deepseek-r1", 1, [("latent_attention", 61, 576, None)]),
        ("deepseek-r1", 8, [("latent_attention", 61, 576, None)]),  # on every GPU in full
        ("mistral-7b-v0.1", 1, [("sliding_attention", 32, 2048, 4096)]),
        (
            "gemma-3-27b",
            2,
            [("sliding_attention", 52, 2048, 1024), ("full_attention", 10, 2048, None)],
        ),
        (
            "gpt-oss-20b",
            1,
            [("sliding_attention", 12, 1024, 128), ("full_attention", 12, 1024, None)],
        ),
        (
            "qwen3-next-80b-a3b",
            2,
            [("linear_attention", 36, 0, None), ("full_attention", 12, 512, None)],
        ),
    ],
)
def test_what_groups_of_layers_keep(name: str, tp: int, groups: list[tuple[object, ...]]) -> None:
    shard = load_model(name).shard(tp)
    assert [(g.kind, g.layers, g.elements, g.window) for g in shard.kv_groups] == groups
    elements = sum(g.layers * g.elements for g in shard.kv_groups)
    assert shard.token_bytes("bfloat16") == 2 * elements
    assert shard.token_bytes("fp8") == elements
    stages = [shard.token_bytes("fp8", stage) for stage in shard.model.stages(2)]
    assert sum(stages) == elements


def test_state_of_linear_attention() -> None:
    """vLLM 0.33.0, model_executor/layers/mamba/mamba_utils.py: a convolution over the last 3 tokens
    of (2 x 16 + 32) x 128 channels, and 32 states of 128 x 128, here in bfloat16."""
    state = load_model("qwen3-next-80b-a3b").shard(1).kv_groups[0].state_bytes
    assert state == 2 * (3 * 8192 + 32 * 128 * 128)
    assert load_model("qwen3-next-80b-a3b").shard(4).kv_groups[0].state_bytes == state // 4
    assert load_model("qwen3-next-80b-a3b").shard(1).state_bytes == 36 * state
    assert load_model("qwen3-8b").shard(1).state_bytes == 0


def test_notes_say_what_is_an_upper_bound() -> None:
    assert load_model("gpt-oss-20b").notes == (
        "gpt-oss-20b: 12 of 24 layers need only the last 128 tokens; all layers kept: an upper"
        " bound",
    )
    assert "36 of 48 layers keep a state" in load_model("qwen3-next-80b-a3b").notes[0]
    assert load_model("llama-3-8b").notes == ()


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [
        (61, 1, [61]),
        (61, 2, [31, 30]),
        (61, 4, [15, 15, 16, 15]),
        (32, 4, [8] * 4),
        (3, 3, [1] * 3),
    ],
)
def test_layers_of_pipeline_stages(layers: int, stages: int, sizes: list[int]) -> None:
    """By hand from vLLM 0.33.0, distributed/utils.py, `get_pp_indices`."""
    ranges = replace(load_model("tiny"), num_hidden_layers=layers).stages(stages)
    assert [len(each) for each in ranges] == sizes
    assert [index for each in ranges for index in each] == list(range(layers))


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen2.5-0.5b", "deepseek-r1", "gpt-oss-20b"])
def test_pipeline_stages_hold_the_model_between_them(name: str) -> None:
    model = load_model(name)
    shard, whole = model.shard(1), model.weight_bytes("auto")
    stages = [shard.weight_bytes("auto", stage) for stage in model.stages(4)]
    repeated = 2 * shard.head_parameters if model.tie_word_embeddings else 0  # first and last
    assert whole <= sum(stages) - repeated <= whole + 4
    assert model.weight_bytes("auto", 1, 4) == max(stages)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="tiny has 2 layers for 3 stages; use 1 to 2"):
        load_model("tiny").weight_bytes("auto", 1, 3)


def test_expert_parallelism_gives_each_gpu_whole_experts() -> None:
    model = load_model("qwen3-30b-a3b")
    both = model.shard(1, 4)
    assert both.expert_parameters * 4 == model.shard(1).expert_parameters
    assert both.linear_parameters == model.shard(1).linear_parameters
    assert model.weight_bytes("auto", 4, 1, 4) == model.weight_bytes("auto", 4)


def test_deepseek_on_eight_gpus() -> None:
    """Projections into latent vectors are on every GPU: more than an eighth of the model."""
    model = load_model("deepseek-r1")
    whole, eighth = model.weight_bytes("auto"), model.weight_bytes("auto", 8)
    into = 61 * 7168 * (1536 + 576) * model.quantization.bits / 8  # type: ignore[union-attr]
    routers = 58 * 7168 * 256 * 2
    assert eighth == pytest.approx((whole - into - routers) / 8 + into + routers, rel=1e-4)


@pytest.mark.parametrize(
    ("method", "gib"),
    [("fp8", 8.46), ("awq", 5.33), ("gptq", 5.33), ("mxfp4", 14.96), ("bitsandbytes", 5.31)],
)
def test_weights_quantised_by_a_setting(method: str, gib: float) -> None:
    """Llama 3 8B: 6.98 B weights in layers at the method's bits, 1.05 B others at 16."""
    model = load_model("llama-3-8b").quantized(method)
    assert model.weight_bytes("auto") / 2**30 == pytest.approx(gib, abs=0.01)
    assert model.parameters == 8_030_261_248


def test_quantised_weights_stay_as_they_are() -> None:
    model = load_model("gpt-oss-20b")
    assert model.quantized("mxfp4") is model


def test_unknown_methods_have_a_near_miss() -> None:
    with pytest.raises(ConfigError, match=r"quantization: unknown 'fp9'; did you mean 'fp8'\?"):
        load_model("tiny").quantized("fp9")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["sliding_attention"]}, "sliding_window: missing"),
        (
            {"layer_types": ["linear_attention", "full_attention"]},
            "linear_num_value_heads: missing",
        ),
        ({"layer_types": ["full_attention"] * 3}, "layer_types: 3 entries for 2 layers"),
        (
            {
                "experts": {
                    "num_experts": 2,
                    "num_experts_per_tok": 3,
                    "moe_intermediate_size": 8,
                }
            },
            "num_experts_per_tok: 3 is more than the 2 experts",
        ),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], words: str) -> None:
    table = {**msgspec.to_builtins(load_model("tiny")), **changes}
    with pytest.raises(ConfigError, match=words):
        convert(table, Model, "m.toml")

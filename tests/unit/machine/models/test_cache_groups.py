"""How layers that keep different things share the blocks of a pool, as vLLM plans it."""

from collections import Counter

import pytest
from msgspec.structs import replace

from kvsim.engines.vllm_v1.groups import Layout
from kvsim.engines.vllm_v1.planning import groups_of_model, peak_blocks, saves_states
from kvsim.machine import Model, load_hardware, model_of
from kvsim.machine.memory import (
    block_layers,
    block_sizes,
    cache_groups,
    is_plain,
    state_block_size,
)
from kvsim.machine.models.hugging_face import from_hugging_face
from kvsim.settings.config import make_config

HYBRID = {"disable_hybrid_kv_cache_manager": False}


def model(name: str) -> Model:
    return model_of(make_config({"model": name}))


def numbers(name: str, hybrid: bool = True) -> dict[str, int]:
    """Kind of layers → number of groups."""
    return dict(Counter(group.kind for group in cache_groups(model(name), hybrid)))


def test_groups_of_public_models() -> None:
    """vLLM 0.33.0, `_get_kv_cache_groups_uniform_page_size`: 52 and 10 layers, 12 and 12, ..."""
    assert numbers("gemma-3-27b") == {"sliding_attention": 6, "full_attention": 1}
    assert numbers("gpt-oss-20b") == {"sliding_attention": 1, "full_attention": 1}
    assert numbers("gemma-2-27b") == {"sliding_attention": 1, "full_attention": 1}
    assert numbers("qwen3-next-80b-a3b") == {"linear_attention": 3, "full_attention": 1}
    assert numbers("mistral-7b-v0.1") == {"sliding_attention": 1}
    assert is_plain(cache_groups(model("llama-3-8b")))


def test_chunks_of_llama_4() -> None:
    """Llama 4 Scout: every fourth of 48 layers has full attention, the others chunks of 8,192."""
    config = {
        "model_type": "llama4_text",
        "hidden_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8192,
        "max_position_embeddings": 10485760,
        "vocab_size": 202048,
    }
    scout = from_hugging_face(config, "config.json")
    kinds = Counter(group.kind for group in cache_groups(scout))
    assert kinds == {"chunked_attention": 3, "full_attention": 1}
    assert scout.attention_chunk_size == 8192


def test_every_layer_is_in_one_group_and_neighbours_are_in_different_ones() -> None:
    gemma = model("gemma-3-27b")
    groups = cache_groups(gemma)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(62))
    assert groups[0].layers[:2] == (0, 7)  # of the sliding layers, every sixth
    assert block_layers(groups, range(62)) == 10


def test_each_stage_of_a_pipeline_has_layers_of_all_groups() -> None:
    gemma = model("gemma-3-27b")
    layers = [block_layers(cache_groups(gemma), stage) for stage in gemma.stages(2)]
    assert layers == [5, 5]


def test_a_few_more_layers_of_one_kind_are_padded() -> None:
    """12 and 13 layers make two groups of 13, not three of 12 (gpt-oss with a drafter)."""
    oss = model("gpt-oss-20b")
    types = (*oss.layer_types * 12, "full_attention")
    more = Model(**{**_fields(oss), "layer_types": types, "num_hidden_layers": 25})
    assert [len(group.layers) for group in cache_groups(more)] == [12, 13]
    assert block_layers(cache_groups(more), range(25)) == 13


def _fields(of: Model) -> dict[str, object]:
    return {name: getattr(of, name) for name in of.__struct_fields__}


def test_without_groups_all_attention_layers_keep_all_tokens() -> None:
    assert numbers("gemma-3-27b", hybrid=False) == {"full_attention": 1}
    assert numbers("mistral-7b-v0.1", hybrid=False) == {"sliding_attention": 1}


@pytest.mark.parametrize(
    ("tensor_parallel_size", "exports", "tokens"),
    [(1, False, 544), (2, False, 544), (4, False, 272), (1, True, 576)],
)
def test_a_block_of_attention_is_as_large_as_a_state(
    tensor_parallel_size: int, exports: bool, tokens: int
) -> None:
    """Qwen3-Next on one GPU has blocks of 544 tokens: github.com/vllm-project/vllm/pull/32492."""
    given = {"model": "qwen3-next-80b-a3b", "tensor_parallel_size": tensor_parallel_size}
    config = make_config(given)
    assert state_block_size(model_of(config), config, exports) == tokens


@pytest.mark.parametrize(("drafts", "tokens"), [(0, 1568), (3, 1600)])
def test_states_grow_with_drafts(drafts: int, tokens: int) -> None:
    """A draft is 5,120 more inputs of the convolution in 16 bits, a token 1,024 bytes; with three
    drafts, two RTX 3090 had blocks of 1,600: github.com/noonghunna/club-3090/issues/295."""
    given = {"model": "qwen3.6-27b", "tensor_parallel_size": 2, "kv_cache_dtype": "fp8"}
    drafter = {"method": "mtp", "num_speculative_tokens": drafts} if drafts else {}
    config = make_config({**given, "speculative_config": drafter})
    assert state_block_size(model_of(config), config, exports=False) == tokens


@pytest.mark.parametrize(
    ("name", "gpus", "tokens"),
    [
        ("gemma-4-31b", 1, {"sliding_attention": 16, "full_attention": 32}),  # 16 x 256, 4 x 512
        ("gemma-4-31b", 8, {"sliding_attention": 16, "full_attention": 16}),  # 2 x 256, 1 x 512
        ("gemma-4-26b-a4b", 8, {"sliding_attention": 32, "full_attention": 16}),
        ("gemma-3-27b", 1, {"sliding_attention": 16, "full_attention": 16}),
    ],
)
def test_blocks_of_layers_that_keep_less_hold_more_tokens(
    name: str, gpus: int, tokens: dict[str, int]
) -> None:
    config = make_config({"model": name, "tensor_parallel_size": gpus})
    assert block_sizes(model_of(config), config) == tokens


def test_requests_of_gemma_4_that_a_pool_holds() -> None:
    """In some 50 GB, vLLM 0.20 printed about 55 thousand tokens, a group's share of the blocks, and
    0.21 about 525 thousand, those of requests: github.com/vllm-project/vllm/issues/43308."""
    config = make_config({"model": "gemma-4-31b", "max_model_len": 262_144, **HYBRID})
    blocks = 55_000 // 16 * 6
    groups = groups_of_model(model_of(config), config, load_hardware("a100-80gb"))
    request = peak_blocks(groups, Layout(16, 16, 262_144, 2 * 2048))
    assert blocks / request * 262_144 == pytest.approx(525_000, rel=0.06)


@pytest.mark.parametrize(
    ("name", "said", "bytes_each"),
    [
        ("nemotron-nano-9b-v2", None, 4),  # its config.json says nothing
        ("nemotron-nano-9b-v2", "auto", 4),
        ("nemotron-nano-9b-v2", "float16", 2),
        ("qwen3-next-80b-a3b", None, 2),
        ("qwen3-next-80b-a3b", "float32", 4),
    ],
)
def test_the_type_of_recurrent_states(name: str, said: str | None, bytes_each: int) -> None:
    """The inputs of the convolution stay as they are: vLLM 0.33.0, models/config.py,
    `NemotronHForCausalLMConfig`, and mamba_utils.py, `_mamba_state_dtype`."""
    config = make_config({"model": name, "mamba_ssm_cache_dtype": said})
    found = model_of(config)
    assert found.linear is not None
    convolved = found.linear.convolved(1) * (found.linear.linear_conv_kernel_dim - 1)
    kept = 2 * convolved + bytes_each * found.linear.recurrent_elements
    states = [each for each in found.shard(1).kv_groups if each.kind == "linear_attention"]
    assert {each.state_bytes for each in states} == {kept}


@pytest.mark.parametrize(("version", "multiple"), [("0.19.0", 64), ("0.33.0", 128)])
def test_states_beside_latent_vectors(version: str, multiple: int) -> None:
    """Their kernels take blocks of more tokens."""
    config = make_config({"model": "kimi-linear-48b-a3b", "vllm_version": version})
    size = state_block_size(model_of(config), config, exports=False)
    assert size == -(-1888 // multiple) * multiple  # 1,888 tokens at multiples of 16


def test_groups_of_mamba_2_are_repeated_on_gpus_beyond_their_number() -> None:
    """vLLM 0.33.0, mamba_utils.py, `extra_groups_for_head_shards`: 8 groups on 16 GPUs."""
    linear = model("nemotron-3-super-120b-a12b").linear
    assert linear is not None and linear.linear_num_key_heads == 8
    each, further = linear.convolved(8), linear.convolved(16)
    groups = 2 * linear.linear_key_head_dim
    assert 2 * (further - groups) == each - groups


@pytest.mark.parametrize(
    ("name", "version", "hardware", "saves"),
    [
        ("qwen3-next-80b-a3b", "0.33.0", "h100-sxm", True),
        ("qwen3-next-80b-a3b", "0.33.0", "b300-sxm", True),
        ("qwen3-next-80b-a3b", "0.33.0", "a100-sxm-80gb", False),
        ("qwen3-next-80b-a3b", "0.32.0", "h100-sxm", False),
        ("nemotron-3-nano-30b-a3b", "0.32.0", "a100-sxm-80gb", True),
        ("nemotron-3-nano-30b-a3b", "0.31.0", "h100-sxm", False),
        ("kimi-k3", "0.29.0", "b200-sxm", True),
        ("kimi-linear-48b-a3b", "0.33.0", "b200-sxm", False),
        ("llama-3.1-8b", "0.33.0", "h100-sxm", False),
    ],
)
def test_who_saves_states_inside_a_chunk(
    name: str, version: str, hardware: str, saves: bool
) -> None:
    config = make_config({"model": name, "vllm_version": version, "enable_prefix_caching": True})
    found = [saves_states(model_of(config), config, load_hardware(hardware))]
    uncached = replace(config, enable_prefix_caching=False)
    found.append(saves_states(model_of(config), uncached, load_hardware(hardware)))
    assert found == [saves, False]

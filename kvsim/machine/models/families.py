"""What families of models have in common, and what their `config.json` may leave out.

Defaults are those of the configuration classes in `transformers` 4.57, for the keys that published
files leave out. Sizes that every published file states have none: without them, a file is broken.

Towers for images and sounds take memory on the GPU and, in a text-only run, nothing else. A tower
is a stack of encoder layers of four square projections and an MLP; its projector maps `hidden_size`
to that of the text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

from msgspec import Struct

from kvsim.machine.models.parts import Natural, Positive


class VisionConfig(Struct, frozen=True, kw_only=True):
    """The keys of a `vision_config` that matter here."""

    model_type: str | None = None
    hidden_size: Positive | None = None
    embed_dim: Positive | None = None
    """Qwen2-VL's name of the width; its `hidden_size` is that of the text."""
    vt_hidden_size: Positive | None = None
    """Kimi's name of the width."""
    intermediate_size: Positive | None = None
    vt_intermediate_size: Positive | None = None
    num_hidden_layers: Positive | None = None
    depth: Positive | None = None
    """Qwen's name of `num_hidden_layers`."""
    vt_num_hidden_layers: Positive | None = None
    patch_size: Natural | None = None
    temporal_patch_size: Positive = 1
    image_size: Natural | None = None
    num_position_embeddings: Natural | None = None
    position_embedding_size: Natural | None = None
    """Gemma's; there are two such tables."""
    deepstack_visual_indexes: list[Natural] = []
    """Layers after which there is a projector, too."""


class _Tower(NamedTuple):
    """A published tower: what its files may leave out."""

    layers: int
    intermediate_size: int
    gated_mlp: bool = False
    projector: Literal["one", "two", "merge", "wide"] = "two"
    """One matrix; two; two after one that merges 2 x 2 patches; or two that are as wide as four
    patches."""


_TOWERS = {
    # SigLIP SO400M, arXiv 2303.15343; Gemma 3 projects with one matrix.
    "siglip_vision_model": _Tower(27, 4304, projector="one"),
    "gemma4_vision": _Tower(27, 4304, gated_mlp=True, projector="one"),
    # Pixtral 12B, arXiv 2410.07073, table 1.
    "pixtral": _Tower(24, 4096, gated_mlp=True, projector="merge"),
    "clip_vision_model": _Tower(24, 4096),
    "qwen2_5_vl": _Tower(32, 3420, gated_mlp=True, projector="wide"),
    "qwen2_vl": _Tower(32, 5120, projector="wide"),
    "llama4_vision_model": _Tower(34, 5632),
}
_WIDE = _Tower(27, 4304, projector="wide")
"""Towers of Qwen from 3 on, and of Kimi."""

STEP_TOWER = 1_980_000_000
"""Parameters of Step-3.7's tower, which files may leave out (transformers 5.24,
models/step3p7/configuration_step3p7.py, defaults)."""


class AudioConfig(Struct, frozen=True, kw_only=True):
    """The keys of an `audio_config` that matter here."""

    hidden_size: Positive | None = None
    num_hidden_layers: Positive | None = None


def audio_parameters(config: AudioConfig) -> tuple[int, str]:
    """Estimated parameters of a tower of Conformers: two MLPs, attention and a convolution."""
    if config.hidden_size is None or config.num_hidden_layers is None:
        return 0, "audio_config does not give the size of its tower: its weights are not counted"
    found = config.num_hidden_layers * 49 * config.hidden_size**2 // 2
    return found, f"{found / 1e6:,.0f} M parameters of its audio tower are an estimate"


def vision_parameters(config: VisionConfig, text_hidden_size: int) -> tuple[int, str]:
    """Estimated parameters of a tower and its projector, and a sentence that says so.

    The sentence of a tower that cannot be estimated says that its weights are not counted.
    """
    known = _TOWERS.get(config.model_type or "")
    if known is None and (config.depth or config.vt_hidden_size):
        known = _WIDE
    hidden = config.embed_dim or config.vt_hidden_size or config.hidden_size
    layers = config.num_hidden_layers or config.depth or config.vt_num_hidden_layers
    layers = layers or (known.layers if known else None)
    columns = config.intermediate_size or config.vt_intermediate_size
    columns = columns or (known.intermediate_size if known else None)
    if hidden is None or layers is None:
        return 0, "vision_config does not give the size of its tower: its weights are not counted"
    gated = known is not None and known.gated_mlp
    layer = 4 * hidden * hidden + (3 if gated else 2) * hidden * (columns or 4 * hidden)
    patch = config.patch_size or 14
    places = config.num_position_embeddings or 2 * (config.position_embedding_size or 0)
    places = places or ((config.image_size or 0) // patch) ** 2
    found = layers * layer + hidden * (3 * patch * patch * config.temporal_patch_size + places)
    projectors = 1 + len(config.deepstack_visual_indexes)
    found += projectors * _projector(known.projector if known else "two", hidden, text_hidden_size)
    return found, f"{found / 1e6:,.0f} M parameters of its vision tower are an estimate"


def _projector(kind: str, hidden: int, text: int) -> int:
    if kind == "one":
        return hidden * text
    if kind == "wide":
        return 4 * hidden * (4 * hidden + text)
    return (4 * hidden * hidden if kind == "merge" else 0) + hidden * text + text * text


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
CHUNKED = "chunked_attention"


class Family(NamedTuple):
    """The models of one `model_type`."""

    defaults: Mapping[str, Any] = {}
    """Keys that a file may leave out."""
    qkv_bias: bool = False
    """Whether query, key and value have a bias where the file does not say so."""
    qk_norm: bool = False
    norms_per_layer: int = 2
    tied: bool = False
    """Whether embeddings are tied where the file does not say so."""
    gated_mlp: bool = True
    windows: tuple[str, ...] = (SLIDING,)
    """Pattern of the layers if the file has a `sliding_window` and no `layer_types`."""
    uses_window: bool = True
    """Whether a `sliding_window` counts where the file does not say so."""
    text_alone: bool = False
    """Whether its text model in `transformers` goes without its vision tower."""
    tower: int = 0
    """Parameters of a vision tower that the file does not describe."""


_GEMMA_3 = Family(
    {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    qk_norm=True,
    norms_per_layer=4,
    tied=True,
    windows=(*[SLIDING] * 5, FULL),
)
_QWEN_3 = Family({"head_dim": 128}, qk_norm=True, uses_window=False)
_QWEN_HYBRID = Family({"head_dim": 256}, qk_norm=True)
_QWEN_3_5 = _QWEN_HYBRID._replace(text_alone=True)
_GEMMA_4 = Family({"sliding_window": 512}, qk_norm=True, norms_per_layer=4, tied=True)
_STEP = Family(qk_norm=True)
_GLM_4_MOE = Family({"attention_out_bias": False})
_DEEPSEEK_V4 = Family()
_DEEPSEEK = Family({"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128})

FAMILIES: dict[str, Family] = {
    "llama": Family({"max_position_embeddings": 2048}),
    "mistral": Family({"max_position_embeddings": 131072, "sliding_window": 4096}),
    "mixtral": Family({"num_experts": 8, "num_experts_per_tok": 2}),
    "ministral": Family(),
    "qwen2": Family({"max_position_embeddings": 32768}, qkv_bias=True, uses_window=False),
    "qwen2_moe": Family(
        {"shared_expert_intermediate_size": 5632}, qkv_bias=True, uses_window=False
    ),
    "qwen2_vl": Family(qkv_bias=True, uses_window=False),
    "qwen2_5_vl": Family(qkv_bias=True, uses_window=False),
    "qwen3": _QWEN_3,
    "qwen3_moe": _QWEN_3,
    "qwen3_vl_text": _QWEN_3,
    "qwen3_vl_moe_text": _QWEN_3,
    "qwen3_next": _QWEN_HYBRID,
    "qwen3_5_text": _QWEN_3_5,
    "qwen3_5_moe_text": _QWEN_3_5,
    "phi3": Family({"max_position_embeddings": 4096}),
    "phimoe": Family(),
    "gemma": Family({"head_dim": 256, "max_position_embeddings": 8192}, tied=True),
    "gemma2": Family(
        {"head_dim": 256, "max_position_embeddings": 8192, "sliding_window": 4096},
        norms_per_layer=4,
        tied=True,
        windows=(SLIDING, FULL),
    ),
    "gemma3_text": _GEMMA_3,
    "gemma3": _GEMMA_3,
    "gpt_oss": Family({"head_dim": 64, "sliding_window": 128}, windows=(SLIDING, FULL)),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "deepseek_v4": _DEEPSEEK_V4,
    "deepseek_ref": _DEEPSEEK_V4,
    "kimi_k2": _DEEPSEEK,
    "kimi_linear": _DEEPSEEK,
    "glm4_moe": _GLM_4_MOE,
    "glm4_moe_lite": _DEEPSEEK,
    "glm4v_moe_text": _GLM_4_MOE,
    "glm_moe_dsa": Family(),
    "minimax_m2": Family(qk_norm=True),
    "minimax_m3": Family(qk_norm=True),
    "minimax_m3_vl_text": Family(qk_norm=True),
    "mimo_v2_flash": Family(),
    "mimo_v2": Family(),
    "nemotron_h": Family(norms_per_layer=1, gated_mlp=False),
    "nemotron-nas": Family(),
    "gemma4_text": _GEMMA_4,
    "gemma4_unified_text": _GEMMA_4,
    "step3p5": _STEP,
    "step3p7": _STEP._replace(tower=STEP_TOWER),
    "ernie4_5": Family(),
    "ernie4_5_moe": Family(),
    "lfm2": Family(qk_norm=True, tied=True),
    "lfm2_moe": Family(qk_norm=True, tied=True),
    "seed_oss": Family({"attention_out_bias": False}, qkv_bias=True),
    "granitemoehybrid": Family(),
    "llama4_text": Family(
        {"head_dim": 128, "attention_chunk_size": 8192}, windows=(*[CHUNKED] * 3, FULL)
    ),
    "granite": Family(),
    "starcoder2": Family(qkv_bias=True, gated_mlp=False, tied=True),
    "falcon": Family({"max_position_embeddings": 2048}, tied=True, gated_mlp=False),
    "mpt": Family(tied=True, gated_mlp=False),
    "gpt_neox": Family(qkv_bias=True, gated_mlp=False),
    "opt": Family(qkv_bias=True, tied=True, gated_mlp=False),
}
"""By `model_type`; of models with several towers, that of the text model."""

_ALSO = {
    other: usual
    for usual, others in {
        "num_hidden_layers": "n_layer n_layers",
        "num_attention_heads": "n_head n_heads",
        "hidden_size": "n_embd d_model",
        "intermediate_size": "ffn_dim ffn_hidden_size",
        "max_position_embeddings": "max_seq_len n_positions",
        "num_key_value_heads": "num_kv_heads num_attention_groups",
        "num_experts": "num_local_experts n_routed_experts moe_num_experts",
        "num_experts_per_tok": "moe_k moe_topk moe_top_k top_k_experts num_experts_per_token",
        "n_shared_experts": "num_shared_experts moe_num_shared_experts",
        "shared_expert_intermediate_size": "share_expert_dim",
        "first_k_dense_replace": "num_dense_layers",
        "moe_latent_size": "routed_expert_hidden_size",
        "mamba_num_heads": "mamba_n_heads",
        "mamba_head_dim": "mamba_d_head",
        "n_groups": "mamba_n_groups",
        "ssm_state_size": "mamba_d_state",
        "conv_kernel": "mamba_d_conv",
        "decoder_sparse_step": "interleave_moe_layer_step",
        "sliding_window_pattern": "_sliding_window_pattern",
        "sliding_window": "sliding_window_size",
        "torch_dtype": "dtype",
    }.items()
    for other in others.split()
}
"""Other names of keys → the usual one."""

_SHAPING = re.compile(
    r"^mamba_(?!hidden_act|proj_bias|conv_bias|chunk)|^ssm_|hybrid_|_pattern$|block_types?$"
    r"|block_configs|layer_period|layer_indices|^attn_layer|layer_group_size"
    r"|^swa_(?!rope)|global_head_dim|num_global_|hidden_size_per_layer|kv_shared|altup_|cla_share"
    r"|index_head_dim|compress_ratio|linear_att|sparse_attention|conv_L|lru_width"
    r"|cross_attention_layers|encoder_layers|type_vocab_size|encoder_ffn_dim|recurrent_"
)
"""Keys that say what single layers are, or that they keep something other than keys and values: of
Mamba and its hybrids, Gemma 3n and 4, MiMo, DeepSeek from V3.2 on, Kimi Linear, MiniMax, LFM,
Hunyuan and Nemotron; and those of encoders."""


def family_of(model_type: str | None) -> Family:
    """The family of a `model_type`; the plainest one for an unknown one."""
    return FAMILIES.get(model_type or "", Family())


_GENERATE_NOTHING = re.compile(
    r"For(MaskedLM|SequenceClassification|TokenClassification|ImageClassification|CTC)$"
    r"|^(XLM)?(Distil)?(Ro)?Bert\w*Model$"
)
"""`architectures` that do not write text."""


def not_a_decoder(config: Mapping[str, Any]) -> str | None:
    """What a model is that is no decoder alone, in words; None for one that may be."""
    listed = config.get("architectures")
    named = [each for each in listed if isinstance(each, str)] if isinstance(listed, list) else []
    if config.get("is_encoder_decoder") or config.get("encoder_layers"):
        return "an encoder with a decoder"
    if config.get("model_type") in ("t5", "mt5", "bart", "whisper", "mllama"):
        return "an encoder with a decoder"
    if any(map(_GENERATE_NOTHING.search, named)) or config.get("type_vocab_size"):
        return "an encoder, which generates nothing"
    return None


def usual_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """A decoder's configuration under the usual keys; keys without a value are left out."""
    table = {key: value for key, value in config.items() if value is not None}
    for other, usual in _ALSO.items():
        if other in table:
            table.setdefault(usual, table[other])
    if table.get("model_type") in ("falcon", "mpt"):
        table = {**table, **_of_old_kind(table)}
    if table.get("model_type") == "llama4_text":
        table = {**table, **_of_llama_4(table)}
    return table


def unread_shapes(config: Mapping[str, Any], read: Collection[str]) -> list[str]:
    """The keys that shape layers, have a value, and are not among those that are `read`."""
    return [
        key
        for key, value in config.items()
        if value
        and key not in read
        and _ALSO.get(key, key) not in read
        and _SHAPING.search(key)
        and not key.startswith("mtp_")
    ]


def _of_old_kind(table: Mapping[str, Any]) -> dict[str, Any]:
    """Falcon and MPT: an MLP of a multiple of the hidden size, one key/value head or as many as
    queries."""
    found: dict[str, Any] = {}
    hidden = table.get("hidden_size")
    if "intermediate_size" not in table and type(hidden) is int:
        ratio = table.get("expansion_ratio", 4)
        found["intermediate_size"] = hidden * ratio if type(ratio) is int else ratio
    grouped = table.get("new_decoder_architecture")
    if not grouped and "num_attention_heads" in table:
        one = table.get("multi_query", table["model_type"] == "falcon")
        found["num_key_value_heads"] = 1 if one else table["num_attention_heads"]
    return found


def _of_llama_4(table: Mapping[str, Any]) -> dict[str, Any]:
    """Llama 4: experts and one shared expert of `intermediate_size`, dense layers of another one,
    attention within chunks of tokens."""
    found: dict[str, Any] = {}
    if "intermediate_size" in table:
        found["moe_intermediate_size"] = table["intermediate_size"]
        found["shared_expert_intermediate_size"] = table["intermediate_size"]
    if "intermediate_size_mlp" in table:
        found["intermediate_size"] = table["intermediate_size_mlp"]
    return found

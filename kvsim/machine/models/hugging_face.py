"""Reads the geometry of a decoder from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct, field

from kvsim.errors import ConfigError, shortened
from kvsim.machine.models.checkpoint import QuantizationConfig, stored_as
from kvsim.machine.models.families import (
    CHUNKED,
    FAMILIES,
    FULL,
    LINEAR,
    SLIDING,
    AudioConfig,
    Family,
    VisionConfig,
    audio_parameters,
    family_of,
    not_a_decoder,
    unread_shapes,
    usual_names,
    vision_parameters,
)
from kvsim.machine.models.geometry import Model
from kvsim.machine.models.layouts import LAYER_TYPES, NONE, layouts
from kvsim.machine.models.names import method_of
from kvsim.machine.models.parts import Compressed, Heads, Indexer, Linear, Natural, Positive
from kvsim.settings.library import convert, converted

T = TypeVar("T")

SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
"""Keys without which there is no geometry."""


class _Decoder(Struct, frozen=True, kw_only=True):
    """The keys of a decoder that matter here, under their usual names."""

    model_type: str | None = None
    num_hidden_layers: Annotated[int, Meta(ge=1, le=10_000)]
    hidden_size: Positive
    num_attention_heads: Positive
    intermediate_size: Positive
    """Columns of dense layers; without any, those of an expert."""
    vocab_size: Positive
    max_position_embeddings: Positive
    num_key_value_heads: Positive | None = None
    head_dim: Positive | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    """Of query, key and value; of the output projection, too, without `attention_out_bias`."""
    attention_out_bias: bool | None = None
    sliding_window: Natural | None = None
    sliding_window_pattern: Positive | None = None
    attention_chunk_size: Positive | None = None
    use_sliding_window: bool | None = None
    max_window_layers: Natural | None = None
    hidden_act: str = "silu"
    attn_output_gate: bool | None = None
    layer_types: list[str] | None = None
    mlp_layer_types: list[str | Natural] | None = None
    heads: dict[str, Heads] | None = None
    num_kv_shared_layers: Natural = 0
    num_nextn_predict_layers: Natural = 0
    lookup_parameters: Natural = 0
    full_attention_interval: Positive | None = None
    num_experts: Natural | None = None
    num_experts_per_tok: Positive | None = None
    moe_intermediate_size: Positive | None = None
    moe_latent_size: Positive | None = None
    n_shared_experts: Natural | None = None
    shared_expert_intermediate_size: Natural | None = None
    first_k_dense_replace: Natural = 0
    decoder_sparse_step: Positive = 1
    mlp_only_layers: list[Natural] | None = None
    kv_lora_rank: Positive | None = None
    q_lora_rank: Positive | None = None
    qk_nope_head_dim: Positive | None = None
    qk_rope_head_dim: Positive | None = None
    v_head_dim: Positive | None = None
    latent_output_gate: bool = False
    indexer: Indexer | None = None
    compressed: Compressed | None = None
    linear: Linear | None = None
    linear_num_key_heads: Positive | None = None
    linear_num_value_heads: Positive | None = None
    linear_key_head_dim: Positive | None = None
    linear_value_head_dim: Positive | None = None
    linear_conv_kernel_dim: Positive = 4
    mamba_ssm_dtype: str | None = None
    expert_dtype: str | None = None
    quantization_config: QuantizationConfig | None = None


class _Document(Struct, frozen=True, kw_only=True):
    """The parts of a `config.json`."""

    name: str | None = field(default=None, name="_name_or_path")
    text_config: dict[str, Any] | None = None
    llm_config: dict[str, Any] | None = None
    language_config: dict[str, Any] | None = None
    vision_config: VisionConfig | None = None
    audio_config: AudioConfig | None = None
    quantization_config: QuantizationConfig | None = None
    torch_dtype: str | None = None
    dtype: str | None = None
    tie_word_embeddings: bool | None = None


def from_hugging_face(
    config: Mapping[str, Any], where: str, side_car: QuantizationConfig | None = None
) -> Model:
    """The model that a Hugging Face `config.json` describes; `where` names it in messages.

    Of a model with several towers, the decoder under `text_config` is taken; a vision tower is
    counted by estimate. Missing keys take the defaults of their family in `transformers`. A family
    that is not known is read as a decoder with gated MLPs, and a remark says so. `side_car`: how a
    file beside it says that weights are stored. Raises `ConfigError` for a missing size, for a
    value of another type or range, for models that are no decoders, and for keys that shape layers
    in a way that is not read.
    """
    document = converted(config, _Document, where)
    inner = document.text_config or document.llm_config or document.language_config
    text = _usual(config, inner, where)
    kind = text.get("model_type")
    family = family_of(kind)
    missing = {key: value for key, value in family.defaults.items() if key not in text}
    if "sliding_window" in (config if inner is None else inner):  # null says that there is none
        missing.pop("sliding_window", None)
    text = {**missing, **text}
    text.setdefault("intermediate_size", text.get("moe_intermediate_size"))
    for key in SIZES:
        if text.get(key) is None:
            raise ConfigError(f"{where}: {key}: missing; the geometry needs it")
    decoder = converted(text, _Decoder, where)
    if kind not in FAMILIES and decoder.hidden_act not in _GATED:
        raise ConfigError(
            f"{where}: model_type {kind!r:.40} with hidden_act {decoder.hidden_act!r:.40} is not"
            " known, so nor is whether its MLPs have gates; choose another model, or give its"
            " geometry as a TOML like those of configs/models"
        )
    table = {
        **_sizes(decoder, family),
        **_attention(decoder, family, where),
        **_experts(decoder, where),
        **_around(document, side_car, decoder, text, family),
        "name": Path(document.name or str(Path(where).parent)).name or where,
        "source": f"{where} (text_config)" if inner is not None else where,
    }
    remarks = [*table.pop("remarks"), *_remarks(decoder, missing)]
    if "quantization" not in table and (method := method_of(table["name"])):
        remarks.append(
            f"no file says how weights are stored, though the name says {method}: they are counted"
            " as unquantised, an upper bound; --quantization sets it"
        )
    return convert(
        {**table, "remarks": tuple(f"{where}: {each}" for each in remarks)}, Model, where
    )


def _usual(
    config: Mapping[str, Any], inner: Mapping[str, Any] | None, where: str
) -> dict[str, Any]:
    """The decoder's configuration under usual keys. Raises `ConfigError` for models that are no
    decoders, and for keys that shape layers in a way that is not read."""
    outer = {"model_type": config.get("model_type")}
    text = usual_names(config if inner is None else {**outer, **inner})
    kind = text.get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise ConfigError(f"{where}: model_type: expected `str`, got {kind!r:.80}")
    if words := not_a_decoder(text) or not_a_decoder(config):
        raise ConfigError(f"{where}: model_type {kind!r:.40} is {words}; choose a decoder")
    read = set(_Decoder.__struct_fields__)
    try:
        for usual, keys in layouts(text, where):
            text, read = {**text, **usual}, read | keys
    except ValueError as error:
        raise ConfigError(f"{where}: {error}; choose another model") from None
    if unread := unread_shapes(text, read):
        raise ConfigError(
            f"{where}: model_type {kind!r:.40}: these keys shape its layers and are not read:"
            f" {shortened(', '.join(unread))}; choose another model, or give its geometry as a TOML"
            " like those of configs/models"
        )
    return text


_GATED = ("silu", "swish", "gelu_pytorch_tanh", "swigluoai", "situ")
"""Activations of MLPs with gates."""


def _sizes(decoder: _Decoder, family: Family) -> dict[str, Any]:
    heads = decoder.num_attention_heads
    bias = decoder.attention_bias
    return {
        **{key: getattr(decoder, key) for key in SIZES},
        "num_key_value_heads": decoder.num_key_value_heads or heads,
        "head_dim": decoder.head_dim or max(decoder.hidden_size // heads, 1),
        "qkv_bias": family.qkv_bias if bias is None else bias,
        "o_bias": bool(bias if decoder.attention_out_bias is None else decoder.attention_out_bias),
        "qk_norm": family.qk_norm,
        "norms_per_layer": family.norms_per_layer,
        "gated_mlp": family.gated_mlp,
        "attention_sinks": decoder.model_type == "gpt_oss",
        "mlp_layer_types": tuple(_own(decoder.mlp_layer_types or [], decoder)),
        "num_kv_shared_layers": decoder.num_kv_shared_layers,
        "lookup_parameters": decoder.lookup_parameters,
        "heads": decoder.heads or {},
    }


def _attention(decoder: _Decoder, family: Family, where: str) -> dict[str, Any]:
    """Windows, chunks, latent attention and linear attention."""
    found: dict[str, Any] = {"attn_output_gate": bool(decoder.attn_output_gate)}
    if others := set(decoder.layer_types or ()) - {*LAYER_TYPES, NONE}:
        raise ConfigError(
            f"{where}: layer_types: {min(others)!r:.40} is not simulated; choose another model"
        )
    types = _layer_types(decoder, family)
    if SLIDING in types or decoder.compressed is not None:
        found["sliding_window"] = decoder.sliding_window
    if CHUNKED in types:
        found["attention_chunk_size"] = decoder.attention_chunk_size
    if LINEAR in types and decoder.linear is not None:
        found["linear"] = decoder.linear
    elif LINEAR in types:
        keys = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        found["linear"] = _present(decoder, [f"linear_{key}" for key in keys], where)
        found["linear"]["linear_conv_kernel_dim"] = decoder.linear_conv_kernel_dim
        found["linear"]["mamba_ssm_dtype"] = decoder.mamba_ssm_dtype
        found["attn_output_gate"] = decoder.attn_output_gate is not False
    if decoder.kv_lora_rank is not None:
        keys = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        latent = found["latent"] = _present(decoder, keys, where)
        latent["q_lora_rank"] = decoder.q_lora_rank
        latent["output_gate"] = decoder.latent_output_gate
        found["head_dim"] = latent["qk_nope_head_dim"] + latent["qk_rope_head_dim"]
    elif decoder.v_head_dim is not None:
        found["v_head_dim"] = decoder.v_head_dim
    found["indexer"], found["compressed"] = decoder.indexer, decoder.compressed
    return {**found, "layer_types": types if set(types) - {FULL} else ()}


def _layer_types(decoder: _Decoder, family: Family) -> tuple[str, ...]:
    """The pattern of the layers; a window that no sequence can leave counts as full attention."""
    window, layers = decoder.sliding_window, decoder.num_hidden_layers
    uses = decoder.use_sliding_window
    slides = bool(window) and (family.uses_window if uses is None else uses)
    if decoder.layer_types is not None:
        types = tuple(LAYER_TYPES.get(each, each) for each in _own(decoder.layer_types, decoder))
        slides = bool(window)
    elif decoder.linear_num_value_heads is not None:
        types = (*[LINEAR] * ((decoder.full_attention_interval or 4) - 1), FULL)
    elif decoder.sliding_window_pattern is not None:
        types = (*[SLIDING] * (min(decoder.sliding_window_pattern, layers) - 1), FULL)
    elif uses and decoder.max_window_layers is not None:
        full = min(decoder.max_window_layers, layers)
        types = (*[FULL] * full, *[SLIDING] * (layers - full))
    else:
        types = family.windows
    longest, chunk = decoder.max_position_embeddings, decoder.attention_chunk_size
    kept = {LINEAR: LINEAR, NONE: NONE}
    if slides and (window or 0) < longest:
        kept[SLIDING] = SLIDING
    if (chunk or longest) < longest:
        kept[CHUNKED] = CHUNKED
    known = tuple(kept.get(each, FULL) for each in types)
    return known[:layers] if decoder.layer_types is None else known


def _own(entries: list[T], decoder: _Decoder) -> list[T]:
    """The entries of a list without those of a drafter behind them (Step-3.5)."""
    layers = decoder.num_hidden_layers
    drafted = len(entries) == layers + decoder.num_nextn_predict_layers
    return entries[:layers] if drafted else entries


def _experts(decoder: _Decoder, where: str) -> dict[str, Any]:
    if not decoder.num_experts:
        return {}
    columns = decoder.moe_intermediate_size or decoder.intermediate_size
    shared = decoder.shared_expert_intermediate_size
    if shared is None:
        shared = (decoder.n_shared_experts or 0) * columns
    return {
        "experts": {
            "num_experts": decoder.num_experts,
            **_present(decoder, ["num_experts_per_tok"], where),
            "moe_intermediate_size": columns,
            "shared_expert_intermediate_size": shared,
            "shared_expert_gate": bool(shared) and (decoder.model_type or "").startswith("qwen"),
            "first_k_dense_replace": decoder.first_k_dense_replace,
            "decoder_sparse_step": decoder.decoder_sparse_step,
            "mlp_only_layers": tuple(decoder.mlp_only_layers or ()),
            "bias": decoder.model_type == "gpt_oss",
            "moe_latent_size": decoder.moe_latent_size,
        }
    }


def _around(
    document: _Document,
    side_car: QuantizationConfig | None,
    decoder: _Decoder,
    text: Mapping[str, Any],
    family: Family,
) -> dict[str, Any]:
    """What the whole model has: types, quantisation, ties, towers."""
    dtype = text.get("torch_dtype") or document.torch_dtype or document.dtype
    tied = decoder.tie_word_embeddings
    if tied is None:
        tied = document.tie_word_embeddings
    remarks: list[str] = []
    found: dict[str, Any] = {}
    said = document.quantization_config or decoder.quantization_config or side_car
    if said is not None:
        found["quantization"] = stored_as(said, decoder.num_hidden_layers, decoder.expert_dtype)
        if found["quantization"] is None:
            method = said.quant_method
            remarks.append(
                f"quantization_config: method {method!r:.40} is not known; weights are counted as"
                " unquantised, an upper bound"
            )
    if document.vision_config is not None:
        tower, remark = vision_parameters(document.vision_config, decoder.hidden_size)
        found["apart_parameters" if family.text_alone else "vision_parameters"] = tower
        remarks.append(remark)
    elif family.tower:
        found["vision_parameters"] = family.tower
        remarks.append(
            f"{family.tower / 1e6:,.0f} M parameters of its vision tower are an estimate"
        )
    elif document.text_config is not None:
        remarks.append("only the weights under text_config are counted")
    if document.audio_config is not None:
        tower, remark = audio_parameters(document.audio_config)
        found["vision_parameters"] = found.get("vision_parameters", 0) + tower
        remarks.append(remark)
    if dtype is None:
        # Quantised checkpoints without a type were made from 16-bit ones.
        dtype = "float32" if said is None else "bfloat16"
    return {
        **found,
        "torch_dtype": dtype,
        "tie_word_embeddings": family.tied if tied is None else tied,
        "remarks": remarks,
    }


def _remarks(decoder: _Decoder, missing: Mapping[str, Any]) -> list[str]:
    """What was assumed."""
    found = []
    if missing:
        keys = ", ".join(f"{key} {value}" for key, value in missing.items())
        found.append(f"not given, so taken from transformers' {decoder.model_type}: {keys}")
    if decoder.model_type not in FAMILIES:
        found.append(
            f"model_type {decoder.model_type!r:.40} is not known; read as a decoder with gated MLPs"
        )
    return found


def _present(decoder: _Decoder, keys: list[str] | tuple[str, ...], where: str) -> dict[str, Any]:
    """The values of keys that must be there."""
    found = {key: getattr(decoder, key) for key in keys}
    for key, value in found.items():
        if value is None:
            raise ConfigError(f"{where}: {key}: missing; the geometry needs it")
    return found

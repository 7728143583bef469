"""Reads the geometry of a decoder from a Hugging Face `config.json`, and from its
`quantization_config` the bits of a weight, and which parts have them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct, field
from msgspec.structs import asdict, replace

from kvsim.errors import ConfigError, shortened
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
    not_a_decoder,
    unread_shapes,
    usual_names,
    vision_parameters,
)
from kvsim.machine.models.geometry import Model
from kvsim.machine.models.layouts import LAYER_TYPES, NONE, layouts
from kvsim.machine.models.parts import (
    ALL,
    METHODS,
    Compressed,
    Heads,
    Indexer,
    Linear,
    Natural,
    Part,
    Positive,
    Quantization,
    grouped,
    method_of,
    quantization,
)
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


_GATED_DELTA_NET = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
"""Keys without which there is no geometry of a layer of `linear_attention` (Qwen3-Next)."""

Bits = Annotated[int, Meta(ge=1, le=16)]


class _Weights(Struct, frozen=True, kw_only=True):
    """How one group of a `compressed-tensors` checkpoint stores its weights."""

    num_bits: Bits = 8
    type: str = "float"
    group_size: int | None = None
    symmetric: bool = True


class _Group(Struct, frozen=True, kw_only=True):
    weights: _Weights | None = None
    input_activations: dict[str, Any] | None = None
    targets: list[str] = []


class _Layer(Struct, frozen=True, kw_only=True):
    """How ModelOpt stores one module."""

    quant_algo: str = ""


class QuantizationConfig(Struct, frozen=True, kw_only=True):
    """The keys of a `quantization_config` that matter here."""

    quant_method: str = ""
    bits: Bits | None = None
    w_bit: Bits | None = None
    group_size: int | None = None
    zero_point: bool | None = None
    weight_block_size: list[Positive] | None = None
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    quant_algo: str | None = None
    kv_cache_quant_algo: str | None = None
    kv_cache_scheme: dict[str, Any] | None = None
    config_groups: dict[str, _Group] | None = None
    quantized_layers: dict[str, _Layer] | None = None
    modules_to_not_convert: list[str] | None = None
    ignore: list[str] | None = None
    exclude_modules: list[str] | None = None
    """The name of `ignore` in ModelOpt's `hf_quant_config.json`."""
    ignored_layers: list[str] | None = None
    llm_int8_skip_modules: list[str] | None = None
    exclude: list[str] | None = None
    global_quant_config: dict[str, Any] | None = None

    @property
    def method(self) -> str:
        """`quant_method` in small letters and with dashes."""
        return self.quant_method.lower().replace("_", "-")

    @property
    def spared(self) -> list[str]:
        """Modules that are not quantised."""
        # Modules that such a file ignores are in 8 bits, not in 16: it spares them from the format
        # of the layers that it lists (DeepSeek-V4-Pro-NVFP4).
        rest_in_8_bits = self.quantized_layers and self.weight_block_size
        ignore = None if rest_in_8_bits else self.ignore or self.exclude_modules
        lists = (self.modules_to_not_convert, ignore, self.ignored_layers)
        further = (self.llm_int8_skip_modules, self.exclude)
        return [module for each in (*lists, *further) for module in each or ()]


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

    @property
    def inner(self) -> dict[str, Any] | None:
        """The decoder of a model with several towers; None for one that has no other parts."""
        return self.text_config or self.llm_config or self.language_config


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
    inner = document.inner
    text = _usual(config, inner, where)
    family = FAMILIES.get(text.get("model_type") or "", Family())  # the plainest for an unknown one
    missing = {key: value for key, value in family.defaults.items() if key not in text}
    if "sliding_window" in (config if inner is None else inner):  # null says that there is none
        missing.pop("sliding_window", None)
    decoder = _decoder({**missing, **text}, where)
    tied = (decoder.tie_word_embeddings, document.tie_word_embeddings, family.tied)
    remarks: list[str] = []
    table = {
        **_sizes(decoder, family),
        **_attention(decoder, family, where),
        **_experts(decoder, where),
        **_stored(document, side_car, decoder, text.get("torch_dtype"), remarks),
        **_towers(document, family, decoder.hidden_size, remarks),
        "tie_word_embeddings": next(each for each in tied if each is not None),
        "name": Path(document.name or str(Path(where).parent)).name or where,
        "source": f"{where} (text_config)" if inner is not None else where,
    }
    remarks += _assumed(table, decoder.model_type, missing)
    return convert(
        {**table, "remarks": tuple(f"{where}: {each}" for each in remarks)}, Model, where
    )


def _usual(
    config: Mapping[str, Any], inner: Mapping[str, Any] | None, where: str
) -> dict[str, Any]:
    """The decoder's configuration under usual keys. Raises `ConfigError` for models that are no
    decoders, and for keys that shape layers in a way that is not read."""
    # A decoder that does not name its type has that of the whole.
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


def _decoder(text: dict[str, Any], where: str) -> _Decoder:
    """The decoder of a configuration under usual keys. Raises `ConfigError` for a missing size, and
    for one of which nobody knows whether its MLPs have gates."""
    text.setdefault("intermediate_size", text.get("moe_intermediate_size"))
    _present(text, SIZES, where)
    decoder = converted(text, _Decoder, where)
    kind, activation = decoder.model_type, decoder.hidden_act
    if kind not in FAMILIES and activation not in _GATED:
        raise ConfigError(
            f"{where}: model_type {kind!r:.40} with hidden_act {activation!r:.40} is not known, so"
            " nor is whether its MLPs have gates; choose another model, or give its geometry as a"
            " TOML like those of configs/models"
        )
    return decoder


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
    if LINEAR in types:
        found["linear"] = decoder.linear
        if decoder.linear is None:
            found["linear"] = _present(asdict(decoder), _GATED_DELTA_NET, where)
            found["linear"]["mamba_ssm_dtype"] = decoder.mamba_ssm_dtype
            found["attn_output_gate"] = decoder.attn_output_gate is not False
    if decoder.kv_lora_rank is not None:
        keys = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        latent = found["latent"] = _present(asdict(decoder), keys, where)
        latent["q_lora_rank"] = decoder.q_lora_rank
        latent["output_gate"] = decoder.latent_output_gate
        found["head_dim"] = latent["qk_nope_head_dim"] + latent["qk_rope_head_dim"]
    elif decoder.v_head_dim is not None:
        found["v_head_dim"] = decoder.v_head_dim
    found["indexer"], found["compressed"] = decoder.indexer, decoder.compressed
    return {**found, "layer_types": types if set(types) - {FULL} else ()}


def _layer_types(decoder: _Decoder, family: Family) -> tuple[str, ...]:
    """The pattern of the layers; a window that no sequence can leave counts as full attention."""
    longest, uses = decoder.max_position_embeddings, decoder.use_sliding_window
    kept = {LINEAR, NONE}
    if decoder.layer_types is not None or (family.uses_window if uses is None else uses):
        kept |= {SLIDING} if 0 < (decoder.sliding_window or 0) < longest else set()
    if (decoder.attention_chunk_size or longest) < longest:
        kept.add(CHUNKED)
    return tuple(each if each in kept else FULL for each in _pattern(decoder, family))


def _pattern(decoder: _Decoder, family: Family) -> tuple[str, ...]:
    """The pattern of the layers, as the file or the family says it."""
    layers = decoder.num_hidden_layers
    if decoder.layer_types is not None:
        return tuple(LAYER_TYPES.get(each, each) for each in _own(decoder.layer_types, decoder))
    types = tuple(family.windows)
    if decoder.linear_num_value_heads is not None:
        types = (*[LINEAR] * ((decoder.full_attention_interval or 4) - 1), FULL)
    elif decoder.sliding_window_pattern is not None:
        types = (*[SLIDING] * (min(decoder.sliding_window_pattern, layers) - 1), FULL)
    # Qwen2: the first `max_window_layers` layers see all tokens.
    elif decoder.use_sliding_window and decoder.max_window_layers is not None:
        full = min(decoder.max_window_layers, layers)
        types = (*[FULL] * full, *[SLIDING] * (layers - full))
    return types[:layers]


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
            **_present(asdict(decoder), ["num_experts", "num_experts_per_tok"], where),
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


def _stored(
    document: _Document,
    side_car: QuantizationConfig | None,
    decoder: _Decoder,
    dtype: object,
    remarks: list[str],
) -> dict[str, Any]:
    """How weights are stored; `dtype`: what the decoder says of it. Adds to the remarks."""
    dtype = dtype or document.torch_dtype or document.dtype
    said = document.quantization_config or decoder.quantization_config or side_car
    if said is None:
        # The default of `transformers`, which engines then run in 16 bits (`Model.dtype`).
        return {"torch_dtype": "float32" if dtype is None else dtype}
    stored = stored_as(said, decoder.num_hidden_layers, decoder.expert_dtype)
    if stored is None:
        remarks.append(
            f"quantization_config: method {said.quant_method!r:.40} is not known; weights are"
            " counted as unquantised, an upper bound"
        )
    # Quantised checkpoints without a type were made from 16-bit ones.
    return {"quantization": stored, "torch_dtype": "bfloat16" if dtype is None else dtype}


def _towers(
    document: _Document, family: Family, hidden_size: int, remarks: list[str]
) -> dict[str, int]:
    """Parameters of the towers for images and sounds. Adds to the remarks."""
    found: dict[str, int] = {}
    if document.vision_config is not None:
        tower, remark = vision_parameters(document.vision_config, hidden_size)
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
    return found


def _assumed(
    table: Mapping[str, Any], kind: str | None, missing: Mapping[str, Any]
) -> Iterator[str]:
    """Remarks on what no file says, and was taken to be so."""
    if missing:
        keys = ", ".join(f"{key} {value}" for key, value in missing.items())
        yield f"not given, so taken from transformers' {kind}: {keys}"
    if kind not in FAMILIES:
        yield f"model_type {kind!r:.40} is not known; read as a decoder with gated MLPs"
    if "quantization" not in table and (method := method_of(table["name"])):
        yield (
            f"no file says how weights are stored, though the name says {method}: they are counted"
            " as unquantised, an upper bound; --quantization sets it"
        )


def _present(values: Mapping[str, Any], keys: Iterable[str], where: str) -> dict[str, Any]:
    """The values of keys that must be there."""
    found = {key: values.get(key) for key in keys}
    for key, value in found.items():
        if value is None:
            raise ConfigError(f"{where}: {key}: missing; the geometry needs it")
    return found


def of_side_car(table: Mapping[str, Any], where: str) -> QuantizationConfig:
    """What `hf_quant_config.json` says, as a `quantization_config` would."""
    said = converted(table.get("quantization", {}), QuantizationConfig, where)
    return replace(said, quant_method="modelopt")


def stored_as(
    config: QuantizationConfig, layers: int, expert_dtype: str | None = None
) -> Quantization | None:
    """Returns how a checkpoint stores its weights; None for an unknown method.

    `expert_dtype`: that of a `config.json` which stores experts otherwise than the rest.
    """
    rules = [*_rules(config)]
    if not rules:
        return None
    found = _by_part(rules)
    if expert_dtype == "fp4" and found.get("experts", rules[0][1]).bits >= 8:
        found["experts"] = quantization("mxfp4")
    spared = config.spared
    parts = [part for part in ALL if part in found and not _spares(part, spared, layers)]
    first = rules[0][1]
    others = {part: found[part].bits for part in parts if found[part].bits != first.bits}
    stored = replace(first, parts=tuple(parts), part_bits=others)
    return replace(stored, kv_cache_dtype="fp8") if _has_fp8_cache(config) else stored


_Rule = tuple[list[str] | None, Quantization]
"""Names of modules, or None for all that are not named apart, and how they are stored."""


def _by_part(rules: list[_Rule]) -> dict[Part, Quantization]:
    """How each part is stored, by the first rule that means it."""
    found: dict[Part, Quantization] = {}
    for modules, stored in rules:
        for part in stored.parts:
            if modules is None or any(_means(part, each) for each in modules):
                found.setdefault(part, stored)
    return found


def _has_fp8_cache(config: QuantizationConfig) -> bool:
    """Whether vLLM takes a KV cache in FP8 for a checkpoint, unless it is told otherwise.

    Source: vLLM of 2026, utils/torch_utils.py, `get_kv_cache_quant_algo_string`, for ModelOpt;
    model_executor/layers/attention/attention.py, `Attention`, for compressed-tensors.
    """
    scheme, method = config.kv_cache_scheme, config.method
    if method.startswith("modelopt"):
        fp8 = {"dynamic": False, "num_bits": 8, "type": "float"}
        if scheme:
            return all(scheme.get(key) == value for key, value in fp8.items())
        return (config.kv_cache_quant_algo or "").lower() == "fp8"
    return method == "compressed-tensors" and scheme is not None


def _rules(config: QuantizationConfig) -> Iterator[_Rule]:
    """How modules are stored."""
    of_algo: dict[str, list[str]] = {}
    for name, layer in (config.quantized_layers or {}).items():
        of_algo.setdefault(layer.quant_algo, []).append(name)
    for algo, modules in of_algo.items():
        if stored := _of_algo(algo):
            yield modules, stored
    # Modules that are not listed are in 16 bits, but in 8 where the whole checkpoint is FP8.
    if of_algo and config.method != "fp8":
        return
    groups: list[_Rule] = []
    if not of_algo and config.method in ("compressed-tensors", "modelopt"):
        groups = [*_of_groups(config)]
    yield from groups
    if not groups and (found := _of_method(config)):
        yield None, found


def _of_groups(config: QuantizationConfig) -> Iterator[_Rule]:
    """The rules of `config_groups`."""
    for group in (config.config_groups or {}).values():
        if group.weights is None:
            continue
        # Others, such as `Linear`, name a class of modules: they mean all.
        named = [target for target in group.targets if "." in target or ":" in target]
        stored = _compressed(group)
        if config.method == "modelopt":
            stored = replace(stored, method="modelopt_fp4" if stored.bits < 8 else "modelopt")
        yield named or None, stored


def _of_algo(algo: str) -> Quantization | None:
    """What ModelOpt calls `FP8`, `NVFP4`, `W4A16_NVFP4` and the like."""
    algo = algo.upper()
    if "MXFP8" in algo:
        return quantization("modelopt_mxfp8")
    if "FP4" in algo:
        return quantization("mxfp4" if "MXFP4" in algo else "modelopt_fp4")
    if "FP8" in algo:
        return quantization("modelopt")
    return quantization("awq") if "AWQ" in algo or "INT4" in algo else None


def _of_method(config: QuantizationConfig) -> Quantization | None:
    """How all weights are stored; None for an unknown method."""
    match config.method:
        case "awq" | "gptq" | "auto-round":
            return _in_groups(config)
        case "fp8" if config.weight_block_size:
            rows, columns, *_ = [*config.weight_block_size, 1]
            # Each block of weights has a scale in 32 bits.
            bits = grouped(8, rows * columns, 32)
            return Quantization(method="fp8", bits=bits, fp8_products=True)
        case "modelopt" if config.quant_algo:
            return _of_algo(config.quant_algo)
        case "quark":
            match config.global_quant_config:
                case {"weight": {"dtype": "fp4"}}:
                    return replace(quantization("mxfp4"), method="quark", parts=ALL, fp4=True)
        case "bitsandbytes" | "":
            if config.load_in_4bit:
                return METHODS["bitsandbytes"]
            return Quantization(method="bitsandbytes", bits=8) if config.load_in_8bit else None
    return METHODS.get(config.quant_method.lower()) or METHODS.get(config.method)


def _in_groups(config: QuantizationConfig) -> Quantization:
    """Integers in groups, each with a scale and, unless they are symmetric, a zero point."""
    bits = config.bits or config.w_bit or 4
    # Only AWQ says that there are none; GPTQ stores them also where all are alike.
    zeros = 0 if config.zero_point is False else bits
    # -1 is one group for a row; counted as 128, it takes hardly more.
    group = max(config.group_size or 0, 0) or 128
    return Quantization(method=config.method, bits=grouped(bits, group, 16, zeros))


def _compressed(group: _Group) -> Quantization:
    """A group of layers of a `compressed-tensors` checkpoint."""
    weights = group.weights or _Weights()
    size = max(weights.group_size or 0, 0)
    is_float = weights.type == "float"
    bits = float(weights.num_bits)
    if size:
        # Microscaling formats (4-bit floats) have scales of 8 bits, the others of 16.
        scale = 8 if is_float and weights.num_bits == 4 else 16
        bits = grouped(weights.num_bits, size, scale, 0 if weights.symmetric else weights.num_bits)
    fp8 = is_float and weights.num_bits == 8 and group.input_activations is not None
    return Quantization(
        method="compressed-tensors",
        bits=bits,
        parts=ALL,
        fp8_products=fp8,
        fp4=is_float and weights.num_bits == 4,
    )


def _spares(part: Part, modules: list[str], layers: int) -> bool:
    """Whether a list of unquantised modules names a part in more than half of the layers."""
    named = [re.search(r"layers\.(\d+)", each) for each in modules if _means(part, each)]
    # A name without a number of a layer means all layers.
    return None in named or 2 * len({number[1] for number in named if number}) > layers


_NAMES: dict[Part, str] = {
    "attention": r"\battn|self_attn|attention|linear_attn|mixer\.(in|out|[qkvo])_proj",
    "experts": r"(?<!shared_)experts?\b",
    "mlp": r"mlp(\.?\*|\$|$|\\?\.\(?(gate|up|down)(_|\|))|shared_expert|feed_forward$",
}
"""Names of modules that mean a whole part, not one router or gate in it."""


def _means(part: Part, module: str) -> bool:
    return bool(re.search(_NAMES[part], module))

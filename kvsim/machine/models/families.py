"""What families of models have in common, and what their `config.json` may leave out, as
`families.toml` says it.

Towers for images and sounds take memory on the GPU and, in a text-only run, nothing else. A tower
is a stack of encoder layers of four square projections and an MLP; its projector maps `hidden_size`
to that of the text.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
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

    @property
    def width(self) -> int | None:
        """Columns of the residual stream."""
        return self.embed_dim or self.vt_hidden_size or self.hidden_size

    @property
    def layers(self) -> int | None:
        """Layers of the encoder."""
        return self.num_hidden_layers or self.depth or self.vt_num_hidden_layers

    @property
    def table_rows(self) -> int:
        """Rows of the tables from which a patch gets its position and its pixels."""
        patch = self.patch_size or 14
        places = self.num_position_embeddings or 2 * (self.position_embedding_size or 0)
        places = places or ((self.image_size or 0) // patch) ** 2
        # Three colours of each pixel.
        return 3 * patch * patch * self.temporal_patch_size + places


class _Tower(NamedTuple):
    """A published tower: what its files may leave out."""

    layers: int | None = None
    intermediate_size: int | None = None
    gated_mlp: bool = False
    projector: Literal["one", "two", "merge", "wide"] = "two"
    """One matrix; two; two after one that merges 2 x 2 patches; or two that are as wide as four
    patches."""


_FILE = tomllib.loads(Path(__file__).with_name("families.toml").read_text("utf-8"))
_TOWERS = {kind: _Tower(**said) for kind, said in _FILE["towers"].items()}
_WIDE = _Tower(27, 4304, projector="wide")
"""Towers of Qwen from 3 on, and of Kimi."""


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
    usual = _WIDE if config.depth or config.vt_hidden_size else _Tower()
    known = _TOWERS.get(config.model_type or "", usual)
    hidden, layers = config.width, config.layers or known.layers
    if hidden is None or layers is None:
        return 0, "vision_config does not give the size of its tower: its weights are not counted"
    columns = config.intermediate_size or config.vt_intermediate_size
    columns = columns or known.intermediate_size or 4 * hidden
    layer = 4 * hidden * hidden + (3 if known.gated_mlp else 2) * hidden * columns
    found = layers * layer + hidden * config.table_rows
    projectors = 1 + len(config.deepstack_visual_indexes)
    found += projectors * _projector(known.projector, hidden, text_hidden_size)
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
    windows: Sequence[str] = (SLIDING,)
    """Pattern of the layers if the file has a `sliding_window` and no `layer_types`."""
    uses_window: bool = True
    """Whether a `sliding_window` counts where the file does not say so."""
    text_alone: bool = False
    """Whether its text model in `transformers` goes without its vision tower."""
    tower: int = 0
    """Parameters of a vision tower that the file does not describe."""


FAMILIES: dict[str, Family] = {
    kind: Family(**said) for kinds, said in _FILE["families"].items() for kind in kinds.split()
}
"""By `model_type`; of models with several towers, that of the text model."""
_ALSO = {other: usual for usual, others in _FILE["keys"].items() for other in others.split()}
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
        # Layers of a drafter.
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
    # The newer architecture states its key/value heads.
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

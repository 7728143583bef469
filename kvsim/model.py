"""Geometry of a decoder: how many parameters it has, and which share of them one GPU holds.

The geometry is read from a TOML of `configs/models`, or from a Hugging Face `config.json` of a
known architecture: grouped-query attention and a gated MLP in every layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from kvsim.config import read_toml
from kvsim.errors import ConfigError
from kvsim.library import convert, find, read_json

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1}

Positive = Annotated[int, Meta(ge=1)]


class Model(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One decoder; keys are those of a Hugging Face `config.json`."""

    name: str
    num_hidden_layers: Positive
    hidden_size: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Positive
    intermediate_size: Positive
    vocab_size: Positive
    max_position_embeddings: Positive
    """Longest sequence in tokens."""
    tie_word_embeddings: bool = False
    """Whether the output projection is the embedding table."""
    qkv_bias: bool = False
    """Whether query, key and value projections have a bias (Qwen2)."""
    qk_norm: bool = False
    """Whether queries and keys are normalised per head (Qwen3)."""
    torch_dtype: Literal["float32", "float16", "bfloat16"] = "bfloat16"
    source: str
    """Where the figures come from."""

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.shard(1).parameters

    def dtype(self, wanted: str) -> str:
        """Type of weights and activations; `auto` is the model's own, but float16 for float32.

        Source: vLLM 0.6.3, vllm/config.py, `_get_and_verify_dtype`.
        """
        if wanted != "auto":
            return wanted
        return "float16" if self.torch_dtype == "float32" else self.torch_dtype

    def weight_bytes(self, dtype: str, tensor_parallel_size: int = 1) -> int:
        """Bytes of the weights on one of `tensor_parallel_size` GPUs."""
        return self.shard(tensor_parallel_size).parameters * DTYPE_BYTES[self.dtype(dtype)]

    def shard(self, tensor_parallel_size: int) -> Shard:
        """The share of one of `tensor_parallel_size` GPUs, or a `ConfigError` if none is possible.

        Attention heads and MLP columns are divided; so are key/value heads, or they are replicated
        where there are fewer of them than GPUs: max(1, heads // GPUs) each (vLLM 0.6.3,
        vllm/config.py, `get_num_kv_heads`).
        """
        tp = tensor_parallel_size
        if not self._divides(tp):
            possible = [n for n in range(1, self.num_attention_heads + 1) if self._divides(n)]
            raise ConfigError(
                f"tensor_parallel_size: {tp} GPUs cannot share the {self.num_attention_heads}"
                f" attention heads, {self.num_key_value_heads} key/value heads and"
                f" {self.intermediate_size} MLP columns of {self.name} evenly;"
                f" use one of {', '.join(map(str, possible))}"
            )
        return Shard(
            model=self,
            heads=self.num_attention_heads // tp,
            kv_heads=max(1, self.num_key_value_heads // tp),
            intermediate_size=self.intermediate_size // tp,
            vocab_size=-(-self.vocab_size // tp),
        )

    def _divides(self, tp: int) -> bool:
        kv_heads = self.num_key_value_heads
        return (
            self.num_attention_heads % tp == 0
            and self.intermediate_size % tp == 0
            and max(kv_heads, tp) % min(kv_heads, tp) == 0
        )


@dataclass(frozen=True, slots=True)
class Shard:
    """What one GPU holds of a model under tensor parallelism; the whole model for one GPU."""

    model: Model
    heads: int
    kv_heads: int
    intermediate_size: int
    """Columns of each of the gate and up projections."""
    vocab_size: int
    """Rows of the embedding and output tables."""

    @property
    def linear_parameters(self) -> int:
        """Weights of the matrix products of all layers, which every token passes through."""
        model = self.model
        attention = model.hidden_size * self.qkv_size + self.heads * model.head_dim * (
            model.hidden_size
        )
        mlp = 3 * model.hidden_size * self.intermediate_size
        return model.num_hidden_layers * (attention + mlp)

    @property
    def head_parameters(self) -> int:
        """Weights of the output projection, which every sampled row passes through."""
        return self.vocab_size * self.model.hidden_size

    @property
    def parameters(self) -> int:
        """All parameters in GPU memory; norms are replicated on every GPU."""
        model = self.model
        per_layer = 2 * model.hidden_size
        if model.qkv_bias:
            per_layer += self.qkv_size
        if model.qk_norm:
            per_layer += 2 * model.head_dim
        tables = self.head_parameters * (1 if model.tie_word_embeddings else 2)
        norms = model.num_hidden_layers * per_layer + model.hidden_size
        return self.linear_parameters + norms + tables

    @property
    def qkv_size(self) -> int:
        """Elements of the query, key and value of one token."""
        return (self.heads + 2 * self.kv_heads) * self.model.head_dim


def load_model(name_or_path: str) -> Model:
    """The model with a shipped name, or that of a TOML, a `config.json` or a folder with one."""
    folder = Path(name_or_path) / "config.json"
    path = folder if folder.is_file() else find("models", name_or_path)
    if path.suffix != ".json":
        return convert(read_toml(str(path)), Model, str(path))
    return from_hugging_face(read_json(path), str(path))


_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` whose geometry `Model` describes."""


def from_hugging_face(config: Mapping[str, Any], where: str) -> Model:
    """The decoder that a Hugging Face `config.json` describes; `where` names it in messages.

    Of a model with several towers, the decoder under `text_config` is taken, and its `source` says
    that other weights are not counted. Raises `ConfigError` for a missing key, and for
    architectures whose KV cache or weights have another geometry.
    """
    text = config.get("text_config", config)
    source = f"{where} (text_config only)" if "text_config" in config else where
    dtypes = [c[key] for c in (text, config) for key in ("torch_dtype", "dtype") if c.get(key)]
    reason = _other_geometry(text, config)
    if reason:
        raise ConfigError(
            f"{where}: {reason}, which is not modelled; give a dense model with full attention"
            " (llama, mistral, qwen2, qwen3), or describe it in a TOML as in configs/models"
        )
    try:
        heads = text["num_attention_heads"]
        table = {
            "name": Path(str(config.get("_name_or_path") or Path(where).parent)).name or where,
            "num_key_value_heads": text.get("num_key_value_heads") or heads,
            "head_dim": text.get("head_dim") or text["hidden_size"] // heads,
            "tie_word_embeddings": bool(text.get("tie_word_embeddings", False)),
            "qkv_bias": bool(text.get("attention_bias", text["model_type"] == "qwen2")),
            "qk_norm": text["model_type"] == "qwen3",
            "torch_dtype": dtypes[0] if dtypes else "float32",
            "source": source,
        }
        for key in (
            "num_hidden_layers",
            "hidden_size",
            "num_attention_heads",
            "intermediate_size",
            "vocab_size",
            "max_position_embeddings",
        ):
            table[key] = text[key]
    except KeyError as error:
        raise ConfigError(f"{where}: {error.args[0]}: missing; the geometry needs it") from None
    return convert(table, Model, where)


def _other_geometry(text: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Why the geometry is not that of `Model`; empty if it is."""
    if text.get("kv_lora_rank"):
        return "kv_lora_rank: multi-head latent attention keeps one compressed vector per token"
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if text.get(key):
            return f"{key}: a mixture of experts reads only a part of its weights per token"
    window = text.get("sliding_window")
    limit = text.get("max_position_embeddings", 0)
    if window and text.get("use_sliding_window", True) and window < limit:
        return f"sliding_window: {window} of {limit} positions are kept, older KV is dropped"
    if set(text.get("layer_types") or ()) - {"full_attention"}:
        return "layer_types: some layers are not full attention"
    for table in (text, config):
        if table.get("quantization_config"):
            return "quantization_config: weights take fewer bytes than torch_dtype says"
    if text.get("model_type") not in _ARCHITECTURES:
        return f"model_type: {text.get('model_type')!r} has a geometry of its own"
    return ""

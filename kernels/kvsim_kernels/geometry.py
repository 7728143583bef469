"""The sizes of the model and of the KV pool that kernels are measured with; no torch here."""

import tomllib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1}

LAYOUTS = ("layer", "cross")


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of every MLP; keys as in `config.json`, widths in columns."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int = 0

    def active(self, tokens: float) -> float:
        """Experts that so many tokens need in the mean, if each draws its own by chance."""
        unused = 1 - self.num_experts_per_tok / self.num_experts
        return self.num_experts * float(1 - unused**tokens)


@dataclass(frozen=True)
class Geometry:
    """One rank of a decoder and its pool of KV blocks.

    `ffn` is the width of the gated MLP; dtypes are keys of `DTYPE_BYTES`, only the cache may be
    fp8. `layout` is that of `kvsim_kernels.pages`.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    block_size: int = 16
    layout: Literal["layer", "cross"] = "cross"
    num_blocks: int = 1024
    max_positions: int = 8192
    """Longest sequence in tokens."""
    experts: Experts | None = None

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads cannot share {self.kv_heads} KV heads")
        if self.dtype not in DTYPE_BYTES or self.dtype == "fp8" or self.kv_dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype} with kv_dtype {self.kv_dtype} is not known")
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, not {self.layout!r}")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys and values of `block_size` tokens in every layer."""
        elements = 2 * self.layers * self.block_size * self.kv_heads * self.head_dim
        return elements * DTYPE_BYTES[self.kv_dtype]

    @property
    def layer_parameters(self) -> int:
        """Weights of the matrix products of one layer."""
        attention = (2 * self.heads + 2 * self.kv_heads) * self.head_dim * self.hidden
        if (experts := self.experts) is None:
            return attention + 3 * self.hidden * self.ffn
        columns = experts.num_experts * experts.moe_intermediate_size
        columns += experts.shared_expert_intermediate_size
        return attention + (3 * columns + experts.num_experts) * self.hidden

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, embedding and output table both."""
        parameters = self.layers * self.layer_parameters + 2 * self.vocab * self.hidden
        return parameters * DTYPE_BYTES[self.dtype]

    def sized(self, **changes: Any) -> "Geometry":
        """Returns this model with another block size, layout, number of blocks or dtype."""
        return replace(self, **changes)

    def model(self) -> dict[str, Any]:
        """The keys of `model` in a profile."""
        table = asdict(self)
        for key in ("block_size", "layout", "num_blocks", "max_positions"):
            del table[key]
        if self.experts is None:
            del table["experts"]
        return table | {"tp": 1}


def read_model(path: Path, dtype: str = "auto", kv_dtype: str = "auto") -> Geometry:
    """The decoder that a file of `configs/models` describes.

    `auto`: the model's own dtype, float32 becoming float16, as serving engines choose; the cache
    takes the dtype of the weights. Raises ValueError that names file and key.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as a model: {error}") from None
    keys = {
        "name": "name",
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "ffn": "intermediate_size",
        "vocab": "vocab_size",
        "max_positions": "max_position_embeddings",
    }
    missing = [key for key in keys.values() if key not in table]
    if missing:
        raise ValueError(f"{path}: {missing[0]}: missing; see configs/models for an example")
    own = table.get("torch_dtype", "bfloat16")
    chosen = ("float16" if own == "float32" else own) if dtype == "auto" else dtype
    try:
        experts = Experts(**table["experts"]) if "experts" in table else None
    except TypeError:
        raise ValueError(
            f"{path}: experts: only the keys {', '.join(Experts.__dataclass_fields__)} can be"
            " measured"
        ) from None
    return Geometry(
        **{ours: table[theirs] for ours, theirs in keys.items()},
        dtype=chosen,
        kv_dtype=chosen if kv_dtype == "auto" else kv_dtype,
        experts=experts,
    )

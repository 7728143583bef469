"""Parts that some decoders have: experts, kinds of attention, groups of layers; bits of a weight.

Keys are those of a Hugging Face `config.json`. Quantised are the matrix products of the layers.
Embeddings, the output projection, norms, biases, routers and vision towers keep the type of the
model, as they do in the usual checkpoints.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct

from kvsim.errors import check_choice

Positive = Annotated[int, Meta(ge=1, le=10**9)]
Natural = Annotated[int, Meta(ge=0, le=10**12)]
LayerType = Literal[
    "full_attention", "sliding_attention", "chunked_attention", "linear_attention", "none"
]
"""What a layer keeps of a sequence; `none`: nothing, as it has no attention at all."""


class Heads(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Attention heads of the layers of one type (Gemma 4, MiMo)."""

    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Positive
    v_head_dim: Positive
    attention_k_eq_v: bool = False
    """Whether values have no projection of their own; both are cached (Gemma 4)."""


class Experts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mixture of experts in place of the MLP; a router sends each token to a few of them."""

    num_experts: Positive
    num_experts_per_tok: Positive
    moe_intermediate_size: Positive
    """Columns of the gate and of the up projection of one expert."""
    shared_expert_intermediate_size: Natural = 0
    """Columns of the shared experts together, which every token passes through."""
    shared_expert_gate: bool = False
    """Whether a gate weighs the shared expert (Qwen)."""
    first_k_dense_replace: Natural = 0
    """Layers at the start that have a dense MLP instead (DeepSeek)."""
    decoder_sparse_step: Positive = 1
    """Every layer of this distance has experts, the others a dense MLP (Qwen, Llama 4)."""
    mlp_only_layers: tuple[Natural, ...] = ()
    """Further layers with a dense MLP."""
    bias: bool = False
    """Whether router and experts have biases (gpt-oss)."""
    moe_latent_size: Positive | None = None
    """Width to which tokens are projected before the experts, and from which after them (Nemotron
    3); None: experts take the hidden size."""

    def __post_init__(self) -> None:
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok: {self.num_experts_per_tok} is more than the"
                f" {self.num_experts} experts"
            )

    def in_layer(self, index: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        return (
            index >= self.first_k_dense_replace
            and (index + 1) % self.decoder_sparse_step == 0
            and index not in self.mlp_only_layers
        )


class Latent(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Multi-head latent attention: all heads share one compressed vector a token.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """

    kv_lora_rank: Positive
    """Elements of the compressed keys and values."""
    qk_rope_head_dim: Positive
    """Elements of the key that carry the position; all heads share them."""
    qk_nope_head_dim: Positive
    v_head_dim: Positive
    q_lora_rank: Positive | None = None
    """Elements of the compressed query; None: queries are not compressed."""
    output_gate: bool = False
    """Whether a gate as wide as the values weighs the output (Kimi-K3)."""
    fp8_ds_mla: bool = False
    """Whether a vector is kept in 8 bits with a scale in 32 bits for every 128 elements, its key of
    the position in 16 (vLLM 0.33.0, v1/attention/backends/mla/flashmla_sparse.py)."""

    @property
    def fp8_ds_mla_bytes(self) -> int:
        """Bytes of such a vector."""
        return self.kv_lora_rank + self.kv_lora_rank // 128 * 4 + 2 * self.qk_rope_head_dim


class Indexer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Heads that choose, for each token, those that attention looks at.

    They keep one key a token (DeepSeek-V3.2 and V4, GLM-5, MiniMax-M3).
    """

    index_n_heads: Positive
    index_head_dim: Positive
    index_topk: Positive
    """Tokens that are chosen."""
    without: tuple[Natural, ...] = ()
    """Layers without one, which attend to all tokens or to the choice of a layer before them."""
    weighs_heads: bool = True
    """Whether its keys are stored in 8 bits with a scale for every 128, and its heads are weighed
    (DeepSeek); otherwise keys have the type of the KV cache (MiniMax-M3)."""

    def parameters(self, hidden: int, query: int) -> int:
        """Weights of its products; queries are made of `query` elements."""
        weights = hidden * self.index_n_heads if self.weighs_heads else 0
        return weights + self.index_head_dim * (query * self.index_n_heads + hidden)

    def group(self, layers: int) -> KvGroup:
        """What it keeps (vLLM 0.33.0, model_executor/models/deepseek_v2.py, `Indexer`)."""
        pair, size = self.index_n_heads * self.index_head_dim, self.index_head_dim
        group = KvGroup("indexer", layers, size, 1, pair_elements=pair)
        if not self.weighs_heads:
            return group
        return group._replace(elements=0, further_bytes=size + 4 * -(-size // 128))


class Compressed(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Attention over one vector a token that is key and value of all heads: of the last tokens, and
    one for every few tokens before them.

    Source: vLLM 0.33.0, models/deepseek_v4/attention.py.
    """

    q_lora_rank: Positive
    o_lora_rank: Positive
    o_groups: Positive
    """Groups of heads whose outputs are compressed apart."""
    qk_rope_head_dim: Positive
    """Elements of the vector that stay in 16 bits; the others are stored in 8."""
    compress_ratios: tuple[Natural, ...]
    """Tokens to one stored vector, by layer; 0 or 1: only the window is kept. Those of a ratio of 4
    overlap, and an indexer chooses among them."""
    hc_mult: Positive = 1
    """Residual streams (hyper-connections)."""

    def vector_bytes(self, width: int) -> int:
        """Bytes of a stored vector of `width` elements: in 8 bits with a scale for every 64, those
        of the position in 16. 584 in DeepSeek-V4: 448 elements, 64 of 16 bits, 7 scales and one
        byte more."""
        plain = width - self.qk_rope_head_dim
        return plain + 2 * self.qk_rope_head_dim + plain // 64 + 1


class Linear(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers with a state of fixed size in place of keys and values.

    | `kind` | layer | its keys are |
    |---|---|---|
    | `gated_delta_net` | Qwen3-Next | keys |
    | `kimi_delta` | Kimi Linear | keys, as many as values |
    | `mamba2` | Mamba 2 | B and C; heads of keys are its groups |
    | `short_conv` | LFM2 | none; values are the hidden size |

    Source of the sizes: vLLM 0.33.0, model_executor/layers/mamba/mamba_utils.py,
    `MambaStateShapeCalculator`.
    """

    kind: Literal["gated_delta_net", "kimi_delta", "mamba2", "short_conv"] = "gated_delta_net"
    linear_num_key_heads: Natural
    linear_num_value_heads: Positive
    linear_key_head_dim: Natural
    linear_value_head_dim: Positive
    linear_conv_kernel_dim: Positive = 4
    mamba_ssm_dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """Type of the recurrent state; None: that of the activations."""
    full_rank_gate: bool = False
    """Whether the gate of a `kimi_delta` layer is one matrix (Kimi-K3)."""

    @property
    def key_size(self) -> int:
        """Elements of the keys of one token."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_size(self) -> int:
        """Elements of the values of one token."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    def convolved(self, tp: int) -> int:
        """Elements that a layer convolves of each token, on one of `tp` GPUs; groups of Mamba 2 are
        repeated where there are fewer than GPUs."""
        keys = -(-self.linear_num_key_heads // tp) * self.linear_key_head_dim
        return 2 * keys + self.value_size // tp

    @property
    def recurrent_elements(self) -> int:
        """Elements of the recurrent state of one sequence and layer."""
        return self.value_size * self.linear_key_head_dim

    def parameters(self, hidden: int, tp: int) -> tuple[int, int]:
        """Weights of the products of a layer on one of `tp` GPUs, and its vectors.

        All have projections into keys and values, a gate as wide as the values and an output
        projection, and convolve their inputs.
        """
        keys, values = self.key_size // tp, self.value_size // tp
        heads, dim = self.linear_num_value_heads // tp, self.linear_value_head_dim
        convolution = (2 * keys + values) * self.linear_conv_kernel_dim
        if self.kind == "short_conv":
            return 4 * hidden * values, convolution
        products = hidden * (2 * keys + 3 * values)
        if self.kind == "mamba2":
            vectors = convolution + 2 * keys + values + 3 * heads + values
            return products + hidden * heads, vectors
        if self.kind == "gated_delta_net":
            return products + hidden * 2 * heads, convolution + 2 * heads + dim
        low_rank = dim * (hidden + values)
        gates = low_rank + hidden * heads + (0 if self.full_rank_gate else low_rank)
        products -= 0 if self.full_rank_gate else hidden * values
        return products + gates, convolution + heads + values + dim


class KvGroup(NamedTuple):
    """Layers that keep the same of a sequence, on one GPU."""

    kind: LayerType | Literal["latent_attention", "indexer", "compressed_attention"]
    layers: int
    elements: int
    """Elements that one layer keeps of one token, in the type of the KV cache."""
    tensors: int
    """Tensors of one layer: 2 for keys and values, 1 for a latent vector."""
    window: int | None = None
    """Tokens that a sliding window or a chunk keeps; None: all."""
    state_bytes: int = 0
    """Bytes that one layer keeps of one sequence, whatever its length."""
    draft_bytes: int = 0
    """Bytes by which `state_bytes` grows for each token that a drafter proposes in a step."""
    pair_elements: int = 0
    """Elements of the keys and of the values of all heads: what a token costs for each token that
    it attends to."""
    further_bytes: int = 0
    """Bytes that one layer keeps of one token, whatever the type of the KV cache."""
    every: int = 1
    """Tokens that share what is kept."""
    attended: int | None = None
    """Tokens that an indexer chooses; None: all that are kept."""

    def token_bytes(self, element_bytes: int) -> float:
        """Bytes that one layer keeps of one token."""
        return (self.elements * element_bytes + self.further_bytes) / self.every


class Layer(NamedTuple):
    """Parameters of one decoder layer on one GPU, by part."""

    attention: int
    """Matrix products of attention, full or linear."""
    mlp: int
    """Matrix products of the dense MLP, or of the shared experts."""
    experts: int
    """Matrix products of the routed experts."""
    router: int
    vectors: int
    """Norms, biases and the like."""

    @property
    def parameters(self) -> int:
        """All of them."""
        return sum(self)


DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1}

Part = Literal["attention", "mlp", "experts"]
"""A part of a layer that is quantised or not; `mlp` includes shared experts."""

ALL: tuple[Part, ...] = ("attention", "mlp", "experts")


ExpertWeights = Literal["bfloat16", "fp8", "int4", "mxfp4", "nvfp4"]
"""How kernels know the weights of experts; `bfloat16` stands for all 16 bits."""


class Quantization(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the weights of the layers are stored."""

    method: str
    """Name of the method, as `--quantization` of vLLM takes it."""
    bits: Annotated[float, Meta(gt=0, le=64)]
    """Bits a weight takes on average, with its share of scales and zero points."""
    parts: tuple[Part, ...] = ALL
    """The parts that are quantised."""
    part_bits: dict[Part, Annotated[float, Meta(gt=0, le=64)]] = {}
    """Bits of the parts that have others than `bits`."""
    fp8_products: bool = False
    """Whether activations are quantised to FP8 too, so that products run at the FP8 peak."""
    fp4: bool = False
    """Whether weights of 4 bits are floats, also where the name of the method does not say so."""
    kv_cache_dtype: Literal["fp8"] | None = None
    """Type of the KV cache for which the checkpoint has scales."""

    @property
    def expert_weights(self) -> ExpertWeights | None:
        """How kernels know the weights of experts; None: no usual way."""
        if "experts" not in self.parts:
            return "bfloat16"
        if self.fp8_products:
            return "fp8"
        bits = self.part_bits.get("experts", self.bits)
        if bits >= 5 or self.method == "bitsandbytes":
            return None
        if not (self.fp4 or "fp4" in self.method):
            return "int4"
        return "nvfp4" if bits >= METHODS["modelopt_fp4"].bits else "mxfp4"


def grouped(bits: int, group_size: int, scale_bits: int, zero_bits: int = 0) -> float:
    """Bits a weight takes, if every `group_size` weights share a scale and a zero point."""
    return bits + (scale_bits + zero_bits) / group_size


NAMES = tomllib.loads(Path(__file__).with_name("names.toml").read_text("utf-8"))
"""What words of names mean, and how methods of quantisation store weights."""
METHODS = {
    name: Quantization(
        method=name,
        bits=grouped(said["bits"], *said["group"]) if "group" in said else said["bits"],
        parts=tuple(said.get("parts", ALL)),
        fp8_products=said.get("fp8_products", False),
    )
    for said in NAMES["methods"]
    for name in said["names"].split()
}
"""Name → its usual form. Names and the parts that they quantise are vLLM 0.33.0's,
`model_executor/layers/quantization/`; `w4a16`, `w8a8` and `gptq-int8` stand for suffixes of names.
"""


OF_ANY_BITS = ("compressed-tensors", "modelopt", "quark", "gptq", "auto_gptq", "gptq_marlin")
"""Methods that say how files are laid out, while the files say how many bits a weight takes."""


def quantization(method: str) -> Quantization:
    """The usual form of a method; raises `ConfigError` with the nearest name for an unknown one."""
    check_choice("quantization", method, METHODS)
    return METHODS[method]


def words_of(spelling: str) -> list[str]:
    """The words of a model's name, in small letters and without who publishes it."""
    last = spelling.rstrip("/").split("/")[-1].lower()
    return [word for word in re.split(r"[-_ :]|(?<=quantized)\.", last) if word]


def method_of(spelling: str) -> str | None:
    """The method by which a name says that weights are stored; "": they are not quantised."""
    words = words_of(spelling)
    if "gptq" in words and ("int8" in words or "8bit" in words):
        return "gptq-int8"
    return next((method for word, method in NAMES["method_of"].items() if word in words), None)

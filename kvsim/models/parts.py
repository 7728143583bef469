"""Parts that some decoders have: experts, latent attention, linear attention; groups of layers.

Keys are those of a Hugging Face `config.json`.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct

Positive = Annotated[int, Meta(ge=1, le=10**9)]
Natural = Annotated[int, Meta(ge=0, le=10**12)]
LayerType = Literal["full_attention", "sliding_attention", "chunked_attention", "linear_attention"]


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


class Linear(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Linear attention by the gated delta rule: a state of fixed size in place of keys and values.

    Source of the sizes: vLLM 0.33.0, model_executor/layers/mamba/mamba_utils.py,
    `gated_delta_net_state_shape`.
    """

    linear_num_key_heads: Positive
    linear_num_value_heads: Positive
    linear_key_head_dim: Positive
    linear_value_head_dim: Positive
    linear_conv_kernel_dim: Positive = 4
    mamba_ssm_dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """Type of the recurrent state; None: that of the activations."""

    @property
    def key_size(self) -> int:
        """Elements of the keys of one token."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_size(self) -> int:
        """Elements of the values of one token."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_elements(self) -> int:
        """Elements of the state of the convolution, of one sequence and layer."""
        return (2 * self.key_size + self.value_size) * (self.linear_conv_kernel_dim - 1)

    @property
    def recurrent_elements(self) -> int:
        """Elements of the recurrent state of one sequence and layer."""
        return self.value_size * self.linear_key_head_dim


class KvGroup(NamedTuple):
    """Layers that keep the same of a sequence, on one GPU."""

    kind: LayerType | Literal["latent_attention"]
    layers: int
    elements: int
    """Elements that one layer keeps of one token; 0 for linear attention."""
    tensors: int
    """Tensors of one layer: 2 for keys and values, 1 for a latent vector."""
    window: int | None = None
    """Tokens that a sliding window or a chunk keeps; None: all."""
    state_bytes: int = 0
    """Bytes that one layer keeps of one sequence, whatever its length."""


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

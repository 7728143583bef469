"""The dense part of a Llama-like decoder layer, as plain torch calls on packed tokens.

Tokens of all sequences are one axis: [tokens, hidden]. Projections are single GEMMs over fused
weights, the way serving engines store them. Normalisation, rotary embedding and activation compute
in float32 and return the dtype they were given.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True)
class Geometry:
    """Sizes of one rank of a model; `ffn` is the width of the gated MLP, 0 without one."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn: int
    vocab: int


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one layer, every matrix as [output, input].

    `qkv`: [(heads + 2 x kv_heads) x head_size, hidden]; `o`: [hidden, heads x head_size];
    `gate_up`: [2 x ffn, hidden]; `down`: [hidden, ffn]; norms: [hidden].
    """

    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    input_norm: torch.Tensor
    post_norm: torch.Tensor

    @classmethod
    def random(
        cls,
        geometry: Geometry,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
    ) -> "LayerWeights":
        """Normal weights with variance 1 / inputs, norms of ones, on the generator's device."""
        heads = geometry.num_heads * geometry.head_size
        kv_heads = geometry.num_kv_heads * geometry.head_size

        def matrix(outputs: int, inputs: int) -> torch.Tensor:
            values = torch.empty(outputs, inputs, dtype=dtype, device=generator.device)
            return values.normal_(std=max(inputs, 1) ** -0.5, generator=generator)

        ones = torch.ones(geometry.hidden, dtype=dtype, device=generator.device)
        return cls(
            qkv=matrix(heads + 2 * kv_heads, geometry.hidden),
            o=matrix(geometry.hidden, heads),
            gate_up=matrix(2 * geometry.ffn, geometry.hidden),
            down=matrix(geometry.hidden, geometry.ffn),
            input_norm=ones,
            post_norm=ones.clone(),
        )


def project_qkv(
    x: torch.Tensor, weight: torch.Tensor, geometry: Geometry
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is to be rotated, queries and then keys, [tokens, heads + kv_heads, head_size]; and
    values [tokens, kv_heads, head_size]. Both are views of one GEMM's output.
    """
    packed = functional.linear(x, weight).view(x.shape[0], -1, geometry.head_size)
    rotated = geometry.num_heads + geometry.num_kv_heads
    return packed[:, :rotated], packed[:, rotated:]


def project_o(attended: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, head_size] -> [tokens, hidden]."""
    return functional.linear(attended.flatten(1), weight)


def mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The gated MLP: down(silu(gate) x up), [tokens, hidden] in and out."""
    return functional.linear(silu_mul(functional.linear(x, gate_up)), down)


def lm_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Logits [rows, vocab] in float32, for the rows that are to be sampled."""
    return functional.linear(x, weight).float()


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normalised, new residual): the residual stream is added first if there is one.

    Zhang and Sennrich 2019, arXiv 1910.07467.
    """
    stream = x if residual is None else x + residual
    wide = stream.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype), stream


def rope_table(
    max_positions: int, head_size: int, theta: float = 500_000.0, device: str | torch.device = "cpu"
) -> torch.Tensor:
    """Cosines and sines [max_positions, 2, head_size / 2], float32; theta as in Llama 3."""
    powers = torch.arange(0, head_size, 2, dtype=torch.float64, device=device) / head_size
    positions = torch.arange(max_positions, dtype=torch.float64, device=device)
    angles = positions[:, None] * theta**-powers
    return torch.stack((angles.cos(), angles.sin()), dim=1).float()


def apply_rope(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotates [tokens, heads, head_size] by each token's position; halves paired as in Llama.

    Su et al. 2021, arXiv 2104.09864.
    """
    cos, sin = table[positions][:, :, None].unbind(1)
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(first half) x second half of the last axis."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The most likely token of each row, int64; the lowest id on a tie."""
    return logits.argmax(dim=-1)


def sample_top_p(
    logits: torch.Tensor, uniforms: torch.Tensor, top_p: float = 1.0, temperature: float = 1.0
) -> torch.Tensor:
    """Nucleus sampling (Holtzman et al. 2019, arXiv 1904.09751), int64 [rows].

    Keeps the fewest most likely tokens whose probability reaches `top_p`, then inverts their
    cumulative distribution at `uniforms` [rows], numbers in [0, 1): the caller owns the randomness.
    Raises ValueError unless 0 < top_p <= 1 and temperature > 0.
    """
    if not 0 < top_p <= 1 or temperature <= 0:
        raise ValueError(f"top_p={top_p} must lie in (0, 1], temperature={temperature} above 0")
    likely, order = torch.sort(
        torch.softmax(logits.double() / temperature, dim=-1), dim=-1, descending=True, stable=True
    )
    before = likely.cumsum(-1) - likely
    kept = likely.masked_fill(before >= top_p, 0.0).cumsum(-1)
    reached = kept > uniforms.double()[:, None] * kept[:, -1:]
    return order.gather(1, reached.int().argmax(dim=-1, keepdim=True))[:, 0]

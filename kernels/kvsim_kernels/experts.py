"""A layer's mixture of experts, as plain torch calls: router, products of the active experts, sum.

Which experts tokens go to is not left to chance: `active` of them take turns, so that a measurement
reads as many weights as it says, and each expert has as many rows as any other.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from kvsim_kernels import dense
from kvsim_kernels.geometry import Experts


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of one layer, every matrix as [output, input].

    `router`: [experts, hidden]; `gate_up`: [experts, 2 x columns, hidden]; `down`: [experts,
    hidden, columns]; `shared`: the same two of the experts that every token passes through.
    """

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: tuple[torch.Tensor, torch.Tensor] | None
    per_token: int

    @classmethod
    def random(
        cls, experts: Experts, hidden: int, generator: torch.Generator, dtype: torch.dtype
    ) -> "ExpertWeights":
        """Normal weights with variance 1 / inputs, on the generator's device."""

        def weights(*shape: int) -> Any:
            values = torch.empty(shape, dtype=dtype, device=generator.device)
            return values.normal_(std=shape[-1] ** -0.5, generator=generator)

        number, columns = experts.num_experts, experts.moe_intermediate_size
        shared = experts.shared_expert_intermediate_size
        return cls(
            weights(number, hidden),
            weights(number, 2 * columns, hidden),
            weights(number, hidden, columns),
            (weights(2 * shared, hidden), weights(hidden, shared)) if shared else None,
            experts.num_experts_per_tok,
        )


def mixture(x: torch.Tensor, weights: ExpertWeights, active: int) -> torch.Tensor:
    """[tokens, hidden] in and out; choice j of all tokens goes to expert j modulo `active`.

    The router computes weights of its choices, of which only the size is used. Rows of an expert
    are padded to those of any other, so that one batched product serves all of them.
    """
    chosen = functional.linear(x, weights.router).float().softmax(-1).topk(weights.per_token)[0]
    choices = chosen.numel()
    rows = torch.arange(-(-choices // active), device=x.device) * active
    place = torch.arange(active, device=x.device)[:, None] + rows
    share = torch.where(place < choices, chosen.flatten()[place.clamp(max=choices - 1)], 0.0)
    token = place.clamp(max=choices - 1) // weights.per_token
    inner = dense.silu_mul(torch.bmm(x[token], weights.gate_up[:active].mT))
    outputs = torch.bmm(inner, weights.down[:active].mT) * share[..., None].to(x.dtype)
    total = torch.zeros_like(x).index_add_(0, token.flatten(), outputs.flatten(0, 1))
    return total if weights.shared is None else total + dense.mlp(x, *weights.shared)

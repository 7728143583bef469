"""A mixture of experts against a loop over its tokens."""

import pytest
from batches import torch
from kvsim_kernels.experts import ExpertWeights, mixture
from kvsim_kernels.geometry import Experts
from torch.nn import functional


@pytest.mark.parametrize("shared", [0, 12])
@pytest.mark.parametrize(("tokens", "active"), [(1, 1), (1, 2), (7, 3), (9, 6)])
def test_the_mixture_is_a_sum_over_the_choices(tokens: int, active: int, shared: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    weights = ExpertWeights.random(Experts(6, 2, 10, shared), 16, generator, torch.float64)
    x = torch.randn(tokens, 16, generator=generator, dtype=torch.float64)
    expected = torch.zeros_like(x)

    def expert(row: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, up = (gate_up @ row).chunk(2)
        return down @ (functional.silu(gate) * up)

    for token, row in enumerate(x):
        shares = (weights.router @ row).softmax(-1).topk(2)[0]
        for choice, share in enumerate(shares):
            place = (2 * token + choice) % active
            expected[token] += share * expert(row, weights.gate_up[place], weights.down[place])
        if weights.shared is not None:
            expected[token] += expert(row, *weights.shared)
    assert torch.allclose(mixture(x, weights, active), expected, rtol=1e-5, atol=1e-6)

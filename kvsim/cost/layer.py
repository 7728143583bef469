"""Roofline of the matrix products and small kernels of a decoder layer, on one GPU.

The formula of a matrix product was fitted to 14,308 measured ones of an H200: its error on shapes
outside the fit is 5.8 % in the median and 17.7 % at p95 (kernel tables of
github.com/ai-dynamo/aiconfigurator at 095f58a). Counts may be numbers or arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvsim.core.vectors import added
from kvsim.machine.hardware import ExpertProducts
from kvsim.machine.models import Shard

COMPUTE_EFFICIENCY, BANDWIDTH_EFFICIENCY, SHARPNESS, FLOOR_US = 0.81, 0.84, 3.1, 4.0
"""Parameters of a matrix product; `SHARPNESS`: how sharply the limit changes from traffic to
arithmetic."""
SMALL_KERNELS, SMALL_KERNEL_US = 4, 2.5
"""Small kernels of a layer: two norms, rotary embedding, activation; least time of each (an
estimate)."""
EXPERT_KERNELS = 4
"""Small kernels around experts: choosing and sorting, activation, weighted sum (an estimate)."""
SAMPLER_US = 30.0
"""Time of the sampler (an estimate)."""


class Peaks(NamedTuple):
    """The peaks of the hardware."""

    flop_s: float
    bandwidth: float
    """Bytes per second."""


def products(shard: Shard) -> dict[str, tuple[int, int]]:
    """(n, k) of the matrix products of a layer: k columns in, n columns out."""
    hidden = shard.model.hidden_size
    return {
        "qkv": (shard.qkv_size, hidden),
        "o": (hidden, shard.heads * shard.model.head_dim),
        "gate_up": (2 * shard.intermediate_size, hidden),
        "down": (hidden, shard.intermediate_size),
    }


def kernel_us(flops: Any, moved: Any, peaks: Peaks) -> Any:
    """Microseconds of a matrix product of so many operations that moves so many bytes."""
    compute = flops / (COMPUTE_EFFICIENCY * peaks.flop_s)
    traffic = moved / (BANDWIDTH_EFFICIENCY * peaks.bandwidth)
    return (compute**SHARPNESS + traffic**SHARPNESS) ** (1 / SHARPNESS) * 1e6 + FLOOR_US


def product_us(m: Any, n: Any, k: Any, peaks: Peaks, element_bytes: int = 2) -> Any:
    """Microseconds of the product of m rows and a weight of n x k."""
    return kernel_us(2 * m * n * k, element_bytes * (m * n + m * k + n * k), peaks)


def small_kernels_us(shard: Shard, tokens: Any, peaks: Peaks, element_bytes: int = 2) -> Any:
    """Norms with their residual, rotary embedding and activation: launches and traffic."""
    values = 8 * shard.model.hidden_size + 2 * shard.qkv_size + 3 * shard.intermediate_size
    traffic = tokens * values * element_bytes / peaks.bandwidth
    return SMALL_KERNELS * SMALL_KERNEL_US + traffic * 1e6


def layer_us(shard: Shard, tokens: Any, peaks: Peaks, element_bytes: int = 2) -> Any:
    """Microseconds of a layer, without attention and all-reduces."""
    shapes = products(shard).values()
    dense = added(product_us(tokens, n, k, peaks, element_bytes) for n, k in shapes)
    return dense + small_kernels_us(shard, tokens, peaks, element_bytes)


def mlp_us(shard: Shard, columns: int, tokens: Any, peaks: Peaks, element_bytes: int = 2) -> Any:
    """Microseconds of a dense MLP of so many columns, with its activation."""
    hidden = shard.model.hidden_size
    us = product_us(tokens, 2 * columns, hidden, peaks, element_bytes)
    us = us + product_us(tokens, hidden, columns, peaks, element_bytes)
    return us + SMALL_KERNEL_US + tokens * 3 * columns * element_bytes / peaks.bandwidth * 1e6


def layers_us(shard: Shard, tokens: Any, peaks: Peaks, element_bytes: int = 2) -> Any:
    """Microseconds of all layers, without attention, experts and all-reduces."""
    us = shard.model.num_hidden_layers * layer_us(shard, tokens, peaks, element_bytes)
    if shard.model.expert_layers:
        dense = mlp_us(shard, shard.intermediate_size, tokens, peaks, element_bytes)
        us = us - shard.model.expert_layers * dense
    return us


def experts_us(
    shard: Shard,
    tokens: float,
    rows: float,
    active: float,
    peaks: Peaks,
    element_bytes: int = 2,
    reached: ExpertProducts | None = None,
) -> float:
    """Microseconds of the router and the experts of a layer, on one GPU.

    It routes `tokens`; its experts, of which `active` are read, multiply `rows` times the experts
    of a token. Products of several experts are one kernel each, which does what is `reached`. An
    estimate.
    """
    experts, hidden = shard.model.experts, shard.model.hidden_size
    assert experts is not None
    columns, rows = shard.expert_columns, rows * experts.num_experts_per_tok
    us: float = product_us(tokens, experts.num_experts, hidden, peaks, element_bytes)
    multiplied, of_experts = rows, peaks
    if reached is not None:
        multiplied = rows + active * reached.padding_rows
        of_experts = peaks._replace(flop_s=reached.tflop_s * 1e12 / COMPUTE_EFFICIENCY)
    for n, k in ((2 * columns, hidden), (hidden, columns)):
        moved = element_bytes * (rows * (n + k) + active * n * k)
        us += kernel_us(2 * multiplied * n * k, moved, of_experts)
    traffic = rows * (3 * columns + 2 * hidden) * element_bytes / peaks.bandwidth
    us += EXPERT_KERNELS * SMALL_KERNEL_US + traffic * 1e6
    if experts.shared_expert_intermediate_size:
        shared = experts.shared_expert_intermediate_size // shard.tensor_parallel_size
        us += mlp_us(shard, shared, tokens, peaks, element_bytes)
    return us


def head_us(shard: Shard, samples: Any, peaks: Peaks, element_bytes: int = 2) -> Any:
    """Microseconds of the output projection and the sampler."""
    hidden, words = shard.model.hidden_size, shard.vocab_size
    return product_us(samples, words, hidden, peaks, element_bytes) + SAMPLER_US

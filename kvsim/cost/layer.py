"""Roofline of the matrix products and small kernels of a decoder layer, on one GPU.

The formula of a matrix product was fitted to 14,308 measured ones of an H200: its error on shapes
outside the fit is 5.8 % in the median and 17.7 % at p95 (kernel tables of
github.com/ai-dynamo/aiconfigurator at 095f58a). Counts may be numbers or arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvsim.models import Shard

COMPUTE_EFFICIENCY, BANDWIDTH_EFFICIENCY, SHARPNESS, FLOOR_US = 0.81, 0.84, 3.1, 4.0
"""Parameters of a matrix product; `SHARPNESS`: how sharply the limit changes from traffic to
arithmetic."""
SMALL_KERNELS, SMALL_KERNEL_US = 4, 2.5
"""Small kernels of a layer: two norms, rotary embedding, activation; least time of each (an
estimate)."""
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


def product_us(m: Any, n: Any, k: Any, peaks: Peaks, element_bytes: int = 2) -> Any:
    """Microseconds of the product of m rows and a weight of n x k."""
    flops, moved = 2 * m * n * k, element_bytes * (m * n + m * k + n * k)
    compute = flops / (COMPUTE_EFFICIENCY * peaks.flop_s)
    traffic = moved / (BANDWIDTH_EFFICIENCY * peaks.bandwidth)
    return (compute**SHARPNESS + traffic**SHARPNESS) ** (1 / SHARPNESS) * 1e6 + FLOOR_US


def small_kernels_us(shard: Shard, tokens: Any, peaks: Peaks, element_bytes: int = 2) -> Any:
    """Norms with their residual, rotary embedding and activation: launches and traffic."""
    values = 8 * shard.model.hidden_size + 2 * shard.qkv_size + 3 * shard.intermediate_size
    traffic = tokens * values * element_bytes / peaks.bandwidth
    return SMALL_KERNELS * SMALL_KERNEL_US + traffic * 1e6


def layer_us(shard: Shard, tokens: Any, peaks: Peaks, element_bytes: int = 2) -> Any:
    """Microseconds of a layer, without attention and all-reduces."""
    shapes = products(shard).values()
    dense = sum(product_us(tokens, n, k, peaks, element_bytes) for n, k in shapes)
    return dense + small_kernels_us(shard, tokens, peaks, element_bytes)


def head_us(shard: Shard, samples: Any, peaks: Peaks, element_bytes: int = 2) -> Any:
    """Microseconds of the output projection and the sampler."""
    hidden, words = shard.model.hidden_size, shard.vocab_size
    return product_us(samples, words, hidden, peaks, element_bytes) + SAMPLER_US

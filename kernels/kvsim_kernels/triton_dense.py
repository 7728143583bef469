"""What stands between the matrix products of a layer, one launch each: RMSNorm, rope, SiLU-mul.

Twins of `kvsim_kernels.dense`, which takes forty small kernels a layer for the same. Grids: norm
(token), rope (token), activation (token, piece of the width).
"""

# ruff: noqa: N803 - compile-time constants are upper-case, as is usual in Triton kernels
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl

ACTIVATED = 1024
"""Columns that one program of the activation computes."""


@triton.jit
def rms_norm_kernel(
    out, stream, x, residual, weight, eps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """One token: the residual is added first if there is one, and `stream` keeps the sum."""
    lanes = tl.arange(0, PADDED)
    real = lanes < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + lanes
    value = tl.load(x + at, mask=real, other=0.0)
    if HAS_RESIDUAL:
        added = value.to(tl.float32) + tl.load(residual + at, mask=real, other=0.0).to(tl.float32)
        # Rounded as `stream` has it, so that the norm is of what the next layer reads.
        value = added.to(out.dtype.element_ty)
        tl.store(stream + at, value, mask=real)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    gain = tl.load(weight + lanes, mask=real, other=0.0).to(tl.float32)
    tl.store(out + at, (wide * scale * gain).to(out.dtype.element_ty), mask=real)


@triton.jit
def rope_kernel(
    out, x, positions, angles, stride_x, stride_x_head,
    HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """All heads of one token, rotated by its position."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, PADDED_HEADS)[:, None]
    lanes = tl.arange(0, HALF)
    real = heads < HEADS
    row = angles + tl.load(positions + token) * (2 * HALF)
    cos = tl.load(row + lanes)[None, :]
    sin = tl.load(row + HALF + lanes)[None, :]
    source = x + token * stride_x + heads * stride_x_head + lanes[None, :]
    low = tl.load(source, mask=real, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=real, other=0.0).to(tl.float32)
    target = out + (token * HEADS + heads) * (2 * HALF) + lanes[None, :]
    tl.store(target, (low * cos - high * sin).to(out.dtype.element_ty), mask=real)
    tl.store(target + HALF, (high * cos + low * sin).to(out.dtype.element_ty), mask=real)


@triton.jit
def silu_mul_kernel(out, gate_up, WIDTH: tl.constexpr, PIECE: tl.constexpr):
    """One piece of one token: silu(gate) x up."""
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    real = lanes < WIDTH
    source = gate_up + token * (2 * WIDTH) + lanes
    gate = tl.load(source, mask=real, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=real, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + token * WIDTH + lanes, value.to(out.dtype.element_ty), mask=real)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normalised, new residual) of contiguous [tokens, hidden], as `dense.rms_norm`."""
    out = torch.empty_like(x)
    stream = x if residual is None else torch.empty_like(x)
    tokens, width = x.shape
    rms_norm_kernel[(tokens,)](
        out, stream, x, x if residual is None else residual, weight, eps,
        WIDTH=width, PADDED=triton.next_power_of_2(width), HAS_RESIDUAL=residual is not None,
        num_warps=8,
    )  # fmt: skip
    return out, stream


def apply_rope(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotates [tokens, heads, head_size] into a contiguous result, as `dense.apply_rope`."""
    tokens, heads, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rope_kernel[(tokens,)](
        out, x, positions, table, x.stride(0), x.stride(1),
        HEADS=heads, PADDED_HEADS=triton.next_power_of_2(heads), HALF=size // 2,
    )  # fmt: skip
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(first half) x second half of contiguous [tokens, 2 x width], as `dense.silu_mul`."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    silu_mul_kernel[(tokens, triton.cdiv(width, ACTIVATED))](
        out, gate_up, WIDTH=width, PIECE=ACTIVATED
    )
    return out

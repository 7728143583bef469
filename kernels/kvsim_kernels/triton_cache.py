"""Moves inside the KV cache: write new tokens by slot, copy blocks.

Grids: cache write (token), block copy (pair, piece of a block, chunk of the piece).
"""

# ruff: noqa: N803 - compile-time constants are upper-case, as is usual in Triton kernels
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl

from kvsim_kernels.pages import FP8_MAX, KVPool

SATURATED_AT = tl.constexpr(FP8_MAX)

COPY_WORDS = 2048
"""int32 words that one program of the block copy moves."""


@triton.jit
def write_cache_kernel(
    key, value, keys, values, slots,
    stride_key, stride_key_head, stride_value, stride_value_head,
    stride_block, stride_head, stride_token,
    HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr, SATURATE: tl.constexpr,
):  # fmt: skip
    """One token's keys and values of all KV heads to its slot; slot -1 writes nothing."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        heads = tl.arange(0, PADDED_HEADS)[:, None]
        lanes = tl.arange(0, HEAD_SIZE)[None, :]
        real = heads < HEADS
        new_key = tl.load(key + token * stride_key + heads * stride_key_head + lanes, mask=real)
        source = value + token * stride_value + heads * stride_value_head + lanes
        new_value = tl.load(source, mask=real)
        if SATURATE:
            new_key = tl.clamp(new_key.to(tl.float32), -SATURATED_AT, SATURATED_AT)
            new_value = tl.clamp(new_value.to(tl.float32), -SATURATED_AT, SATURATED_AT)
        target = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_token
        target += heads.to(tl.int64) * stride_head + lanes
        tl.store(keys + target, new_key.to(keys.dtype.element_ty), mask=real)
        tl.store(values + target, new_value.to(values.dtype.element_ty), mask=real)


@triton.jit
def copy_blocks_kernel(words, pairs, stride_piece, stride_block, size, CHUNK: tl.constexpr):
    """One chunk of one piece of one block."""
    pair = tl.program_id(0)
    source = tl.load(pairs + pair * 2)
    target = tl.load(pairs + pair * 2 + 1)
    at = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    piece = words + tl.program_id(1).to(tl.int64) * stride_piece
    moved = tl.load(piece + source * stride_block + at, mask=at < size)
    tl.store(piece + target * stride_block + at, moved, mask=at < size)


def write_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Stores the keys and values of new tokens; arguments as in `torch_impl.write_cache`."""
    tokens, heads, head_size = key.shape
    if not tokens:
        return
    if key.stride(2) != 1 or value.stride(2) != 1 or key_cache.stride() != value_cache.stride():
        raise ValueError("heads must be contiguous and both caches must have the same strides")
    write_cache_kernel[(tokens,)](
        key, value, key_cache, value_cache, slot_mapping,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1), *key_cache.stride()[:3],
        HEADS=heads,
        PADDED_HEADS=triton.next_power_of_2(heads),
        BLOCK_SIZE=key_cache.shape[2],
        HEAD_SIZE=head_size,
        SATURATE=key_cache.dtype == torch.float8_e4m3fn,
    )  # fmt: skip


def copy_blocks(pool: KVPool, pairs: torch.Tensor) -> None:
    """Copies blocks inside a pool; `pairs`: int64 [pairs, 2], source and target, contiguous.

    No target may be a source or another pair's target: the copies run in any order.
    """
    if not len(pairs):
        return
    words = pool.words()
    pieces, _, size = words.shape
    copy_blocks_kernel[(len(pairs), pieces, triton.cdiv(size, COPY_WORDS))](
        words, pairs, words.stride(0), words.stride(1), size, CHUNK=COPY_WORDS
    )

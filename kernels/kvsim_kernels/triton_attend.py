"""The loop over keys that every paged-attention kernel shares.

A tile of queries walks over the keys of one sequence and one KV head, `TILE` keys at a time. Each
key's block is looked up in the block table; a running maximum and sum keep the softmax exact
(Milakov and Gimelshein 2018, arXiv 1805.02867). Scores are in units of log2, so `scale` and
`slopes` arrive multiplied by log2(e).

    keys     first ........ full ....... last
             |  every query  |  masked:   |
             |  sees them    |  causal,   |
             |  no mask      |  end, window
"""

# ruff: noqa: N803 - compile-time constants are upper-case, as is usual in Triton kernels
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter; decided when triton is imported.

The interpreter multiplies the raw 16-bit patterns of bfloat16 in `tl.dot`, so kernels take it as
their flag UPCAST and widen their tiles first; the GPU build is unchanged.
"""


@triton.jit
def attend(
    query,  # [rows, HEAD_SIZE]
    positions,  # [rows] position of each query
    slopes,  # [rows] ALiBi slope of each query
    keys,  # pointer to block 0 of this KV head
    values,
    table,  # pointer to this sequence's row of the block table
    first,
    full,
    last,
    scale,
    window,
    stride_block,
    stride_token,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
):
    """Unnormalised output [rows, HEAD_SIZE], maximum and sum [rows] over keys first..last-1."""
    acc = tl.zeros([ROWS, HEAD_SIZE], dtype=tl.float32)
    peak = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    if HAS_WINDOW:
        full = first
    else:
        acc, peak, total = _tiles(
            acc, peak, total, query, positions, slopes, keys, values, table, first, full,
            scale, window, stride_block, stride_token,
            BLOCK_SIZE, HEAD_SIZE, TILE, False, HAS_WINDOW, HAS_ALIBI,
        )  # fmt: skip
    return _tiles(
        acc, peak, total, query, positions, slopes, keys, values, table, full, last,
        scale, window, stride_block, stride_token,
        BLOCK_SIZE, HEAD_SIZE, TILE, True, HAS_WINDOW, HAS_ALIBI,
    )  # fmt: skip


@triton.jit
def _tiles(
    acc, peak, total, query, positions, slopes, keys, values, table, first, last,
    scale, window, stride_block, stride_token,
    BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_ALIBI: tl.constexpr,
):  # fmt: skip
    lanes = tl.arange(0, HEAD_SIZE)
    # The block ids of the next tile are loaded one iteration ahead: looked up in the iteration that
    # uses them, they would take the pipeline's stages, and keys and values were buffered once.
    ahead = first + tl.arange(0, TILE)
    block = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < last, other=0)
    for start in range(first, last, TILE):
        at = start + tl.arange(0, TILE)
        inside = at < last
        row = block.to(tl.int64) * stride_block + (at % BLOCK_SIZE) * stride_token
        ahead = at + TILE
        block = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < last, other=0)
        offsets = row[:, None] + lanes[None, :]
        if MASKED:
            key = tl.load(keys + offsets, mask=inside[:, None], other=0.0).to(query.dtype)
        else:
            key = tl.load(keys + offsets).to(query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if HAS_ALIBI:
            scores += slopes[:, None] * (at[None, :] - positions[:, None]).to(tl.float32)
        if MASKED:
            seen = inside[None, :] & (at[None, :] <= positions[:, None])
            if HAS_WINDOW:
                seen = seen & (at[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))

        highest = tl.maximum(peak, tl.max(scores, 1))
        # A row that has seen nothing yet keeps its maximum at -inf; 0 avoids -inf - -inf.
        anchor = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - anchor[:, None])
        shrink = tl.exp2(peak - anchor)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        if MASKED:
            value = tl.load(values + offsets, mask=inside[:, None], other=0.0).to(query.dtype)
        else:
            value = tl.load(values + offsets).to(query.dtype)
        acc = tl.dot(weights.to(query.dtype), value, acc, input_precision="ieee")
        peak = highest
    return acc, peak, total


@triton.jit
def divided(acc, total):
    """acc / total by rows; zeros where nothing was seen (padding rows)."""
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]

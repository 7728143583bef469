"""Prefill over a paged context: a chunk of new tokens per sequence, its keys already written.

Grid (query head, query tile, sequence). Query i of a chunk sits at position context + i and sees
the keys 0 .. context + i, all of them read from pages; tiles past the end of a chunk exit at once.
Programs begin with the last tile of all heads: it has the most keys, and whatever is begun last
should be short. Heads that share their keys run side by side.
"""

# ruff: noqa: N803 - compile-time constants are upper-case, as is usual in Triton kernels
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl

from kvsim_kernels.pages import PLAIN, Attention, Pages
from kvsim_kernels.triton_attend import INTERPRETED, LOG2E, attend, divided


@triton.jit(do_not_specialize=["window", "stride_table"])
def prefill_kernel(
    out, query, slopes, keys, values, table, lengths, query_start, scale, window,
    stride_out, stride_out_head, stride_query, stride_query_head,
    stride_block, stride_head, stride_token, stride_table,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_ALIBI: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head over its context and the chunk's own keys."""
    sequence = tl.program_id(2)
    head = tl.program_id(0)
    begin = tl.load(query_start + sequence)
    chunk = tl.load(query_start + sequence + 1) - begin
    lowest = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS
    if lowest < chunk:
        context = tl.load(lengths + sequence) - chunk
        rows = lowest + tl.arange(0, ROWS)
        lanes = tl.arange(0, HEAD_SIZE)
        real = (rows < chunk)[:, None]
        token = (begin + rows).to(tl.int64)[:, None]
        source = query + token * stride_query + head * stride_query_head + lanes[None, :]
        tile = tl.load(source, mask=real, other=0.0)
        if UPCAST:
            tile = tile.to(tl.float32)
        slope = tl.zeros([ROWS], dtype=tl.float32)
        if HAS_ALIBI:
            slope += tl.load(slopes + head) * LOG2E
        first = 0
        if HAS_WINDOW:
            first = tl.maximum(context + lowest + 1 - window, 0) // BLOCK_SIZE * BLOCK_SIZE
        head_offset = (head // GROUP).to(tl.int64) * stride_head
        acc, _, total = attend(
            tile, context + rows, slope, keys + head_offset, values + head_offset,
            table + sequence.to(tl.int64) * stride_table,
            first, (context + lowest + 1) // TILE * TILE,
            context + tl.minimum(lowest + ROWS, chunk),
            scale, window, stride_block, stride_token,
            BLOCK_SIZE, HEAD_SIZE, ROWS, TILE, HAS_WINDOW, HAS_ALIBI,
        )  # fmt: skip
        target = out + token * stride_out + head * stride_out_head + lanes[None, :]
        tl.store(target, divided(acc, total).to(out.dtype.element_ty), mask=real)


def prefill_launch(head_size: int, itemsize: int) -> dict[str, int]:
    """Queries per tile, keys per tile, warps and pipeline stages: nothing spills on sm_90."""
    if itemsize == 4:
        return {"ROWS": 16, "TILE": 16, "num_warps": 8, "num_stages": 1}
    if head_size > 128:
        return {"ROWS": 128, "TILE": 32, "num_warps": 8, "num_stages": 3}
    return {"ROWS": 128, "TILE": 64, "num_warps": 8, "num_stages": 3}


def prefill(
    query: torch.Tensor,
    query_start: torch.Tensor,
    pages: Pages,
    attention: Attention = PLAIN,
    *,
    max_query_len: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one chunk per sequence over its pages.

    `query`: [tokens, query heads, head_size]; `query_start`: int32 [sequences + 1];
    `pages.lengths` counts context and chunk. `max_query_len`: at least the longest chunk; None
    reads it from the device. Returns the shape and dtype of `query`.
    """
    out = torch.empty_like(query) if out is None else out
    longest = int(query_start.diff().max()) if max_query_len is None else max_query_len
    launch = prefill_launch(pages.head_size, query.element_size())
    grid = (query.shape[1], triton.cdiv(longest, launch["ROWS"]), len(query_start) - 1)
    prefill_kernel[grid](
        out, query, attention.alibi_slopes, pages.keys, pages.values,
        pages.block_table, pages.lengths, query_start,
        attention.scale_for(pages.head_size) * LOG2E.value, attention.window or 0,
        out.stride(0), out.stride(1), query.stride(0), query.stride(1),
        *pages.keys.stride()[:3], pages.block_table.stride(0),
        GROUP=query.shape[1] // pages.num_kv_heads,
        BLOCK_SIZE=pages.block_size,
        HEAD_SIZE=pages.head_size,
        HAS_WINDOW=attention.window is not None,
        HAS_ALIBI=attention.alibi_slopes is not None,
        UPCAST=INTERPRETED,
        **launch,
    )  # fmt: skip
    return out

"""Paged decode: one query per sequence. v1 takes a sequence in one pass, v2 in partitions.

Grids (Kwon et al. 2023, arXiv 2309.06180; vLLM 0.6.3 `csrc/attention/`), with the query heads that
share a KV head packed into one tile so that keys and values are read once per group:

    v1      (sequence, KV head)
    v2      (sequence, KV head, partition)  ->  output, maximum, sum per partition
    reduce  (sequence, query head)          ->  merged output

vLLM's partitions have 512 tokens. These have as many as keep the GPU busy (`partition_tokens`):
a long partition spares merging and fills the pipeline of loads once, a short one spreads few
sequences over many multiprocessors.
"""

# ruff: noqa: N803 - compile-time constants are upper-case, as is usual in Triton kernels
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from kvsim_kernels.pages import PLAIN, Attention, Pages
from kvsim_kernels.triton_attend import INTERPRETED, LOG2E, attend, divided

MERGED_PARTITIONS = 16
"""Partitions that the reduce kernel merges at once."""

SMALLEST_PARTITION, LARGEST_PARTITION = 128, 8192
"""Tokens."""

PROGRAMS = 6
"""Programs of decode v2 for each multiprocessor. For equal lengths three to four are best on an
H200, by 1 to 2 %; more keep unequal ones from waiting for the longest."""


@triton.jit
def _group(
    query, slopes, keys, values, table, lengths, sequence, kv_head, first, last, scale, window,
    stride_query, stride_query_head, stride_block, stride_head, stride_token, stride_table,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_ALIBI: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The query heads of one KV head over the keys first..last-1 of one sequence."""
    rows = tl.arange(0, ROWS)
    lanes = tl.arange(0, HEAD_SIZE)
    length = tl.load(lengths + sequence)
    heads = kv_head * GROUP + rows
    pointers = query + sequence.to(tl.int64) * stride_query + heads[:, None] * stride_query_head
    tile = tl.load(pointers + lanes[None, :], mask=rows[:, None] < GROUP, other=0.0)
    if UPCAST:
        tile = tile.to(tl.float32)
    slope = tl.zeros([ROWS], dtype=tl.float32)
    if HAS_ALIBI:
        slope = tl.load(slopes + heads, mask=rows < GROUP, other=0.0) * LOG2E
    if HAS_WINDOW:
        first = tl.maximum(first, (length - window) // BLOCK_SIZE * BLOCK_SIZE)
    positions = tl.zeros([ROWS], dtype=tl.int32) + (length - 1)
    head_offset = kv_head.to(tl.int64) * stride_head
    return attend(
        tile, positions, slope, keys + head_offset, values + head_offset,
        table + sequence.to(tl.int64) * stride_table,
        first, first + (last - first) // TILE * TILE, last,
        scale, window, stride_block, stride_token,
        BLOCK_SIZE, HEAD_SIZE, ROWS, TILE, HAS_WINDOW, HAS_ALIBI,
    )  # fmt: skip


# These change from step to step: specialised, a 1 or a multiple of 16 among them would compile the
# kernel anew.
@triton.jit(do_not_specialize=["window", "stride_table"])
def decode_v1_kernel(
    out, stride_out, stride_out_head,
    query, slopes, keys, values, table, lengths, scale, window,
    stride_query, stride_query_head, stride_block, stride_head, stride_token, stride_table,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_ALIBI: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """All keys of a sequence for the query heads of one KV head."""
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    acc, _, total = _group(
        query, slopes, keys, values, table, lengths, sequence, kv_head,
        0, tl.load(lengths + sequence), scale, window,
        stride_query, stride_query_head, stride_block, stride_head, stride_token, stride_table,
        GROUP, BLOCK_SIZE, HEAD_SIZE, ROWS, TILE, HAS_WINDOW, HAS_ALIBI, UPCAST,
    )  # fmt: skip
    rows = tl.arange(0, ROWS)
    lanes = tl.arange(0, HEAD_SIZE)
    target = out + sequence.to(tl.int64) * stride_out
    target += (kv_head * GROUP + rows)[:, None] * stride_out_head + lanes[None, :]
    tl.store(target, divided(acc, total).to(out.dtype.element_ty), mask=rows[:, None] < GROUP)


@triton.jit(do_not_specialize=["window", "stride_table", "size"])
def decode_v2_kernel(
    partial, peaks, totals, query, slopes, keys, values, table, lengths, scale, window,
    stride_query, stride_query_head, stride_block, stride_head, stride_token, stride_table, size,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_ALIBI: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One partition, of `size` tokens: its unnormalised output, maximum and sum."""
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    partition = tl.program_id(2)
    length = tl.load(lengths + sequence)
    first = partition * size
    last = tl.minimum(first + size, length)
    oldest = 0
    if HAS_WINDOW:
        oldest = length - window
    # Others leave their place in `partial` as it is: the reduce kernel does not look there.
    if first < length and last > oldest:
        acc, peak, total = _group(
            query, slopes, keys, values, table, lengths, sequence, kv_head,
            first, last, scale, window,
            stride_query, stride_query_head, stride_block, stride_head, stride_token, stride_table,
            GROUP, BLOCK_SIZE, HEAD_SIZE, ROWS, TILE, HAS_WINDOW, HAS_ALIBI, UPCAST,
        )  # fmt: skip
        rows = tl.arange(0, ROWS)
        lanes = tl.arange(0, HEAD_SIZE)
        heads = tl.num_programs(1) * GROUP
        index = sequence.to(tl.int64) * heads + kv_head * GROUP + rows
        index = index * tl.num_programs(2) + partition
        real = rows < GROUP
        tl.store(partial + index[:, None] * HEAD_SIZE + lanes[None, :], acc, mask=real[:, None])
        tl.store(peaks + index, peak, mask=real)
        tl.store(totals + index, total, mask=real)


@triton.jit(do_not_specialize=["window", "partitions", "size"])
def decode_reduce_kernel(
    out, partial, peaks, totals, lengths, window, partitions, stride_out, stride_out_head, size,
    HEAD_SIZE: tl.constexpr, MERGED: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Merges the partitions of one query head; those outside length or window hold no numbers."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    length = tl.load(lengths + sequence)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0) // size
    used = tl.cdiv(length, size)
    lanes = tl.arange(0, HEAD_SIZE)
    acc = tl.zeros([HEAD_SIZE], dtype=tl.float32)
    peak = tl.full([1], float("-inf"), dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    base = (sequence.to(tl.int64) * tl.num_programs(1) + head) * partitions
    for start in range(first, used, MERGED):
        at = start + tl.arange(0, MERGED)
        real = at < used
        peak_of = tl.load(peaks + base + at, mask=real, other=float("-inf"))
        total_of = tl.load(totals + base + at, mask=real, other=0.0)
        rows = partial + (base + at)[:, None] * HEAD_SIZE + lanes[None, :]
        tile = tl.load(rows, mask=real[:, None], other=0.0)
        highest = tl.maximum(peak, tl.max(peak_of, 0))
        shrink = tl.exp2(peak - highest)
        weights = tl.exp2(peak_of - highest)
        total = total * shrink + tl.sum(weights * total_of, 0)
        acc = acc * shrink + tl.sum(weights[:, None] * tile, 0)
        peak = highest
    result = acc / tl.where(total == 0.0, 1.0, total)
    target = out + sequence.to(tl.int64) * stride_out + head * stride_out_head
    tl.store(target + lanes, result.to(out.dtype.element_ty))


def tile_rows(group: int) -> int:
    """Rows of the query tile: the group of heads, padded to what `tl.dot` takes."""
    return max(16, int(triton.next_power_of_2(group)))


def decode_v1(
    query: torch.Tensor,
    pages: Pages,
    attention: Attention = PLAIN,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Paged decode in one pass: [sequences, query heads, head_size] in and out.

    `out` may be given (graph capture). Rows of length 0 get zeros.
    """
    out = torch.empty_like(query) if out is None else out
    arguments, constants = _arguments(query, pages, attention)
    decode_v1_kernel[(query.shape[0], pages.num_kv_heads)](
        out, out.stride(0), out.stride(1), *arguments, **constants
    )
    return out


def decode_v2(
    query: torch.Tensor,
    pages: Pages,
    attention: Attention = PLAIN,
    *,
    max_seq_len: int | None = None,
    size: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Paged decode in partitions, merged by a second kernel.

    `max_seq_len`: at least the longest length; None reads it from the device, which a captured
    graph must not do. `size`: tokens of a partition; None chooses. Surplus partitions exit at once.
    Shapes as in `decode_v1`.
    """
    out = torch.empty_like(query) if out is None else out
    longest = int(pages.lengths.max()) if max_seq_len is None else max_seq_len
    sequences, heads, head_size = query.shape
    size = size or partition_tokens(
        sequences * pages.num_kv_heads, longest, multiprocessors(query.device)
    )
    partitions = max(1, triton.cdiv(longest, size))
    partial = query.new_empty((sequences, heads, partitions, head_size), dtype=torch.float32)
    peaks, totals = query.new_empty((2, sequences, heads, partitions), dtype=torch.float32)
    arguments, constants = _arguments(query, pages, attention)
    decode_v2_kernel[(sequences, pages.num_kv_heads, partitions)](
        partial, peaks, totals, *arguments, size, **constants
    )
    decode_reduce_kernel[(sequences, heads)](
        out, partial, peaks, totals, pages.lengths, attention.window or 0, partitions,
        out.stride(0), out.stride(1), size,
        HEAD_SIZE=head_size, MERGED=MERGED_PARTITIONS,
        HAS_WINDOW=attention.window is not None,
    )  # fmt: skip
    return out


def partition_tokens(groups: int, longest: int, multiprocessors: int) -> int:
    """Tokens of a partition: the most, from 128 to 8,192, that still give every multiprocessor
    `PROGRAMS` of them. `groups`: sequences times KV heads, each `longest` tokens at most."""
    size = LARGEST_PARTITION
    while size > SMALLEST_PARTITION and groups * -(-longest // size) < PROGRAMS * multiprocessors:
        size //= 2
    return size


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device; of a CPU, where kernels are interpreted, one."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def decode_launch(head_size: int, itemsize: int, kv_itemsize: int) -> dict[str, int]:
    """Keys per tile, warps and pipeline stages, chosen so that nothing spills on sm_90.

    Head size 128 in bfloat16 was measured on an H200 (`kvsim_kernels.tune`): 2 warps and 2 stages
    are faster by up to 3.5 % where sequences are few. `itemsize`, `kv_itemsize`: bytes of a number
    of the query and of the cache. fp8 is widened in registers, of which 4 warps have too few.
    float32 has no exact tensor-core product: its dots run on the ordinary units and need room.
    """
    if itemsize == 4:
        return {"TILE": 32, "num_warps": 8, "num_stages": 2}
    if head_size > 128:
        return {"TILE": 32, "num_warps": 4, "num_stages": 2}
    return {"TILE": 64, "num_warps": 8 if kv_itemsize == 1 else 4, "num_stages": 3}


def _arguments(
    query: torch.Tensor, pages: Pages, attention: Attention
) -> tuple[list[Any], dict[str, Any]]:
    """What v1 and v2 are called with alike: run-time arguments; constants with launch numbers."""
    group = query.shape[1] // pages.num_kv_heads
    arguments = [
        query, attention.alibi_slopes, pages.keys, pages.values, pages.block_table, pages.lengths,
        attention.scale_for(pages.head_size) * LOG2E.value, attention.window or 0,
        query.stride(0), query.stride(1), *pages.keys.stride()[:3], pages.block_table.stride(0),
    ]  # fmt: skip
    constants = {
        "GROUP": group,
        "BLOCK_SIZE": pages.block_size,
        "HEAD_SIZE": pages.head_size,
        "ROWS": tile_rows(group),
        "HAS_WINDOW": attention.window is not None,
        "HAS_ALIBI": attention.alibi_slopes is not None,
        "UPCAST": INTERPRETED,
    }
    return arguments, constants | decode_launch(
        pages.head_size, query.element_size(), pages.keys.element_size()
    )

"""A third opinion: torch's flex_attention over the same page table. A check, not an engine kernel.

The pool is seen as one long sequence of physical slots; the mask maps each slot back to the
position that the queried sequence stores there. The map is [sequences, blocks] and is rebuilt on
every call, which alone rules it out for serving.
"""

from collections.abc import Callable

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from kvsim_kernels.pages import PLAIN, Attention, Pages

Mask = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def decode(query: torch.Tensor, pages: Pages, attention: Attention = PLAIN) -> torch.Tensor:
    """One query per sequence: [sequences, query heads, head_size] in and out.

    A sequence must not list the same block twice. Length 0 gives zeros.
    """
    num_blocks, kv_heads, block_size, head_size = pages.keys.shape
    logical = _logical_blocks(pages)
    positions = pages.lengths.long() - 1

    def position_of(sequence: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        return logical[sequence, slot // block_size] * block_size + slot % block_size

    def mask(
        sequence: torch.Tensor, head: torch.Tensor, row: torch.Tensor, slot: torch.Tensor
    ) -> torch.Tensor:
        seen = attention.visible(positions[sequence], position_of(sequence, slot))
        return (logical[sequence, slot // block_size] >= 0) & seen

    def bias(
        score: torch.Tensor,
        sequence: torch.Tensor,
        head: torch.Tensor,
        row: torch.Tensor,
        slot: torch.Tensor,
    ) -> torch.Tensor:
        distance = position_of(sequence, slot) - positions[sequence]
        assert attention.alibi_slopes is not None
        return score + attention.alibi_slopes[head] * distance

    keys, values = (
        cache.transpose(0, 1)
        .reshape(1, kv_heads, num_blocks * block_size, head_size)
        .to(query.dtype)
        for cache in (pages.keys, pages.values)
    )
    out = flex_attention(
        query[:, :, None],
        keys,
        values,
        score_mod=bias if attention.alibi_slopes is not None else None,
        block_mask=_page_mask(pages, mask),
        scale=attention.scale_for(head_size),
        enable_gqa=True,
    )
    return out[:, :, 0].masked_fill(pages.lengths[:, None, None] == 0, 0.0)


def _used_blocks(pages: Pages) -> torch.Tensor:
    """Blocks of each sequence, int64 [sequences]."""
    return -(-pages.lengths.long() // pages.block_size)


def _logical_blocks(pages: Pages) -> torch.Tensor:
    """Which block of a sequence a physical block is, int64 [sequences, blocks]; -1 if none."""
    rows, columns = pages.block_table.shape
    column = torch.arange(columns, device=pages.block_table.device).expand(rows, columns)
    used = column < _used_blocks(pages)[:, None]
    logical = torch.full((rows, pages.keys.shape[0]), -1, device=column.device)
    row = torch.arange(rows, device=column.device)[:, None].expand(rows, columns)
    logical[row[used], pages.block_table.long()[used]] = column[used]
    return logical


def _page_mask(pages: Pages, mask: Mask) -> BlockMask:
    """The blocks that flex_attention has to visit: those of the table."""
    table = pages.block_table.clamp(0, pages.keys.shape[0] - 1).to(torch.int32)
    slots = pages.keys.shape[0] * pages.block_size
    full = torch.zeros(table.shape[0], 1, 1, pages.keys.shape[0], dtype=torch.int32)
    full = full.to(table.device)
    full[:, 0, 0, : table.shape[1]] = table
    return BlockMask.from_kv_blocks(
        _used_blocks(pages).to(torch.int32)[:, None, None],
        full,
        BLOCK_SIZE=(128, pages.block_size),
        mask_mod=mask,
        seq_lengths=(1, slots),
    )

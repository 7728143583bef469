"""Pure-torch twins: gather the pages, then scaled_dot_product_attention; indexed cache moves.

They run wherever torch runs and are the second opinion on every Triton kernel. Gathering moves at
least three times the bytes of a paged kernel and pads to the longest sequence, so these are checks
and a baseline, not engine kernels. Masked slots must hold finite numbers: their weight is zero, and
zero times NaN is NaN.
"""

from itertools import pairwise

import torch
from torch.nn import functional

from kvsim_kernels.pages import FP8_MAX, PLAIN, Attention, KVPool, Pages


def decode(query: torch.Tensor, pages: Pages, attention: Attention = PLAIN) -> torch.Tensor:
    """One query per sequence: [sequences, query heads, head_size] in and out (query's dtype)."""
    keys, values = _gathered(pages, pages.block_table, query.dtype)
    positions = pages.lengths.long()[:, None, None] - 1
    bias = _bias(positions, keys.shape[2], query, attention)
    out = functional.scaled_dot_product_attention(
        query[:, :, None],
        keys,
        values,
        attn_mask=bias,
        scale=attention.scale_for(pages.head_size),
        enable_gqa=True,
    )[:, :, 0]
    return out.masked_fill(pages.lengths[:, None, None] == 0, 0.0)


def prefill(
    query: torch.Tensor, query_start: torch.Tensor, pages: Pages, attention: Attention = PLAIN
) -> torch.Tensor:
    """A chunk per sequence over its paged context, one sequence after another.

    Shapes as in `reference.prefill`; the result has the query's dtype.
    """
    out = torch.empty_like(query)
    starts, lengths = query_start.tolist(), pages.lengths.tolist()
    for row, (begin, end) in enumerate(pairwise(starts)):
        if begin == end:
            continue
        used = -(-lengths[row] // pages.block_size)
        keys, values = _gathered(pages, pages.block_table[row : row + 1, :used], query.dtype)
        first = lengths[row] - (end - begin)
        positions = torch.arange(first, lengths[row], device=query.device)[None, :, None]
        out[begin:end] = functional.scaled_dot_product_attention(
            query[None, begin:end].transpose(1, 2),
            keys,
            values,
            attn_mask=_bias(positions, keys.shape[2], query, attention),
            scale=attention.scale_for(pages.head_size),
            enable_gqa=True,
        )[0].transpose(0, 1)
    return out


def write_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Stores the keys and values of new tokens, [tokens, kv_heads, head_size].

    `slot_mapping`: int64 [tokens], block x block_size + offset; -1 skips the token.
    """
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    block_size = key_cache.shape[2]
    block, offset = slots // block_size, slots % block_size
    key_cache[block, :, offset] = to_cache_dtype(key[kept], key_cache.dtype)
    value_cache[block, :, offset] = to_cache_dtype(value[kept], value_cache.dtype)


def to_cache_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` as the cache stores it; fp8 saturates at its largest finite number."""
    if dtype == torch.float8_e4m3fn:
        tensor = tensor.clamp(-FP8_MAX, FP8_MAX)
    return tensor.to(dtype)


def copy_blocks(pool: KVPool, pairs: torch.Tensor) -> None:
    """Copies blocks inside a pool; `pairs`: int64 [pairs, 2], source and target.

    No target may be a source or another pair's target.
    """
    words = pool.words()
    words[:, pairs[:, 1]] = words[:, pairs[:, 0]]


def swap_blocks(source: KVPool, target: KVPool, pairs: torch.Tensor) -> None:
    """Moves blocks between pools through one staging buffer; `pairs` as in `copy_blocks`."""
    source.require_same_blocks(target)
    device = target.data.device
    staged = source.words()[:, pairs[:, 0].to(source.data.device)].to(device)
    target.words()[:, pairs[:, 1].to(device)] = staged


def _gathered(
    pages: Pages, table: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values in order, [sequences, kv_heads, max_blocks x block_size, head_size]."""
    rows = table.long().clamp(0, pages.keys.shape[0] - 1)
    keys, values = (
        cache[rows].transpose(1, 2).flatten(2, 3).to(dtype) for cache in (pages.keys, pages.values)
    )
    return keys, values


def _bias(
    query_positions: torch.Tensor, keys: int, query: torch.Tensor, attention: Attention
) -> torch.Tensor:
    """The mask that SDPA takes: -inf where a key is out of sight, else the ALiBi term.

    `query_positions`: [sequences, queries, 1]. Returns [sequences, heads or 1, queries, keys].
    """
    key_positions = torch.arange(keys, device=query.device)
    seen = attention.visible(query_positions, key_positions)[:, None]
    if attention.alibi_slopes is None:
        return seen
    distance = (key_positions - query_positions)[:, None].float()
    alibi = attention.alibi_slopes[None, :, None, None] * distance
    return alibi.masked_fill(~seen, float("-inf")).to(query.dtype)

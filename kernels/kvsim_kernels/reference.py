"""The oracle: attention over block tables as plain loops in float64.

Every other implementation is judged against these two functions, which follow the block table
token by token and share no code with it.
"""

import torch

from kvsim_kernels.pages import PLAIN, Attention, Pages


def decode(query: torch.Tensor, pages: Pages, attention: Attention = PLAIN) -> torch.Tensor:
    """One query per sequence, at its last position.

    `query`: [sequences, query heads, head_size]. Returns float64 of the same shape; a sequence of
    length 0 gives zeros.
    """
    out = torch.zeros(query.shape, dtype=torch.float64)
    for row in range(query.shape[0]):
        length = int(pages.lengths[row])
        if length:
            keys, values = _tokens(pages, row, length)
            out[row] = _attend(query[row], length - 1, keys, values, attention)
    return out


def prefill(
    query: torch.Tensor, query_start: torch.Tensor, pages: Pages, attention: Attention = PLAIN
) -> torch.Tensor:
    """A chunk of queries per sequence, the last tokens that the pages hold of it.

    `query`: [tokens, query heads, head_size], the chunks of all sequences one after another;
    `query_start`: [sequences + 1], where each begins. Returns float64 of the shape of `query`.
    """
    out = torch.zeros(query.shape, dtype=torch.float64)
    for row in range(len(query_start) - 1):
        begin, end = int(query_start[row]), int(query_start[row + 1])
        length = int(pages.lengths[row])
        keys, values = _tokens(pages, row, length)
        for token in range(begin, end):
            position = length - (end - token)
            out[token] = _attend(query[token], position, keys, values, attention)
    return out


def _tokens(pages: Pages, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one sequence in order, float64 [length, kv_heads, head_size]."""
    keys = torch.zeros(length, pages.num_kv_heads, pages.head_size, dtype=torch.float64)
    values = torch.zeros_like(keys)
    for token in range(length):
        block = int(pages.block_table[row, token // pages.block_size])
        keys[token] = pages.keys[block, :, token % pages.block_size].double()
        values[token] = pages.values[block, :, token % pages.block_size].double()
    return keys, values


def _attend(
    query: torch.Tensor,
    position: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    attention: Attention,
) -> torch.Tensor:
    """One token's query [heads, head_size] at `position` over the keys that it may see."""
    heads, head_size = query.shape
    group = heads // keys.shape[1]
    first = 0 if attention.window is None else max(0, position - attention.window + 1)
    distance = torch.arange(first, position + 1, dtype=torch.float64) - position
    out = torch.zeros(heads, head_size, dtype=torch.float64)
    for head in range(heads):
        seen = keys[first : position + 1, head // group]
        scores = seen @ query[head].double() * attention.scale_for(head_size)
        if attention.alibi_slopes is not None:
            scores = scores + attention.alibi_slopes[head].double() * distance
        weights = torch.exp(scores - scores.max())
        out[head] = weights @ values[first : position + 1, head // group] / weights.sum()
    return out

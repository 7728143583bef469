"""How many blocks a server has, by what its log says."""

from __future__ import annotations

import re
from typing import NamedTuple

from kvsim.settings.defaults import DEFAULT_BLOCK_SIZE
from kvsim.settings.server.log import Fact, Start

_WHOLE_REQUESTS_SINCE = (0, 21)
"""Since this version the printed tokens are those of whole requests of the longest length; before
they were the blocks' (vLLM 0.20.0 and 0.21.0 `v1/core/kv_cache_utils.py`)."""


class Pool(NamedTuple):
    """The blocks of one replica."""

    blocks: int
    """Number of blocks, counted as `num_gpu_blocks_override` does: in V1 it includes the block that
    is never used."""
    block_size: int
    """Tokens."""
    line: int
    """The line of the log that says it."""


class Sharing(NamedTuple):
    """How the layers of a model share a pool."""

    groups: int
    """Groups of layers with block tables of their own."""
    request_blocks: int
    """Blocks that a request of `max_model_len` tokens takes in all of them."""


def pool_of(
    start: Start,
    block_size: int | None,
    max_model_len: int | None,
    data_parallel_size: int,
    sharing: Sharing | None = None,
) -> Pool:
    """The blocks of a start that printed them; `block_size`: None if nothing says it; `sharing`:
    None if one table serves all layers.

    Ranks may print different numbers: the engine takes the smallest for all.
    """
    printed, tokens, total = _least(start.blocks), _least(start.cache_tokens), start.blocks_of_all
    if printed is None and total is not None:
        printed = Fact(total.value // data_parallel_size, total.line)
    if tokens is None:
        assert printed is not None, "a start with its blocks"
        return Pool(printed.value, block_size or DEFAULT_BLOCK_SIZE, printed.line)
    if not block_size and printed and printed.value and not tokens.value % printed.value:
        # Less than what kernels take comes from groups of layers, which share the blocks.
        each = tokens.value // printed.value
        block_size = None if each % DEFAULT_BLOCK_SIZE else each
    size = block_size or DEFAULT_BLOCK_SIZE
    if printed is not None and data_parallel_size == 1:
        return Pool(printed.value, size, printed.line)
    version = start.version.value if start.version else ""
    return Pool(blocks_of(tokens.value, size, max_model_len, version, sharing), size, tokens.line)


def blocks_of(
    tokens: int,
    block_size: int,
    max_model_len: int | None,
    version: str,
    sharing: Sharing | None = None,
) -> int:
    """Blocks of a cache whose size is printed in tokens.

    Up to vLLM 0.20 that is blocks // groups × block size, so that up to groups - 1 blocks more are
    not seen. Since 0.21 it is the floor of blocks / R × L for the longest length L and the R blocks
    that a request of it takes: the same where one table serves all layers and L is a whole number
    of blocks, but for a floating-point error of one token.
    """
    match = re.match(r"(\d{1,9})\.(\d{1,9})", version)
    if match is None:
        in_blocks = not tokens % block_size
    else:
        in_blocks = (int(match[1]), int(match[2])) < _WHOLE_REQUESTS_SINCE
    if in_blocks or not max_model_len:
        return tokens // block_size * (sharing.groups if sharing else 1)
    blocks = sharing.request_blocks if sharing else -(-max_model_len // block_size)
    return -(-tokens * blocks // max_model_len)


def _least(facts: list[Fact]) -> Fact | None:
    return min(facts, key=lambda fact: fact.value, default=None)

"""When writing one more token of a sequence is taken to need a free block.

Under `one-each`, a victim can fall to a request whose last block still has room: in recorded runs
of vLLM 0.6.3 most of them did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvsim.engine.named import callable_with, find_rule
from kvsim.engine.pool import BlockPool
from kvsim.engine.request import Sequence
from kvsim.errors import ConfigError

Growth = Callable[[Sequence, int, BlockPool], int]
"""Free blocks that the tokens of a sequence without a slot are taken to need, from the sequence,
the block size in tokens, and the pool that holds its table."""


def one_each(sequence: Sequence, block_size: int, pool: BlockPool) -> int:
    """One free block for every running sequence, even where its last block has room.

    The engine counts the block that is written to (vLLM 0.6.3.post1 `core/block_manager.py:202`,
    `core/block/block_table.py`, `get_num_blocks_touched_by_append_slots`).
    """
    missing = sequence.length - sequence.filled
    if missing == 1:
        return 1
    beyond = missing - (block_size - sequence.filled % block_size)
    return 1 - (-beyond // block_size)


def when_needed(sequence: Sequence, block_size: int, pool: BlockPool) -> int:
    """The blocks that the tokens open, and one if a shared block must be copied to be written.

    vLLM V1 (`v1/core/kv_cache_manager.py`, `allocate_slots`) and nano-vllm ask this way.
    """
    table = sequence.table
    need = max(0, -(-sequence.length // block_size) - len(table))
    place = sequence.filled // block_size
    if sequence.filled < sequence.length and place < len(table):
        need += pool.references.get(table[place], 1) > 1
    return need


GROWTH: dict[str, Growth] = {"one-each": one_each, "when-needed": when_needed}
"""Names of the block managers' argument `growth`."""


def make_growth(name: str | Growth, /, **given: Any) -> Growth:
    """The rule that `name` stands for: of `GROWTH`, or `package.module:name`, a function or a class
    that makes one of `given`.

    Raises `ConfigError`, also later, where an outsider's rule returns no number of blocks.
    """
    growth: Growth = find_rule("growth", GROWTH, name, _guarded, **given)
    return growth


def _guarded(label: str, growth: Growth) -> Growth:
    """A rule from outside, whose numbers are not trusted."""
    callable_with(label, growth, "sequence", "block_size", "pool")

    def need(sequence: Sequence, block_size: int, pool: BlockPool) -> int:
        blocks = growth(sequence, block_size, pool)
        if type(blocks) is not int or blocks < 0:
            raise ConfigError(
                f"{label} returned {blocks!r}; return a number of blocks, an int from 0 on"
            )
        return blocks

    return need

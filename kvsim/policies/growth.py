"""When one more token of a sequence counts as needing a free block.

Under `one-each`, a request can be preempted although its last block still has room. In recorded
runs of vLLM 0.6.3, most victims were preempted this way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvsim.core.request import Request
from kvsim.errors import ConfigError
from kvsim.policies.named import callable_with, find_rule

Growth = Callable[[Request, int, Any], int]
"""A rule that returns the number of free blocks that the next tokens of a sequence count as
needing. Its arguments are the sequence, the block size in tokens, and the pool of its table."""


def one_each(sequence: Request, block_size: int, pool: Any) -> int:
    """Counts one free block for every running sequence, even if its last block has room.

    The engine counts the block that is written to (vLLM 0.6.3.post1 `core/block_manager.py:202`,
    `core/block/block_table.py`, `get_num_blocks_touched_by_append_slots`).
    """
    missing = sequence.length - sequence.filled
    if missing == 1:
        return 1
    beyond = missing - (block_size - sequence.filled % block_size)
    return 1 - (-beyond // block_size)


def when_needed(sequence: Request, block_size: int, pool: Any) -> int:
    """Counts the blocks that the new tokens open, plus one if a shared block must be copied first.

    vLLM V1 (`v1/core/kv_cache_manager.py`, `allocate_slots`) and nano-vllm ask this way.
    """
    table = sequence.table
    need = max(0, -(-sequence.length // block_size) - len(table))
    place = sequence.filled // block_size
    if sequence.filled < sequence.length and place < len(table):
        need += pool.references.get(table[place], 1) > 1
    return need


GROWTH: dict[str, Growth] = {"one-each": one_each, "when-needed": when_needed}
"""Values of the block managers' argument `growth`."""


def make_growth(name: str | Growth, /, **given: Any) -> Growth:
    """Returns the rule called `name`: a key of `GROWTH`, or `package.module:name` of a function or
    of a class whose instances are called. `given` holds the arguments that its constructor may
    name.

    Raises `ConfigError` for an unknown rule, and during the run if a user's rule returns something
    other than a number of blocks.
    """
    growth: Growth = find_rule("growth", GROWTH, name, _guarded, **given)
    return growth


def _guarded(label: str, growth: Growth) -> Growth:
    """Wraps a user's rule and checks the numbers that it returns."""
    callable_with(label, growth, "sequence", "block_size", "pool")

    def need(sequence: Request, block_size: int, pool: Any) -> int:
        blocks = growth(sequence, block_size, pool)
        if type(blocks) is not int or blocks < 0:
            raise ConfigError(
                f"{label} returned {blocks!r}; return a whole number of blocks, 0 or more"
            )
        return blocks

    return need

"""When writing one more token of a sequence is taken to need a free block.

Under `one-each`, a victim can fall to a request whose last block still has room: in recorded runs
of vLLM 0.6.3 most of them did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvsim.request import Sequence

if TYPE_CHECKING:
    from kvsim.blocks.tables import Tables

Growth = Callable[["Tables", Sequence], int]


def one_each(tables: Tables, sequence: Sequence) -> int:
    """One free block for every running sequence, even where its last block has room.

    The engine counts the block that is written to (vLLM 0.6.3.post1 `core/block_manager.py:202`,
    `core/block/block_table.py`, `get_num_blocks_touched_by_append_slots`).
    """
    missing = sequence.length - sequence.filled
    if missing == 1:
        return 1
    size = tables.block_size
    beyond = missing - (size - sequence.filled % size)
    return 1 - (-beyond // size)


def when_needed(tables: Tables, sequence: Sequence) -> int:
    """The blocks that the tokens open, and one if a shared block must be copied to be written.

    vLLM V1 (`v1/core/kv_cache_manager.py`, `allocate_slots`) and nano-vllm ask this way.
    """
    size, table = tables.block_size, sequence.table
    need = max(0, -(-sequence.length // size) - len(table))
    place = sequence.filled // size
    if sequence.filled < sequence.length and place < len(table):
        need += tables.gpu.references.get(table[place], 1) > 1
    return need


GROWTH: dict[str, Growth] = {"one-each": one_each, "when-needed": when_needed}
"""Names of the block managers' argument `growth`."""

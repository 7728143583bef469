"""The one pool from which all KV cache groups of an engine take their blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from kvsim.engine.order import MakeOrder
from kvsim.engines.vllm_v1_blocks import ContentPool


class GroupPool(ContentPool):
    """Blocks that are released one by one, with or without content.

    A content key stands for a group and for all tokens up to the end of a block. Equal content in
    two groups has two keys.
    """

    def __init__(self, size: int, first: int, eviction: MakeOrder) -> None:
        super().__init__(size, first, eviction)
        self.named: set[int] = set()
        """Keys that were given to blocks in the current scheduling call."""
        self._end: dict[int, int] = {}
        """block → tokens up to the end of its newest content."""

    def idle_among(self, blocks: Iterable[int]) -> int:
        """Returns how many of these blocks nobody holds. Entries of 0 are no blocks."""
        references = self.references
        return sum([block != 0 and block not in references for block in blocks])

    def name(self, block: int, key: int, end: int) -> None:
        """Gives a block in use, which ends after `end` tokens, its content in place of any other
        content."""
        self.unname(block)
        self.label([block], [key])
        self._end[block] = end
        self.named.add(key)

    def unname(self, block: int) -> None:
        """Takes the content of a block in use away: it can no longer be hit."""
        if block in self.key_of:
            self.forget([block])

    def end_of(self, block: int) -> int:
        """Returns the tokens up to the end of the content of a block; 0 if it has none."""
        return self._end[block] if block in self.key_of else 0

    def free_list(self) -> Iterator[int]:
        """Returns the idle blocks in the order in which they are reused."""
        return chain(reversed([*self._blank]), self._blank.fresh, self.content)

    def release(self, blocks: Iterable[int], access_ns: int = -1) -> None:
        """Drops one reference of each of these blocks, in this order. Entries of 0 are no blocks.

        Of those that become idle, the ones without content are reused first, the first one of them
        before the others; those with content are reused last, in this order.
        """
        references, key_of = self.references, self.key_of
        blank: list[int] = []
        for block in blocks:
            if not block:
                continue
            if references[block] > 1:
                references[block] -= 1
                continue
            del references[block]
            if block in key_of:
                self.content.put(block, key_of[block], self._end[block], access_ns)
            else:
                blank.append(block)
        blank.reverse()
        self._blank.put_table(blank, [None] * len(blank), [0] * len(blank), access_ns)

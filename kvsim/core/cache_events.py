"""What a prefix cache reports of itself: which blocks can be hit from now on, and which no more.

A block is reported when it gets its content and when it loses it, each block by itself, also where
another one holds the same (vLLM 0.33.0 `v1/core/block_pool.py`, `cache_full_blocks` and
`_maybe_evict_cached_block`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Stored(NamedTuple):
    """Blocks that can be hit from now on."""

    parent: int | None
    """Key of the block before the first one; None at the start of a prompt."""
    keys: Sequence[int]
    """A key for each block, made of its tokens and all before them."""


class Removed(NamedTuple):
    """Blocks whose content is lost, in this order."""

    keys: Sequence[int]


class CacheEvents:
    """Collects the reports of one prefix cache until they are published."""

    def __init__(self) -> None:
        self._events: list[Stored | Removed] = []

    def stored(self, parent: int | None, keys: Sequence[int]) -> None:
        """Reports blocks that can be hit from now on."""
        self._events.append(Stored(parent, keys))

    def labelled(self, keys: Sequence[int], first: int) -> None:
        """Reports the blocks from `first` on of a sequence with these leading keys."""
        self.stored(keys[first - 1] if first else None, keys[first:])

    def removed(self, keys: Sequence[int]) -> None:
        """Reports blocks whose content is lost."""
        self._events.append(Removed(keys))

    def take(self) -> list[Stored | Removed]:
        """Returns what was reported since the last call, in order."""
        events, self._events = self._events, []
        return events

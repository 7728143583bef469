"""What the loop and those who look on ask of a block manager."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from mypy_extensions import i64, mypyc_attr

from kvsim.core import guard
from kvsim.core.plan import Plan
from kvsim.core.request import Request


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


@mypyc_attr(allow_interpreted_subclasses=True)
class BlockManager:
    """Who holds which blocks of the GPU, which are in its pool `gpu`."""

    cpu: Any
    """Blocks in CPU memory for swapped requests, in a pool like that of the GPU."""
    block_size: i64
    needs_keys: bool
    """Whether it reads what blocks hold, so that requests need a stream."""
    empty_slots: i64
    """Slots in tables that hold no token."""
    tier: Any
    """What a connector keeps in CPU memory, for those who look on; None: nothing."""

    @property
    def swaps(self) -> bool:
        """Whether tables can move to the CPU pool."""
        return False

    @property
    def lookups(self) -> tuple[int, int]:
        """How many full blocks were looked up by content, and how many were found."""
        return 0, 0

    @property
    def hears(self) -> Any:
        """The policy that is told which request gives blocks back
        (`kvsim.policies.sessions.SessionOrder`); None: nobody."""
        return None

    def observe(self, plan: Plan) -> None:
        """Notes in a plan how many blocks are in which state."""
        raise NotImplementedError

    def tables(self, request: Request) -> list[list[int]]:
        """Its block tables, one for each group of layers that keep the same of a request; an entry
        of 0 stands for no block."""
        raise NotImplementedError

    def own_blocks(self, request: Request) -> int:
        """Blocks in its tables that no other request holds."""
        raise NotImplementedError

    def cached_tokens(self, request: Request) -> int:
        """Tokens of a new request whose computation an admission would save now. Asking changes
        nothing."""
        return 0

    def report(self, events: Any) -> bool:
        """Reports to `events` (`kvsim.core.blocks.CacheEvents`) from now on what enters and
        leaves the prefix cache. Returns whether the engine publishes such events."""
        return False

    def audit(self, requests: Iterable[Request]) -> None:
        """Asserts that pools and tables agree."""
        raise NotImplementedError


guard.keep(BlockManager)

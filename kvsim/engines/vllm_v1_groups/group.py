"""What every kind of KV cache group has in common, and the rules of full attention among them.

A group is layers that keep the same of a sequence. It has a block table of its own for each
sequence; all groups take their blocks from one pool. A kind of group is a subclass that says what
it no longer needs, what an admission asks for, what can be hit, and what is worth keeping.

Source: vLLM 0.33.0, `v1/core/single_type_kv_cache_manager.py`, `SingleTypeKVCacheManager`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Annotated, ClassVar, NamedTuple

from msgspec import Meta, Struct

from kvsim.engines.vllm_v1_groups.pool import GroupPool

Tokens = Annotated[int, Meta(ge=1)]

Found = Callable[[int], list[int] | None]
"""Maps a block number to the blocks with this content, one for each group that is looked up, or to
None unless all of them have it."""

Entry = list[int] | None
"""The blocks that were hit at one place, one for each group; None where no block is needed."""


class Layout(NamedTuple):
    """What the groups of one engine share."""

    key_tokens: int
    """Tokens of a block key."""
    align: int
    """Every hit of several groups is a multiple of this: the least common multiple of their block
    sizes (vLLM's `scheduler_block_size`)."""
    max_model_len: int
    max_in_flight_tokens: int
    """`max_num_batched_tokens` x number of steps in flight."""
    retention_interval: int | None
    """`prefix_cache_retention_interval`: None keeps every block that a hit could use, 0 those at
    the end of prompts, any other value also those at its multiples."""
    num_spec_tokens: int = 0
    lookahead_keys: bool = False
    """Whether the key of a block covers the token after it, too (EAGLE)."""
    drops_last: bool = False
    """Whether a hit loses its last block (EAGLE without `lookahead_keys`)."""

    def resumes_at(self, tokens: int, unit: int) -> int:
        """Returns the last multiple of `unit` at which a sequence with the same `tokens` tokens can
        resume (`get_mamba_prefill_checkpoint_position`)."""
        if self.drops_last:
            return max((tokens // unit - 1) * unit, 0)
        return max((tokens - 1) // unit * unit, 0)


class Ask(NamedTuple):
    """What a sequence asks of every group."""

    slots: int
    """Number of leading tokens that need a slot, lookahead included."""
    tokens: int
    """The same without lookahead, and without the limit of `max_model_len`."""
    start: int
    """Number of leading tokens that are computed, hits and loads included."""
    prefill_end: int
    """Where its prompt stage ends."""
    admission: bool = False
    """Whether it is the test of the whole sequence, in which a window never needs more than its own
    tokens and those in flight."""


class GroupTable:
    """What one group holds for one sequence."""

    __slots__ = ("blocks", "known", "registered")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        """Block ids in token order; 0 where it holds none."""
        self.registered = 0
        """Number of leading entries that were registered or passed over for good."""
        self.known = False
        """Whether it has adopted hits or registered a block."""


class Prompt(NamedTuple):
    """The places at which later sequences may leave or resume a sequence."""

    tokens: int
    """Tokens of its prompt."""
    junction: int
    """Tokens of a prefix that another sequence shares, though not all groups had kept it; 0 if
    there is none."""
    marks: tuple[int, ...]
    """Tokens at which a sequence with the same prompt resumes."""


class Known(NamedTuple):
    """What is known of a sequence when its blocks are registered."""

    prompt: Prompt
    upto: int
    """Number of leading tokens whose blocks others may hit."""
    key_of: Callable[[int], int]
    """Maps a number of tokens to the content key of the block of this group that ends there."""
    drop: bool
    """Whether hits of this group lose their last block."""

    def marks(self, block_size: int) -> list[int]:
        """Returns the numbers of tokens at which sequences are known to resume."""
        marks, junction = [*self.prompt.marks], self.prompt.junction
        if junction:
            marks += [junction, junction - block_size] if self.drop else [junction]
        return marks


class Mask(NamedTuple):
    """Where later sequences can resume, and so which blocks are worth keeping."""

    align: int
    """Every hit is a multiple of this many tokens."""
    interval: int | None
    """Retention interval in tokens (`Layout.retention_interval`)."""
    drop: bool
    """Whether a hit loses its last block."""
    marks: Collection[int] = ()
    """Numbers of tokens at which sequences are known to resume."""
    horizon: int = 0
    """Block after the last one of the sequence, where sequences may resume, too; 0 for none."""


class Group(Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """Layers that keep all tokens of a sequence, unless a subclass says otherwise."""

    block_size: Tokens
    eagle: bool = False
    """Whether the layers of an EAGLE draft are in it."""

    words: ClassVar[str]
    """What its layers are, in words."""
    holds_tokens = True
    """Whether its blocks have a slot for each token."""

    def with_prefix_cache(self) -> Group:
        """Returns the rules of this group where a prefix cache is on."""
        return self

    def table(self) -> GroupTable:
        """Returns an empty table."""
        return GroupTable()

    # -- questions -----------------------------------------------------------------------------

    def skipped(self, computed: int) -> int:
        """Returns how many leading tokens nobody reads once `computed` tokens are computed."""
        return 0

    def released_at(self) -> tuple[int, int] | None:
        """Returns where blocks fall behind while a sequence decodes, as (start, each): `trim` finds
        more only where the computed tokens are a multiple of `each` behind `start`. None: never."""
        return None

    def most_blocks(self, layout: Layout) -> int | None:
        """Returns the most blocks that a sequence ever holds; None if its length decides."""
        return None

    def peak_blocks(self, layout: Layout) -> int:
        """Returns the blocks that a sequence of `max_model_len` tokens holds at most."""
        most = self.most_blocks(layout)
        return -(-layout.max_model_len // self.block_size) if most is None else most

    def missing(
        self, table: GroupTable, ask: Ask, hits: list[int], pool: GroupPool, layout: Layout
    ) -> int:
        """Returns the free blocks that `adopt` and `grow` would use."""
        wanted = self._wanted(ask, layout)
        most = self.most_blocks(layout) if ask.admission else None
        if most is not None and most < wanted:
            wanted = most
        held = len(table.blocks)
        if table.known:
            return max(wanted - held, 0)
        behind = self.skipped(ask.start) // self.block_size
        new = max(wanted - max(behind, len(hits) + held), 0)
        return new + pool.idle_among(hits[max(behind - held, 0) :])

    def find(self, found: Found, most: int, drop: bool, align: int) -> list[Entry]:
        """Returns the longest hit of at most `most` tokens, entry by entry. With `drop`, the hit
        loses its last block. It is a multiple of `align` tokens."""
        raise NotImplementedError

    def keeps(self, first: int, last: int, mask: Mask) -> list[bool] | None:
        """Returns which of the blocks `first .. last - 1` a later hit could use; None for all."""
        return None

    # -- moves ---------------------------------------------------------------------------------

    def adopt(self, table: GroupTable, hits: list[int], start: int, pool: GroupPool) -> None:
        """Begins a table with the blocks that were hit, except those behind the window of a
        sequence with `start` computed tokens."""
        behind = self.skipped(start) // self.block_size
        used = hits[behind:]
        pool.hit([block for block in used if block])
        table.blocks = [0] * behind + used
        table.registered = len(table.blocks)
        table.known = True

    def make_room(self, table: GroupTable, start: int, external: int, pool: GroupPool) -> None:
        """Adds blocks for the last `external` of `start` tokens, which a connector loads."""
        if external and start > self.skipped(start):
            table.blocks += pool.take_many(max(-(-start // self.block_size) - len(table.blocks), 0))

    def grow(self, table: GroupTable, ask: Ask, pool: GroupPool, layout: Layout) -> None:
        """Adds the blocks that the slots need."""
        more = self._wanted(ask, layout) - len(table.blocks)
        if more > 0:
            table.blocks += pool.take_many(more)

    def trim(self, table: GroupTable, processed: int, pool: GroupPool) -> None:
        """Gives back the blocks that nobody reads once `processed` tokens are computed."""
        behind = min(self.skipped(processed) // self.block_size, len(table.blocks))
        released = []
        for place in range(behind - 1, -1, -1):
            if not table.blocks[place]:
                break
            released.append(table.blocks[place])
            table.blocks[place] = 0
        if released:
            pool.release(released)

    def register(self, table: GroupTable, known: Known, pool: GroupPool, layout: Layout) -> None:
        """Lets others hit the full blocks of what is known."""
        first, last, size = table.registered, known.upto // self.block_size, self.block_size
        if last <= first:
            return
        mask = Mask(layout.align, layout.retention_interval, known.drop, known.marks(size))
        kept = self.keeps(first, last, mask)
        for place in range(first, last):
            block = table.blocks[place]
            if block and (kept is None or kept[place - first]):
                end = (place + 1) * size
                pool.name(block, known.key_of(end), end)
        table.registered = last
        table.known = True

    def _wanted(self, ask: Ask, layout: Layout) -> int:
        """Returns the number of table entries for all slots."""
        return -(-ask.slots // self.block_size)

"""State-space layers and linear attention: a block is a state, not a place for tokens."""

from __future__ import annotations

from msgspec import structs

from kvsim.engines.vllm_v1_groups.group import (
    Ask,
    Entry,
    Found,
    Group,
    GroupTable,
    Known,
    Layout,
    Mask,
    Prompt,
    Tokens,
)
from kvsim.engines.vllm_v1_groups.pool import GroupPool


class Mamba(Group, frozen=True, kw_only=True, tag="mamba"):
    """Layers that keep one state of a sequence, and one more for each drafted token.

    Without a prefix cache, the state is never given back before the sequence ends. Its block size
    is then `max_model_len` (vLLM 0.33.0, `MambaManager` with `mamba_cache_mode` `none`).
    """

    checkpoint: bool = False
    """Whether the layers can save one state inside a chunk."""
    checkpoint_alignment: Tokens = 1
    """Such a state lies at a multiple of this many tokens behind the start of the chunk."""

    words = "states"
    holds_tokens = False

    def with_prefix_cache(self) -> AlignedMamba:
        return AlignedMamba(**structs.asdict(self))

    def skipped(self, computed: int) -> int:
        return max(computed - 1, 0)

    def peak_blocks(self, layout: Layout) -> int:
        return 1 + layout.num_spec_tokens

    def find(self, found: Found, most: int, drop: bool, align: int) -> list[Entry]:
        """Returns the last state that is there."""
        size = self.block_size
        for place in range(most // size - 1, -1, -1):
            if (place + 1) * size % align == 0:
                blocks = found(place)
                if blocks is not None:
                    return [*[None] * place, blocks]
        return []

    def _wanted(self, ask: Ask, layout: Layout) -> int:
        return super()._wanted(ask, layout) + layout.num_spec_tokens


class StateTable(GroupTable):
    """States of a sequence at block ends."""

    __slots__ = ("export", "grown", "last_state", "retired")

    def __init__(self) -> None:
        super().__init__()
        self.grown = False
        """Whether blocks were added since the hits were adopted."""
        self.last_state = -1
        """Entry of the state before the newest one; -1 if there is none."""
        self.retired = 0
        """Number of leading entries that were given back."""
        self.export: tuple[int, int] | None = None
        """State that the chunk saves on its way: its tokens, and the entry of its block."""


class AlignedMamba(Mamba, frozen=True, kw_only=True, tag="mamba-aligned"):
    """The same layers with a prefix cache: a block keeps the state at its end (vLLM 0.33.0,
    `mamba_cache_mode` `align`).

    A state moves on with its sequence, so only chunks that end at a block end leave one behind
    (`kvsim.engines.vllm_v1_groups.chunks`).
    """

    def with_prefix_cache(self) -> AlignedMamba:
        return self

    def table(self) -> StateTable:
        return StateTable()

    def peak_blocks(self, layout: Layout) -> int:
        return 2 + layout.num_spec_tokens + self.checkpoint

    def missing(
        self, table: GroupTable, ask: Ask, hits: list[int], pool: GroupPool, layout: Layout
    ) -> int:
        assert isinstance(table, StateTable)
        if hits and pool.key_of[hits[-1]] in pool.named:
            # Another request computes this state in this very step: wait for the next one.
            return pool.size + 2
        wanted = -(-ask.tokens // self.block_size) + layout.num_spec_tokens
        new = wanted - len(hits) - len(table.blocks)
        if new > 0:
            most = 1 + (self._export(table, ask, layout) is not None)
            new = min(new, most if table.grown else most + layout.num_spec_tokens)
        return new + pool.idle_among(hits)

    def grow(self, table: GroupTable, ask: Ask, pool: GroupPool, layout: Layout) -> None:
        assert isinstance(table, StateTable)
        drafts, blocks = layout.num_spec_tokens, table.blocks
        wanted = -(-ask.tokens // self.block_size) + drafts
        table.export = self._export(table, ask, layout)
        held, grown, table.grown = len(blocks), table.grown, True
        if wanted <= held and table.export is None:
            return
        if grown:
            table.last_state = held - 1 - drafts
        elif held:
            table.last_state = held - 1
        gap = wanted - drafts - 1 - (table.export is not None)
        blocks += [0] * (gap - held)
        if grown:
            # States of drafts that this step leaves behind are written again, further on.
            for place in range(held - drafts, min(held, gap)):
                blocks.append(blocks[place])
                blocks[place] = 0
        blocks += pool.take_many(max(wanted - len(blocks), 0))

    def trim(self, table: GroupTable, processed: int, pool: GroupPool) -> None:
        assert isinstance(table, StateTable)
        blocks = table.blocks
        behind = min(self.skipped(processed) // self.block_size, len(blocks))
        if behind > table.retired:
            pool.release(blocks[table.retired : behind][::-1])
            blocks[table.retired : behind] = [0] * (behind - table.retired)
            table.retired = behind
        last = table.last_state
        if 0 <= last < -(-processed // self.block_size) - 1 and blocks[last]:
            pool.release([blocks[last]])
            blocks[last] = 0

    def keeps(self, first: int, last: int, mask: Mask) -> list[bool] | None:
        each = 1 if mask.interval is None else mask.interval // self.block_size
        if each == 1:
            return None
        ends = {mark // mask.align * mask.align // self.block_size for mark in mask.marks}
        return [
            place in ends or (each > 0 and place % each == 0)
            for place in range(first + 1, last + 1)
        ]

    def register(self, table: GroupTable, known: Known, pool: GroupPool, layout: Layout) -> None:
        super().register(table, known, pool, layout)
        assert isinstance(table, StateTable)
        if table.export is None:
            return
        tokens, place = table.export
        block = table.blocks[place]
        if not self._worth(tokens, known.prompt, layout):
            pool.unname(block)
        elif pool.end_of(block) != tokens:
            pool.name(block, known.key_of(tokens), tokens)

    def _worth(self, tokens: int, prompt: Prompt, layout: Layout) -> bool:
        """Whether a state that a chunk saved on its way is kept for others."""
        if tokens in (layout.resumes_at(prompt.tokens, layout.align), prompt.junction):
            return True
        place, rest = divmod(tokens, self.block_size)
        if rest:
            return False
        kept = self.keeps(place - 1, place, Mask(layout.align, layout.retention_interval, False))
        return kept is None or kept[0]

    def _export(self, table: StateTable, ask: Ask, layout: Layout) -> tuple[int, int] | None:
        """Returns the state that the chunk saves on its way, if there is one."""
        tokens, end = layout.resumes_at(ask.tokens, layout.align), ask.tokens
        place = -(-end // self.block_size) - 2
        prefill_end = ask.prefill_end if layout.retention_interval == 0 else 0
        held, drafts = table.blocks, layout.num_spec_tokens
        if end < prefill_end or not self.saves(ask.start, end, tokens, layout):
            return None
        writable = (
            place >= len(held) or not held[place] or (table.grown and place >= len(held) - drafts)
        )
        return (tokens, place) if writable else None

    def saves(self, start: int, end: int, tokens: int, layout: Layout) -> bool:
        """Whether the chunk from `start` to `end` can save the state after `tokens` tokens on its
        way (`is_mamba_prefill_checkpoint_valid`)."""
        size = self.block_size
        return (
            self.checkpoint
            and start % layout.key_tokens == 0
            and -(-end // size) - 2 > (start - 1) // size
            and start + layout.key_tokens <= tokens
            and start < tokens < end
            and (tokens - start) % self.checkpoint_alignment == 0
        )

"""Full attention: every token is kept until the sequence ends."""

from __future__ import annotations

from kvsim.engines.vllm_v1_groups.group import Entry, Found, Group, GroupTable, Known, Layout
from kvsim.engines.vllm_v1_groups.pool import GroupPool


class Full(Group, frozen=True, kw_only=True, tag="full"):
    """Layers of full attention (vLLM 0.33.0, `FullAttentionManager`)."""

    words = "full attention"

    def find(self, found: Found, most: int, drop: bool, align: int) -> list[Entry]:
        entries: list[Entry] = []
        for place in range(most // self.block_size):
            blocks = found(place)
            if blocks is None:
                break
            entries.append(blocks)
        tokens = len(entries) * self.block_size
        if drop and tokens:
            tokens -= self.block_size
        del entries[tokens // align * align // self.block_size :]
        return entries

    def register(self, table: GroupTable, known: Known, pool: GroupPool, layout: Layout) -> None:
        super().register(table, known, pool, layout)
        if self.block_size > layout.key_tokens:
            self._keep_tail(table, known, pool, layout.key_tokens)

    def _keep_tail(self, table: GroupTable, known: Known, pool: GroupPool, key_tokens: int) -> None:
        """Names the block in which the prompt ends. No lookup finds it, because hits end at block
        ends, but a block with content is reused after those without."""
        end = (known.prompt.tokens - (not known.drop)) // key_tokens * key_tokens
        place = end // self.block_size
        if not 0 < end <= known.upto or end % self.block_size == 0 or place >= len(table.blocks):
            return
        block = table.blocks[place]
        if block and pool.end_of(block) < end:
            pool.name(block, known.key_of(end), end)

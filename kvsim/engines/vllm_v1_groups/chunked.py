"""Chunked attention: a token reads its own chunk of the sequence only."""

from __future__ import annotations

from kvsim.engines.vllm_v1_groups.group import Entry, Found, Group, Layout, Tokens


class Chunked(Group, frozen=True, kw_only=True, tag="chunked"):
    """Layers in which a token reads the tokens before it in its chunk of `chunk` tokens (Llama 4;
    vLLM 0.33.0, `ChunkedLocalAttentionManager`)."""

    chunk: Tokens

    words = "attention in chunks"

    def skipped(self, computed: int) -> int:
        return computed // self.chunk * self.chunk

    def released_at(self) -> tuple[int, int]:
        return 0, self.chunk

    def most_blocks(self, layout: Layout) -> int:
        tokens = min(self.chunk + layout.max_in_flight_tokens, layout.max_model_len)
        return -(-tokens // self.block_size)

    def find(self, found: Found, most: int, drop: bool, align: int) -> list[Entry]:
        """Returns everything before the last chunk, without a lookup, and the leading blocks of
        that chunk that are there."""
        first = self.skipped(most) // self.block_size
        entries: list[Entry] = [None] * first
        for place in range(first, most // self.block_size):
            blocks = found(place)
            if blocks is None:
                break
            entries.append(blocks)
        return entries

"""Sliding windows: only the last tokens are kept."""

from __future__ import annotations

from kvsim.engines.vllm_v1_groups.group import Entry, Found, Group, Layout, Mask, Tokens


class Sliding(Group, frozen=True, kw_only=True, tag="sliding"):
    """Layers in which a token reads the last `window` tokens, itself included (vLLM 0.33.0,
    `SlidingWindowManager`)."""

    window: Tokens

    words = "a sliding window"

    def skipped(self, computed: int) -> int:
        return max(0, computed - self.window + 1)

    def released_at(self) -> tuple[int, int]:
        return self.window - 1, self.block_size

    def most_blocks(self, layout: Layout) -> int:
        tokens = min(self.window - 1 + layout.max_in_flight_tokens, layout.max_model_len)
        return -(-tokens // self.block_size) + 1

    def find(self, found: Found, most: int, drop: bool, align: int) -> list[Entry]:
        """Returns the last run of blocks that fills a window, or else the run at the very start."""
        # A window of one token needs no block, yet the engine looks for one.
        size, need = self.block_size, max(self._blocks_of_window(drop), 1)
        entries: list[Entry] = [None] * (most // size)
        run, place = 0, len(entries)
        while place and run < need:
            place -= 1
            blocks = found(place)
            if blocks is None:
                run = 0
            elif run or (place + (not drop)) * size % align == 0:
                entries[place] = blocks
                run += 1
        # After a whole scan, `place` is 0 and the run begins there.
        del entries[place + run :]
        if run < need:
            _cut_to(entries, align, size)
        if drop and entries:
            entries.pop()
            _cut_to(entries, align, size)
        return entries

    def keeps(self, first: int, last: int, mask: Mask) -> list[bool] | None:
        align, interval, drop, marks, horizon = mask
        size = self.block_size
        if align % size:
            return None
        need, kept = self._blocks_of_window(drop), [False] * (last - first)
        segment = align if interval is None else interval
        ends = [] if interval is None else [mark // align * align // size + drop for mark in marks]
        if segment:
            each = segment // size
            if need >= each:
                return None
            for place in range(max(first, int(drop)), last):
                kept[place - first] = (place - drop) % each >= each - need
            if horizon % each and not drop:
                # The last segment is cut short, and nothing before it is of use.
                need = min(need, horizon % each)
                ends.append(horizon)
        for end in ends:
            for place in range(max(first, end - need), min(last, end)):
                kept[place - first] = True
        return kept

    def _blocks_of_window(self, drop: bool) -> int:
        """Returns the consecutive blocks that a hit needs."""
        return -(-(self.window - 1) // self.block_size) + drop


def _cut_to(entries: list[Entry], align: int, size: int) -> None:
    """Cuts a hit down to a multiple of `align` tokens."""
    del entries[len(entries) * size // align * align // size :]

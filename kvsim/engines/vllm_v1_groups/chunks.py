"""Where a chunk of a prompt ends, so that states at block ends can be kept.

Source: vLLM 0.33.0, `v1/core/sched/scheduler.py`, `_mamba_block_aligned_split`.
"""

from __future__ import annotations

from typing import NamedTuple

from kvsim.engines.vllm_v1_groups.group import Layout, Prompt
from kvsim.engines.vllm_v1_groups.mamba import AlignedMamba


class Chunks(NamedTuple):
    """How the chunks of an engine are cut whose `groups` keep states at block ends."""

    groups: tuple[AlignedMamba, ...]
    layout: Layout

    def cut(self, prompt: Prompt, length: int, start: int, tokens: int, most_tokens: int) -> int:
        """Returns how many of the next `tokens` tokens from `start` a step computes.

        A chunk of a prompt ends at a block end, at the last state from which an equal sequence can
        resume, or at the junction, whichever comes first. 0 means that the chunk would reach no
        block end. `length` is the number of known tokens, and `most_tokens` is the longest chunk
        that the engine ever allows.
        """
        if not self.groups:
            return tokens
        layout, size = self.layout, self.groups[0].block_size
        prefill_end, end = max(prompt.tokens, length - 1), start + tokens
        if start >= prefill_end:
            return tokens
        saved = layout.resumes_at(prefill_end, layout.align)
        saves = end >= prefill_end and all(
            group.saves(start, end, saved, layout) for group in self.groups
        )
        if end < prefill_end:
            aligned = end // size * size
            if aligned > start or size <= most_tokens:
                end = aligned
        stops = []
        if not saves:
            stops.append(layout.resumes_at(length, size))
            if start % size:
                stops.append((start // size + 1) * size)
        if start < prompt.junction < end:
            stops.append(start + (prompt.junction - start) // size * size)
        end = min((stop for stop in stops if start < stop < end), default=end)
        return max(end - start, 0)

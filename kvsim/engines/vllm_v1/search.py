"""How much of a sequence a tier can restore, if every group of layers has to agree.

Source: vLLM 0.33.0 `distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py`,
`_lookup_complete_chunks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvsim.engines.vllm_v1.cpu_tier import PENDING, CpuTier, Key
from kvsim.engines.vllm_v1.groups import Chunked, Group, Sliding


class ChunkedGroup(NamedTuple):
    """A group of layers whose blocks go to a tier in chunks."""

    rules: Group
    tokens: int
    """Tokens of a chunk."""
    window: int
    """Tokens that a token reads; 0: all before it."""

    @property
    def slides(self) -> bool:
        """Whether its window moves with every token."""
        return isinstance(self.rules, Sliding)

    @property
    def window_chunks(self) -> int:
        """The chunks that a window touches at least; 0 without a window."""
        return -(-self.window // self.tokens)

    def load_chunks(self, end: int) -> int:
        """Returns the chunks that have to be loaded for a hit of `end` tokens."""
        if not self.slides:
            return self.window_chunks
        padding = -end % self.tokens
        return max(self.window_chunks, -(-(self.window - 1 + padding) // self.tokens))


def chunked_groups(groups: Sequence[Group], blocks_per_chunk: int) -> list[ChunkedGroup]:
    """Returns the groups with their chunks."""
    return [
        ChunkedGroup(group, group.block_size * blocks_per_chunk, _window(group)) for group in groups
    ]


def _window(group: Group) -> int:
    if isinstance(group, Sliding):
        return group.window
    return group.chunk if isinstance(group, Chunked) else 0


class Search:
    """Looks up sequences in a tier."""

    def __init__(self, groups: Sequence[ChunkedGroup], tier: CpuTier) -> None:
        self._groups, self._tier = groups, tier
        numbers = range(len(groups))
        self._windowed = sorted(
            [number for number in numbers if groups[number].window],
            key=lambda number: -groups[number].window_chunks,
        )
        self._order = [number for number in numbers if not groups[number].window] + self._windowed

    def longest(self, keys: list[list[Key]], base: int, length: int) -> int | None:
        """Returns how many tokens behind the first `base` tokens of a sequence of `length` tokens
        can be loaded. `keys` are those of its chunks, group by group. None: some of these chunks
        are still being written."""
        top, hit, later = length - bool(self._windowed), 0, False
        popped: set[int] = set()
        due = self._order
        while due:
            looked_up, numbers, due = False, due, []
            for number in numbers:
                group = self._groups[number]
                tokens, pops = group.tokens, group.rules.eagle and number not in popped
                top = min(top, len(keys[number]) * tokens)
                if top - base < tokens:
                    return 0
                first, count = base // tokens, self._count(number, keys[number], base, top, pops)
                if count == 0:
                    return 0
                if count is None:
                    later = True
                else:
                    if pops:
                        popped.add(number)
                    top = min(top, tokens * (first + count - pops))
                new = top - base
                if new < tokens:
                    return 0
                if new < hit:
                    if not group.rules.eagle:
                        popped.clear()
                    if later:
                        later, due = False, self._order
                    elif looked_up and not due:
                        due = self._windowed
                looked_up = looked_up or group.window > 0
                hit = new
        return None if later else hit

    def _count(self, number: int, keys: list[Key], base: int, top: int, pops: bool) -> int | None:
        """Returns the chunks of one group, counted from that of token `base`, up to whose end the
        tier can restore it. With `pops`, one chunk more is asked for, which is lost again."""
        group, known = self._groups[number], len(keys)
        tokens = group.tokens
        last = min(-(-top // tokens) + pops, known)
        keys = keys[base // tokens : last]
        if not group.window:
            return self._leading(keys)
        end = min(top, (last - pops) * tokens)
        return self._last_window(keys, group.window_chunks + pops, group.load_chunks(end) + pops)

    def _leading(self, keys: list[Key]) -> int | None:
        """Returns the number of leading chunks that are present; None if one is being written."""
        pending, count = False, 0
        for key in keys:
            state = self._tier.look_up(key)
            if state is None:
                break
            pending = pending or state == PENDING
            count += 1
        return None if pending else count

    def _last_window(self, keys: list[Key], window: int, first_window: int) -> int | None:
        """Returns the end of the last window whose chunks are all present, or else of the run at
        the start; None if one of them is being written. Until a chunk is missing, the window has
        `first_window` chunks."""
        run, pending, needed = 0, False, first_window
        for place in range(len(keys) - 1, -1, -1):
            state = self._tier.look_up(keys[place])
            if state is None:
                run, pending, needed = 0, False, window
                continue
            run += 1
            pending = pending or state == PENDING
            if run == needed:
                return None if pending else place + run
        return None if pending else run

"""How much of the prompts a cache could have served: for every capacity, and at best.

The cache is simulated alone: one request at a time in file order, no time, no blocks pinned by
running requests, full blocks of prompts only. All blocks of a request are looked up, then inserted.
The leading blocks that are present hit. At least the last token of a prompt is computed again, as
in vLLM.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvsim.engine.request import Stream
from kvsim.limits import BLOCKS, check_size
from kvsim.workload.trace import Row


@dataclass(slots=True, frozen=True)
class Reuse:
    """Which earlier request last used each block that a request looks up.

    Equal keys mean equal prefixes, so the known blocks of a request are the first of its prompt.
    The last user of a block is never earlier than that of the next block.
    """

    block_size: int
    blocks: list[int]
    """Full blocks of each prompt."""
    limits: list[int]
    """Number of these blocks that may hit; the block of the last token may not."""
    runs: list[list[tuple[int, int, int]]]
    """For each request its known blocks as (request, first, last), where `request` used them
    last."""
    distinct: int
    """Number of different blocks in the trace."""


def find_reuse(rows: Sequence[Row], streams: Sequence[Stream], block_size: int) -> Reuse:
    """The reuse in one pass over the prompts' keys, at `block_size` tokens per block.

    Raises `ConfigError` if there are more different blocks than `kvsim.limits` has room for.
    """
    last_user: dict[int, int] = {}
    blocks, limits, runs = [], [], []
    for row, stream in zip(rows, streams, strict=True):
        full = row.input_length // block_size
        check_size("different blocks", max(full, len(last_user)), BLOCKS)
        keys = stream.keys(0, full, block_size)
        blocks.append(len(keys))
        limits.append((row.input_length - 1) // block_size)
        runs.append(_runs(keys, last_user))
        last_user.update(dict.fromkeys(keys, row.index))
    return Reuse(block_size, blocks, limits, runs, len(last_user))


def _runs(keys: Sequence[int], last_user: dict[int, int]) -> list[tuple[int, int, int]]:
    """Leading known keys grouped by their last user; users never get later along the prompt."""
    runs, first = [], 0
    while first < len(keys) and (user := last_user.get(keys[first], -1)) >= 0:
        end = bisect_right(keys, -user, first, key=lambda key: -last_user.get(key, -1))
        runs.append((user, first, end))
        first = end
    return runs


def ceiling_tokens(
    rows: Sequence[Row], streams: Sequence[Stream], block_size: int, *, outputs: bool = False
) -> int:
    """Prompt tokens that hit in an unlimited cache; with `outputs`, it keeps outputs, too."""
    seen: set[int] = set()
    hit_tokens = 0
    for row, stream in zip(rows, streams, strict=True):
        length = row.input_length + (row.output_length if outputs else 0)
        keys = stream.keys(0, length // block_size, block_size)
        known = bisect_right(keys, False, key=lambda key: key not in seen)
        hit_tokens += min(known, (row.input_length - 1) // block_size) * block_size
        seen.update(keys[known:])
    return hit_tokens


def lru_hit_tokens(reuse: Reuse, capacities: Sequence[int]) -> list[int]:
    """Prompt tokens that hit under LRU eviction, for each capacity in blocks.

    The blocks of a prompt are touched from last to first, so its tail is dropped first. LRU is a
    stack algorithm: a block hits at every capacity above its depth in the order of last use, and
    one pass finds all depths (Mattson et al., "Evaluation techniques for storage hierarchies",
    1970).
    """
    begins, ends = (np.array(depths, dtype=np.int64) for depths in _depths(reuse))
    deepest = int(ends.max(initial=0))
    change = np.bincount(begins, minlength=deepest + 1) - np.bincount(ends, minlength=deepest + 1)
    hits = np.concatenate(([0], change.cumsum().cumsum()))
    return [int(hits[min(capacity, deepest)]) * reuse.block_size for capacity in capacities]


def _depths(reuse: Reuse) -> tuple[list[int], list[int]]:
    """Intervals of depths (first, one past the last) of blocks that were found and may hit."""
    begins, ends = [], []
    live = _Fenwick(len(reuse.blocks))
    for request, runs in enumerate(reuse.runs):
        for user, first, end in runs:
            counted = min(end, reuse.limits[request]) - first
            if counted > 0:
                depth = live.above(user)
                begins.append(depth)
                ends.append(depth + counted)
        for user, first, end in runs:
            live.add(user, first - end)
        live.add(request, reuse.blocks[request])
    return begins, ends


class _Fenwick:
    """Counts per request, with sums over all later requests (Fenwick 1994)."""

    def __init__(self, size: int) -> None:
        self._sums = [0] * (size + 1)
        self._total = 0

    def add(self, index: int, count: int) -> None:
        self._total += count
        index += 1
        while index < len(self._sums):
            self._sums[index] += count
            index += index & -index

    def above(self, index: int) -> int:
        """Sum of the counts of all requests after `index`."""
        below, index = 0, index + 1
        while index:
            below += self._sums[index]
            index &= index - 1
        return self._total - below


def min_hit_tokens(reuse: Reuse, capacities: Sequence[int]) -> list[int]:
    """Prompt tokens that hit if the block whose next use is furthest is always dropped first.

    No policy can have more hits (Belady, "A study of replacement algorithms for a virtual-storage
    computer", 1966; Mattson's MIN). Blocks with the same next use all belong to one prompt, and the
    deepest is dropped first. So the state is one count per next user.
    """
    next_uses: list[list[tuple[int, int]]] = [[] for _ in reuse.blocks]
    for request, runs in enumerate(reuse.runs):
        for user, first, end in runs:
            next_uses[user].append((request, end - first))
    return [_min_hit_tokens(reuse, next_uses, capacity) for capacity in capacities]


def _min_hit_tokens(reuse: Reuse, next_uses: list[list[tuple[int, int]]], capacity: int) -> int:
    resident = [0] * len(reuse.blocks)
    """Blocks in the cache by the request that uses them next."""
    furthest: list[int] = []
    """Heap of these requests, negated."""
    hits = size = unused = 0
    for request, blocks in enumerate(reuse.blocks):
        hits += min(resident[request], reuse.limits[request])
        size += blocks - resident[request]
        resident[request] = 0
        unused += blocks
        for user, count in next_uses[request]:
            if not resident[user]:
                heapq.heappush(furthest, -user)
            resident[user] += count
            unused -= count
        dropped = min(unused, max(0, size - capacity))
        unused -= dropped
        size -= dropped
        while size > capacity:
            user = -furthest[0]
            dropped = min(resident[user], size - capacity)
            resident[user] -= dropped
            size -= dropped
            if not resident[user]:
                heapq.heappop(furthest)
    return hits * reuse.block_size

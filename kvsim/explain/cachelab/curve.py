"""The hits of a cache that evicts the least recently used block, at every capacity at once.

A block hits at every capacity above its distance (`kvsim.workload.reuse`). The blocks of a run have
consecutive distances, so each run adds a ramp to the curve, and the curve is a sum of ramps.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import ConfigError
from kvsim.results.phases import Ints
from kvsim.workload.reuse import Chain, Counting, Found, Reuse, Walk, bounded_chains, chains
from kvsim.workload.streams import SpannedStream
from kvsim.workload.trace import Row

_PENDING = 1 << 18


class Ramps:
    """A sum of ramps over capacities. Its memory follows the number of different ends."""

    def __init__(self) -> None:
        self._at, self._slope = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        self._pending = array("q"), array("q")

    def add(self, begin: int, end: int, weight: int) -> None:
        """Add one that rises by `weight` per block from `begin` to `end`."""
        at, slope = self._pending
        at.extend((begin, end))
        slope.extend((weight, -weight))
        if len(at) >= _PENDING:
            self._merge()

    def values(self, capacities: Sequence[int]) -> list[int]:
        """The height at each capacity."""
        self._merge()
        places = np.searchsorted(self._at, capacities)
        slopes = np.concatenate(([0], self._slope.cumsum()))
        moments = np.concatenate(([0], (self._slope * self._at).cumsum()))
        found: list[int] = (np.array(capacities) * slopes[places] - moments[places]).tolist()
        return found

    def _merge(self) -> None:
        at = np.concatenate((self._at, np.array(self._pending[0], dtype=np.int64)))
        slope = np.concatenate((self._slope, np.array(self._pending[1], dtype=np.int64)))
        self._at, places = np.unique(at, return_inverse=True)
        self._slope = np.zeros(len(self._at), dtype=np.int64)
        np.add.at(self._slope, places, slope)
        self._pending = array("q"), array("q")


class Curve:
    """Hits by capacity in blocks, of the requests that were added."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._tokens, self._blocks, self._requests = Ramps(), Ramps(), Ramps()

    def add(self, found: Found) -> None:
        """Count what a request finds."""
        size, most = self._size, found.most_tokens
        for _, first, last, distance in found.runs:
            whole, end = min(last, most // size), min(last, -(-most // size))
            if first < end:
                self._blocks.add(distance, distance + end - first, 1)
            if first < whole:
                self._tokens.add(distance, distance + whole - first, size)
            if first <= whole < last and most > whole * size:
                self._tokens.add(
                    distance + whole - first, distance + whole - first + 1, most % size
                )
        if found.runs and most:
            distance = found.runs[0].distance
            self._requests.add(distance, distance + 1, 1)

    def tokens(self, capacities: Sequence[int]) -> list[int]:
        """Prompt tokens that hit, at each capacity."""
        return self._tokens.values(capacities)

    def blocks(self, capacities: Sequence[int]) -> list[int]:
        """Blocks of prompts that hit, at each capacity."""
        return self._blocks.values(capacities)

    def requests(self, capacities: Sequence[int]) -> list[int]:
        """Requests that find at least one block, at each capacity."""
        return self._requests.values(capacities)


def make_curve(found: Iterable[Found], block_size: int) -> Curve:
    """The curve of these requests, which may be a stream (`Walk.step`)."""
    curve = Curve(block_size)
    for each in found:
        curve.add(each)
    return curve


def lru_tokens(reuse: Reuse, capacities: Sequence[int], since: int = 0) -> list[int]:
    """Prompt tokens that hit under LRU, at each capacity in blocks, from request `since` on."""
    return make_curve(reuse.found[since:], reuse.counting.block_size).tokens(capacities)


NextUses = list[list[tuple[int, int]]]
"""Of each request, who uses its blocks next, and how many of them."""


def next_uses(reuse: Reuse, *, every: bool = False) -> NextUses:
    """Who uses the blocks of each request next. `every`: also where the use can be no hit, as some
    programs count; then the result may be below the optimum."""
    found: NextUses = [[] for _ in reuse.found]
    for request, (blocks, most_tokens, runs) in enumerate(reuse.found):
        end = blocks if every else -(-most_tokens // reuse.counting.block_size)
        for user, first, last, _ in runs:
            if first < end:
                found[user].append((request, min(last, end) - first))
    return found


def optimum_tokens(
    reuse: Reuse, capacities: Sequence[int], since: int = 0, *, every: bool = False
) -> list[int]:
    """Prompt tokens that hit at each capacity in blocks, from request `since` on. `every`: as for
    `next_uses`."""
    uses = next_uses(reuse, every=every)
    size = reuse.counting.block_size
    kept = (optimum_blocks(reuse, uses, capacity) for capacity in capacities)
    return [kept_tokens(reuse.found[since:], blocks[since:], size) for blocks in kept]


def kept_tokens(found: Sequence[Found], blocks: Sequence[int], size: int) -> int:
    """Prompt tokens that hit where so many leading blocks of each request are in the cache."""
    return sum(min(kept * size, each.most_tokens) for each, kept in zip(found, blocks, strict=True))


def optimum_blocks(reuse: Reuse, uses: NextUses, capacity: int) -> list[int]:
    """The leading blocks that each request finds.

    Blocks that the same request uses next are dropped deepest first, so the cache is one number
    for each of the requests to come.
    """
    resident = [0] * len(reuse.found)
    kept = []
    furthest: list[int] = []
    """Heap of the requests that use something in the cache, negated."""
    size = unused = 0
    for request, (blocks, _, _) in enumerate(reuse.found):
        kept.append(resident[request])
        size += blocks - resident[request]
        resident[request] = 0
        unused += blocks
        for user, count in uses[request]:
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
    return kept


_HOT = 0.01
"""Share of the prompts from which on a block is always kept."""
_LOOKED_AT = 1000
"""Prompts, evenly spread, that say which blocks these are."""
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9)

Keys = NDArray[np.uint64]


def sampled_lru_tokens(
    rows: Sequence[Row],
    streams: Sequence[SpannedStream],
    block_size: int,
    capacities: Sequence[int],
    rate: float,
    *,
    seed: int = 0,
) -> list[float]:
    """Prompt tokens that hit under LRU at each capacity in blocks, estimated from a share `rate` of
    the blocks. Another `seed` samples other blocks.

    Raises `ConfigError` for an impossible rate, and for too many blocks (`kvsim.settings.limits`).
    """
    if not 0 < rate <= 1:
        raise ConfigError(f"rate: {rate:g} is not above 0 and at most 1")
    asked = bounded_chains(rows, streams, Counting(block_size))
    hot = _hot_keys(rows, streams, block_size)
    walk, looked_up, sampled = Walk(1), 0, 0
    distances: list[Ints] = []
    weights: list[Ints] = []
    for chain in asked:
        keys = _keys(chain, block_size)
        always = np.isin(keys, hot)
        kept = np.flatnonzero(always | _chosen(keys, rate, seed))
        looked_up += len(keys) - int(always.sum())
        sampled += len(kept) - int(always.sum())
        thinned = keys[kept].tolist()
        spans = [(place, place + 1, key - place) for place, key in enumerate(thinned)]
        most = int(np.searchsorted(kept, chain.most_tokens // block_size))
        for _, first, last, since in walk.step(Chain(spans, len(spans), most)).runs:
            count = min(last, most) - first
            if count > 0:
                distances.append(since + np.arange(count))
                weights.append(always[kept[first : first + count]].astype(np.int64))
    if not distances:
        return [0.0] * len(capacities)
    among, is_hot = np.concatenate(distances), np.concatenate(weights)
    scale = looked_up / sampled if sampled else 1.0
    # Hot blocks are used all the time, so they are among those used since, and count once.
    distance = np.maximum(among - len(hot), 0) / rate + np.minimum(among, len(hot))
    weight = np.where(is_hot == 1, 1.0, scale) * block_size
    return [float(weight[distance < capacity].sum()) for capacity in capacities]


def _hot_keys(rows: Sequence[Row], streams: Sequence[SpannedStream], block_size: int) -> Keys:
    """Keys in more than a share `_HOT` of the prompts."""
    places = np.unique(np.linspace(0, len(rows) - 1, _LOOKED_AT).astype(int)).tolist()
    users: Counter[int] = Counter()
    counting = Counting(block_size)
    for chain in chains([rows[at] for at in places], [streams[at] for at in places], counting):
        users.update(_keys(chain, block_size).tolist())
    most = max(1, _HOT * len(places))
    return np.array([key for key, number in users.items() if number > most], dtype=np.uint64)


def _keys(chain: Chain, block_size: int) -> Keys:
    """The keys of a chain, cut to 64 bits."""
    parts = [
        np.arange(first, min(last, chain.blocks), dtype=np.uint64) * np.uint64(block_size)
        + np.uint64(offset % (1 << 64))
        for first, last, offset in chain.spans
        if first < chain.blocks
    ]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint64)


def _chosen(keys: Keys, rate: float, seed: int) -> NDArray[np.bool_]:
    """Whether a key is in the sample: always or never."""
    mixed = (keys + np.uint64(seed)) * np.uint64(_MIX[0])
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(_MIX[1])
    chosen: NDArray[np.bool_] = (mixed >> np.uint64(32)) < np.uint64(round(rate * (1 << 32)))
    return chosen

"""An estimate of the LRU curve from a sample of the blocks, in a fraction of the memory.

By its distance alone, a block says at which capacities it hits, so a sample of the blocks, each
with the distance among them divided by the rate, estimates the curve (SHARDS; Waldspurger et al.,
"Efficient MRC construction with SHARDS", FAST 2015). But blocks that very many prompts begin with
must not be left to chance: those in more than one prompt of a hundred are all kept, and count once.
A chain without some of its blocks is still a chain, so the distances are those of
`kvsim.workload.reuse`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import ConfigError
from kvsim.explain.cachelab.curve import Ints
from kvsim.workload.reuse import Chain, Counting, Walk, bounded_chains, chains
from kvsim.workload.streams import SpannedStream
from kvsim.workload.trace import Row

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

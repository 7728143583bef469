"""Routers of llm-d's inference scheduler (commit 520af47, `pkg/epp`).

Written from its source: its decisions were not recorded, so nothing here was compared with the real
router. Each scorer gives a worker between 0 and 1, the weighted sum is its score, and the greatest
score wins, by chance among equals.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence

import xxhash

from kvsim.routers.index import Tier
from kvsim.routers.router import Asked, Choice, Router

_Loads = Sequence[tuple[int, int, float]]


class _Scored(Router):
    """Weighs free queues, free KV cache, and known prefixes; the workers' numbers are those of the
    last scrape, which the real router makes every 50 ms."""

    scrape_ns = 50_000_000

    def __init__(
        self,
        workers: Sequence[str],
        seed: int = 0,
        *,
        queue_weight: float,
        kv_cache_weight: float,
        prefix_weight: float,
    ) -> None:
        super().__init__(workers, seed)
        self._weights = queue_weight, kv_cache_weight, prefix_weight
        self._loads: _Loads = [(0, 0, 0.0)] * len(self.workers)

    def choose(self, asked: Asked, alive: Sequence[int], now_ns: int) -> Choice:
        queue, kv_cache, prefix = self._weights
        known = self.known(asked, alive)
        waiting = {worker: self._loads[worker][0] for worker in alive}
        low, high = min(waiting.values()), max(waiting.values())
        scores = {
            worker: queue * ((high - waiting[worker]) / (high - low) if high > low else 1.0)
            + kv_cache * min(max(1.0 - self._loads[worker][2], 0.0), 1.0)
            + prefix * known[worker]
            for worker in alive
        }
        most = max(scores.values())
        return Choice([worker for worker in alive if scores[worker] == most], why="score")

    def known(self, asked: Asked, alive: Sequence[int]) -> dict[int, float]:
        """Returns the share of the prompt, between 0 and 1, that each worker is taken to have."""
        raise NotImplementedError

    def expected(self, asked: Asked, alive: Sequence[int], now_ns: int) -> Mapping[int, int] | None:
        most = min(asked.input_length, self.index_limit_tokens or asked.input_length)
        shares = self.known(asked, alive)
        return {worker: round(share * most) for worker, share in shares.items()}

    def snapshot(self, loads: _Loads) -> None:
        self._loads = list(loads)


class Default(_Scored):
    """The profile that ships: queue 2, KV cache 2, and a guess at prefixes 3.

    What a worker was sent stands for what it has, in pieces of `4 * block_size` characters, at most
    `PIECES` a prompt. Two quirks of the source (`approximateprefix/`) are kept. A worker's list of
    pieces is full at `lru_capacity`, and loses the heads of prompts first, since those are touched
    first. A worker that lost a head still counts for the pieces behind it, as long as some worker
    has each piece.
    """

    PIECES = 256

    def __init__(
        self,
        workers: Sequence[str],
        seed: int = 0,
        *,
        block_size: int = 16,
        lru_capacity: int = 31_250,
        queue_weight: float = 2.0,
        kv_cache_weight: float = 2.0,
        prefix_weight: float = 3.0,
    ) -> None:
        super().__init__(
            workers,
            seed,
            queue_weight=queue_weight,
            kv_cache_weight=kv_cache_weight,
            prefix_weight=prefix_weight,
        )
        self._characters = 4 * block_size
        self.index_limit_tokens = self.PIECES * block_size
        self._capacity = lru_capacity
        self._pieces: list[OrderedDict[int, None]] = [OrderedDict() for _ in self.workers]
        """Pieces that each worker was sent, the least recent first."""

    def known(self, asked: Asked, alive: Sequence[int]) -> dict[int, float]:
        pieces = self._split(asked.content.text)
        counts = dict.fromkeys(alive, 0)
        for piece in pieces:
            holders = [worker for worker in alive if piece in self._pieces[worker]]
            if not holders:
                break
            for worker in holders:
                counts[worker] += 1
        return {worker: count / max(len(pieces), 1) for worker, count in counts.items()}

    def sent(self, asked: Asked, worker: int, now_ns: int) -> None:
        pieces = self._pieces[worker]
        for piece in self._split(asked.content.text):
            pieces[piece] = None
            pieces.move_to_end(piece)
            if len(pieces) > self._capacity:
                pieces.popitem(last=False)

    def worker_lost(self, worker: int) -> None:
        self._pieces[worker].clear()

    def _split(self, text: str) -> list[int]:
        size, chain, pieces = self._characters, xxhash.xxh3_64(), []
        for start in range(0, min(len(text), size * self.PIECES), size):
            chain.update(text[start : start + size].encode())
            pieces.append(chain.intdigest())
        return pieces


class Precise(_Scored):
    """The profile with an index fed by KV events: prefix 2, KV cache 1, queue 1."""

    heeds_events = True

    def __init__(
        self,
        workers: Sequence[str],
        seed: int = 0,
        *,
        block_size: int = 64,
        queue_weight: float = 1.0,
        kv_cache_weight: float = 1.0,
        prefix_weight: float = 2.0,
    ) -> None:
        super().__init__(
            workers,
            seed,
            queue_weight=queue_weight,
            kv_cache_weight=kv_cache_weight,
            prefix_weight=prefix_weight,
        )
        self._block_size = block_size
        self._caches = [Tier() for _ in self.workers]

    def known(self, asked: Asked, alive: Sequence[int]) -> dict[int, float]:
        keys = asked.content.keys(self._block_size)
        return {worker: self._caches[worker].run(keys) / max(len(keys), 1) for worker in alive}

    def stored(
        self,
        worker: int,
        parent: Hashable | None,
        keys: Sequence[Hashable],
        tier: str = "device",
    ) -> None:
        if tier == "device":
            self._caches[worker].stored(parent, keys)

    def removed(self, worker: int, keys: Sequence[Hashable], tier: str = "device") -> None:
        if tier == "device":
            self._caches[worker].removed(keys)

    def cleared(self, worker: int) -> None:
        self._caches[worker] = Tier()

    def worker_lost(self, worker: int) -> None:
        self.cleared(worker)

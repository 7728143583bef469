"""Routers of llm-d's inference scheduler (commit 520af47, `pkg/epp`).

Written from its source: its decisions were not recorded, so nothing here was compared with the real
router. Each scorer gives a worker between 0 and 1, the weighted sum is its score, and the greatest
score wins, by chance among equals.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import xxhash

from kvsim.fleet.routers.dynamo import Tier
from kvsim.fleet.routers.router import (
    TOKEN_CHARACTERS,
    Asked,
    Choice,
    InFlight,
    Keys,
    Loads,
    delay_ns,
    interval_ns,
)


class Weights(NamedTuple):
    """What each scorer counts for."""

    prefix: float = 0.0
    """The share of the prompt that a worker is taken to have."""
    kv_cache: float = 0.0
    """The free share of its KV cache (`kv-cache-utilization-scorer`)."""
    queue: float = 0.0
    """Its waiting requests: 1 for the least among the workers, 0 for the most."""
    active_request: float = 0.0
    """Its requests that the router sent and that have not ended: 1 for none, 0 for the most."""


class _Scored(InFlight):
    """Weighs free queues, free KV cache, and known prefixes; the workers' numbers are those of the
    last scrape."""

    profile: ClassVar[Weights]
    """The weights that are not given."""

    def __init__(
        self,
        workers: Sequence[str],
        seed: int = 0,
        *,
        prefix_weight: float | None = None,
        kv_cache_weight: float | None = None,
        queue_weight: float | None = None,
        active_request_weight: float | None = None,
        refresh_metrics_interval_ms: float = 50.0,
        metrics_delay_ms: float = 0.0,
    ) -> None:
        """Workers are scraped every `refresh_metrics_interval_ms` (`pkg/epp/server/options.go`);
        what is scraped is `metrics_delay_ms` old."""
        super().__init__(workers, seed)
        weights = {
            "prefix": prefix_weight,
            "kv_cache": kv_cache_weight,
            "queue": queue_weight,
            "active_request": active_request_weight,
        }
        given = {key: weight for key, weight in weights.items() if weight is not None}
        self._weights = self.profile._replace(**given)
        self.scrape_ns = interval_ns(refresh_metrics_interval_ms)
        self.scrape_delay_ns = delay_ns(metrics_delay_ms)
        self._loads: Loads = [(0, 0, 0.0)] * len(self.workers)

    def choose(self, asked: Asked, alive: Sequence[int], now_ns: int) -> Choice:
        weights, known = self._weights, self.known(asked, alive) if self._weights.prefix else {}
        waiting = {worker: self._loads[worker][0] for worker in alive}
        low, high = min(waiting.values()), max(waiting.values())
        active = max(self.load[worker] for worker in alive)
        scores = {
            worker: weights.queue * ((high - waiting[worker]) / (high - low) if high > low else 1.0)
            + weights.kv_cache * min(max(1.0 - self._loads[worker][2], 0.0), 1.0)
            + weights.prefix * known.get(worker, 0.0)
            + weights.active_request * (1.0 - self.load[worker] / active if active else 1.0)
            for worker in alive
        }
        most = max(scores.values())
        return Choice([worker for worker in alive if scores[worker] == most], why="score")

    def known(self, asked: Asked, alive: Sequence[int]) -> dict[int, float]:
        """Returns the share of the prompt, between 0 and 1, that each worker is taken to have."""
        raise NotImplementedError

    def expected(self, asked: Asked, alive: Sequence[int], now_ns: int) -> Mapping[int, int] | None:
        if not self._weights.prefix:
            return None
        most = min(asked.input_length, self.index_limit_tokens or asked.input_length)
        shares = self.known(asked, alive)
        return {worker: round(share * most) for worker, share in shares.items()}

    def snapshot(self, loads: Loads) -> None:
        self._loads = list(loads)


class Default(_Scored):
    """The profile that ships: queue 2, KV cache 2, and a guess at prefixes 3.

    What a worker was sent stands for what it has, in pieces of its text, at most `PIECES` a prompt.
    Two quirks of the source (`approximateprefix/`) are kept. A worker's list of
    pieces is full at `lru_capacity`, and loses the heads of prompts first, since those are touched
    first. A worker that lost a head still counts for the pieces behind it, as long as some worker
    has each piece.
    """

    PIECES = 256
    profile = Weights(prefix=3.0, kv_cache=2.0, queue=2.0)

    def __init__(
        self,
        workers: Sequence[str],
        seed: int = 0,
        *,
        block_size: int = 16,
        hash_block_size: int | None = None,
        lru_capacity: int = 31_250,
        **settings: Any,
    ) -> None:
        """`hash_block_size` is the length of a piece in characters; None for four times the block
        size of the engine, as the real one tunes it. The tokens at which its index ends are
        estimated from it (`TOKEN_CHARACTERS`). `lru_capacity` is in pieces."""
        super().__init__(workers, seed, **settings)
        self._characters = hash_block_size or TOKEN_CHARACTERS * block_size
        self.index_limit_tokens = self.PIECES * self._characters // TOKEN_CHARACTERS
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
        super().sent(asked, worker, now_ns)
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
    profile = Weights(prefix=2.0, kv_cache=1.0, queue=1.0)

    def __init__(
        self,
        workers: Sequence[str],
        seed: int = 0,
        *,
        block_size: int = 64,
        kv_event_delay_ms: float = 0.0,
        **settings: Any,
    ) -> None:
        """`kv_event_delay_ms` is the time that events take from the engine's step to the router."""
        super().__init__(workers, seed, **settings)
        self.event_delay_ns = delay_ns(kv_event_delay_ms)
        self._block_size = block_size
        self._caches = [Tier() for _ in self.workers]

    def known(self, asked: Asked, alive: Sequence[int]) -> dict[int, float]:
        keys = asked.content.keys(self._block_size)
        return {worker: self._caches[worker].run(keys) / max(len(keys), 1) for worker in alive}

    def stored(
        self, worker: int, parent: Hashable | None, keys: Keys, tier: str = "device"
    ) -> None:
        if tier == "device":
            self._caches[worker].stored(parent, keys)

    def removed(self, worker: int, keys: Keys, tier: str = "device") -> None:
        if tier == "device":
            self._caches[worker].removed(keys)

    def cleared(self, worker: int) -> None:
        self._caches[worker] = Tier()

    def worker_lost(self, worker: int) -> None:
        self.cleared(worker)

"""Routers of the textbook, to compare the real ones with."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence

import xxhash

from kvsim.fleet.routers.router import Asked, Choice, InFlight, Router


class Uniform(Router):
    """Any worker, with equal chances."""

    def choose(self, asked: Asked, alive: Sequence[int], now_ns: int) -> Choice:
        return Choice(alive)


class RoundRobin(Router):
    """The workers in turn."""

    def __init__(self, workers: Sequence[str], seed: int = 0) -> None:
        super().__init__(workers, seed)
        self._turn = 0

    def choose(self, asked: Asked, alive: Sequence[int], now_ns: int) -> Choice:
        return Choice([alive[self._turn % len(alive)]])

    def sent(self, asked: Asked, worker: int, now_ns: int) -> None:
        self._turn += 1


class LeastLoaded(InFlight):
    """The worker with the fewest requests in flight; the first of equals."""

    def choose(self, asked: Asked, alive: Sequence[int], now_ns: int) -> Choice:
        return Choice([min(alive, key=self.load.__getitem__)])


class PowerOfTwo(InFlight):
    """The less loaded of two that are drawn (Mitzenmacher, "The Power of Two Choices in Randomized
    Load Balancing", 2001); the first drawn of equals."""

    def choose(self, asked: Asked, alive: Sequence[int], now_ns: int) -> Choice:
        load, most = self.load, len(alive) - 1
        # A worker wins its pairs with busier ones, and half of those with its equals.
        weights = [
            sum(load[other] > load[one] for other in alive)
            + (sum(load[other] == load[one] for other in alive) - 1) / 2
            for one in alive
        ]
        return Choice(alive, weights if most else None)


class SessionAffinity(Router):
    """All requests of a session to one worker, by the hash of its name; a request without a session
    by the hash of its own."""

    def choose(self, asked: Asked, alive: Sequence[int], now_ns: int) -> Choice:
        return Choice([alive[_hash(asked.session or asked.id) % len(alive)]])


class BoundedHash(InFlight):
    """Consistent hashing with bounded loads: from the session's place on a ring on, the first
    worker with fewer than `bound` times the mean number of requests, this one counted (Mirrokni,
    Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2018)."""

    POINTS = 100
    """Places of each worker on the ring."""

    def __init__(self, workers: Sequence[str], seed: int = 0, bound: float = 1.25) -> None:
        super().__init__(workers, seed)
        if bound < 1:
            raise ValueError(f"bound is {bound}; give a factor of at least 1")
        self._bound = bound
        self._ring = sorted(
            (_hash(f"{name}-{point}"), worker)
            for worker, name in enumerate(self.workers)
            for point in range(self.POINTS)
        )

    def choose(self, asked: Asked, alive: Sequence[int], now_ns: int) -> Choice:
        limit = math.ceil(self._bound * (sum(self.load[one] for one in alive) + 1) / len(alive))
        free = {one for one in alive if self.load[one] < limit}
        start = bisect(self._ring, (_hash(asked.session or asked.id), len(self.workers)))
        for _, worker in (*self._ring[start:], *self._ring[:start]):
            if worker in free:
                return Choice([worker])
        raise AssertionError("the mean of the loads is below the limit, so some worker is, too")


def _hash(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode())

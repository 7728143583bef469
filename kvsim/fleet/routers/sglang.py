"""The SGLang router (0.3.2, `sgl-model-gateway/src/policies`)."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from kvsim.fleet.routers import plain
from kvsim.fleet.routers.router import Asked, Choice, InFlight, interval_ns
from kvsim.fleet.routers.sglang_tree import Node, Tree


class RoundRobin(plain.RoundRobin):
    """`round_robin`: the workers in turn."""


class Uniform(plain.Uniform):
    """`random`: any worker."""


class PowerOfTwo(plain.Uniform):
    """`power_of_two`: any worker. It is meant to be the less loaded of two; but without token loads
    from a monitor, this version counts the requests of no worker, and all are equal."""


class CacheAware(InFlight):
    """`cache_aware`: the worker that brought the longest known part of the prompt, unless that part
    is short or the workers are unevenly loaded; then the one with the fewest requests in flight."""

    def __init__(
        self,
        workers: Sequence[str],
        seed: int = 0,
        *,
        cache_threshold: float = 0.3,
        balance_abs_threshold: int = 64,
        balance_rel_threshold: float = 1.5,
        max_tree_size: int = 2**26,
        eviction_interval_secs: float = 60.0,
    ) -> None:
        """`max_tree_size` is in characters of one worker. Of equal workers the first one that is
        alive is taken; a real router lists them in the order of a hash map."""
        super().__init__(workers, seed)
        self._threshold = _single(cache_threshold)
        self._absolute, self._relative = balance_abs_threshold, _single(balance_rel_threshold)
        self._most = max_tree_size
        self.tick_ns = interval_ns(eviction_interval_secs * 1e3)
        self._unnamed: Node | None = None
        """Where the last search ended, if nobody was named there: who gets the request will be."""
        self.tree = Tree(len(self.workers))
        self.matched = 0
        """Characters that the last search matched."""

    def choose(self, asked: Asked, alive: Sequence[int], now_ns: int) -> Choice:
        least = min(alive, key=self.load.__getitem__)
        loads = [self.load[worker] for worker in alive]
        low, high = min(loads), max(loads)
        if high - low > self._absolute and _single(high) > _single(self._relative * low):
            return Choice([least], why="imbalanced")
        text = asked.content.text
        self.matched, node = self.tree.search(text)
        share = _single(self.matched / len(text)) if text else 0.0
        if share > self._threshold:
            if node.named in node.holders and node.named in alive:
                return Choice([node.named], why="match")
            self._unnamed = node
            return Choice(sorted(node.holders.keys() & alive) or alive, why="match")
        if node.named not in node.holders:
            # The real one names whichever holder its hash map lists first; nobody is told which.
            node.named = min(node.holders, default=None)
        return Choice([least], why="low")

    def expected(self, asked: Asked, alive: Sequence[int], now_ns: int) -> Mapping[int, int] | None:
        text = asked.content.text
        held, size = self.tree.held_of(text), max(len(text), 1)
        return {worker: round(held[worker] / size * asked.input_length) for worker in alive}

    def sent(self, asked: Asked, worker: int, now_ns: int) -> None:
        super().sent(asked, worker, now_ns)
        if self._unnamed is not None:
            self._unnamed.named, self._unnamed = worker, None
        self.tree.insert(asked.content.text, worker)

    def tick(self) -> None:
        """Takes prompts from workers that hold too many characters."""
        self.tree.evict(self._most)


def _single(number: float) -> float:
    """The number in single precision, as the router compares."""
    (rounded,) = struct.unpack("f", struct.pack("f", number))
    return float(rounded)

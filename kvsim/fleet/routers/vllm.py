"""Routers of the vLLM project: its own balancer over data-parallel ranks, and production-stack's.

The balancer is that of 0.33.0 (`v1/engine/core_client.py`,
`DPLBAsyncMPClient.get_core_engine_for_request`), the others are of production-stack at commit
a6c01db (`routing_logic.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import md5
from itertools import count
from operator import itemgetter

from kvsim.fleet.routers.router import Asked, Choice, InFlight, Loads, Router, delay_ns, interval_ns


class DataParallel(InFlight):
    """The rank with the least score, the first of equals from a place that moves on by one each
    time.

    A rank's score is the greater of the requests that all clients together probably have there and
    those that it last reported, plus a charge for requests that wait while more than half of the KV
    cache is in use. Until the next report, each request sent counts as waiting once for each
    client.
    """

    def __init__(
        self,
        workers: Sequence[str],
        seed: int = 0,
        *,
        clients: int = 1,
        client_index: int = 0,
        min_stats_update_interval_ms: float = 100.0,
        metrics_delay_ms: float = 0.0,
    ) -> None:
        """Reports come every `min_stats_update_interval_ms` (`v1/engine/coordinator.py`), and are
        `metrics_delay_ms` old."""
        super().__init__(workers, seed)
        self.scrape_ns = interval_ns(min_stats_update_interval_ms)
        self.scrape_delay_ns = delay_ns(metrics_delay_ms)
        self._clients = clients
        self._start = len(self.workers) * client_index // clients
        self.loads = [(0, 0, 0.0)] * len(self.workers)
        """Waiting, running and usage of each rank, as last reported and counted since."""

    def choose(self, asked: Asked, alive: Sequence[int], now_ns: int) -> Choice:
        if asked.rank is not None:
            return Choice([asked.rank], why="rank")
        count = len(self.workers)
        # All but those whose engine has stopped, from the place whose turn it is.
        places = ((self._start + place) % count for place in range(count))
        ranks = [rank for rank in places if rank in alive]
        return Choice([min(ranks, key=self._score)], why="score")

    def _score(self, worker: int) -> float:
        waiting, running, usage = self.loads[worker]
        score: float = max(self._clients * self.load[worker], waiting + running)
        return score + 6 * waiting * max(0.0, usage - 0.5) if waiting else score

    def sent(self, asked: Asked, worker: int, now_ns: int) -> None:
        super().sent(asked, worker, now_ns)
        if asked.rank is None:
            waiting, running, usage = self.loads[worker]
            self.loads[worker] = (waiting + self._clients, running, usage)
            self._start = (self._start + 1) % len(self.workers)

    def snapshot(self, loads: Loads) -> None:
        self.loads = list(loads)


class _Rated(Router):
    """Counts the requests sent to each worker in a window of time."""

    def __init__(self, workers: Sequence[str], seed: int = 0, *, window: float = 60.0) -> None:
        """`window` is in seconds."""
        super().__init__(workers, seed)
        self._window_ns = round(window * 1e9)
        self._times: dict[int, deque[int]] = {}

    def rates(self, now_ns: int) -> dict[int, float]:
        """Returns requests a second of each worker that was ever sent one."""
        oldest = now_ns - self._window_ns
        for times in self._times.values():
            while times and times[0] < oldest:
                times.popleft()
        return {
            worker: len(times) / (self._window_ns / 1e9) for worker, times in self._times.items()
        }

    def sent(self, asked: Asked, worker: int, now_ns: int) -> None:
        self._times.setdefault(worker, deque()).append(now_ns)

    def _least_rate(self, alive: Sequence[int], now_ns: int) -> int:
        """The first worker without a rate, else the one with the least."""
        rates = self.rates(now_ns)
        return min(alive, key=lambda worker: rates.get(worker, -1.0))


class RoundRobin(_Rated):
    """The live workers in turn, by name; each set of live workers has a turn of its own."""

    def __init__(self, workers: Sequence[str], seed: int = 0, *, window: float = 60.0) -> None:
        super().__init__(workers, seed, window=window)
        self._turns: dict[tuple[int, ...], int] = {}

    def choose(self, asked: Asked, alive: Sequence[int], now_ns: int) -> Choice:
        ordered = tuple(sorted(alive, key=self.workers.__getitem__))
        turn = self._turns.get(ordered, 0)
        self._turns[ordered] = turn + 1
        return Choice([ordered[turn % len(ordered)]])


class Session(_Rated):
    """Sessions on a ring of hashes; a request without one goes to the least rate."""

    POINTS = 160
    """Places of each worker on the ring."""

    def __init__(self, workers: Sequence[str], seed: int = 0, *, window: float = 60.0) -> None:
        super().__init__(workers, seed, window=window)
        self._ring = sorted(
            (_md5(f"{name}-{point}"), worker)
            for worker, name in enumerate(self.workers)
            for point in range(self.POINTS)
        )

    def choose(self, asked: Asked, alive: Sequence[int], now_ns: int) -> Choice:
        if asked.session is None:
            return Choice([self._least_rate(alive, now_ns)], why="rate")
        start = bisect_right(self._ring, _md5(asked.session), key=itemgetter(0))
        following = (self._ring[at % len(self._ring)][1] for at in count(start))
        return Choice([next(worker for worker in following if worker in alive)], why="session")


@dataclass(slots=True, eq=False)
class _Piece:
    """A node of the trie: who holds it, and what follows."""

    holders: set[int] = field(default_factory=set)
    nexts: dict[str, _Piece] = field(default_factory=dict)


class PrefixAware(_Rated):
    """Workers that were sent the longest part of this prompt before; nothing is ever forgotten."""

    CHARACTERS = 128
    """Length of a piece; the last one of a prompt may be shorter, and counts as much."""

    def __init__(
        self,
        workers: Sequence[str],
        seed: int = 0,
        *,
        window: float = 60.0,
        prefix_min_match_length: int = 0,
    ) -> None:
        """`prefix_min_match_length` is in characters: below it, the least rate decides."""
        super().__init__(workers, seed, window=window)
        self._least = prefix_min_match_length
        self._root = _Piece()

    def match(self, text: str, alive: Sequence[int]) -> tuple[int, set[int]]:
        """Returns characters matched, in whole pieces, and the live workers that hold them all."""
        node, holders, matched = self._root, set(alive), 0
        for piece in self._pieces(text):
            following = node.nexts.get(piece)
            if following is None or not (left := holders & following.holders):
                break
            node, holders, matched = following, left, matched + self.CHARACTERS
        return matched, holders

    def expected(self, asked: Asked, alive: Sequence[int], now_ns: int) -> Mapping[int, int] | None:
        text, size = asked.content.text, max(len(asked.content.text), 1)
        shares = {worker: min(self.match(text, [worker])[0] / size, 1.0) for worker in alive}
        return {worker: round(share * asked.input_length) for worker, share in shares.items()}

    def choose(self, asked: Asked, alive: Sequence[int], now_ns: int) -> Choice:
        matched, holders = self.match(asked.content.text, alive)
        if matched < self._least:
            return Choice([self._least_rate(alive, now_ns)], why="rate")
        return Choice(sorted(holders), why="match")

    def sent(self, asked: Asked, worker: int, now_ns: int) -> None:
        super().sent(asked, worker, now_ns)
        node = self._root
        for piece in self._pieces(asked.content.text):
            node = node.nexts.setdefault(piece, _Piece())
            node.holders.add(worker)

    def _pieces(self, text: str) -> list[str]:
        return [text[i : i + self.CHARACTERS] for i in range(0, len(text), self.CHARACTERS)]


def _md5(name: str) -> int:
    return int(md5(name.encode(), usedforsecurity=False).hexdigest(), 16)

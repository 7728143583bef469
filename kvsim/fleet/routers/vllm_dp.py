"""vLLM's own balancer over data-parallel ranks (0.33.0, `v1/engine/core_client.py`,
`DPLBAsyncMPClient.get_core_engine_for_request`)."""

from __future__ import annotations

from collections.abc import Sequence

from kvsim.fleet.routers.router import Asked, Choice, InFlight, delay_ns, interval_ns


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
        places = [(self._start + place) % count for place in range(count)]
        return Choice([min(places, key=self._score)], why="score")

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

    def snapshot(self, loads: Sequence[tuple[int, int, float]]) -> None:
        self.loads = list(loads)

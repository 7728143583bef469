"""Routers of the vLLM production-stack (commit a6c01db, `routing_logic.py`)."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from hashlib import md5
from itertools import count
from operator import itemgetter

from kvsim.fleet.routers.router import Asked, Choice, Router


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


class _Piece:
    """A node of the trie: who holds it, and what follows."""

    __slots__ = ("holders", "nexts")

    def __init__(self) -> None:
        self.holders: set[int] = set()
        self.nexts: dict[str, _Piece] = {}


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

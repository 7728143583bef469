"""What a router is: a request is shown, a worker is named, and the books follow what was sent.

A router knows what a real one knows: what it sent itself, what workers report, and when. It sees
nothing inside an engine. Workers are numbered from 0. At the end are routers of the textbook, to
compare the real ones with.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from random import Random
from typing import NamedTuple, Protocol

import numpy as np
import xxhash

from kvsim.core.request import Request
from kvsim.errors import ConfigError
from kvsim.workload.streams import Streams
from kvsim.workload.trace import Row

TOKEN_CHARACTERS = 4
"""Characters that stand for a token where its text is unknown, as llm-d estimates
(`pkg/epp`, commit 520af47)."""


Keys = Sequence[Hashable]
"""What blocks are known by, one after another."""
Loads = Sequence[tuple[int, int, float]]
"""Waiting and running requests and the share of the KV cache in use, for each worker."""


class Content(Protocol):
    """What a prompt says, as far as routers look at it."""

    @property
    def text(self) -> str:
        """The prompt as characters."""

    def keys(self, block_size: int) -> Keys:
        """A key for each full block of so many tokens, made of it and all before it."""


class Asked(NamedTuple):
    """A request, as a router is shown it."""

    id: str
    input_length: int
    """Tokens of its prompt."""
    content: Content
    session: str | None = None
    rank: int | None = None
    """The worker that the client insists on."""


class Choice(NamedTuple):
    """What a router decides from: the real one draws among these workers."""

    workers: Sequence[int]
    weights: Sequence[float] | None = None
    """Their chances; None: equal ones."""
    why: str = ""
    """The rule that decided, in one word."""


class Routed(NamedTuple):
    """A request's way."""

    worker: int
    choice: Choice


class Router:
    """Names a worker for each request.

    A subclass gives `choose`, and overrides those of the other methods whose news it heeds. Times
    are in nanoseconds. A router that draws at random does so from a stream of its own.
    """

    def __init__(self, workers: Sequence[str], seed: int = 0) -> None:
        """`workers` are their names: for a real router, the addresses."""
        self.workers = tuple(workers)
        self._random = Random(seed)

    def choose(self, asked: Asked, alive: Sequence[int], now_ns: int) -> Choice:
        """Returns the workers among which the real router would draw; `alive` are those that can be
        chosen, in the order in which the router was given them."""
        raise NotImplementedError

    def route(self, asked: Asked, alive: Sequence[int], now_ns: int) -> Routed:
        """Chooses a worker and books the request for it. Raises `ConfigError` for one that cannot
        be chosen."""
        choice = self.choose(asked, alive, now_ns)
        workers, weights, _ = choice
        chosen = workers[0]
        # One alone draws nothing, so that routers without chance leave the stream as it is.
        if len(workers) > 1:
            (chosen,) = self._random.choices(workers, weights)
        if chosen not in alive:
            kind = f"{type(self).__module__}:{type(self).__qualname__}"
            raise ConfigError(
                f"router: {kind} chose {chosen!r}, which is none of the workers that can be chosen,"
                f" {', '.join(map(str, alive))}; return some of `alive`"
            )
        self.sent(asked, chosen, now_ns)
        return Routed(chosen, choice)

    index_limit_tokens: int | None = None
    """Tokens of a prompt at which its index ends: prompts that agree so far are equal to it."""

    def expected(self, asked: Asked, alive: Sequence[int], now_ns: int) -> Mapping[int, int] | None:
        """Returns the leading tokens of a prompt that it takes each worker to have cached; None if
        it keeps no index of prompts. Asking changes no decision."""
        return None

    # -- news ------------------------------------------------------------------------------------

    def sent(self, asked: Asked, worker: int, now_ns: int) -> None:
        """The request went to this worker."""

    def first_token(self, id: str) -> None:
        """The prompt of a request is computed."""

    def output_block(self, id: str, decay: float | None = None) -> None:
        """The output of a request filled another block."""

    def ended(self, id: str) -> None:
        """A request is over."""

    def stored(
        self, worker: int, parent: Hashable | None, keys: Keys, tier: str = "device"
    ) -> None:
        """A worker reports that these blocks, behind `parent`, are in its cache; None: they begin a
        prompt. `tier` is `device`, `host` or `disk`."""

    def removed(self, worker: int, keys: Keys, tier: str = "device") -> None:
        """A worker reports that these blocks are gone."""

    def cleared(self, worker: int) -> None:
        """A worker reports that its caches are empty."""

    def snapshot(self, loads: Loads) -> None:
        """What was last measured."""

    scrape_ns: int | None = None
    """How often the workers are measured (`snapshot`); None: never."""
    scrape_delay_ns: int = 0
    """How old a measurement is when the router gets it."""
    heeds_events: bool = False
    """Whether the router goes by what workers report of their caches (`stored`, `removed`)."""
    event_delay_ns: int = 0
    """How long such a report is under way."""
    tick_ns: int | None = None
    """How often the router looks after itself (`tick`); None: never."""

    def tick(self) -> None:
        """Called every `tick_ns`."""

    def worker_lost(self, worker: int) -> None:
        """A worker is gone, with all that it held."""

    def worker_added(self, worker: int) -> None:
        """A worker is there, and empty."""


def delay_ns(milliseconds: float) -> int:
    """A delay in nanoseconds. Raises `ValueError` if it is negative."""
    if milliseconds < 0:
        raise ValueError(f"a delay of {milliseconds:g} ms is negative; give 0 or more")
    return round(milliseconds * 1e6)


def interval_ns(milliseconds: float) -> int:
    """An interval in nanoseconds. Raises `ValueError` unless it lets time pass."""
    if not milliseconds * 1e6 >= 1:
        raise ValueError(f"an interval of {milliseconds:g} ms lets no time pass; give more than 0")
    return round(milliseconds * 1e6)


class InFlight(Router):
    """A router that counts the requests that each worker has and has not ended."""

    def __init__(self, workers: Sequence[str], seed: int = 0) -> None:
        super().__init__(workers, seed)
        self.load = [0] * len(self.workers)
        """Requests in flight of each worker."""
        self._where: dict[str, int] = {}

    def sent(self, asked: Asked, worker: int, now_ns: int) -> None:
        self.load[worker] += 1
        self._where[asked.id] = worker

    def ended(self, id: str) -> None:
        worker = self._where.pop(id, None)
        if worker is not None:
            self.load[worker] -= 1


_FIRST, _NUMBER = np.uint32(0xE0000), np.uint32(0x30000)
"""Code points of the characters that stand for tokens, far from surrogates."""
_MIXER, _BITS = np.uint64(0x9E3779B97F4A7C15), 0xFFFF_FFFF_FFFF_FFFF


class StreamContent:
    """Content of a request of a trace, whose tokens are known by identity only.

    A token is `TOKEN_CHARACTERS` of the text. Which ones follows from the token and all before it,
    so prompts that begin alike have texts that begin alike.
    """

    def __init__(self, streams: Streams, request: Row | Request) -> None:
        self._streams, self._index = streams, request.index
        self._length = request.input_length

    @cached_property
    def text(self) -> str:
        stream, length = self._streams[self._index], int(self._length)
        if stream.knows_tokens:
            keys = np.array([key & _BITS for key in stream.content_keys(0, length, 1)], np.uint64)
        else:
            spans = ((first, min(last, length), by) for first, last, by in stream.spans(1))
            # A stream goes on behind its prompt.
            parts = [
                np.uint64((first + by - stream.salt) & _BITS)
                + np.arange(last - first, dtype=np.uint64)
                for first, last, by in spans
                if first < last
            ]
            keys = np.concatenate(parts)
        # The upper bits of a product are the best mixed ones.
        codes = (keys * _MIXER >> np.uint64(40)).astype("<u4")
        codes = _FIRST + codes % _NUMBER
        return str(codes.repeat(TOKEN_CHARACTERS).data, "utf-32-le")

    def keys(self, block_size: int) -> Keys:
        return self._streams[self._index].keys(0, self._length // block_size, block_size)


def asked_of(request: Row | Request, streams: Streams) -> Asked:
    """A request as a router is shown it; `streams`: what the rows of the trace say."""
    content = StreamContent(streams, request)
    return Asked(request.id, request.input_length, content, request.session)


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
        # Behind all places with this very hash, whoever's they are.
        start = bisect(self._ring, (_hash(asked.session or asked.id), len(self.workers)))
        for _, worker in (*self._ring[start:], *self._ring[:start]):
            if worker in free:
                return Choice([worker])
        raise AssertionError("the mean of the loads is below the limit, so some worker is, too")


def _hash(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode())

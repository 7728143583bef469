"""What caches of every size make of a trace: the figures behind `kvsim cache curve`.

The cache is simulated alone, before any time is: one request at a time in the order of the trace,
nothing pinned by running requests. All blocks of a request are looked up, then inserted. The
leading blocks that are present hit. Only an audit (`cache_eviction`) looks at a run.

The hits of a cache that evicts the least recently used block are found at every capacity at once.
A block hits at every capacity above its distance (`kvsim.workload.reuse`). The blocks of a run have
consecutive distances, so each run adds a ramp to the curve, and the curve is a sum of ramps.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import ConfigError
from kvsim.results.statistics import Ints
from kvsim.workload import native
from kvsim.workload.keys import streams
from kvsim.workload.reuse import (
    Chain,
    Counting,
    Found,
    Reuse,
    Walk,
    bounded_chains,
    chains,
    find_reuse,
)
from kvsim.workload.source import Source, look
from kvsim.workload.streams import Span, SpannedStream
from kvsim.workload.trace import HashContent, Row, Trace

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
        # The sum of slope x (capacity - bend) over the bends below each capacity.
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
        self.tokens, self.blocks, self.requests = Ramps(), Ramps(), Ramps()
        """Of prompts that hit; requests are those that find at least one block."""

    def add(self, found: Found) -> None:
        """Count what a request finds."""
        size, most = self._size, found.most_tokens
        for _, first, last, distance in found.runs:
            # Of the block in which `most` ends, only a part hits.
            whole, end = min(last, most // size), min(last, -(-most // size))
            if first < end:
                self.blocks.add(distance, distance + end - first, 1)
            if first < whole:
                self.tokens.add(distance, distance + whole - first, size)
            if first <= whole < last and most > whole * size:
                partial = distance + whole - first
                self.tokens.add(partial, partial + 1, most % size)
        if found.runs and most:
            distance = found.runs[0].distance
            self.requests.add(distance, distance + 1, 1)


def make_curve(found: Iterable[Found], block_size: int) -> Curve:
    """The curve of these requests, which may be a stream (`Walk.step`)."""
    curve = Curve(block_size)
    for each in found:
        curve.add(each)
    return curve


def lru_tokens(reuse: Reuse, capacities: Sequence[int], since: int = 0) -> list[int]:
    """Prompt tokens that hit under LRU, at each capacity in blocks, from request `since` on."""
    return make_curve(reuse.found[since:], reuse.counting.block_size).tokens.values(capacities)


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
    kept = (optimum_blocks(uses, capacity) for capacity in capacities)
    return [kept_tokens(reuse.found[since:], blocks[since:], size) for blocks in kept]


def kept_tokens(found: Sequence[Found], blocks: Sequence[int], size: int) -> int:
    """Prompt tokens that hit where so many leading blocks of each request are in the cache."""
    return sum(min(kept * size, each.most_tokens) for each, kept in zip(found, blocks, strict=True))


def optimum_blocks(uses: NextUses, capacity: int) -> list[int]:
    """The leading blocks that each request finds.

    Blocks that the same request uses next are dropped deepest first, so the cache is one number
    for each of the requests to come. What nobody uses again would go before all of it, and is left
    out.
    """
    resident = [0] * len(uses)
    kept = []
    furthest: list[int] = []
    """Heap of the requests that use something in the cache, negated."""
    total = 0
    for request, following in enumerate(uses):
        kept.append(resident[request])
        total -= resident[request]
        resident[request] = 0
        for user, count in following:
            if not resident[user]:
                heapq.heappush(furthest, -user)
            resident[user] += count
            total += count
        while total > capacity:
            user = -furthest[0]
            dropped = min(resident[user], total - capacity)
            resident[user] -= dropped
            total -= dropped
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
    # Each block that is kept is a span of its own, known by its key alone.
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
    # The constants and shifts of SplitMix64; the upper half is as good as drawn.
    mixed = (keys + np.uint64(seed)) * np.uint64(_MIX[0])
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(_MIX[1])
    chosen: NDArray[np.bool_] = (mixed >> np.uint64(32)) < np.uint64(round(rate * (1 << 32)))
    return chosen


SAME, OTHER, ROOT = "same session", "another session", "shared root"
WHO = (SAME, OTHER, ROOT)
"""Whose content is reused. A shared root is content that at least two sessions had used before. A
request without a session is a session of its own."""


class Group(NamedTuple):
    """Requests that belong together: those of a session, or those that begin alike."""

    name: str
    input_tokens: int
    reuse: Reuse
    """Of its requests."""


def who_reuses(rows: Sequence[Row], reuse: Reuse) -> dict[str, Ramps]:
    """Of each of `WHO`, the tokens that hit by capacity, under LRU."""
    size = reuse.counting.block_size
    ramps = {who: Ramps() for who in WHO}
    shared: list[int] = []
    """Of each request, how many leading blocks at least two sessions have used."""
    for row, (_, most_tokens, runs) in zip(rows, reuse.found, strict=True):
        reached = 0
        for user, first, last, distance in runs:
            same = row.session is not None and row.session == rows[user].session
            reached = max(reached, min(last, shared[user]) if same else last)
            cut = max(first, min(last, shared[user]))
            for who, begin, end in ((ROOT, first, cut), (SAME if same else OTHER, cut, last)):
                end = min(end, most_tokens // size)
                if begin < end:
                    since = distance + begin - first
                    ramps[who].add(since, since + end - begin, size)
        shared.append(reached)
    return ramps


def by_prefix(rows: Sequence[Row], reuse: Reuse) -> list[Group]:
    """Requests by their first block, those with most prompt tokens first. Each group is named after
    its first request."""
    names: list[str | None] = []
    for row, (blocks, _, runs) in zip(rows, reuse.found, strict=True):
        names.append(names[runs[0].user] if runs else row.id if blocks else None)
    return grouped(rows, reuse, names)


def grouped(rows: Sequence[Row], reuse: Reuse, names: Sequence[str | None]) -> list[Group]:
    """Requests by these names, those with most prompt tokens first; None: in no group."""
    members: dict[str, list[tuple[Row, Found]]] = {}
    for name, row, found in zip(names, rows, reuse.found, strict=True):
        if name is not None:
            members.setdefault(name, []).append((row, found))
    groups = []
    for name, each in members.items():
        own = Reuse(reuse.counting, [found for _, found in each], 0)
        groups.append(Group(name, sum(row.input_length for row, _ in each), own))
    return sorted(groups, key=lambda group: -group.input_tokens)


POINTS = 16
"""Capacities of a curve that are chosen for it, evenly over the logarithm."""


class Point(NamedTuple):
    """A cache of one size, in prompt tokens that hit."""

    blocks: int
    lru: int
    optimum: int | None
    """None where rows were not kept for it."""
    lru_blocks: int
    """Blocks of prompts that hit, under LRU."""
    requests: int
    """Requests that find at least one block, under LRU."""

    @property
    def left(self) -> int | None:
        """What LRU leaves to the optimum."""
        return None if self.optimum is None else self.optimum - self.lru


class Asked(NamedTuple):
    """What a study is to show."""

    capacities: Sequence[int] = ()
    """In blocks; the answer in words is about the first one."""
    warm_up: int = 0
    """Requests at the start, which fill the cache and are not measured."""
    block_bytes: int | None = None
    """Of the model, if one is named."""
    points: int = POINTS
    """How many further capacities to show."""


class Study(NamedTuple):
    """The reuse of a trace, and what caches make of it."""

    trace: str
    counting: Counting
    requests: int
    """Requests that are measured; those before only fill the cache."""
    input_tokens: int
    blocks: int
    """Blocks of their prompts, all of which are looked up."""
    distinct: int
    """Different blocks of the whole trace."""
    ceiling: int
    """Prompt tokens that hit in a cache without limit."""
    points: list[Point]
    asked: Asked
    reused: Mapping[str, list[int]] = MappingProxyType({})
    """Of each of `WHO`, tokens by distance: up to the first point, from each one to the next."""
    sessions: Sequence[Group] = ()
    prefixes: Sequence[Group] = ()

    @property
    def chosen(self) -> int | None:
        """The capacity asked about, in blocks; one of the points."""
        return next(iter(self.asked.capacities), None)

    def share(self, tokens: int) -> float:
        """Of the prompt tokens."""
        return tokens / self.input_tokens if self.input_tokens else 0.0

    def point(self, blocks: int) -> Point:
        """The point of a capacity."""
        return next(point for point in self.points if point.blocks == blocks)

    def record(self) -> dict[str, Any]:
        """Everything as plain values, for a JSON file."""
        return {
            "trace": self.trace,
            **self.counting._asdict(),
            "requests": self.requests,
            "input_tokens": self.input_tokens,
            "blocks": self.blocks,
            "distinct_blocks": self.distinct,
            "ceiling_tokens": self.ceiling,
            "block_bytes": self.asked.block_bytes,
            "points": [
                {
                    "capacity_blocks": point.blocks,
                    "lru_tokens": point.lru,
                    "optimum_tokens": point.optimum,
                    "lru_blocks": point.lru_blocks,
                    "lru_requests": point.requests,
                }
                for point in self.points
            ],
            "reused_tokens_by_distance": dict(self.reused),
        }


def study_trace(trace: Trace, counting: Counting, asked: Asked) -> Study:
    """Study a trace at every capacity. Raises `ConfigError` where nothing is left to measure."""
    rows, warm_up = trace.rows, asked.warm_up
    refuse_empty(warm_up, len(rows))
    reuse = find_reuse(rows, streams(trace), counting)
    measured = Reuse(counting, reuse.found[warm_up:], reuse.distinct)
    curve = make_curve(measured.found, counting.block_size)
    sizes = sizes_of(reuse.distinct, asked)
    optimum = optimum_tokens(reuse, sizes, warm_up)
    reused = {
        who: np.diff(ramps.values([0, *sizes])).tolist()
        for who, ramps in who_reuses(rows, reuse).items()
    }
    size, lengths = counting.block_size, [row.input_length for row in rows[warm_up:]]
    return Study(
        trace.path,
        counting,
        len(rows) - warm_up,
        sum(lengths),
        sum(-(-each // size) if counting.partial_blocks else each // size for each in lengths),
        reuse.distinct,
        measured.ceiling_tokens,
        _points(curve, sizes, optimum),
        asked,
        reused,
        grouped(rows, reuse, [row.session for row in rows]),
        by_prefix(rows, reuse),
    )


def _points(curve: Curve, sizes: Sequence[int], optimum: Sequence[int | None]) -> list[Point]:
    lru, blocks, requests = (
        ramps.values(sizes) for ramps in (curve.tokens, curve.blocks, curve.requests)
    )
    return [Point(*each) for each in zip(sizes, lru, optimum, blocks, requests, strict=True)]


def refuse_empty(warm_up: int, requests: int) -> None:
    """Raise `ConfigError` if no request is left after those that warm up."""
    if warm_up >= requests:
        raise ConfigError(f"--warm-up: {warm_up} of {requests} requests; leave some to measure")


def sizes_of(distinct: int, asked: Asked) -> list[int]:
    """Capacities up to one that holds everything, with those asked about and twice as many."""
    most = max(distinct, 1)
    chosen = {round(most ** (1 - step / asked.points / 1.5)) for step in range(asked.points)}
    return sorted({*chosen, *asked.capacities, *(2 * each for each in asked.capacities)} - {0})


_REGION = 1 << 65
"""Distance of the keys of two namespaces, above all ids."""


def open_recording(source: Source) -> tuple[Trace, Iterator[Row]]:
    """The header and the rows of a native trace of chained hash ids, or without content. Raises
    `TraceError` for another file."""
    if "kvsim_trace" in look(source).keys:
        trace, rows = native.stream(source)
        if trace.hash_kind == "prefix":
            return trace, (_known(source, row) for row in rows)
    what = "no native trace of chained hash ids; use kvsim cache curve, or kvsim trace convert"
    raise source.error(what, line=0)


def study_recording(trace: Trace, rows: Iterable[Row], asked: Asked) -> Study:
    """Study what `open_recording` returns under LRU alone, in blocks of the ids. Raises
    `ConfigError` where nothing is left to measure."""
    size = trace.block_size or 1
    # Keys are ids, not positions of tokens: one for each block.
    walk, curve = Walk(1), Curve(size)
    number = requests = blocks = tokens = 0
    for number, (row, chain) in enumerate(_chains(rows, size), 1):
        found = walk.step(chain)
        if number > asked.warm_up:
            requests += 1
            tokens += row.input_length
            blocks += chain.blocks
            curve.add(found)
    if not number:
        raise ConfigError(f"{trace.path}: no requests after the header; add one per line")
    refuse_empty(asked.warm_up, number)
    sizes = sizes_of(walk.distinct, asked)
    [ceiling] = curve.tokens.values([walk.distinct])
    return Study(
        *(trace.path, Counting(size), requests, tokens, blocks, walk.distinct, ceiling),
        _points(curve, sizes, [None] * len(sizes)),
        asked,
    )


def _known(source: Source, row: Row) -> Row:
    if row.content is None or isinstance(row.content, HashContent):
        return row
    raise source.error("only hash ids are counted row by row; use kvsim cache curve")


def _chains(rows: Iterable[Row], size: int) -> Iterator[tuple[Row, Chain]]:
    """Rows with their chains. The key of a block is its id, in the region of its namespace; a row
    without ids has a region of its own."""
    regions: dict[tuple[str | None, str | None], int] = {}
    for row in rows:
        spans: list[Span] = []
        if isinstance(row.content, HashContent):
            first = regions.setdefault((row.scope, row.salt), len(regions)) * _REGION
            place = 0
            for start, count in row.content.prompt:
                spans.append((place, place + count, first + start - place))
                place += count
        else:
            spans.append((0, row.input_length, -(row.index + 1) * _REGION))
        most = (row.input_length - 1) // size * size
        yield row, Chain(spans, row.input_length // size, most)

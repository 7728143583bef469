"""How far eviction is from the optimum: policies on a trace (`kvsim cache policies`), and in a run
(`kvsim cache audit`).

Three numbers bound the hits of a run from above, each below the next:

* *pinned optimum*: whoever sees the future chooses what is evicted, in the schedule of the run.
  What a running request holds stays, and idle content has the room that the run left it, step by
  step.
* *optimum*: the whole pool holds content, in the order in which the run looked prompts up.
* *ceiling*: nothing is ever evicted.

The differences split `evicted_tokens` of the ledger (`kvsim.results.ledger`): lost to the
policy, to pinning and to capacity. With more hits a run would have had another schedule, so the
pinned optimum bounds this schedule only. The optimum does not depend on times.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from sys import maxsize
from typing import Any, NamedTuple

import numpy as np

from kvsim.core import records as kinds
from kvsim.core.contents import Numbering
from kvsim.core.vectors import EMPTY
from kvsim.engines.sglang.tree import RADIX_EVICTION, PagePool, RadixTree, Rank, Text, make_rank
from kvsim.errors import ConfigError
from kvsim.explain.cache_curve import kept_tokens, optimum_tokens
from kvsim.explain.certainty import LEVEL, Estimate, Figure, together
from kvsim.policies.eviction import EVICTIONS, make_eviction
from kvsim.policies.order import MakeOrder, Replacement
from kvsim.workload.keys import streams
from kvsim.workload.reuse import Chain, Counting, Reuse, Walk, bounded_chains, find_reuse
from kvsim.workload.streams import Span, SpannedStream
from kvsim.workload.trace import Row, Trace


class Prompt(NamedTuple):
    """What a request looks up."""

    keys: Sequence[int]
    """Keys of its blocks."""
    spans: Sequence[Span]
    """What identifies them, too (`Chain.spans`)."""
    most_tokens: int
    """Leading tokens that may hit."""
    now_ns: int


def prompts(
    rows: Sequence[Row], streams: Iterable[SpannedStream], counting: Counting
) -> list[Prompt]:
    """The prompts of a trace, block by block. Without recorded times, one per second.

    Raises `ConfigError` if they have more blocks than `kvsim.settings.limits` has room for.
    """
    asked = bounded_chains(rows, streams, counting)
    return [
        Prompt(
            _keys(chain, counting.block_size),
            chain.spans,
            chain.most_tokens,
            number * 1_000_000_000 if row.arrival_ns is None else row.arrival_ns,
        )
        for number, (row, chain) in enumerate(zip(rows, asked, strict=True))
    ]


def _keys(chain: Chain, block_size: int) -> list[int]:
    keys: list[int] = []
    for first, last, offset in chain.spans:
        if first < chain.blocks:
            end = min(last, chain.blocks)
            keys += range(first * block_size + offset, end * block_size + offset, block_size)
    return keys


def replay(
    asked: Iterable[Prompt], make: MakeOrder, capacity: int, block_size: int, *, closed: bool
) -> list[int]:
    """The leading tokens that each prompt finds in a cache of `capacity` blocks.

    A prompt is looked up first. Then its blocks count as used, or are stored, from the last to the
    first. Of a prompt longer than the cache, the beginning is kept.
    """
    cache = _Cache(make, capacity, block_size, closed)
    return [cache.serve(prompt) for prompt in asked]


class _Cache:
    """Blocks, all with content, numbered as they are first needed."""

    def __init__(self, make: MakeOrder, capacity: int, block_size: int, closed: bool) -> None:
        self._order = make(0, capacity)
        self._size = block_size
        self._capacity = capacity
        self._blocks: dict[int, int] = {}
        """Key → block."""
        self._keys: list[int] = []
        """By block."""
        self._depths: list[int] = []
        """By block, the depth of its content."""
        self._closed = closed and isinstance(self._order, Replacement)
        self._parents: dict[int, int] = {}
        """Key → the key before it."""
        self._children: dict[int, int] = {}
        """Key → number of keys here that continue it; 0 is left out."""

    def serve(self, prompt: Prompt) -> int:
        """Returns the number of leading tokens that hit, and takes in the prompt."""
        blocks, keys = self._blocks, prompt.keys[: self._capacity]
        here = next((n for n, key in enumerate(keys) if key not in blocks), len(keys))
        held = [blocks[key] for key in keys[:here]]
        if self._closed:
            self._take_closed(keys, held, prompt.now_ns)
        else:
            for depth in reversed(range(len(keys))):
                self._touch(keys[depth], depth, prompt.now_ns)
        return min(here * self._size, prompt.most_tokens)

    def _touch(self, key: int, depth: int, now_ns: int) -> None:
        """One block is used, or stored in the place of another one."""
        block = self._blocks.get(key)
        if block is None:
            block = self._stored(key, depth, now_ns)
        else:
            self._order.hit(block)
        self._order.put(block, key, (depth + 1) * self._size, now_ns)

    def _take_closed(self, keys: Sequence[int], held: list[int], now_ns: int) -> None:
        """Uses or stores all blocks; the ends among them can be evicted afterwards."""
        for block in reversed(held):
            self._order.hit(block)
        missing = range(len(held), len(keys))
        for depth in missing:
            if depth:
                self._parents[keys[depth]] = keys[depth - 1]
                self._children[keys[depth - 1]] = self._children.get(keys[depth - 1], 0) + 1
        for depth in reversed(missing):
            self._stored(keys[depth], depth, now_ns)
        # Only what nothing here continues can be evicted.
        if keys and keys[-1] not in self._children:
            self._order.put(self._blocks[keys[-1]], keys[-1], len(keys) * self._size, now_ns)

    def _stored(self, key: int, depth: int, now_ns: int) -> int:
        order = self._order
        if isinstance(order, Replacement):
            order.missed(key)
        if len(self._blocks) < self._capacity:
            block = len(self._keys)
            self._keys.append(key)
            self._depths.append(depth)
        else:
            block = order.pop()
            self._evicted(self._keys[block], self._depths[block], now_ns)
            self._keys[block], self._depths[block] = key, depth
        self._blocks[key] = block
        order.store(block, key)
        return block

    def _evicted(self, key: int, depth: int, now_ns: int) -> None:
        del self._blocks[key]
        if not self._closed:
            return
        parent = self._parents.pop(key, None)
        if parent is None:
            return
        self._children[parent] -= 1
        # Its last continuation is gone, so it can be evicted now.
        if not self._children[parent]:
            del self._children[parent]
            self._order.put(self._blocks[parent], parent, depth * self._size, now_ns)


def replay_radix(asked: Iterable[Prompt], rank: Rank, capacity: int, block_size: int) -> list[int]:
    """The leading tokens that each prompt finds in SGLang's radix tree. It evicts whole nodes."""
    pool, numbering = PagePool(capacity, 1), Numbering(block_size)
    tree = RadixTree(pool, rank)
    found = []
    for prompt in asked:
        text = Text(block_size, numbering.runs(prompt.spans, maxsize))
        number = min(len(prompt.keys), capacity)
        here, node = tree.match(text, number), tree.end
        found.append(min(here * block_size, prompt.most_tokens))
        # What was found must not make room for the rest.
        tree.lock(node)
        tree.make_room(number - here)
        pages = pool.take(EMPTY, number - here)
        tree.insert(node, text, number, pages, here, 0, 0)
        tree.unlock(node)
    return found


RADIX = "sglang-"
"""Prefix of the names of SGLang's policies, which evict whole nodes of its tree."""
POLICIES = (
    *(name for name in EVICTIONS if name != "belady"),
    *(RADIX + name for name in RADIX_EVICTION),
)
"""Policies that a trace can be replayed through. The oracle's place is taken by the optimum."""


class Ranked(NamedTuple):
    """A policy at one capacity, in prompt tokens that hit."""

    name: str
    capacity: int
    blocks: int | None
    """Tokens where single blocks are evicted; None for a policy that evicts whole nodes."""
    closed: int
    """Tokens where only ends of prompts are evicted."""
    gain: Estimate | None
    """Of `closed` over `lru`, per prompt token; None where the trace is too short to tell."""


class Ranking(NamedTuple):
    """Policies at some capacities."""

    trace: str
    block_size: int
    input_tokens: int
    rows: list[Ranked]
    optimum: dict[int, int]
    """By capacity."""
    ceiling: int

    def record(self) -> dict[str, Any]:
        """Everything as plain values, for a JSON file."""
        return {
            "trace": self.trace,
            "block_size": self.block_size,
            "input_tokens": self.input_tokens,
            "ceiling_tokens": self.ceiling,
            "optimum_tokens": self.optimum,
            "policies": [
                {
                    "policy": row.name,
                    "capacity_blocks": row.capacity,
                    "single_blocks_tokens": row.blocks,
                    "closed_tokens": row.closed,
                    "gain_over_lru": None if row.gain is None else row.gain.difference,
                    "interval": None if row.gain is None else row.gain.interval(LEVEL),
                }
                for row in self.rows
            ],
        }


def rank_policies(
    trace: Trace,
    names: Sequence[str],
    capacities: Sequence[int],
    counting: Counting,
    done: Callable[[int], None] = lambda number: None,
) -> Ranking:
    """Replay a trace through policies: names of `POLICIES`, or a user's `package.module:name`.

    `done` is called with 1 whenever a policy has been replayed with a capacity.
    Raises `ConfigError` for an unknown name.
    """
    identities = streams(trace)
    asked = prompts(trace.rows, identities, counting)
    reuse = find_reuse(trace.rows, identities, counting)
    size = counting.block_size
    lengths = np.array([row.input_length for row in trace.rows])
    optimum = dict(zip(capacities, optimum_tokens(reuse, capacities), strict=True))
    rows: list[Ranked] = []
    for capacity in capacities:
        base = _replayed("lru", asked, capacity, size, closed=True)
        for name in names:
            closed = base if name == "lru" else _replayed(name, asked, capacity, size, closed=True)
            single = None
            if not name.startswith(RADIX):
                single = sum(_replayed(name, asked, capacity, size, closed=False))
            gain = _gain(base, closed, lengths)
            rows.append(Ranked(name, capacity, single, sum(closed), gain))
            done(1)
    total = int(lengths.sum())
    return Ranking(trace.path, size, total, rows, optimum, reuse.ceiling_tokens)


def _replayed(
    name: str, asked: Sequence[Prompt], capacity: int, block_size: int, *, closed: bool
) -> list[int]:
    """What `replay` returns for the policy of this name; those of SGLang are always `closed`."""
    if name == "belady":
        raise ConfigError("--policy: belady sees the future; the optimum is in every table")
    if name.startswith(RADIX):
        rank = make_rank(name.removeprefix(RADIX), {})
        return replay_radix(asked, rank, capacity, block_size)
    make = make_eviction(name, block_size=block_size, num_gpu_blocks=capacity, seed=0)
    return replay(asked, make, capacity, block_size, closed=closed)


def _gain(base: Sequence[int], found: Sequence[int], lengths: Any) -> Estimate | None:
    """Hits per prompt token over those of `base`, from stretches of the trace."""
    scale = 1 / lengths.mean()
    figure = Figure(np.array(base) * scale, np.array(found) * scale, lambda v: v.mean(axis=-1))
    return together({"hits": figure}).get("hits")


_ENDS = (kinds.PREEMPTED, kinds.SWAPPED_OUT)
_BEGINS = (kinds.SCHEDULED, kinds.SWAPPED_IN, kinds.READMITTED)
_NEVER_NS = 1 << 62


class Audit(NamedTuple):
    """Prompt tokens of a run's first admissions. All but `prompt_tokens` add up to it."""

    prompt_tokens: int
    hit: int
    """Found in the cache."""
    policy: int
    """Evicted, though another choice could have kept them in this schedule."""
    pinning: int
    """Evicted, because running requests held the room that the optimum would have used."""
    capacity: int
    """Evicted, and even the optimum would have had no room for them."""
    timing: int
    """An earlier request was computing them at that moment."""
    granularity: int
    """Known, but not as a whole block that may hit, the last token included."""
    other_salt: int
    """Known under another cache salt only."""
    cold: int
    """Never computed before."""
    unreached: int
    """Not computed by the end of the run."""

    @property
    def pinned_optimum(self) -> int:
        """Most tokens that could have hit in the schedule of the run."""
        return self.hit + self.policy

    @property
    def optimum(self) -> int:
        """Most tokens that could have hit with this pool and this order of look-ups."""
        return self.pinned_optimum + self.pinning

    @property
    def ceiling(self) -> int:
        """Tokens that would have hit in a pool without limit."""
        return self.optimum + self.capacity


class Recorded(NamedTuple):
    """A run with prefix caching: what `kvsim.report.files` reads, and what its prompts say."""

    summary: Mapping[str, Any]
    requests: Mapping[str, Any]
    steps: Mapping[str, Any]
    transitions: Mapping[str, Any]
    streams: Sequence[SpannedStream]
    """Of its requests (`kvsim.workload.keys.streams`)."""


class Visit(NamedTuple):
    """A time during which a request holds blocks."""

    begin_ns: int
    arrival_ns: int
    place: int
    """Of the request."""
    end_ns: int
    first: bool
    """Whether it is the first one, whose hits count."""


def audit(run: Recorded) -> Audit:
    """Split the prompt tokens of a run."""
    requests = run.requests
    admitted = np.asarray(requests["first_scheduled_ns"]) >= 0

    def total(name: str) -> int:
        return int(np.asarray(requests[name])[admitted].sum())

    hit, evicted = total("num_cached_tokens"), total("evicted_tokens")
    pinned, most = bounds(run)
    # Of requests admitted in one step the order is not known, so a bound can miss a hit among them.
    optimum = max(hit, min(most, hit + evicted))
    pinned_optimum = max(hit, min(pinned, optimum))
    return Audit(
        total("input_length"),
        hit,
        pinned_optimum - hit,
        optimum - pinned_optimum,
        hit + evicted - optimum,
        total("concurrent_tokens"),
        total("partial_block_tokens") + total("last_block_tokens"),
        total("other_salt_tokens"),
        total("cold_tokens"),
        total("unreached_tokens"),
    )


def bounds(run: Recorded) -> tuple[int, int]:
    """What the hits of a run cannot exceed, in prompt tokens: the pinned optimum, the optimum."""
    meta, steps = run.summary["meta"], run.steps
    size, pool = meta["block_size"], meta["num_gpu_blocks"]
    visits = sorted(_visits(run))
    walk = Walk(size)
    found = [walk.step(chain) for chain in _chains(visits, run, size)]
    reuse = Reuse(Counting(size), found, walk.distinct)
    free = pool - np.asarray(steps["used_blocks"])
    room = list(zip(np.asarray(steps["start_ns"]).tolist(), free.tolist(), strict=True))
    early = meta["steps_in_flight"] > 1
    pinned = kept_tokens(found, _pinned_blocks(visits, reuse, room, early), size)
    return pinned, optimum_tokens(reuse, [pool])[0]


def _visits(run: Recorded) -> Iterator[Visit]:
    """When each request held blocks. All times but that of its end are starts of steps."""
    requests, transitions = run.requests, run.transitions
    changes: dict[int, list[tuple[int, int]]] = {}
    names = ("request", "kind", "time_ns")
    for place, kind, time_ns in zip(*(transitions[name].tolist() for name in names), strict=True):
        changes.setdefault(place, []).append((kind, time_ns))
    columns = (np.asarray(requests[n]) for n in ("first_scheduled_ns", "arrival_ns", "finish_ns"))
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for place, (begin_ns, arrival_ns, finish_ns) in enumerate(rows):
        holds, first = begin_ns >= 0, True
        for kind, time_ns in changes.get(place, ()):
            if kind in _BEGINS:
                holds, begin_ns = True, time_ns
            elif kind in _ENDS:
                yield Visit(begin_ns, arrival_ns, place, time_ns, first)
                holds = first = False
        if holds:
            end_ns = finish_ns if finish_ns >= 0 else _NEVER_NS
            yield Visit(begin_ns, arrival_ns, place, end_ns, first)


def _chains(visits: Sequence[Visit], run: Recorded, size: int) -> Iterator[Chain]:
    """What each visit leaves behind, and the tokens that a cache without limit would have found."""
    requests = run.requests
    lengths = np.asarray(requests["input_length"])
    computed = lengths + np.asarray(requests["output_tokens"]) // np.asarray(requests["n"]) - 1
    hits, evicted = (
        np.asarray(requests["num_cached_tokens"]),
        np.asarray(requests["evicted_tokens"]),
    )
    known = np.where(evicted > 0, hits + np.asarray(requests["last_block_tokens"]) + evicted, hits)
    for visit in visits:
        place = visit.place
        stream = run.streams[place]
        blocks = int(min(max(computed[place], hits[place]), stream.named_tokens)) // size
        yield Chain(stream.spans(size), blocks, int(known[place]) if visit.first else 0)


_RELEASE, _VISIT, _ROOM = range(3)
"""Order of events at one instant."""


def _pinned_blocks(
    visits: Sequence[Visit], reuse: Reuse, room: Sequence[tuple[int, int]], early: bool
) -> list[int]:
    """The leading blocks that each visit could have found, if idle content had been evicted by its
    next use.

    A block is idle from the moment when its last holder releases it. Until then it takes no room
    of others. `room`: when each step began, and how many blocks nobody held in it. `early`: whether
    steps are composed before the previous one ends. Then what is released when a step begins still
    counted as held.
    """
    idle = [0] * len(visits)
    """Idle blocks by the visit that uses them next."""
    kept = [0] * len(visits)
    furthest: list[int] = []
    total = now_ns = released = 0
    releases = [
        (until_ns, _RELEASE, user, count) for user, count, until_ns in _waits(visits, reuse, kept)
    ]
    begins = ((visit.begin_ns, _VISIT, number, 0) for number, visit in enumerate(visits))
    spaces = ((start_ns, _ROOM, free, 0) for start_ns, free in room)
    for time_ns, kind, value, count in heapq.merge(sorted(releases), begins, spaces):
        # Only what is released as this step begins still counted as held when it was composed.
        if time_ns > now_ns:
            now_ns, released = time_ns, 0
        if kind == _RELEASE:
            if not idle[value]:
                heapq.heappush(furthest, -value)
            idle[value] += count
            total += count
            released += count * early
        elif kind == _VISIT:
            total -= idle[value]
            idle[value] = 0
        while kind == _ROOM and total > value + released:
            user = -furthest[0]
            dropped = min(idle[user], total - value - released)
            idle[user] -= dropped
            kept[user] -= dropped
            total -= dropped
            if not idle[user]:
                heapq.heappop(furthest)
    return kept


def _waits(
    visits: Sequence[Visit], reuse: Reuse, kept: list[int]
) -> Iterator[tuple[int, int, int]]:
    """Idle content: who uses it next, the number of blocks, and since when it is idle.

    Fills `kept` with the blocks that each visit finds if nothing is evicted.
    """
    size = reuse.counting.block_size
    held: list[list[tuple[int, int]]] = []
    """Of each visit, until when somebody holds its blocks: (block after the last one, time). The
    beginning of a prompt is held longest."""
    for number, (visit, found) in enumerate(zip(visits, reuse.found, strict=True)):
        # The last block counts, of which only a part may hit.
        most = -(-found.most_tokens // size)
        mine: list[tuple[int, int]] = []
        for user, first, last, _ in found.runs:
            kept[number] = max(kept[number], min(last, most))
            begin = first
            for upto, until_ns in held[user]:
                end = min(upto, last)
                if end <= begin:
                    continue
                # Otherwise somebody still holds them when this visit begins: they were never idle.
                if begin < min(end, most) and until_ns <= visit.begin_ns:
                    yield number, min(end, most) - begin, until_ns
                if until_ns > visit.end_ns:
                    mine.append((end, until_ns))
                begin = end
        if not mine or mine[-1][0] < found.blocks:
            mine.append((found.blocks, visit.end_ns))
        held.append(mine)

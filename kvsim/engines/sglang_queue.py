"""The order in which SGLang 0.5.23 considers waiting requests (`managers/schedule_policy.py`).

*Unaware* policies ignore the radix tree. *Aware* ones first look up every waiting request, which
counts as a use of what they find. If several requests begin alike and the beginning is not cached,
all but the first are *late*: they can hit what the first one computes.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from sys import maxsize
from typing import Any, NamedTuple

from kvsim.engine.request import Request, Span, Stream
from kvsim.engines.sglang_blocks import SglangTables
from kvsim.engines.sglang_budget import Environment
from kvsim.engines.sglang_radix import Node, Place

MANY = 128
"""Number of waiting requests above which `lpm` and `hrrn` fall back to `fcfs`, and of which `fcfs`
looks up most."""
REFRESH_CALLS = 32
"""Number of calls after which an unaware policy looks up the waiting requests once."""


_ZEROS = -(1 << 72)
"""Keys of prompts that replace a too long one are near this; those of a trace are not."""


class StandIn(Stream):
    """The prompt that replaces a too long one: token 0, and outputs that nobody shares."""

    def __init__(self, index: int) -> None:
        self._index = index

    def keys(self, first: int, last: int, block_size: int) -> list[int]:
        return [
            offset + place * block_size
            for start, end, offset in self.spans(block_size)
            for place in range(max(first, start), min(last, end))
        ]

    def spans(self, block_size: int) -> list[Span]:
        """Returns its pages by the arithmetic of their keys."""
        own = _ZEROS - (self._index + 1 << 30)
        return [(0, 1, _ZEROS), (1, maxsize, own)] if block_size == 1 else [(0, maxsize, own)]

    def contents(self, first: int, last: int, block_size: int) -> list[int]:
        return self.keys(first, last, block_size)

    def sample(self, index: int) -> Stream:
        return self


class Standing:
    """What the engine records about a request, beside its pages."""

    __slots__ = (
        "considered_tokens",
        "end",
        "entry",
        "ignore_eos",
        "limit_tokens",
        "middle_chunks",
        "node",
        "place",
        "prefix",
        "rank",
        "retracted",
        "served",
        "since_tokens",
    )

    def __init__(self, limit_tokens: int, rank: int, ignore_eos: bool, served: bool) -> None:
        self.limit_tokens = limit_tokens
        """The most tokens it may generate: what its client announced, as far as there is room."""
        self.rank = rank
        """Its priority; smaller values go first."""
        self.ignore_eos = ignore_eos
        self.served = served
        """False if its prompt is too long. One token is then computed in its place."""
        self.entry = 0
        """Number of its last entry into the queue."""
        self.since_tokens = 0
        """Number of tokens that the engine had computed at that time, by its own count."""
        self.considered_tokens = 0
        """Number of its tokens when an admission was last tried."""
        self.prefix = 0
        """Number of tokens with KV before the chunk in flight."""
        self.end = 0
        """Number of tokens up to which its last chunk goes."""
        self.middle_chunks = 0
        """Number of chunks in flight that are not the last one of its prompt."""
        self.node: Node | None = None
        """The node where its last lookup ended."""
        self.place: Place | None = None
        """Where it left the tree when it was last refreshed, if it waits since then."""
        self.retracted = False
        """Whether it lost its pages since its last prefill. Results in flight are then dropped."""


class Look(NamedTuple):
    """A waiting request and the result of its lookup."""

    matched_tokens: int
    """Number of its tokens, without the last one, that are cached."""
    node: Node
    late: bool
    work_tokens: int
    """Tokens that remain to be computed, at least 1."""


class Engine(NamedTuple):
    """What an order may know about the engine."""

    blocks: SglangTables
    running: list[Request]
    computed_tokens: int
    """Number of tokens that the engine has computed, by its own count."""
    standings: Mapping[Request, Standing]


Unaware = Callable[[Engine, Request], Any]
Aware = Callable[[Engine, Request, Look], Any]


def by_limit(engine: Engine, request: Request) -> Any:
    """`lof`: longest output first."""
    return -engine.standings[request].limit_tokens


def by_routing_key(engine: Engine) -> Unaware | None:
    """`routing-key`: the key with the most running requests first, then the others."""
    running = Counter(each.session for each in engine.running if each.session)
    if not running:
        return None

    def order(engine: Engine, request: Request) -> Any:
        key = request.session or ""
        return (0, -running[key], key) if running[key] else (1, 0, key)

    return order


def longest_prefix(engine: Engine, request: Request, look: Look) -> Any:
    """`lpm`: most cached tokens first."""
    return look.late, 0 if look.late else -look.matched_tokens


def response_ratio(engine: Engine, request: Request, look: Look) -> Any:
    """`hrrn`: highest ratio of waiting to work first. The wait is counted in tokens."""
    if look.late:
        return math.inf, request.id
    uncached = max(0, request.input_length - look.matched_tokens)
    if not uncached:
        return -math.inf, request.id
    waited = max(0, engine.computed_tokens - engine.standings[request].since_tokens)
    return -waited / uncached, request.id


def least_work(engine: Engine, request: Request, look: Look) -> Any:
    """`shortest-prefill-first`: least remaining work first."""
    return look.late, look.work_tokens, engine.standings[request].entry


AWARE: dict[str, Aware] = {
    "lpm": longest_prefix,
    "hrrn": response_ratio,
    "shortest-prefill-first": least_work,
}
ORDERS = ("fcfs", "lof", "routing-key", "dfs-weight", *AWARE)
"""Values of `schedule_policy`."""


class QueueOrder:
    """Sorts the waiting queue before each prefill."""

    def __init__(self, policy: str, environment: Environment, priorities: bool) -> None:
        """`priorities` says whether priorities come first. Raises `ValueError` for an unknown
        policy."""
        if policy not in ORDERS:
            raise ValueError(
                f"schedule_policy: unknown {policy!r}; choose from {', '.join(ORDERS)}"
            )
        if priorities and policy not in ("fcfs", "lof"):
            raise ValueError(
                f"enable_priority_scheduling: {policy} ignores priorities; use fcfs or lof"
            )
        self.policy = policy
        self._priorities = priorities
        self._check = int(environment.in_batch_check_threshold)
        self._late = int(environment.in_batch_deprioritize_threshold)
        self._calls = 0
        self.looks: dict[Request, Look] = {}
        """The results of the last call's lookups."""

    def sort(self, waiting: deque[Request], engine: Engine) -> deque[Request]:
        """Returns the queue in its new order."""
        policy, aware = self.policy, engine.blocks.needs_keys
        if policy in ("lpm", "hrrn") and len(waiting) > MANY:
            policy = "fcfs"
        if policy in AWARE or policy == "dfs-weight":
            if not aware:
                return waiting
            self.looks = dict(self._look_up(waiting, engine))
            if policy == "dfs-weight":
                return deque(_depth_first(engine.blocks.gpu.tree.root, self.looks))
            key = AWARE[policy]
            return deque(sorted(waiting, key=lambda each: key(engine, each, self.looks[each])))
        if engine.blocks.refreshes and waiting:
            if self._calls % REFRESH_CALLS == 0:
                _refresh(waiting, engine)
            self._calls += 1
        return self._sort_unaware(policy, waiting, engine)

    def _sort_unaware(self, policy: str, waiting: deque[Request], engine: Engine) -> deque[Request]:
        standings, first = engine.standings, self._priorities
        if policy == "fcfs":
            if not first:
                return waiting
            return deque(
                sorted(waiting, key=lambda each: (standings[each].rank, standings[each].entry))
            )
        if policy == "lof":
            rank = {each: standings[each].rank if first else 0 for each in waiting}
            return deque(sorted(waiting, key=lambda each: (rank[each], by_limit(engine, each))))
        order = by_routing_key(engine)
        return waiting if order is None else deque(sorted(waiting, key=lambda r: order(engine, r)))

    def _look_up(
        self, waiting: Iterable[Request], engine: Engine
    ) -> Iterable[tuple[Request, Look]]:
        beginnings: set[int] = set()
        """Keys of the first tokens of the requests that are not late."""
        for request in waiting:
            sequence, standing = request.sequences[0], engine.standings[request]
            cached, node = engine.blocks.look_up(sequence, standing.node)
            standing.node = node
            matched = min(cached, sequence.length - 1)
            late = False
            if cached <= self._check:
                late = self._late <= 0
                if not late and sequence.length >= self._late:
                    stream = sequence.identities(self._late)
                    assert stream is not None
                    (key,) = stream.keys(self._late - 1, self._late, 1)
                    late = key in beginnings
                    beginnings.add(key)
            yield request, Look(matched, node, late, max(1, sequence.length - matched))


def _refresh(waiting: deque[Request], engine: Engine) -> None:
    """Looks up the first waiting requests, the first one last. What they find counts as used.

    Most find what they found the last time. Of those that find the same, only the last matters.
    """
    blocks, tree = engine.blocks, engine.blocks.gpu.tree
    used: dict[Node, None] = {}
    for request in reversed(list(islice(waiting, MANY))):
        standing = engine.standings[request]
        place = standing.place
        if place is None or not place.holds():
            for node in used:
                tree.touch(node)
            used.clear()
            place = standing.place = blocks.locate(request.sequences[0], standing.node)
            standing.node = place.node
        used.pop(place.node, None)
        used[place.node] = None
    for node in used:
        tree.touch(node)


def _depth_first(root: Node, looks: dict[Request, Look]) -> list[Request]:
    """`dfs-weight`: subtrees with more waiting requests first; the requests of a node come after
    them."""
    own: dict[Node, list[Request]] = {}
    weights: Counter[Node] = Counter()
    for request, look in looks.items():
        own.setdefault(look.node, []).append(request)
        node: Node | None = look.node
        while node is not None:
            weights[node] += 1
            node = node.parent
    found: list[Request] = []
    stack: list[tuple[Node, bool]] = [(root, False)]
    while stack:
        node, below = stack.pop()
        if below:
            found += own.get(node, ())
            continue
        stack.append((node, True))
        children = [child for child in node.children.values() if weights[child]]
        children.sort(key=lambda child: -weights[child])
        stack += [(child, False) for child in reversed(children)]
    return found

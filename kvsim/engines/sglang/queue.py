"""The order in which SGLang 0.5.23 considers waiting requests (`managers/schedule_policy.py`).

*Unaware* policies ignore the radix tree. *Aware* ones first look up every waiting request, which
counts as a use of what they find. If several requests begin alike and the beginning is not cached,
all but the first are *late*: they can hit what the first one computes.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from itertools import islice
from sys import maxsize
from typing import Any, Final

from mypy_extensions import i64

from kvsim.core.request import Request
from kvsim.engines.sglang.manager import Group, SglangTables, Standing
from kvsim.engines.sglang.server import Environment
from kvsim.engines.sglang.tree import Node, RadixTree

MANY: Final = 128
"""Number of waiting requests above which `lpm` and `hrrn` fall back to `fcfs`, and of which `fcfs`
looks up most."""
REFRESH_CALLS: Final = 32
"""Number of calls after which an unaware policy looks up the waiting requests once."""
UNAWARE: Final = ("fcfs", "lof", "routing-key")
ORDERS: Final = (*UNAWARE, "dfs-weight", "lpm", "hrrn", "shortest-prefill-first")
"""Values of `schedule_policy`."""


class QueueOrder:
    """Sorts the waiting queue before each prefill."""

    policy: str
    _priorities: bool
    _most: i64
    """Number of waiting requests up to which the order depends on what they find in the tree."""
    _sorts: bool
    """Whether an unaware policy has another order than that of the queue."""
    _check: i64
    _late: i64
    _calls: i64

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
        self.policy, self._priorities = policy, priorities
        aware = MANY if policy in ("lpm", "hrrn") else maxsize
        self._most = -1 if policy in UNAWARE else aware
        self._sorts = priorities or policy in ("lof", "routing-key")
        self._check = int(environment.in_batch_check_threshold)
        self._late = int(environment.in_batch_deprioritize_threshold)
        self._calls = 0

    def sort(
        self,
        waiting: deque[Request],
        blocks: SglangTables,
        running: Group,
        computed_tokens: i64,
    ) -> deque[Request]:
        """Returns the queue in its new order. `computed_tokens`: those of the engine so far."""
        if len(waiting) <= self._most:
            return self._sort_aware(waiting, blocks, computed_tokens)
        # `lpm` and `hrrn` come here, too, while too many wait.
        if blocks.refreshes and waiting:
            if self._calls % REFRESH_CALLS == 0:
                _refresh(waiting, blocks)
            self._calls += 1
        return self._sort_unaware(waiting, running) if self._sorts else waiting

    def _sort_aware(
        self, waiting: deque[Request], blocks: SglangTables, computed_tokens: i64
    ) -> deque[Request]:
        if not blocks.needs_keys:
            return waiting
        self._look_up(waiting, blocks)
        if self.policy == "dfs-weight":
            return _depth_first(blocks.tree, waiting)

        def order(each: Request) -> tuple[Any, ...]:
            standing: Standing = each.standing
            if self.policy == "lpm":
                return standing.late, 0 if standing.late else -standing.matched
            if self.policy == "hrrn":
                return _response(each, computed_tokens), each.id
            return standing.late, standing.work, standing.entry

        return deque(sorted(waiting, key=order))

    def _sort_unaware(self, waiting: deque[Request], running: Group) -> deque[Request]:
        keys: Counter[str] = Counter()
        if self.policy == "routing-key":
            keys.update([each.session for each in running.members if each.session])
            if not keys:
                return waiting

        def order(each: Request) -> tuple[Any, ...]:
            standing: Standing = each.standing
            if self.policy == "routing-key":
                key = each.session or ""
                return (0, -keys[key], key) if keys[key] else (1, 0, key)
            rank: i64 = standing.rank if self._priorities else 0
            return rank, standing.entry if self.policy == "fcfs" else -standing.limit

        return deque(sorted(waiting, key=order))

    def _look_up(self, waiting: Iterable[Request], blocks: SglangTables) -> None:
        """Looks up all waiting requests."""
        beginnings: set[int] = set()
        """Keys of the first tokens of the requests that are not late."""
        for request in waiting:
            standing: Standing = request.standing
            cached: i64 = blocks.look_up(request, request.length)
            standing.matched = min(cached, request.length - 1)
            standing.work = max(1, request.length - standing.matched)
            standing.late = False
            if cached <= self._check:
                standing.late = self._late <= 0
                if not standing.late and request.length >= self._late:
                    # The key of a token tells all before it: where it is equal, so many tokens are.
                    key = int(request._stream.keys(self._late - 1, self._late, 1)[0])
                    standing.late = key in beginnings
                    beginnings.add(key)


def _refresh(waiting: Iterable[Request], blocks: SglangTables) -> None:
    """Looks up the first waiting requests, the first one last. What they find counts as used."""
    for request in reversed(list(islice(waiting, MANY))):
        blocks.look_up(request, request.length)


def _response(request: Request, computed_tokens: i64) -> float:
    """Highest ratio of waiting to work first. The wait is counted in tokens."""
    standing: Standing = request.standing
    if standing.late:
        return math.inf
    uncached: i64 = max(0, request.input_length - standing.matched)
    if uncached == 0:
        return -math.inf
    return -(int(max(0, computed_tokens - standing.since)) / int(uncached))


def _depth_first(tree: RadixTree, waiting: Iterable[Request]) -> deque[Request]:
    """`dfs-weight`: subtrees with more waiting requests first; the requests of a node come after
    them."""
    own: dict[Node, list[Request]] = {}
    weights: Counter[Node] = Counter()
    for request in waiting:
        node: Node | None = request.standing.node
        own.setdefault(request.standing.node, []).append(request)
        while node is not None:
            weights[node] += 1
            node = node.parent
    children: dict[Node | None, list[Node]] = {}
    for each in tree.nodes.values():
        if weights[each]:
            children.setdefault(each.parent, []).append(each)
    found: deque[Request] = deque()
    stack: list[tuple[Node, bool]] = [(tree.root, False)]
    while stack:
        each, below = stack.pop()
        if below:
            found += own.get(each, [])
            continue
        # It comes again below its children, with its own requests.
        stack.append((each, True))
        branches = sorted(children.get(each, []), key=lambda child: -weights[child])
        # Reversed, so that the heaviest one is on top.
        stack += [(child, False) for child in reversed(branches)]
    return found

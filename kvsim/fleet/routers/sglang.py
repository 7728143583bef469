"""The SGLang router (0.3.2, `sgl-model-gateway/src/policies`)."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count

from kvsim.fleet.routers.router import Asked, Choice, InFlight, interval_ns


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
            # Whoever was named holds it no more: any holder is drawn, or anybody if there is none.
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


STAMPED_EVERY = 8
"""A search refreshes its node's stamp only at a multiple of this."""


@dataclass(slots=True, eq=False)
class Node:
    """Characters that follow those of the parent, and who holds them."""

    text: str
    parent: Node | None
    named: int | None
    holders: dict[int, int] = field(default_factory=dict)
    """Worker → stamp: when it was last sent a prompt that ends here; 0: none did."""
    children: dict[str, Node] = field(default_factory=dict)
    """First character → child."""

    def held_below(self, worker: int) -> bool:
        """Whether the worker holds a child, too."""
        return any(worker in child.holders for child in self.children.values())


class Tree:
    """The radix tree of all prompts that were routed."""

    def __init__(self, workers: int) -> None:
        self.root = Node("", None, None)
        self.held = [0] * workers
        """Characters that each worker holds."""
        # Fits all recorded runs in which the workers registered one by one.
        self.stamp = workers * (workers + 1) // 2

    def insert(self, text: str, worker: int) -> None:
        """The worker is sent this text."""
        node, at = self.root, 0
        while at < len(text):
            child = node.children.get(text[at])
            if child is None:
                child = node.children[text[at]] = Node(text[at:], node, worker)
                shared = len(child.text)
            else:
                shared = _shared(child.text, text, at)
                if shared < len(child.text):
                    child = self._split(child, shared)
            if worker not in child.holders:
                # Only where a text ends is the stamp set.
                child.holders[worker] = 0
                self.held[worker] += len(child.text)
            node, at = child, at + shared
        if node is not self.root:
            node.holders[worker] = self.stamp
        self.stamp += 1

    def search(self, text: str) -> tuple[int, Node]:
        """Returns how many characters match, and the node in which the match ends."""
        node, at = [(self.root, 0), *self._along(text)][-1]
        if node.named in node.holders and self.stamp % STAMPED_EVERY == 0:
            node.holders[node.named] = self.stamp
        self.stamp += 1
        return at, node

    def held_of(self, text: str) -> list[int]:
        """Returns how many leading characters each worker was sent and still holds."""
        held = [0] * len(self.held)
        for node, at in self._along(text):
            for worker in node.holders:
                held[worker] = at
        return held

    def _along(self, text: str) -> Iterator[tuple[Node, int]]:
        """The nodes that match a text, each with the characters matched so far; of the last one, a
        part may."""
        node, at = self.root, 0
        while at < len(text) and (child := node.children.get(text[at])) is not None:
            shared = _shared(child.text, text, at)
            node, at = child, at + shared
            yield node, at
            if shared < len(child.text):
                break

    def evict(self, most: int) -> None:
        """Takes leaves from each worker that holds more than `most` characters, the least recent
        first, until it is at the limit."""
        for worker, held in enumerate(self.held):
            if held > most:
                self._evict(worker, most)

    def _evict(self, worker: int, most: int) -> None:
        # Settles ties, as nodes do not compare.
        order = count()
        leaves = [
            (node.holders[worker], next(order), node)
            for node in self._nodes()
            if worker in node.holders and not node.held_below(worker)
        ]
        heapify(leaves)
        while self.held[worker] > most and leaves:
            _, _, node = heappop(leaves)
            del node.holders[worker]
            self.held[worker] -= len(node.text)
            parent = node.parent
            if not node.holders and not node.children and parent is not None:
                del parent.children[node.text[0]]
            if parent is not None and worker in parent.holders and not parent.held_below(worker):
                heappush(leaves, (parent.holders[worker], next(order), parent))

    def _split(self, node: Node, at: int) -> Node:
        """Cuts a node; returns the upper part, held and named as the whole was."""
        assert node.parent is not None, "the root has no characters"
        upper = Node(node.text[:at], node.parent, node.named)
        upper.holders = dict(node.holders)
        upper.children[node.text[at]] = node
        node.parent.children[node.text[0]] = upper
        node.text, node.parent = node.text[at:], upper
        return upper

    def _nodes(self) -> Iterator[Node]:
        found = list(self.root.children.values())
        while found:
            node = found.pop()
            yield node
            found += node.children.values()


def _shared(one: str, text: str, at: int) -> int:
    """How many characters `one` shares with `text` from `at` on."""
    low, high = 0, min(len(one), len(text) - at)
    if text.startswith(one[:high], at):
        return high
    while high - low > 1:  # shares `low`, not `high`
        middle = (low + high) // 2
        if text.startswith(one[low:middle], at + low):
            low = middle
        else:
            high = middle
    return low

"""Replays a trace through an eviction order, at one capacity, without time.

Two readings. *Single blocks*: any block may go, as in a cache that knows nothing of prefixes; a
block whose beginning is gone takes room and cannot hit. *Closed*: a block stays as long as one that
continues it does, so only ends of prompts go. `lru` and `vllm-0.6.3` evict ends by themselves, so
both readings are one. An order that is no `Replacement` is replayed as single blocks in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from sys import maxsize
from typing import NamedTuple

from kvsim.core.contents import Numbering
from kvsim.core.vectors import EMPTY
from kvsim.engines.sglang.node import Text
from kvsim.engines.sglang.ranks import Rank
from kvsim.engines.sglang.tree import PagePool, RadixTree
from kvsim.policies.order import MakeOrder
from kvsim.policies.replacement.replacement import Replacement
from kvsim.workload.reuse import Chain, Counting, bounded_chains
from kvsim.workload.streams import Span, SpannedStream
from kvsim.workload.trace import Row


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
        self._order.hit_table(held)
        missing = range(len(held), len(keys))
        for depth in missing:
            if depth:
                self._parents[keys[depth]] = keys[depth - 1]
                self._children[keys[depth - 1]] = self._children.get(keys[depth - 1], 0) + 1
        for depth in reversed(missing):
            self._stored(keys[depth], depth, now_ns)
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
        tree.lock(node)
        tree.make_room(number - here)
        pages = pool.take(EMPTY, number - here)
        tree.insert(text, number, pages, here, here, 0, 0)
        tree.unlock(node)
    return found

"""Rules of somebody who uses kvsim, good and bad ones."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from typing import Any

from kvsim.core.request import Request
from kvsim.policies.future import Future
from kvsim.policies.order import Order
from kvsim.policies.tables import FullHit, HitsSave, PublishAt


class AnyOrder(Order):
    """Any idle block, blank or not, by the seed and by all that happened before."""

    def __init__(self, *, seed: int) -> None:
        self._random = random.Random(seed)
        self._idle: list[int] = []

    def store(self, block: int, key: int) -> None:
        self._random.random()

    def hit(self, block: int) -> None:
        self._random.random()
        if block in self._idle:
            self._idle.remove(block)

    def put(self, block: int, key: int | None, tokens: int, access_ns: int) -> None:
        self._random.seed(hash((self._random.random(), block, tokens, access_ns)))
        self._idle.append(block)

    def pop(self) -> int:
        return self._idle.pop(self._random.randrange(len(self._idle)))


class TwoQueues(Order):
    """2Q (Johnson and Shasha, VLDB 1994): first in, first out; least recently used after a return.

    A quarter of the pool is for content that is new, and half as many keys are remembered.
    """

    def __init__(self, *, size: int) -> None:
        self._most_new, self._most_known = max(1, size // 4), max(1, size // 2)
        self._new: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._known: list[int] = []
        self._idle: set[int] = set()

    def store(self, block: int, key: int) -> None:
        if key in self._known:
            self._known.remove(key)
            self._old[block] = key
        else:
            self._new[block] = key

    def hit(self, block: int) -> None:
        self._idle.discard(block)
        if block in self._old:
            self._old[block] = self._old.pop(block)

    def put(self, block: int, key: int | None, tokens: int, access_ns: int) -> None:
        self._idle.add(block)

    def pop(self) -> int:
        queues = [self._old, self._new]
        if len(self._new) > self._most_new or not self._old:
            queues.reverse()
        block = next(block for queue in queues for block in queue if block in self._idle)
        self._idle.remove(block)
        if block in self._new:
            self._known = [*self._known, self._new.pop(block)][-self._most_known :]
        else:
            del self._old[block]
        return block


class Uses(Future):
    """When each key is looked up from now on."""

    def __init__(self, requests: Seq[Seq[int]]) -> None:
        super().__init__()
        self.requests = requests
        self.now = 0

    def next_use(self, key: int) -> int:
        coming = range(self.now, len(self.requests))
        return next((at for at in coming if key in self.requests[at]), len(self.requests))


class Belady(Order):
    """What is used furthest in the future goes first, of equals the one deepest in its sequence."""

    def __init__(self, *, future: Uses) -> None:
        self._future = future
        self._idle: dict[int, tuple[int, int]] = {}

    def hit(self, block: int) -> None:
        self._idle.pop(block, None)

    def put(self, block: int, key: int | None, tokens: int, access_ns: int) -> None:
        assert key is not None
        self._idle[block] = key, tokens

    def pop(self) -> int:
        return self._take(max(self._idle, key=self._rank))

    def _rank(self, block: int) -> tuple[int, int]:
        key, tokens = self._idle[block]
        return self._future.next_use(key), tokens

    def _take(self, block: int) -> int:
        del self._idle[block]
        return block


class Liar(Order):
    """Gives out a block that is not idle."""

    def put(self, block: int, key: int | None, tokens: int, access_ns: int) -> None: ...

    def pop(self) -> int:
        return -1


class Needy(Order):
    """Asks for what nobody has."""

    def __init__(self, *, wisdom: int) -> None: ...


class NoOrder:
    """Lacks everything."""


def cautious(sequence: Request, block_size: int, pool: Any) -> int:
    """Two blocks for every sequence that grows."""
    return 2


class Patient:
    """`when-needed`, and a number of blocks drawn from the seed."""

    def __init__(self, *, seed: int, block_size: int) -> None:
        self._random = random.Random(seed)
        self._size = block_size

    def __call__(self, sequence: Request, block_size: int, pool: Any) -> int:
        assert block_size == self._size
        return max(0, -(-sequence.length // block_size) - len(sequence.table))


def owing(sequence: Request, block_size: int, pool: Any) -> int:
    return -1


def unasked(sequence: Request) -> int:
    return 1


COMPUTED = PublishAt("once it is computed", computed=True)
CHARGE = HitsSave("as nano-vllm of August 2025", blocks=False, tested=False, charged=True)
TWO_TOKENS = FullHit("the last two tokens are computed again", withheld=0, least=2)
NEGATIVE = FullHit("more than everything", withheld=-5, least=0)

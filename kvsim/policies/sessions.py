"""An eviction order that is told of requests, sessions and the clock: for what agents know and an
engine does not.

```
 a request leaves ──► its blocks are a Use ──► worth(use): the least goes first,
                                               of equals what was released first
```
One class serves both engines: as `eviction` of vLLM V1's block manager it orders blocks, as
`radix_eviction_policy` of SGLang it ranks leaves of the radix tree.

Hints are wishes. An order may keep a pinned block to the last; it is always given out before a
request has to wait for it, so that no hint can stop progress. What a hint asked for and did not get
is counted, and said in the notes of the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from kvsim.core.batch import Batch
from kvsim.core.request import Request
from kvsim.policies.order import Order

_NS_PER_S = 1_000_000_000


class Use:
    """One stay of a request in the cache, and the idle blocks that nobody has used since."""

    __slots__ = ("blocks", "ended_ns", "number", "pinned_until_ns", "request", "wished")

    def __init__(self, request: Request | None, number: int, ended_ns: int) -> None:
        self.request = request
        """None: nobody knows whose the blocks were."""
        self.number, self.ended_ns = number, ended_ns
        self.pinned_until_ns = -1
        """Until when a policy promised to keep it."""
        self.wished = False
        """Whether a wish for it is still to be kept or broken."""
        self.blocks: dict[int, None] = {}
        """In the order in which they go: the tail of the sequence first."""


class SessionOrder(Order):
    """Evicts by `worth`, which a policy overrides; as it stands, the least recently used.

    Blocks that a later request hits become part of its use, so what is left of a use is what no
    later turn had any use for.
    """

    most_pinned = 1.0
    """Share of the pool that pins may take; wishes beyond are refused."""

    def __init__(self) -> None:
        self.newest: dict[str, Request] = {}
        """Session → its request that left the engine last."""
        self.counts: Counter[str] = Counter()
        """What became of wishes."""
        self._batch: Any = None
        self._pins: dict[str, Use] = {}
        """Session → what was pinned for it last."""
        self._uses: dict[Use, None] = {}
        """Those with idle blocks."""
        self._owner: dict[int, Use] = {}
        """block → its last use, also while it is in use again."""
        self._of_request: dict[int, Use] = {}
        """Place in the trace → the last use of that request, for the radix tree."""
        self._number = 0
        self._next: Use | None = None

    # -- what a policy decides ----------------------------------------------------------------

    def worth(self, use: Use) -> Any:
        """How much its blocks are worth now; the least goes first. Asked of all when a block is
        needed: not again before its use is used up, or something was released or hit."""
        return 0

    def leaves(self, use: Use) -> None:
        """A request leaves the engine, completed or preempted: the time to read its hints."""

    # -- for policies -------------------------------------------------------------------------

    @property
    def now_ns(self) -> int:
        """The start of the step that is being composed."""
        return 0 if self._batch is None else int(self._batch.now_ns)

    @property
    def pool_tokens(self) -> int:
        """Tokens for which the pool has room."""
        blocks = self._batch.blocks
        return int(blocks.gpu.size * blocks.block_size)

    def superseded(self, use: Use) -> bool:
        """Whether a later request of its session has left the engine since."""
        request = use.request
        if request is None or request.session is None:
            return False
        return self.newest[request.session] is not request

    def pin(self, use: Use, seconds: float) -> None:
        """Promises to keep what a session has for so long, or refuses. A new promise takes the
        place of the session's last one."""
        assert use.request is not None, "only a request has wishes"
        self.counts["wishes to pin"] += 1
        session = use.request.session or use.request.id
        self._pins.pop(session, None)
        self._pins = {name: each for name, each in self._pins.items() if self.pinned(each)}
        held = sum(int(each.request.length) for each in self._pins.values() if each.request)
        if held + int(use.request.length) > self.most_pinned * self.pool_tokens:
            self.counts["refused: too much is pinned"] += 1
        else:
            use.pinned_until_ns, use.wished = self.now_ns + round(seconds * _NS_PER_S), True
            self._pins[session] = use

    def pinned(self, use: Use) -> bool:
        """Whether a promise to keep it still holds."""
        return use.pinned_until_ns > self.now_ns

    def refuse(self, wish: str) -> None:
        """Counts a wish that the policy or the engine has no way to grant."""
        self.counts[f"refused: {wish}"] += 1

    def remarks(self) -> list[str]:
        """What became of wishes, for the notes of the result."""
        if not self.counts:
            return []
        return ["hints: " + ", ".join(f"{n:,} {what}" for what, n in sorted(self.counts.items()))]

    # -- what the block managers tell -----------------------------------------------------------

    def begins(self, batch: Batch) -> None:
        """A run begins, with this batch."""
        self._batch = batch

    @property
    def hears(self) -> SessionOrder | None:
        return self

    def released(self, request: Request, blocks: Iterable[int]) -> None:
        """A request is about to give back these blocks."""
        self._number += 1
        use = Use(request, self._number, self.now_ns)
        for block in blocks:
            self._owner[block] = use
        self._of_request[request.index] = use
        if request.session is not None:
            self.newest[request.session] = request
        self.leaves(use)
        self._next = None

    def __call__(self, node: Any) -> Any:
        """The rank of a leaf of SGLang's radix tree: the worth of the use that has its text."""
        request = node.text.request
        use = None if request is None else self._of_request.get(request.index)
        if use is None:
            use = Use(request, 0, self.now_ns)
        return self.worth(use), node.time

    # -- the order of blocks ----------------------------------------------------------------------

    def put(self, block: int, key: int | None, tokens: int, access_ns: int) -> None:
        use = self._owner.get(block)
        # Given back before its request is over, as what leaves a window.
        if use is None:
            self._number += 1
            use = self._owner[block] = Use(None, self._number, self.now_ns)
        use.blocks[block] = None
        self._uses[use] = None
        self._next = None

    def hit(self, block: int) -> None:
        use = self._owner.get(block)
        if use is not None and block in use.blocks:
            self._take(use, block)
            self._next = None

    def pop(self) -> int:
        use = self._next
        if use is None or not use.blocks:
            use = self._next = min(self._uses, key=lambda each: (self.worth(each), each.number))
        if use.wished and self.pinned(use):
            self.counts["broken: nothing else was left"] += 1
            use.wished = False
        block = next(iter(use.blocks))
        self._take(use, block)
        del self._owner[block]
        return block

    def _take(self, use: Use, block: int) -> None:
        del use.blocks[block]
        if not use.blocks:
            del self._uses[use]

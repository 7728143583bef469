"""Hints: the beginning of a prompt stays for a time after its last use."""

from __future__ import annotations

from collections import OrderedDict

from kvsim.policies.replacement.replacement import Replacement


class Retained(Replacement):
    """Least recently used, but the first tokens of every prompt go last for some time after their
    last use.

    What users ask engines for: pin a prefix (vLLM #37003), until a deadline (vLLM #52113). By
    default the first 1,024 tokens, for 300 s.
    """

    __slots__ = ("_now_ns", "_others", "_pinned", "_pinned_tokens", "_ttl_ns")

    def __init__(
        self, first: int = 0, size: int = 0, *, pinned_tokens: int = 1024, ttl_s: float = 300.0
    ) -> None:
        super().__init__(first, size)
        self._pinned_tokens, self._ttl_ns = pinned_tokens, round(ttl_s * 1e9)
        self._pinned: OrderedDict[int, int] = OrderedDict()
        """Idle blocks, least recently used first, with the time of that use."""
        self._others: OrderedDict[int, int] = OrderedDict()
        self._now_ns = 0

    def put(self, block: int, key: int | None, tokens: int, access_ns: int) -> None:
        super().put(block, key, tokens, access_ns)
        self._now_ns = max(self._now_ns, access_ns)
        blocks = self._pinned if tokens <= self._pinned_tokens else self._others
        blocks[block] = access_ns

    def used(self, block: int) -> None:
        self._pinned.pop(block, None)
        self._others.pop(block, None)

    def choose(self) -> int:
        oldest = next(iter(self._pinned.values()), self._now_ns)
        expired = self._now_ns - oldest >= self._ttl_ns
        return (self._pinned if expired or not self._others else self._others).popitem(last=False)[
            0
        ]

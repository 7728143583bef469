"""Which leaf of the radix tree is evicted next (SGLang 0.5.23, `mem_cache/evict_policy.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mypy_extensions import i64

from kvsim.engines.sglang.node import Node
from kvsim.errors import ConfigError
from kvsim.policies.named import callable_with, find_rule
from kvsim.policies.order import Order


class Rank:
    """Grades the leaves that no request holds. Of those with the smallest grade, the one used
    longest ago is evicted."""

    oldest: bool = False
    """Whether all grades are equal."""
    own: Callable[[Any], Any] | None = None
    """An outsider's rank, whose values of any kind are compared instead."""
    hears: Any = None
    """The policy that is told which request gives pages back; None: nobody."""

    def grade(self, node: Node) -> i64:
        """The grade of a leaf."""
        return 0


class LeastRecent(Rank):
    """Evicts the least recently used node first."""

    def __init__(self) -> None:
        self.oldest = True


class LeastFrequent(Rank):
    """Evicts the least frequently used node first."""

    def grade(self, node: Node) -> i64:
        return node.hits


class Segmented(Rank):
    """Evicts nodes used fewer than `protected_threshold` times first."""

    _threshold: i64

    def __init__(self, protected_threshold: int = 2) -> None:
        self._threshold = protected_threshold

    def grade(self, node: Node) -> i64:
        return 1 if node.hits >= self._threshold else 0


class ByPriority(Rank):
    """Evicts the node of the worst priority first."""

    def grade(self, node: Node) -> i64:
        return node.priority


class TailFirst(Rank):
    """Evicts nodes far from the expected end of the next prompt first: those more than `threshold`
    tokens away. That prompt is expected to be `next_prompt_estimate` tokens longer than the longest
    so far."""

    _ahead: i64

    def __init__(self, threshold: int = 0, next_prompt_estimate: int = 0) -> None:
        self._ahead = next_prompt_estimate - threshold

    def grade(self, node: Node) -> i64:
        bound: i64 = max(node.history_tokens + self._ahead, 0)
        return 1 if node.begin * node.text.page_size < bound else 0


RADIX_EVICTION: dict[str, Any] = {
    "lru": LeastRecent,
    "lfu": LeastFrequent,
    "slru": Segmented,
    "priority": ByPriority,
    "tlru": TailFirst,
}
"""Values of `radix_eviction_policy`."""


def make_rank(name: Any, config: Mapping[str, Any]) -> Rank:
    """Returns the rank called `name`: a key of the table, or `package.module:name` of a function of
    a node. Raises `ConfigError`."""
    if isinstance(name, Rank):
        return name

    def guard(label: str, found: Any) -> Any:
        callable_with(label, found, "node")
        return found

    if name in ("lru", "lfu", "priority") and config:
        raise ConfigError(f"radix_eviction_policy_config: {name} takes no settings; leave it out")
    found = find_rule("radix_eviction_policy", RADIX_EVICTION, name, guard, **config)
    if isinstance(found, Rank):
        return found
    rank = Rank()
    rank.own, rank.hears = found, found.hears if isinstance(found, Order) else None
    return rank

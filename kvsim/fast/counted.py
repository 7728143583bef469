"""Which block managers have a twin that counts blocks in place of naming them."""

from __future__ import annotations

from kvsim.config import RunConfig
from kvsim.engine.counted import Counted, CountPool
from kvsim.engine.pool import BlockPool
from kvsim.engine.tables import Tables
from kvsim.engines.vllm_063_blocks import Naive
from kvsim.engines.vllm_v1_blocks import VllmV1PrefixTables, VllmV1Tables
from kvsim.engines.vllm_v1_runs import VllmV1Runs


class CountedNaive(Counted, Naive):
    """`Naive`, counted."""

    def make_pool(self, size: int, first: int) -> BlockPool:
        return CountPool(size, first)


class CountedVllmV1(Counted, VllmV1Tables):
    """`VllmV1Tables`, counted."""

    def make_pool(self, size: int, first: int) -> BlockPool:
        return CountPool(size, first + 1)


COUNTED_TWINS: dict[type[Tables], type[Tables]] = {
    Naive: CountedNaive,
    VllmV1Tables: CountedVllmV1,
    VllmV1PrefixTables: VllmV1Runs,
}
"""Block managers → what decides the same without naming blocks."""


def without_names(kind: type[Tables], config: RunConfig) -> type[Tables]:
    """What serves in place of a block manager where nobody asks for the names of blocks.

    A rule from outside is shown the block manager, and finds in it what it expects there, as far as
    that has content; who orders idle content orders blocks.
    """
    twin = COUNTED_TWINS.get(kind, kind)
    if not kind.needs_keys:
        return twin
    rules = (config.engine, config.victim, config.scheduler_args.get("requeue"))
    outside = any(":" in rule for rule in rules if isinstance(rule, str))
    orders = config.block_manager_args.get("eviction", "lru") != "lru"
    return kind if outside or orders else twin

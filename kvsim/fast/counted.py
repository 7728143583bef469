"""Which block managers have a twin that counts blocks in place of naming them."""

from __future__ import annotations

from kvsim.config import RunConfig
from kvsim.engine.counted import Counted, CountPool
from kvsim.engine.pool import BlockPool
from kvsim.engine.tables import Tables
from kvsim.engines.nano_blocks import NanoTables, NanoTables2025
from kvsim.engines.nano_runs import NanoRuns, NanoRuns2025
from kvsim.engines.vllm_063_blocks import Naive, PrefixCaching
from kvsim.engines.vllm_063_runs import Vllm063Runs
from kvsim.engines.vllm_v1_blocks import VllmV1PrefixTables, VllmV1Tables
from kvsim.engines.vllm_v1_runs import VllmV1Runs
from kvsim.library import look_up


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
    NanoTables: NanoRuns,
    NanoTables2025: NanoRuns2025,
    PrefixCaching: Vllm063Runs,
    VllmV1Tables: CountedVllmV1,
    VllmV1PrefixTables: VllmV1Runs,
}
"""Block managers → what decides the same without naming blocks."""

OWN_EVICTION = {PrefixCaching: "vllm-0.6.3", VllmV1PrefixTables: "lru"}
"""The eviction rule under which the content of a manager is kept in runs."""


def without_names(kind: type[Tables], config: RunConfig) -> type[Tables]:
    """What serves in place of a block manager where nobody asks for the names of blocks.

    A rule from outside is shown the block manager, and finds in it what it expects there, as far as
    that has content, unless it says that it looks for no names (`Scheduler.names_blocks`). Who
    orders idle content orders blocks, and swapped blocks are looked up one by one.
    """
    twin = COUNTED_TWINS.get(kind, kind)
    if not kind.needs_keys:
        return twin
    args, own = config.block_manager_args, OWN_EVICTION.get(kind)
    rules = [config.victim, config.scheduler_args.get("requeue")]
    rules += [args.get("growth"), args.get("idle_order")]
    shown = _names_blocks(config.engine) or any(map(_outside, rules))
    orders = args.get("eviction", own) != own
    swaps = twin.swaps < kind.swaps and config.preemption_mode not in (None, "recompute")
    return kind if shown or orders or swaps else twin


def _names_blocks(engine: str) -> bool:
    """Whether a scheduler is from outside, and looks for the names of blocks."""
    return _outside(engine) and bool(look_up("engine", {}, engine).names_blocks)


def _outside(rule: object) -> bool:
    return isinstance(rule, str) and ":" in rule

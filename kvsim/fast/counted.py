"""Block managers that have a twin which counts blocks instead of naming them."""

from __future__ import annotations

from kvsim.config import RunConfig
from kvsim.engine.counted import Counted, CountPool
from kvsim.engine.pool import BlockPool
from kvsim.engine.tables import Tables
from kvsim.engines.vllm_063_blocks import Naive, PrefixCaching
from kvsim.engines.vllm_063_runs import Vllm063Runs
from kvsim.library import look_up


class CountedNaive(Counted, Naive):
    """`Naive` with counted blocks."""

    def make_pool(self, size: int, first: int) -> BlockPool:
        return CountPool(size, first)


COUNTED_TWINS: dict[type[Tables], type[Tables]] = {
    Naive: CountedNaive,
    PrefixCaching: Vllm063Runs,
}
"""Block manager → the twin that makes the same decisions without naming blocks."""

OWN_EVICTION: dict[type[Tables], str] = {PrefixCaching: "vllm-0.6.3"}
"""Block manager → the eviction rule under which its content can be kept in runs."""


def without_names(kind: type[Tables], config: RunConfig) -> type[Tables]:
    """Returns the class to use in place of a block manager when no block ids are needed.

    A user's policy may inspect the block manager and must find block ids there. So the manager is
    kept in that case, unless the policy declares that it reads no ids (`Scheduler.names_blocks`). A
    user's eviction order works on blocks, and swapped blocks are looked up one by one, so these
    need ids as well.
    """
    twin = COUNTED_TWINS.get(kind, kind)
    if twin is kind or not kind.needs_keys:
        return twin
    args, own = config.block_manager_args, OWN_EVICTION.get(kind)
    rules = [config.victim, config.scheduler_args.get("requeue")]
    rules += [args.get(key) for key in ("growth", "idle_order", "radix_eviction_policy")]
    shown = _names_blocks(config.engine) or any(map(_outside, rules))
    orders = args.get("eviction", own) != own
    swaps = twin.swaps < kind.swaps and config.preemption_mode not in (None, "recompute")
    return kind if shown or orders or swaps else twin


def _names_blocks(engine: str) -> bool:
    """Whether a scheduler is a user's own and reads block ids."""
    return _outside(engine) and bool(look_up("engine", {}, engine).names_blocks)


def _outside(rule: object) -> bool:
    return isinstance(rule, str) and ":" in rule

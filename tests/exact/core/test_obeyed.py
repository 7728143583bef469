"""Whatever a policy overrides is asked: every public method of V1's schedulers, managers and groups
is overridden by one that counts and calls super, in runs with every feature, and changes nothing.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from made import make_trace
from tiered import AGAIN, SMALL, cost

from kvsim.engines.vllm_v1.groups import Full
from kvsim.engines.vllm_v1.manager import KVCacheManager
from kvsim.engines.vllm_v1.scheduler import VllmV1, VllmV1Async
from kvsim.run.simulation import simulate
from kvsim.workload import TokenContent, Trace

PROMPTS = [tuple(range(7 * n, 7 * n + 40 + 10 * (n % 3))) for n in range(12)]
BUSY = make_trace([(len(each), 30, TokenContent(each)) for each in PROMPTS])
for _row in BUSY.rows:
    _row.arrival_ns = _row.index * 3_000_000
    _row.priority = _row.index % 3
    _row.lora = ("a", "b")[_row.index % 2]
    _row.abort_after_ns = 20_000_000 if _row.index == 7 else None
DRAFTS = {"method": "eagle", "num_speculative_tokens": 2, "acceptance_rate": 0.5}
SIMPLE = {"kv_connector": "SimpleCPUOffloadConnector"}
RUNS: dict[str, tuple[Trace, dict[str, Any]]] = {
    "plain": (BUSY, {}),
    "by priority": (BUSY, {"scheduling_policy": "priority"}),
    "drafts": (BUSY, {"speculative_config": DRAFTS}),
    "adapters": (BUSY, {"enable_lora": True, "max_loras": 1}),
    "windows": (BUSY, {"model": "gpt-oss-20b", "num_gpu_blocks_override": 40}),
    "states": (BUSY, {"model": "qwen3-next-80b-a3b", "tensor_parallel_size": 4}),
    "tier": (AGAIN, {"kv_offloading_size": 1.0}),
    "simple tier": (AGAIN, {"kv_offloading_size": 1.0, "kv_transfer_config": SIMPLE}),
}
calls: Counter[str] = Counter()


def counting(base: type) -> Any:
    """A subclass that overrides everything and changes nothing."""
    made: Any = type(f"Counting{base.__name__}", (base,), {"__module__": __name__})
    for name in dir(base):
        if not name.startswith("_"):
            found = getattr(base, name)
            if isinstance(found, property) or type(found).__name__ == "getset_descriptor":
                if any(name in vars(each).get("__mypyc_attrs__", ()) for each in base.__mro__):
                    continue  # a field
                setattr(made, name, property(_asked(made, name)))
            elif callable(found):
                setattr(made, name, _called(made, name))
    globals()[made.__name__] = made
    return made


def _asked(made: type, name: str) -> Callable[[Any], Any]:
    def get(self: Any) -> Any:
        calls[name] += 1
        return getattr(super(made, self), name)

    return get


def _called(made: type, name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **more: Any) -> Any:
        calls[name] += 1
        return getattr(super(made, self), name)(*args, **more)

    return call


GROUP = counting(Full)


class OwnGroups(KVCacheManager):
    """Has groups of an outsider's class."""

    def __init__(self, groups: Any, num_gpu_blocks: int, **settings: Any) -> None:
        own = [GROUP(block_size=each.block_size) for each in groups]
        super().__init__(own, num_gpu_blocks, **settings)


SCHEDULERS = {each: counting(each) for each in (VllmV1, VllmV1Async)}
MANAGER = counting(KVCacheManager)


def settings(name: str, base: type) -> dict[str, Any]:
    ahead = {"async_scheduling": base is VllmV1Async}
    return {**SMALL, "cost": cost(200), "num_gpu_blocks_override": 16, **ahead, **RUNS[name][1]}


def same(one: Any, other: Any) -> bool:
    tables = ((one.requests, other.requests), (one.steps, other.steps))
    return all(list(a[name]) == list(b[name]) for a, b in tables for name in b)


@pytest.mark.parametrize("base", SCHEDULERS)
@pytest.mark.parametrize("name", RUNS)
def test_what_is_overridden_is_called_and_changes_nothing(name: str, base: type) -> None:
    trace, given = RUNS[name][0], settings(name, base)
    usual = simulate(trace, given)
    del given["async_scheduling"]
    calls.clear()
    own = f"{__name__}:{SCHEDULERS[base].__name__}"
    manager = f"{__name__}:{MANAGER.__name__}"
    result = simulate(trace, {**given, "engine": own, "block_manager": manager})
    assert same(usual, result)
    composed = len(usual.steps["start_ns"])
    for each in ("compose", "settle", "after_step", "begin", "observe"):
        assert calls[each] >= composed - 1, each
    for each in ("allocate", "cut", "trim", "publish"):
        assert calls[each] >= sum(usual.steps["decode_seqs"]), each


class Trims(KVCacheManager):
    """Overrides `trim` alone."""

    def trim(self, request: Any, computed: Any) -> None:
        calls["trim"] += 1
        super().trim(request, computed)


class Publishes(KVCacheManager):
    """Overrides `publish` alone."""

    def publish(self, request: Any, upto: Any) -> None:
        calls["publish"] += 1
        super().publish(request, upto)


@pytest.mark.parametrize("caching", (False, True))
@pytest.mark.parametrize("base", (Trims, Publishes))
def test_what_is_asked_only_where_it_does_something_is_asked_for_every_token_if_it_is_overridden(
    base: type, caching: bool
) -> None:
    given = {**settings("plain", VllmV1Async), "enable_prefix_caching": caching}
    usual = simulate(BUSY, given)
    calls.clear()
    result = simulate(BUSY, {**given, "block_manager": f"{__name__}:{base.__name__}"})
    assert same(usual, result)
    assert sum(calls.values()) >= sum(usual.steps["decode_seqs"]) > 0


NOT_ASKED = {
    *(
        "lingers",
        "unfinished",
        "gauges",
        "keeps_states",
    ),  # before a run, or by recorders and some engines
    *("own_blocks", "cached_tokens", "report"),  # by victims, routers and the events of a fleet
    *("content_key", "find_block", "has_key", "keys", "reserved"),  # by some connectors
    *("detach", "drop_at_once", "drop_tables", "forget_hits"),
}
"""Methods that nobody asks in some of these runs."""


def test_every_public_method_is_asked_in_some_run() -> None:
    calls.clear()
    for name, (trace, _) in RUNS.items():
        given = settings(name, VllmV1Async)
        del given["async_scheduling"]
        own = {"engine": f"{__name__}:CountingVllmV1Async"}
        simulate(trace, {**given, **own, "block_manager": f"{__name__}:CountingKVCacheManager"})
    methods = {each for kind in (*SCHEDULERS.values(), MANAGER) for each in vars(kind)}
    public = {each for each in methods if not each.startswith("_")}
    assert public - {*calls} <= NOT_ASKED
    assert len({*calls} & public) > 30


def test_the_rules_of_an_own_group_are_asked() -> None:
    given = settings("plain", VllmV1)
    usual = simulate(BUSY, given)
    calls.clear()
    assert same(usual, simulate(BUSY, {**given, "block_manager": f"{__name__}:OwnGroups"}))
    asked = {"rules", "find", "present", "missing", "wanted", "grow", "adopt", "register", "trim"}
    assert asked <= {*calls}
    assert calls["missing"] >= sum(usual.steps["decode_seqs"])

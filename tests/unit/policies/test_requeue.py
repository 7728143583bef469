"""Where victims join the waiting queue again: each rule under each engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import worlds
from hypothesis import given
from hypothesis import strategies as st

import kvsim
from kvsim.core.blocks import BlockManager
from kvsim.core.request import Request
from kvsim.engines.nano import Nano, Nano2025, NanoTables, NanoTables2025
from kvsim.engines.vllm_033 import Vllm033, Vllm033Tables
from kvsim.engines.vllm_063.blocks import Naive
from kvsim.engines.vllm_063.scheduler import Vllm063, Vllm063Async
from kvsim.engines.vllm_v1.scheduler import VllmV1, VllmV1Async
from kvsim.errors import ConfigError
from kvsim.policies import requeue
from kvsim.policies.requeue import REQUEUE, make_requeue
from kvsim.workload.streams import TokenStream

SIZE, BLOCKS = 4, 9


def vllm0(scheduler: Any, tables: Any, **knobs: Any) -> Callable[..., tuple[Any, BlockManager]]:
    def make(**more: Any) -> tuple[Any, BlockManager]:
        engine = scheduler(
            num_gpu_blocks=BLOCKS, max_model_len=64, max_num_seqs=8, watermark=0.0, **knobs, **more
        )
        return engine, tables(SIZE, BLOCKS, 0)

    return make


def v1(scheduler: Any) -> Callable[..., tuple[Any, Any]]:
    def make(**more: Any) -> tuple[Any, Any]:
        return worlds.v1(scheduler, SIZE, BLOCKS + 1, max_model_len=64, **more)

    return make


def nano(scheduler: Any, tables: Any) -> Callable[..., tuple[Any, BlockManager]]:
    def make(**more: Any) -> tuple[Any, BlockManager]:
        return scheduler(block_size=SIZE, **more), tables(SIZE, BLOCKS)

    return make


ENGINES = {
    "0.3.3": vllm0(Vllm033, Vllm033Tables),
    "0.6.3": vllm0(Vllm063, Naive, block_size=SIZE),
    "0.6.3 async": vllm0(Vllm063Async, Naive, block_size=SIZE),
    "v1": v1(VllmV1),
    "v1 async": v1(VllmV1Async),
    "nano": nano(Nano, NanoTables),
    "nano 2025": nano(Nano2025, NanoTables2025),
}


def r2_else_tail(candidates: Sequence[Request], blocks: BlockManager) -> Request:
    """So that an older request gives way before a younger one."""
    return next((each for each in candidates if each.id == "r2"), candidates[-1])


def after_two_victims(engine: str, rule: str | None) -> list[str]:
    """The waiting queue once r2, and later r3, have lost their blocks.

    r0 to r3 fill 8 of 9 blocks, and each wants one more after the first step; r4 and r5 wait.
    """
    scheduler, tables = ENGINES[engine](victim=r2_else_tail, requeue=rule)
    batch = worlds.batch_of(tables, scheduler, [9] * 6)
    for index, length in enumerate((8, 8, 8, 8, 16, 16)):
        stream = TokenStream([index] * length, row=index, rows=9)
        request = Request(index, f"r{index}", length, stream)
        request.arrival_ns = index
        worlds.arrive(scheduler, batch, request)
    preempted, steps = 0, worlds.Steps(scheduler, batch)
    for now in range(1, 9):
        plan = steps.compose(now)
        preempted += len(plan.preempted)
        if preempted >= 2:
            return [request.id for request in batch.waiting]
        steps.settle(now)
    raise AssertionError("two were never preempted")


@pytest.mark.parametrize("engine", ENGINES)
def test_where_victims_wait(engine: str) -> None:
    assert after_two_victims(engine, "head") == ["r3", "r2", "r4", "r5"]
    assert after_two_victims(engine, "tail") == ["r4", "r5", "r2", "r3"]
    assert after_two_victims(engine, "arrival") == ["r2", "r3", "r4", "r5"]
    assert after_two_victims(engine, None) == after_two_victims(engine, "head")


requests = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=12)


@given(requests)
def test_sorted_queues_stay_sorted(victims: list[tuple[int, int]]) -> None:
    by_arrival: deque[Request] = deque()
    by_priority: deque[Request] = deque()
    for index, (priority, arrival) in enumerate(victims):
        victim = Request(index, f"{index:02}", 1, priority=priority)
        victim.arrival_ns = arrival
        requeue.arrival(by_arrival, victim)
        requeue.priority(by_priority, victim)
    assert list(by_arrival) == sorted(by_arrival, key=lambda r: (r.arrival_ns, r.index))
    assert list(by_priority) == sorted(by_priority, key=lambda r: (r.priority, r.arrival_ns, r.id))


def test_the_priority_policy_of_v1_is_the_rule_priority() -> None:
    scheduler, _ = ENGINES["v1"](scheduling_policy="priority")
    assert scheduler.requeue is requeue.priority
    scheduler, _ = ENGINES["v1"]()
    assert scheduler.requeue is requeue.head


def test_only_one_rule_respects_a_sorted_queue() -> None:
    for name in ("head", "tail", "arrival"):
        with pytest.raises(ValueError, match=r"requeue: only priority .*--scheduling-policy fcfs"):
            make_requeue(name, "priority", sorts=True)
        assert make_requeue(name) is REQUEUE[name]
    assert make_requeue("priority", "priority", sorts=True) is requeue.priority
    assert make_requeue("head", "head", sorts=True) is requeue.head  # as vLLM 0.6.3 does
    with pytest.raises(ValueError, match="requeue: priority needs --scheduling-policy priority"):
        make_requeue("priority")


HERE = __name__
CROWD = worlds.trace(*((i, 5 + i % 7, 6 + i % 5) for i in range(24)))


def ends(engine: str, rule: str | None) -> list[int]:
    """When each request of a crowd ends."""
    settings: dict[str, Any] = {"engine": engine, "num_gpu_blocks_override": 17}
    if engine != "vllm-0.6.3":
        settings["disable_async_output_proc"] = None
    if engine == "vllm-v1":
        settings["enable_prefix_caching"] = False
    if rule is not None:
        settings["scheduler_args"] = {"requeue": rule}
    result = kvsim.simulate(CROWD, worlds.config(**settings))
    assert sum(result.steps["preempted_recompute"]) > 3
    return list(result.requests["finish_ns"])


@pytest.mark.parametrize("engine", ["vllm-0.3.3", "vllm-0.6.3", "vllm-v1"])
def test_a_rule_can_be_set_for_a_run(engine: str) -> None:
    assert ends(engine, "head") == ends(engine, None)
    assert ends(engine, "tail") != ends(engine, None)


def test_a_rule_that_does_not_go_with_the_queue_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="requeue: unknown 'front'; choose from head, tail, arrival"
    ):
        ends("vllm-v1", "front")
    with pytest.raises(ConfigError, match="vllm-v1: requeue: priority needs"):
        ends("vllm-v1", "priority")


def twice(waiting: deque[Request], victim: Request) -> None:
    """A rule from outside that puts a victim in twice."""
    waiting.extend((victim, victim))


def behind_the_first(waiting: deque[Request], victim: Request) -> None:
    """A rule from outside."""
    waiting.insert(1, victim)


def test_a_rule_from_outside() -> None:
    assert ends("vllm-v1", f"{HERE}:behind_the_first") != ends("vllm-v1", "head")
    with pytest.raises(
        ConfigError, match=r"requeue: .*:twice left \d+ requests in the waiting queue"
    ):
        ends("vllm-v1", f"{HERE}:twice")
    with pytest.raises(ConfigError, match=r"requeue: .*:SIZE is not called as .waiting, victim."):
        ends("vllm-v1", f"{HERE}:SIZE")

"""Who gives way: each policy under each engine, and what no policy can break."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import worlds
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples

import kvsim
from kvsim.core.blocks import BlockManager
from kvsim.core.request import RUNNING, Request
from kvsim.core.vectors import numbers
from kvsim.engines.nano import Nano, Nano2025, NanoTables, NanoTables2025
from kvsim.engines.vllm_033 import Vllm033, Vllm033Tables
from kvsim.engines.vllm_063.blocks import Naive
from kvsim.engines.vllm_063.scheduler import Vllm063, Vllm063Async
from kvsim.engines.vllm_v1.scheduler import VllmV1, VllmV1Async
from kvsim.errors import ConfigError, EngineStopped
from kvsim.policies.victims import VICTIMS, Victim, make_victim
from kvsim.workload.clients import random_stream
from kvsim.workload.streams import TokenStream

SIZE, LONGEST = 4, 64
Made = tuple[Any, Any]


def old(scheduler: Any, tables: Any, **knobs: Any) -> Callable[[Victim | None, int], Made]:
    """An engine of the 0.x line with ample CPU blocks and no watermark."""
    if scheduler is not Vllm033:
        knobs["block_size"] = SIZE

    def make(victim: Victim | None, blocks: int) -> Made:
        engine = scheduler(
            num_gpu_blocks=blocks, max_model_len=LONGEST, watermark=0.0, victim=victim, **knobs
        )
        return engine, tables(SIZE, blocks, 100)

    return make


def v1(scheduler: Any, **knobs: Any) -> Callable[[Victim | None, int], Made]:
    """vLLM V1 with one block more, which it never uses."""

    def make(victim: Victim | None, blocks: int) -> Made:
        return worlds.v1(scheduler, SIZE, blocks + 1, max_model_len=LONGEST, victim=victim, **knobs)

    return make


def nano(scheduler: Any, tables: Any) -> Callable[[Victim | None, int], Made]:
    """nano-vllm."""

    def make(victim: Victim | None, blocks: int) -> Made:
        return scheduler(block_size=SIZE, victim=victim), tables(SIZE, blocks)

    return make


ENGINES = {
    "0.3.3": old(Vllm033, Vllm033Tables),
    "0.6.3": old(Vllm063, Naive),
    "0.6.3 chunked": old(Vllm063, Naive, enable_chunked_prefill=True),
    "0.6.3 async": old(Vllm063Async, Naive),
    "v1": v1(VllmV1),
    "v1 async": v1(VllmV1Async),
    "nano": nano(Nano, NanoTables),
    "nano 2025": nano(Nano2025, NanoTables2025),
}
SWAPPING = {
    "0.3.3 swap": old(Vllm033, Vllm033Tables, preemption_mode="swap"),
    "0.6.3 swap": old(Vllm063, Naive, preemption_mode="swap"),
    "0.6.3 chunked swap": old(Vllm063, Naive, preemption_mode="swap", enable_chunked_prefill=True),
}
CHUNKS = {
    "v1 unreserved": v1(VllmV1, max_num_batched_tokens=8, scheduler_reserve_full_isl=False),
    "v1 async unreserved": v1(
        VllmV1Async, max_num_batched_tokens=8, scheduler_reserve_full_isl=False
    ),
}


def policy(name: str, seed: int = 0) -> Victim | None:
    return make_victim(name, seed=seed, max_model_len=LONGEST)


class Clock:
    """Composes steps and settles each as late as the engine allows."""

    def __init__(self, scheduler: Any, tables: Any) -> None:
        self.scheduler = scheduler
        self.lengths: dict[int, int] = {}
        self.batch = worlds.batch_of(tables, scheduler, self.lengths)
        self.steps = worlds.Steps(scheduler, self.batch)
        self.flying = self.steps.flying
        self.now = 0

    def send(self, index: int, length: int, output: int, **more: Any) -> None:
        self.lengths[index] = output
        stream = TokenStream([index] * length, row=index, rows=100)
        request = Request(index, f"r{index}", length, stream, **more)
        worlds.arrive(self.scheduler, self.batch, request)

    def step(self) -> Any:
        plan = self.steps.compose(self.now)
        if self.steps.late(plan):
            self.now += 1
            self.steps.settle(self.now)
        self.batch.audit()
        return plan


PROMPTS = (4, 11, 15, 5, 10)
"""13 blocks of 4. With one token more, only the first needs another block."""


def first_victims(engine: str, victim: Victim | None) -> list[str]:
    """Who loses its blocks in the first step that lacks one."""
    clock = Clock(*ENGINES[engine](victim, 13))
    for index, length in enumerate(PROMPTS):
        clock.send(index, length, 9, priority=index == 1)
    while True:
        preempted = clock.step().preempted
        if preempted:
            return [request.id for request, _ in preempted]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("name", "behind", "anyone"),
    [
        ("tail", "r4", "r4"),
        ("head", "r1", "r0"),
        ("least-computed", "r3", "r0"),
        ("most-computed", "r2", "r2"),
        ("priority", "r1", "r1"),
        ("cost-aware", "r3", "r3"),  # 2 blocks for 6 tokens, the others 3 for 11 at best
    ],
)
def test_whom_a_policy_takes(engine: str, name: str, behind: str, anyone: str) -> None:
    """r0 lacks a block: V1 may take anyone, the others somebody behind it."""
    expected = anyone if engine.startswith("v1") else behind
    assert first_victims(engine, policy(name)) == [expected]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_random_victim_comes_from_a_stream_of_its_own(engine: str) -> None:
    candidates = ["r0", "r1", "r2", "r3", "r4"]
    if not engine.startswith("v1"):
        candidates = candidates[1:]
    taken = [first_victims(engine, policy("random", seed)) for seed in range(8)]
    draws = [random_stream(seed, "victim").integers(len(candidates)) for seed in range(8)]
    # A single block is enough for r0 only where those behind it may run without a free one.
    assert [each[0] for each in taken] == [candidates[draw] for draw in draws]
    assert len({each[0] for each in taken}) > 1


@pytest.mark.parametrize("engine", ENGINES)
def test_without_a_policy_the_tail_gives_way(engine: str) -> None:
    assert first_victims(engine, None) == ["r4"]


def test_with_nobody_behind_it_a_request_gives_way_itself() -> None:
    def never(candidates: Sequence[Request], blocks: BlockManager) -> Request:
        assert len(candidates) == 1
        return candidates[0]

    for name in ("0.3.3", "0.6.3", "nano", "nano 2025", "v1"):
        clock = Clock(*ENGINES[name](never, 1))
        clock.send(0, 4, 2)
        clock.step()
        with suppress(EngineStopped):  # nano-vllm dies of a step that serves nobody
            clock.step()
        assert [request.id for request, _ in clock.batch.plan.preempted] == ["r0"], name


def test_shared_blocks_and_progress_count_against_a_cost_aware_victim() -> None:
    blocks = Naive(4, 20, 0)

    def request(index: int, length: int, known: int, table: list[int]) -> Request:
        made = Request(index, f"r{index}", length)
        made.state, made.length = RUNNING, known
        blocks.give(made, numbers(table), known)
        return made

    tables = [blocks.gpu.take_many(2) for _ in range(3)]
    choose = make_victim("cost-aware", seed=0, max_model_len=16)
    assert choose is not None
    # 2/8 · (1 − 1/9) against 2/8 · (1 − 4/12): the first has made less progress.
    first, second = request(0, 7, 8, tables[0]), request(1, 4, 8, tables[1])
    assert choose([second, first], blocks) is first
    # Two blocks that somebody shares free nothing.
    for block in tables[0]:
        blocks.gpu.share(block)
    assert choose([first, second], blocks) is second


@settings(max_examples=examples(150), deadline=None)
@given(
    engine=st.sampled_from(sorted({**ENGINES, **SWAPPING, **CHUNKS})),
    name=st.sampled_from(sorted(VICTIMS)),
    seed=st.integers(0, 99),
    blocks=st.integers(7, 14),
    requests=st.lists(
        st.tuples(st.integers(1, 14), st.integers(1, 8), st.integers(0, 2), st.integers(0, 6)),
        min_size=1,
        max_size=9,
    ),
)
def test_any_policy_keeps_the_books_and_every_request_ends(
    engine: str, name: str, seed: int, blocks: int, requests: list[tuple[int, int, int, int]]
) -> None:
    clock = Clock(*{**ENGINES, **SWAPPING, **CHUNKS}[engine](policy(name, seed), blocks))
    batch = clock.batch
    arriving = deque(sorted(enumerate(requests), key=lambda each: each[1][3]))
    number = 0
    while arriving or len(batch) or clock.flying:
        while arriving and arriving[0][1][3] <= number:
            index, (length, output, priority, _) = arriving.popleft()
            clock.send(index, length, output, priority=priority)
        clock.step()
        number += 1
        assert number < 2_000, "nothing ends"
    assert len(batch.ended) == len(requests)
    for request in batch.ended:
        assert not request.reason
        assert request.output_tokens == clock.lengths[request.index]
    assert batch.blocks.gpu.free == batch.blocks.gpu.size


# -- in whole runs -------------------------------------------------------------------------------

CROWD = worlds.trace(*((i, 5 + i % 7, 6 + i % 5) for i in range(24)))
CROWD.rows[:] = [replace(row, priority=-row.index) for row in CROWD.rows]


def outcome(**given: Any) -> Any:
    result = kvsim.simulate(CROWD, worlds.config(num_gpu_blocks_override=17, **given))
    assert result.meta["outcome"]["kind"] == "finished"
    columns = {key: list(each) for key, each in result.steps.items()}
    return columns, [list(each) for each in result.requests.values()]


V1 = {"engine": "vllm-v1", "enable_prefix_caching": False, "disable_async_output_proc": None}


@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"enable_chunked_prefill": True},
        V1,
        {**V1, "async_scheduling": False},
        {"engine": "vllm-0.3.3", "disable_async_output_proc": None},
    ],
)
def test_tail_is_what_the_engines_do_by_themselves(engine: dict[str, Any]) -> None:
    by_itself = outcome(**engine)
    assert sum(by_itself[0]["preempted_recompute"]) > 3
    assert outcome(**engine, victim="tail") == by_itself
    assert outcome(**engine, victim="head") != by_itself


def test_the_priority_policy_of_v1_is_the_victim_priority() -> None:
    by_itself = outcome(**V1, scheduling_policy="priority")
    assert outcome(**V1, scheduling_policy="priority", victim="priority") == by_itself
    assert outcome(**V1, scheduling_policy="priority", victim="tail") != by_itself


def test_a_seed_decides_the_random_victims() -> None:
    runs = [outcome(**V1, victim="random", seed=seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def oldest(candidates: Sequence[Request], blocks: BlockManager) -> Request:
    """A policy from outside."""
    return candidates[0]


class Fussy:
    """A policy from outside that returns nonsense."""

    def __init__(self, *, seed: int) -> None:
        self.seed = seed

    def __call__(self, candidates: Sequence[Request], blocks: BlockManager) -> Any:
        return self.seed


def test_a_policy_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import ModuleType

    module = ModuleType("mine")
    module.oldest, module.Fussy = oldest, Fussy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", module)
    assert outcome(**V1, victim="mine:oldest") == outcome(**V1, victim="head")
    with pytest.raises(
        ConfigError, match=r"victim: mine:Fussy returned 0, which is not a candidate"
    ):
        outcome(**V1, victim="mine:Fussy")


def test_an_unknown_policy_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="victim: unknown 'tale'; did you mean 'tail'"):
        outcome(victim="tale")


def test_draws_are_even() -> None:
    choose = policy("random", 5)
    assert choose is not None
    candidates = [Request(index, str(index), 1) for index in range(4)]
    scheduler = Naive(4, 4, 0)
    drawn = [choose(candidates, scheduler).index for _ in range(4000)]
    assert np.bincount(drawn, minlength=4) == pytest.approx(1000, abs=120)

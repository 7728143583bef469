"""Block tables in runs of vLLM 0.6.3, beside the same tables block by block."""

import random
from typing import Any

import pytest
from exact.engines.paired import Pair, hashed, paired, plant
from fuzz.draw import draw_trace
from fuzz.equal import assert_equal_runs
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.assembly import assemble
from kvsim.config import make_config
from kvsim.engine.run_tables import RunTables
from kvsim.engine.tables import Tables
from kvsim.engines.vllm_063_blocks import PrefixCaching
from kvsim.engines.vllm_063_runs import Vllm063Runs
from kvsim.fast.counted import COUNTED_TWINS
from kvsim.run import simulate
from kvsim.workload.trace import ParentContent, Row, Trace

GROWTH = {"block_manager_args": {"growth": "kvsim.engine.growth:one_each"}}
"""A rule from outside that is shown a pool."""

KINDS: list[type[Tables]] = [PrefixCaching]


class Twins:
    """Both kinds of tables over one trace, moved alike."""

    def __init__(self, kind: type[Tables], trace: Trace, size: int, blocks: int, **rules: Any):
        self.size = size
        self.named = kind(size, blocks, 0, **rules)
        self.runs = COUNTED_TWINS[kind](size, blocks, 0, **rules)
        self.pairs = paired(trace)
        self.running: list[Pair] = []
        self.now_ns = 0

    def both(self) -> list[Tables]:
        return [self.named, self.runs]

    def admit(self, pair: Pair) -> bool:
        """Admit a sequence if there are blocks, and compute all of it."""
        needs = [
            tables.admission_need(each.request)
            for tables, each in zip(self.both(), pair, strict=True)
        ]
        assert needs[0] == needs[1]
        if needs[0] > self.named.gpu.free or pair[0].length > self.named.gpu.free * self.size:
            return False
        seen = []
        for tables, each in zip(self.both(), pair, strict=True):
            tables.allocate(each)
            seen.append(tables.scheduled(each, self.now_ns))
        assert seen[0] == seen[1]
        self.running.append(pair)
        return True

    def step(self) -> None:
        """The step that is composed ends: what is in use is computed."""
        for tables in self.both():
            tables.composed()
        for pair in self.running:
            for tables, each in zip(self.both(), pair, strict=True):
                each.computed = each.length
                if tables.publish_at.computed:
                    tables.publish(each, each.length)
        self.now_ns += 1

    def grow(self, pair: Pair) -> bool:
        """One more token, with a slot."""
        if self.named.gpu.free < 1:
            return False
        for tables, each in zip(self.both(), pair, strict=True):
            each.length += 1
            tables.append(each)
            tables.scheduled(each, self.now_ns)
        return True

    def release(self, pair: Pair) -> None:
        for tables, each in zip(self.both(), pair, strict=True):
            tables.free(each)
        self.running.remove(pair)

    def check(self) -> None:
        """Counts, hits, and what is resident are the same."""
        assert self.named.census() == self.runs.census()
        assert self.named.lookups == self.runs.lookups
        for one, other in self.running:
            assert self.named.own_blocks(one) == self.runs.own_blocks(other)
        for one, other in self.pairs:
            assert len(self.named.match(one)) == len(self.runs.match(other))
        for place, tables in enumerate(self.both()):
            tables.audit([pair[place].request for pair in self.running])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(seed=st.integers(0, 2**40))
@settings(max_examples=40, deadline=None)
def test_runs_decide_what_blocks_decide(kind: type[Tables], seed: int) -> None:
    rng = random.Random(seed)
    trace = draw_trace(rng)
    rules: dict[str, Any] = {}
    if rng.random() < 0.5:
        rules["publish_at"] = rng.choice(("allocation", "computed"))
        rules["hits_save"] = rng.choice(("computation", "charge", "admission"))
        rules["full_hit"] = rng.choice(("last-block", "last-token", "nothing"))
    size = rng.choice((1, 2, 3, 4, 7, 16))
    twins = Twins(kind, trace, size, rng.choice((4, 12, 40, 200)), **rules)
    for _ in range(60):
        waiting = [pair for pair in twins.pairs if pair not in twins.running]
        for _ in range(rng.choice((0, 1, 3))):
            if waiting:
                twins.admit(waiting.pop(rng.randrange(len(waiting))))
        if rng.random() < 0.5:
            for pair in twins.running:
                if pair[0].computed:
                    twins.grow(pair)
        twins.step()
        for pair in list(twins.running):
            if rng.random() < 0.2:
                twins.release(pair)
        twins.check()


def resident(twins: Twins) -> list[int]:
    """How much of each request is found, by both."""
    twins.check()
    return [len(twins.runs.match(other)) for _, other in twins.pairs]


def test_the_evictor_walks_to_the_longest_prefix_of_one_time() -> None:
    """vLLM 0.6.3: of tables last scheduled at once, blocks go one each where they are as long."""
    trace = hashed((1, 2, 3, 4, 5), (7, 8, 9), (20, 21, 22), (1, 2, 3, 4, 5, 6), (7, 8, 9, 6))
    twins = Twins(PrefixCaching, trace, 1, 8)
    for pair in twins.pairs[:2]:
        assert twins.admit(pair)
    twins.step()
    for pair in twins.pairs[:2]:
        twins.release(pair)
    assert resident(twins)[3:] == [5, 3]
    assert twins.admit(twins.pairs[2])  # Takes 5 and 4 of the one, then 3: it was given back first.
    assert resident(twins)[3:] == [2, 3]


def test_a_later_access_ends_the_walk() -> None:
    """vLLM 0.6.3: the short table goes first, as the long one was scheduled later."""
    trace = hashed((1, 2), (7, 8, 9, 10), (20,), (1, 2, 3), (7, 8, 9, 10, 11))
    twins = Twins(PrefixCaching, trace, 1, 6)
    for pair in twins.pairs[:2]:
        assert twins.admit(pair)
        twins.step()
        twins.release(pair)
    assert twins.admit(twins.pairs[2])
    assert resident(twins)[3:] == [1, 4]


def test_a_block_that_fills_is_merged_with_one_that_is_known() -> None:
    """vLLM 0.6.3: the output of one is in the prompt of another, whose idle block it takes."""
    rows = [Row(0, "a", 1, 0, 3, 3), Row(1, "b", 2, 0, 5, 1, ParentContent(0, 5))]
    twins = Twins(PrefixCaching, Trace("made", "native", "", rows), 1, 9)
    first, second = twins.pairs
    for pair in (second, first):
        assert twins.admit(pair)
    twins.step()
    twins.release(second)
    assert twins.runs.census()[:3] == (3, 2, 4)
    assert twins.grow(first)
    twins.step()
    twins.check()
    assert twins.runs.census()[:3] == (4, 1, 4)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_planted_fault_is_found(kind: type[Tables]) -> None:
    """The audit finds each kind of broken books."""
    for fault in ("refs", "end", "cached", "left", "at"):
        twins = Twins(kind, hashed((1, 2, 3, 4, 5), (1, 2, 9, 9)), 1, 20)
        for pair in twins.pairs:
            assert twins.admit(pair)
        twins.step()
        twins.release(twins.pairs[0])
        assert isinstance(twins.runs, RunTables)
        plant(twins.runs.gpu, fault)
        with pytest.raises(AssertionError):
            twins.runs.audit([twins.pairs[1][1].request])


@pytest.mark.parametrize(
    ("engine", "settings", "expected"),
    [
        ("vllm-0.6.3", {}, Vllm063Runs),
        ("vllm-0.6.3", {"preemption_mode": "recompute"}, Vllm063Runs),
        ("vllm-0.6.3", {"preemption_mode": "swap"}, PrefixCaching),
        ("vllm-0.6.3", {"block_manager_args": {"eviction": "vllm-0.6.3"}}, Vllm063Runs),
        ("vllm-0.6.3", {"block_manager_args": {"eviction": "lru"}}, PrefixCaching),
        (
            "vllm-0.6.3",
            {"block_manager_args": {"growth": "kvsim.engine.growth:one_each"}},
            PrefixCaching,
        ),
        ("vllm-0.6.3", {"n": 2}, PrefixCaching),
        ("vllm-0.6.3", {"victim": "fuzz.outsiders:Victim1"}, PrefixCaching),
    ],
)
def test_who_is_shown_blocks_finds_blocks(
    engine: str, settings: dict[str, Any], expected: type
) -> None:
    caching = {"enable_prefix_caching": True} if engine == "vllm-0.6.3" else {}
    config = make_config({"model": "tiny", "engine": engine, **caching, **settings})
    assert type(assemble(config, named=False).blocks) is expected
    assert type(assemble(config).blocks) in KINDS


@pytest.mark.parametrize("engine", ["vllm-0.6.3"])
def test_a_default_run_makes_no_object_for_a_block(engine: str) -> None:
    """One prompt of thousands of blocks is one run, and its steps are worked out in numbers."""
    trace = Trace("made", "native", "", [Row(0, "0", 1, 0, 15_000, 1_000)])
    made: list[Any] = []

    def parts_of(config: Any, named: bool) -> Any:
        parts = assemble(config, named)
        made.append(parts.blocks.gpu)
        return parts

    caching = {"enable_prefix_caching": True} if engine == "vllm-0.6.3" else {}
    config = {"engine": engine, "block_size": 2, "max_model_len": 16_200, **caching}
    given = {**config, "num_gpu_blocks_override": 8_101, "cost": {"model": "constant"}}
    result = simulate(trace, given, parts_of=parts_of)
    assert result.requests["status"] == ["completed"]
    blocks = 8_000 if engine == "vllm-0.6.3" else 7_999
    assert [(run.start, run.end) for run in made[0].idle_runs() if run.copies is None] == [
        (0, blocks)
    ]
    assert result.meta["fast_path"]["repeated_steps"] > 990


@pytest.mark.parametrize("engine", ["vllm-0.6.3"])
def test_a_block_that_fills_is_looked_at_in_its_turn(engine: str) -> None:
    """Outputs that others have in their prompts, short of blocks, with hits on what just filled."""
    hits = preemptions = 0
    for keep in (20, 40):
        for arrival_ms in range(10, 250, 60):
            rows = [
                Row(0, "r0", 1, 0, 8, 34),
                Row(1, "r1", 2, arrival_ms * 1_000_000, 42, 30, ParentContent(0, keep)),
                Row(2, "r2", 3, arrival_ms * 1_000_000, 9, 34),
                Row(3, "r3", 4, 400_000_000, 42, 30, ParentContent(1, 42)),
            ]
            trace = Trace("made", "native", "", rows)
            caching = {"enable_prefix_caching": True} if engine == "vllm-0.6.3" else {}
            given = {"model": "tiny", "engine": engine, "block_size": 4, "max_model_len": 80}
            given |= {"num_gpu_blocks_override": 22, **caching}
            given["cost"] = {"model": "constant", "step_us": 10_000, "prefill_token_us": 0}
            result = assert_equal_runs(trace, given, f"{keep} tokens, {arrival_ms} ms").result
            assert result is not None
            hits += int(result.steps["cached_tokens"].sum())
            preemptions += int(result.requests["num_preemptions"].sum())
    assert hits and preemptions


def test_who_parts_in_numbers_was_scheduled_in_its_last_step() -> None:
    """vLLM 0.6.3, asynchronous: of two tables, the one that ended first goes first, though the
    other one is longer and began with it."""
    at_ns = 10_000_000_000
    rows = [
        Row(0, "long", 1, 0, 20, 30),
        Row(1, "short", 2, 0, 5, 3),
        Row(2, "other", 3, at_ns, 10, 2),
        Row(3, "again", 4, 2 * at_ns, 6, 2, ParentContent(1, 5)),
        Row(4, "again", 5, 3 * at_ns, 21, 2, ParentContent(0, 20)),
    ]
    given = {"model": "tiny", "engine": "vllm-0.6.3", "enable_prefix_caching": True}
    given |= {"block_size": 1, "num_gpu_blocks_override": 60, "max_model_len": 60}
    given |= {"watermark": 0.0, "cost": {"model": "constant"}}
    result = assert_equal_runs(Trace("made", "native", "", rows), given, "parting").result
    assert result is not None
    assert result.steps["cached_tokens"].sum() == 20
    assert result.meta["fast_path"]["repeated_steps"] > 20

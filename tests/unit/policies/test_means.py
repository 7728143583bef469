"""By which means a victim gives way: the table of rules, prices, whole runs, full CPU pools."""

from __future__ import annotations

from typing import Any

import pytest
import worlds
from exact import test_flow as flow
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples
from unit.policies.test_victims import SIZE, Clock

import kvsim
from kvsim.core.batch import Batch
from kvsim.core.plan import RECOMPUTE, SWAP
from kvsim.core.request import RUNNING, Request
from kvsim.cost import ConstantCost, MeansPrices, TableCost, make_prices
from kvsim.engines.vllm_033 import Vllm033, Vllm033Tables
from kvsim.engines.vllm_063.blocks import Naive
from kvsim.engines.vllm_063.scheduler import Vllm063
from kvsim.errors import ConfigError
from kvsim.machine import CopiedBlock, LinkTimes, load_hardware, load_model
from kvsim.policies.victims import make_means
from kvsim.settings.config import make_config


class Asked:
    """Prices that remember what they were asked."""

    def __init__(self, token_ns: int, block_ns: int) -> None:
        self.token_ns, self.block_ns = token_ns, block_ns
        self.tokens: list[int] = []
        self.blocks: list[tuple[int, int]] = []

    def recompute_ns(self, tokens: int) -> int:
        self.tokens.append(tokens)
        return tokens * self.token_ns

    def swap_ns(self, blocks: int, queued_blocks: int) -> int:
        self.blocks.append((blocks, queued_blocks))
        return (queued_blocks + 2 * blocks) * self.block_ns


def running(length: int, n: int = 1, cpu_blocks: int = 20, steps: int = 1) -> tuple[Request, Batch]:
    """A request whose prompt, and one token for each further step, were computed."""
    engine = Vllm063(block_size=SIZE, num_gpu_blocks=40, max_model_len=64)
    clock = Clock(engine, Naive(SIZE, 40, cpu_blocks))
    clock.send(0, length, 9, n=n)
    for _ in range(steps):
        clock.step()
    clock.batch.begin(clock.now, engine.max_num_seqs)
    return clock.batch.running[0], clock.batch


@pytest.mark.parametrize(
    ("mode", "n", "expected"),
    [
        (None, 1, RECOMPUTE),
        (None, 2, SWAP),
        ("recompute", 1, RECOMPUTE),
        ("recompute", 2, RECOMPUTE),
        ("swap", 1, SWAP),
        ("auto", 2, SWAP),
    ],
)
def test_what_each_mode_means(mode: str | None, n: int, expected: str) -> None:
    assert make_means(mode, Asked(1, 10**9))(*running(8, n)) == expected


def test_auto_asks_for_what_would_be_lost_and_moved_behind_what_is_queued() -> None:
    prices = Asked(token_ns=10, block_ns=13)
    means = make_means("auto", prices)
    victim, batch = running(10)
    assert means(victim, batch) == SWAP  # 2 x 3 blocks x 13 against 10 tokens x 10
    batch.plan.swaps_out += [(0, 0)] * 2
    assert means(victim, batch) == RECOMPUTE  # 2 blocks wait before it: 104 against 100
    assert prices.tokens == [10, 10]
    assert prices.blocks == [(3, 0), (3, 2)]


@pytest.mark.parametrize(
    ("n", "steps", "cpu_blocks", "expected"),
    [
        (1, 1, 4, SWAP),
        (1, 1, 1, RECOMPUTE),
        (2, 2, 20, SWAP),
        (2, 2, 1, SWAP),  # two run, so recompute is no way out: the engine dies of it
    ],
)
def test_a_full_cpu_pool_leaves_recompute_if_one_sequence_runs(
    n: int, steps: int, cpu_blocks: int, expected: str
) -> None:
    victim, batch = running(10, n, cpu_blocks, steps)
    assert sum(s.state == RUNNING for s in victim.sequences) == n
    assert make_means("auto", Asked(10**6, 0))(victim, batch) == expected


def test_auto_needs_prices_and_modes_are_known() -> None:
    for mode in ("auto", "swop"):
        with pytest.raises(ValueError, match="preemption_mode: unknown"):
            make_means(mode)


# -- prices ----------------------------------------------------------------------------------------


def test_prices_are_those_of_the_run() -> None:
    hardware = load_hardware("h100-sxm")
    prices = MeansPrices(ConstantCost(), LinkTimes(CopiedBlock(1024, 1), hardware, block_us=7))
    assert prices.recompute_ns(100) == 6_000_000 + 100 * 40_000
    assert prices.recompute_ns(0) == 0
    assert prices.swap_ns(3, 0) == 2 * 3 * 7_000
    assert prices.swap_ns(3, 5) == 2 * 3 * 7_000 + 5 * 7_000


def test_asking_for_a_price_is_no_step_of_the_run() -> None:
    model, hardware = load_model("llama-3-8b"), load_hardware("h200-sxm")
    config = make_config({"engine": "vllm-0.6.3", "preemption_mode": "auto"})
    prices = make_prices(config, model, hardware)
    assert prices is not None
    run = TableCost(model, hardware, config, "h200-sxm-llama-3-8b-public")
    assert prices.recompute_ns(512) > 0
    assert run.describe()["priced_steps"] == 0
    assert make_prices(make_config({}), model, hardware) is None


# -- whole runs ------------------------------------------------------------------------------------

CROWD = worlds.trace(*((i, 5 + i % 7, 6 + i % 5) for i in range(24)))
ENGINES: list[dict[str, Any]] = [
    {},
    {"disable_async_output_proc": False},
    {"enable_chunked_prefill": True},
    {"scheduling_policy": "priority", "enable_chunked_prefill": True},
    {"engine": "vllm-0.3.3", "disable_async_output_proc": None},
]


def outcome(mode: str, block_us: float, cpu_blocks: int = 100, **given: Any) -> Any:
    table = worlds.config(
        num_gpu_blocks_override=17,
        num_cpu_blocks_override=cpu_blocks,
        preemption_mode=mode,
        cost={"link": {"block_us": block_us}},
        **given,
    )
    result = kvsim.simulate(CROWD, table)
    assert result.meta["outcome"]["kind"] == "finished"
    columns = {key: list(each) for key, each in result.steps.items()}
    return columns, [list(each) for each in result.requests.values()]


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_auto_swaps_over_a_fast_link_and_recomputes_over_a_slow_one(engine: dict[str, Any]) -> None:
    swapped = outcome("swap", 0.001, **engine)
    assert sum(swapped[0]["preempted_swap"]) > 3
    assert outcome("auto", 0.001, **engine) == swapped
    recomputed = outcome("recompute", 1e9, **engine)
    assert sum(recomputed[0]["preempted_recompute"]) > 3
    assert outcome("auto", 1e9, **engine) == recomputed


def test_a_middling_link_takes_both_means() -> None:
    """10 ms and 1 ms a token against 2 copies of a block: about 20 ms against 3 blocks."""
    steps, _ = outcome("auto", 3_400)
    assert sum(steps["preempted_swap"]) > 0
    assert sum(steps["preempted_recompute"]) > 0


def test_no_cpu_pool_is_recompute() -> None:
    assert outcome("auto", 0.001, cpu_blocks=0) == outcome("recompute", 0.001, cpu_blocks=0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"engine": "vllm-v1"}, "preemption_mode: vllm-v1 has no such setting"),
        ({"engine": "nano-vllm"}, "preemption_mode: nano-vllm has no such setting"),
        ({"block_manager": "contiguous"}, "block_manager: contiguous cannot swap"),
        ({"scheduling_policy": "priority"}, "auto cannot choose under scheduling_policy priority"),
    ],
)
def test_auto_is_refused_where_nothing_can_be_swapped(given: dict[str, Any], words: str) -> None:
    table = worlds.config(preemption_mode="auto", **given)
    if "engine" in given:
        del table["disable_async_output_proc"]
    with pytest.raises(ConfigError, match=words):
        kvsim.simulate(CROWD, table)


# -- books -----------------------------------------------------------------------------------------


@settings(max_examples=examples(150), deadline=None)
@given(
    kind=st.sampled_from(["0.3.3", "0.6.3", "0.6.3 chunked"]),
    blocks=st.integers(7, 14),
    cpu_blocks=st.integers(0, 9),
    block_ns=st.integers(0, 12),
    requests=st.lists(st.tuples(st.integers(1, 14), st.integers(1, 8)), min_size=1, max_size=9),
)
def test_the_cheaper_means_is_taken_and_no_cpu_pool_is_too_small(
    kind: str, blocks: int, cpu_blocks: int, block_ns: int, requests: list[tuple[int, int]]
) -> None:
    prices = Asked(token_ns=3, block_ns=block_ns)
    given: dict[str, Any] = {"num_gpu_blocks": blocks, "max_model_len": 64, "watermark": 0.0}
    given |= {"preemption_mode": "auto", "prices": prices}
    if kind == "0.3.3":
        clock = Clock(Vllm033(**given), Vllm033Tables(SIZE, blocks, cpu_blocks))
    else:
        engine = Vllm063(block_size=SIZE, enable_chunked_prefill=kind.endswith("chunked"), **given)
        clock = Clock(engine, Naive(SIZE, blocks, cpu_blocks))
    for index, (length, output) in enumerate(requests):
        clock.send(index, length, output)
    batch, steps = clock.batch, 0
    while len(batch):
        asked = len(prices.tokens)
        taken = [means for _, means in clock.step().preempted]
        dearer = list(zip(prices.blocks[asked:], prices.tokens[asked:], strict=True))
        cheapest = [
            SWAP if (queued + 2 * moved) * block_ns < tokens * 3 else RECOMPUTE
            for (moved, queued), tokens in dearer
        ]
        # A victim whose blocks did not fit into the CPU pool was recomputed without asking.
        assert taken.count(SWAP) == cheapest.count(SWAP)
        assert len(taken) >= len(cheapest)
        steps += 1
        assert steps < 2_000, "nothing ends"
    assert len(batch.ended) == len(requests)
    assert all(request.output_tokens == clock.lengths[request.index] for request in batch.ended)
    assert batch.blocks.gpu.free == blocks
    assert batch.blocks.cpu.free == cpu_blocks


@settings(max_examples=examples(60), deadline=None)
@given(
    drawn=flow.rows,
    chosen=st.fixed_dictionaries(
        {
            "num_gpu_blocks_override": st.integers(16, 40),
            "num_cpu_blocks_override": st.integers(0, 30),
            "max_num_seqs": st.integers(3, 8),
            "enable_chunked_prefill": st.booleans(),
            "enable_prefix_caching": st.booleans(),
            "n": st.sampled_from((1, 1, 1, 2, 3)),
        }
    ),
    block_us=st.sampled_from([0.0, 1_000.0, 3_000.0, 10_000.0]),
)
def test_whole_runs_balance_and_no_single_sequence_overfills_the_cpu_pool(
    drawn: list[tuple[int, int, int, int]], chosen: dict[str, Any], block_us: float
) -> None:
    trace = flow.make_trace(drawn)
    table = worlds.config(preemption_mode="auto", cost={"link": {"block_us": block_us}}, **chosen)
    result = kvsim.simulate(trace, table, watcher=flow.Auditor())
    flow.check(result, trace)
    if chosen["n"] == 1:
        assert result.meta["outcome"]["kind"] != "swap-space-exhausted"

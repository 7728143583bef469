"""The prefix cache by hash id against a cache with an entry per block."""

import random
from typing import Any

import numpy as np
import pytest
from marks import mostly_long

from kvsim.engines.prefix_runs import UnitPool
from kvsim.run import simulate
from kvsim.workload.trace import HashContent, Row, Trace

ID_TOKENS = 32


def conversations(rng: random.Random) -> Trace:
    """Turns that extend what was said before by whole ids; a rest of an id is theirs alone."""
    rows: list[Row] = []
    said: list[list[int]] = [[]]
    fresh = iter(range(1, 10**6))
    now_ns = 0
    for index in range(rng.randrange(5, 60)):
        now_ns += rng.randrange(0, 40) * 5_000_000
        before = rng.choice(said)
        ids = [*before, *(next(fresh) for _ in range(rng.randrange(0, 4)))]
        said.append(ids)
        rest = rng.randrange(0, ID_TOKENS)
        length = len(ids) * ID_TOKENS + rest or 1
        named = [*ids, next(fresh)] if length > len(ids) * ID_TOKENS else ids
        content = HashContent(tuple((each, 1) for each in named))
        rows.append(
            Row(index, f"r{index}", index + 2, now_ns, length, rng.randrange(1, 60), content)
        )
    return Trace(
        "drawn", "native", "", rows, block_size=ID_TOKENS, hash_kind="prefix", partial_hash=True
    )


@pytest.mark.parametrize("seed", mostly_long(150, quick=20))
def test_it_decides_what_a_cache_by_block_decides(seed: int) -> None:
    rng = random.Random(seed)
    trace = conversations(rng)
    block_size = rng.choice((4, 8, 16, 32))
    settings: dict[str, Any] = {
        "engine": "vllm-0.6.3",
        "model": "tiny",
        "block_size": block_size,
        "max_model_len": 1024,
        "max_num_seqs": rng.choice((3, 12)),
        "num_gpu_blocks_override": 1024 // block_size + rng.choice((2, 30, 200)),
        "preemption_mode": "recompute",
        "enable_prefix_caching": True,
        "disable_async_output_proc": rng.random() < 0.5,
        "cost": {"model": "constant"},
    }
    runs = simulate(trace, {**settings, "block_manager": "prefix-runs"})
    blocks = simulate(trace, {**settings, "block_manager": "twins.prompt_cache:PromptCaching"})
    assert runs.meta["cache"] == blocks.meta["cache"], seed
    assert runs.meta["outcome"] == blocks.meta["outcome"], seed
    for name, column in blocks.steps.items():
        assert np.array_equal(column, runs.steps[name]), f"seed {seed}: {name}"
    for name, values in blocks.requests.items():
        assert list(values) == list(runs.requests[name]), f"seed {seed}: {name}"


def test_a_pool_evicts_the_tail_of_what_was_released_first() -> None:
    pool = UnitPool(10)
    old, new = [(1, 3), (2, 2)], [(1, 3), (3, 1)]
    assert pool.hold(old) == (0, 5)
    pool.take_many(5)
    pool.release(old)
    assert pool.hold(new) == (3, 1)
    pool.take_many(1)
    assert (pool.used, pool.cached, pool.free) == (4, 2, 6)
    # Four blank blocks, then one of id 2, the only one that nobody holds.
    pool.take_many(5)
    assert pool.resident[2] == 1
    assert (pool.used, pool.cached, pool.free) == (9, 1, 1)
    pool.audit()


def test_a_shorter_prompt_holds_no_more_of_an_id_than_it_needs() -> None:
    """What else was resident of it is blank: an admission counts on no more than it needs."""
    pool = UnitPool(4)
    _, missing = pool.hold([(1, 3)])
    pool.lend(missing)
    pool.give_back(missing - pool.release([(1, 3)]))
    assert pool.free == 4
    assert pool.hold([(1, 2)]) == (2, 0)
    assert pool.free == 2
    pool.lend(2)
    assert (pool.used, pool.free) == (4, 0)

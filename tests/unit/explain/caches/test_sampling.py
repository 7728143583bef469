"""The estimate from a sample of blocks, against the exact curve."""

from __future__ import annotations

from random import Random

import pytest
from marks import long
from shared import SHARED, needs_shared
from trees import BLOCK, random_case

from kvsim.errors import ConfigError
from kvsim.explain.cache_curve import lru_tokens, sampled_lru_tokens
from kvsim.workload import open_trace
from kvsim.workload.keys import streams
from kvsim.workload.reuse import Counting, find_reuse

CONVERSATION = "traces/mooncake/conversation_trace.jsonl.gz"


def test_all_blocks_are_the_exact_curve() -> None:
    for seed in range(30):
        case = random_case(Random(seed), 40, 6, wide=3)
        capacities = [1, 2, 5, 10, 20, 1000]
        rows, identities = case.trace.rows, streams(case.trace)
        found = sampled_lru_tokens(rows, identities, BLOCK, capacities, 1.0)
        assert found == lru_tokens(case.reuse(), capacities), f"seed {seed}"


@pytest.mark.parametrize("rate", [0.0, -1.0, 1.5])
def test_an_impossible_rate_is_refused(rate: float) -> None:
    case = random_case(Random(0), 5, 3)
    with pytest.raises(ConfigError, match="is not above 0 and at most 1"):
        sampled_lru_tokens(case.trace.rows, streams(case.trace), BLOCK, [1], rate)


@long
@needs_shared(CONVERSATION)
@pytest.mark.parametrize(("rate", "points"), [(0.1, 0.6), (0.01, 2.4)])
def test_the_stated_error_on_the_conversation_trace(rate: float, points: float) -> None:
    trace = open_trace(str(SHARED / CONVERSATION))
    identities = streams(trace)
    sizes = [256, 1024, 4096, 8192, 16_384, 32_768, 65_536, 131_072]
    exact = lru_tokens(find_reuse(trace.rows, identities, Counting(512)), sizes)
    tokens = sum(row.input_length for row in trace.rows)
    for seed in (0, 7919, 15_838):
        found = sampled_lru_tokens(trace.rows, identities, 512, sizes, rate, seed=seed)
        errors = [abs(one - other) for one, other in zip(found, exact, strict=True)]
        assert max(errors) / tokens < points / 100, f"seed {seed}"

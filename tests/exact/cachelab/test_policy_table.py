"""Policies on public traces, block by block, beside libCacheSim 0.3.5's Python package.

shared/design/cache-lab.md, section 3. The policies that leave nothing open are compared: shares of
prompt tokens, in thousandths.
"""

from __future__ import annotations

import pytest
from marks import long, whole
from shared import SHARED, needs_shared

from kvsim.explain.cache_curve import optimum_tokens
from kvsim.explain.cache_eviction import prompts, replay
from kvsim.policies.eviction import EVICTIONS
from kvsim.workload import open_trace
from kvsim.workload.keys import streams
from kvsim.workload.reuse import Counting, find_reuse

CONVERSATION = "traces/mooncake/conversation_trace.jsonl.gz"
SYNTHETIC = "traces/mooncake/synthetic_trace.jsonl.gz"
WEKA = "traces/native-samples/weka_100_sessions.jsonl.gz"
PARTIAL, FULL, AGENTS = Counting(512, True, True), Counting(512), Counting(64)

Shares = dict[str, float]
ROWS: list[tuple[str, Counting, int, Shares, float | None]] = [
    (CONVERSATION, PARTIAL, 1500,
     {"lru": 0.049, "fifo": 0.048, "arc": 0.061, "2q": 0.061, "sieve": 0.058}, None),
    (CONVERSATION, PARTIAL, 30_000,
     {"lru": 0.332, "fifo": 0.301, "arc": 0.317, "2q": 0.306, "sieve": 0.281}, None),
    (SYNTHETIC, FULL, 1024,
     {"lru": 0.088, "fifo": 0.090, "arc": 0.102, "2q": 0.087, "sieve": 0.044}, 0.285),
    # Each further policy takes 2 to 4 s: docs/results/cache.md has the command.
    (WEKA, AGENTS, 8192, {"lru": 0.277, "arc": 0.397}, 0.610),
    (WEKA, AGENTS, 32_768, {"lru": 0.895, "fifo": 0.835, "arc": 0.888}, 0.923),
]  # fmt: skip
"""Trace, what counts, capacity in blocks, shares, optimum if it was counted alike."""
FIRST = {WEKA: 1000}
"""How many requests of a trace are taken, if not all."""


@long
@whole
@pytest.mark.parametrize(
    ("relative", "counting", "capacity", "shares", "optimum"),
    [
        pytest.param(*row, marks=needs_shared(row[0]), id=f"{row[0].split('/')[-1][:5]}-{row[2]}")
        for row in ROWS
    ],
)
def test_shares_that_libcachesim_found(
    relative: str, counting: Counting, capacity: int, shares: Shares, optimum: float | None
) -> None:
    trace = open_trace(str(SHARED / relative))
    number = FIRST.get(relative)
    rows, identities = trace.rows[:number], streams(trace)[:number]
    asked = prompts(rows, identities, counting)
    tokens = sum(row.input_length for row in rows)
    found = dict.fromkeys(shares, 0.0)
    for name in shares:
        hits = replay(asked, EVICTIONS[name], capacity, counting.block_size, closed=False)
        found[name] = sum(hits) / tokens
    assert found == pytest.approx(shares, abs=0.0006)
    if optimum is not None:
        [most] = optimum_tokens(find_reuse(rows, identities, counting), [capacity])
        assert most / tokens == pytest.approx(optimum, abs=0.0006)

"""Published hit rates of synthetic traffic, from their descriptions. A cache alone needs no GPU."""

from __future__ import annotations

from random import Random

import pytest
from marks import long

from kvsim.explain.cache_curve import lru_tokens, make_curve
from kvsim.workload import Row, SegmentContent, Trace
from kvsim.workload.keys import streams
from kvsim.workload.reuse import Counting, Reuse, find_reuse

Segments = list[tuple[str, int]]


def reuse_of(prompts: list[Segments], block_size: int) -> tuple[Reuse, int]:
    """The reuse of prompts of named parts, and the number of their tokens."""
    rows = [
        Row(at, str(at), at + 2, None, sum(n for _, n in parts), 1, SegmentContent(tuple(parts)))
        for at, parts in enumerate(prompts)
    ]
    trace = Trace("made", "native", "", rows)
    reuse = find_reuse(rows, streams(trace), Counting(block_size))
    return reuse, sum(row.input_length for row in rows)


@pytest.mark.parametrize("sessions", [75, pytest.param(150, marks=long)])
def test_a_shared_pool_finds_nearly_all_of_an_agent(sessions: int) -> None:
    """Mooncake Store under vLLM: 20 k common tokens, 10 k of the first input, 30 turns of 2,048
    and 900 tokens; "above 95 %" with 75 to 375 sessions (Mooncake, docs/source/performance/vllm/
    vllm-v1-mooncake-store.md, 73d8c53)."""
    prompts: list[Segments] = []
    histories: list[Segments] = [[("system", 20_000), (f"{s}", 10_000)] for s in range(sessions)]
    for turn in range(30):
        for session, history in enumerate(histories):
            if turn:
                history.append((f"{session} asks {turn}", 2048))
            prompts.append(list(history))
            history.append((f"{session} answer {turn}", 900))
    reuse, tokens = reuse_of(prompts, 16)
    assert reuse.ceiling_tokens / tokens == pytest.approx(0.956, abs=0.002)


def test_the_round_in_which_a_pool_of_80_gb_is_too_small() -> None:
    """20 clients, 10 rounds of 4,096 tokens behind a barrier, pages of 64, Qwen3-8B (36 layers, 8
    heads of 128, 2 bytes): 80 GB hold 542,534 tokens. Published: 83 % in round 6, 36 % in round 7
    (Mooncake, docs/source/performance/mooncake/ssd-offload-benchmark-results.md, 73d8c53)."""
    pool = 80 * 10**9 // (2 * 36 * 8 * 128 * 2 * 64)
    shares = []
    for seed in range(8):
        random, prompts = Random(seed), list[Segments]()
        for rounds in range(1, 11):
            clients = list(range(20))
            random.shuffle(clients)  # --ready-queue-policy random
            prompts += [[(f"{c} {r}", 4096) for r in range(rounds)] for c in clients]
        found = reuse_of(prompts, 64)[0].found
        each = (
            make_curve(found[20 * r : 20 * r + 20], 64).tokens.values([pool])[0] for r in range(10)
        )
        shares.append([hits / (20 * 4096 * (r + 1)) for r, hits in enumerate(each)])
    for share in shares:
        assert share[5] == pytest.approx(0.833, abs=0.001)
        assert 0.70 < share[6] < 0.82  # 0.857 where everything is kept.
        assert max(share[7:]) < 0.62


def test_documents_in_a_small_pool_and_with_a_large_tier() -> None:
    """BLIS: 100 documents of 1,024 tokens, each asked about at random in 1,280 tokens more, 600
    requests, 3,000 blocks of 16: .0772 of the prompt tokens; .3674 with a tier that holds them all
    (inference-sim #1699)."""
    small, large = 0.0, 0.0
    for seed in range(8):
        random = Random(seed)
        prompts = [[(f"{random.randrange(100)}", 1024), (f"own {n}", 1280)] for n in range(600)]
        reuse, tokens = reuse_of(prompts, 16)
        small += lru_tokens(reuse, [3000])[0] / tokens / 8
        large += reuse.ceiling_tokens / tokens / 8
    assert small == pytest.approx(0.0772, abs=0.012)
    assert large == pytest.approx(0.3674, abs=0.004)

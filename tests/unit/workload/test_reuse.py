"""The fast hit counts equal a cache that is simulated block by block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from made import make_trace, traces
from marks import examples, long

from kvsim.explain.cache_curve import lru_tokens, optimum_tokens
from kvsim.workload import SegmentContent, Trace
from kvsim.workload.keys import streams
from kvsim.workload.reuse import Counting, ceiling_tokens, find_reuse


def prompts(trace: Trace, block_size: int) -> list[list[int]]:
    return [
        list(stream.keys(0, row.input_length // block_size, block_size))
        for row, stream in zip(trace.rows, streams(trace), strict=True)
    ]


def hit_blocks(trace: Trace, keys: Sequence[int], cache: object, number: int, size: int) -> int:
    known = 0
    while known < len(keys) and keys[known] in cache:  # type: ignore[operator]
        known += 1
    return min(known, (trace.rows[number].input_length - 1) // size)


def lru_by_hand(trace: Trace, block_size: int, capacity: int) -> int:
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for number, keys in enumerate(prompts(trace, block_size)):
        hits += hit_blocks(trace, keys, cache, number, block_size)
        for key in reversed(keys):
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits * block_size


def min_by_hand(trace: Trace, block_size: int, capacity: int) -> int:
    requests = prompts(trace, block_size)
    cache: set[int] = set()
    hits = 0
    for number, keys in enumerate(requests):
        hits += hit_blocks(trace, keys, cache, number, block_size)
        cache.update(keys)

        def next_use(key: int, after: int = number) -> tuple[int, int]:
            for later in range(after + 1, len(requests)):
                most = (trace.rows[later].input_length - 1) // block_size
                if key in requests[later][:most]:  # the last token is never a hit
                    return later, requests[later].index(key)
            return len(requests), 0

        while len(cache) > capacity:
            cache.remove(max(cache, key=next_use))
    return hits * block_size


@long
@settings(max_examples=examples(100), deadline=None)
@given(traces(forms="hhhsstpu", max_rows=10), st.integers(1, 5))
def test_lru_and_min_hits_at_every_capacity(trace: Trace, block_size: int) -> None:
    reuse = find_reuse(trace.rows, streams(trace), Counting(block_size))
    capacities = list(range(reuse.distinct + 2))
    assert lru_tokens(reuse, capacities) == [
        lru_by_hand(trace, block_size, capacity) for capacity in capacities
    ]
    few = capacities[::3]
    assert optimum_tokens(reuse, few) == [
        min_by_hand(trace, block_size, capacity) for capacity in few
    ]


@settings(max_examples=examples(100), deadline=None)
@given(traces(max_rows=10), st.integers(1, 5))
def test_the_ceiling_is_a_cache_that_drops_nothing(trace: Trace, block_size: int) -> None:
    identities = streams(trace)
    reuse = find_reuse(trace.rows, identities, Counting(block_size))
    ceiling = ceiling_tokens(trace.rows, identities, block_size)
    assert ceiling == lru_by_hand(trace, block_size, 10**9)
    assert lru_tokens(reuse, [reuse.distinct, 10**9]) == [ceiling, ceiling]
    assert ceiling_tokens(trace.rows, identities, block_size, outputs=True) >= ceiling


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    content = SegmentContent((("a", 8),))
    trace = make_trace([(8, 1, content), (8, 1, content), (9, 1, content)])
    assert ceiling_tokens(trace.rows, streams(trace), 4) == 4 + 8


def test_a_trace_that_shares_nothing_hits_nothing() -> None:
    trace = make_trace([(40, 9, None)] * 3)
    reuse = find_reuse(trace.rows, streams(trace), Counting(4))
    assert lru_tokens(reuse, [1, 100]) == optimum_tokens(reuse, [1, 100]) == [0, 0]
    assert reuse.distinct == 30

"""Every capacity at once equals one capacity at a time, and the optimum equals brute force."""

from __future__ import annotations

from collections import OrderedDict
from random import Random

import pytest
from marks import long, mostly_long
from trees import BLOCK, Case, most_hits, random_case

from kvsim.explain.cache_curve import (
    by_prefix,
    grouped,
    lru_tokens,
    make_curve,
    optimum_tokens,
    who_reuses,
)
from kvsim.workload import HashContent, Row, Trace
from kvsim.workload.keys import streams
from kvsim.workload.reuse import Counting, Walk, chains


def lru_by_hand(case: Case, capacity: int) -> int:
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for keys, most in zip(case.keys, case.most, strict=True):
        here = next((n for n, key in enumerate(keys) if key not in cache), len(keys))
        hits += min(here, most)
        for key in reversed(keys):
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


@pytest.mark.parametrize("group", mostly_long(25, quick=4))
def test_no_choice_of_what_to_keep_hits_more_than_the_optimum(group: int) -> None:
    for seed in range(group * 60, (group + 1) * 60):
        rng = Random(seed)
        case = random_case(rng, rng.randint(2, 7), 3)
        reuse = case.reuse()
        for capacity in range(1, 6):
            best = optimum_tokens(reuse, [capacity])[0]
            assert best == BLOCK * most_hits(case, capacity), f"seed {seed}, {capacity} blocks"


def test_lru_equals_a_list_at_every_capacity() -> None:
    for seed in range(80):
        rng = Random(seed)
        case = random_case(rng, rng.randint(1, 40), 6)
        reuse = case.reuse()
        capacities = range(reuse.distinct + 2)
        by_hand = [BLOCK * lru_by_hand(case, capacity) for capacity in capacities]
        assert lru_tokens(reuse, capacities) == by_hand, f"seed {seed}"
        blocks = make_curve(reuse.found, BLOCK).blocks.values(capacities)
        assert [BLOCK * each for each in blocks] == by_hand, f"seed {seed}"
        assert by_hand == sorted(by_hand)
        assert by_hand[-1] == reuse.ceiling_tokens
        best = optimum_tokens(reuse, capacities)
        assert all(one <= other <= by_hand[-1] for one, other in zip(by_hand, best, strict=True))


@long
def test_a_stream_of_requests_gives_the_same_curve_and_remembers_owners_only() -> None:
    """More requests than slots: those that own nothing any more are given out again."""
    rng = Random(1)
    case = random_case(rng, 5000, 8, wide=3)
    walk, counting = Walk(BLOCK), Counting(BLOCK)
    asked = chains(case.trace.rows, streams(case.trace), counting)
    curve = make_curve(map(walk.step, asked), BLOCK)
    capacities = [1, 10, 100, 1000, 10_000]
    assert curve.tokens.values(capacities) == lru_tokens(case.reuse(), capacities)
    assert curve.tokens.values([100]) == [BLOCK * lru_by_hand(case, 100)]
    assert len(walk._recency.owners) < 5000


def test_requests_that_find_something_at_each_capacity() -> None:
    case = random_case(Random(3), 40, 5)
    curve = make_curve(case.reuse().found, BLOCK)
    for capacity in range(30):
        cache: OrderedDict[int, None] = OrderedDict()
        finders = 0
        for keys, most in zip(case.keys, case.most, strict=True):
            finders += bool(most and keys and keys[0] in cache)
            for key in reversed(keys):
                cache[key] = None
                cache.move_to_end(key)
            while len(cache) > capacity:
                cache.popitem(last=False)
        assert curve.requests.values([capacity]) == [finders]


def test_the_parts_by_who_reuses_session_and_prefix_add_up() -> None:
    for seed in range(50):
        case = random_case(Random(seed), 30, 5)
        reuse, rows = case.reuse(), case.trace.rows
        capacities = [1, 3, 9, 27, 1000]
        whole = lru_tokens(reuse, capacities)
        parts = [ramps.values(capacities) for ramps in who_reuses(rows, reuse).values()]
        assert [sum(each) for each in zip(*parts, strict=True)] == whole, f"seed {seed}"
        prefixes = [
            make_curve(group.reuse.found, BLOCK).tokens.values(capacities)
            for group in by_prefix(rows, reuse)
        ]
        assert [sum(each) for each in zip(*prefixes, strict=True)] == whole, f"seed {seed}"
        roots = {keys[0] for keys in case.keys if keys}
        assert len(prefixes) == len(roots)
        sessions = [row.session for row in rows]
        groups = grouped(rows, reuse, sessions)
        assert {group.name for group in groups} == {*sessions} - {None}


def test_who_used_it_before() -> None:
    """Session a twice, then b, then c: b takes what a alone had, c what a and b had."""
    rows = [
        Row(i, str(i), i + 2, i, 9, 1, HashContent(((7, 2),)), session=session)
        for i, session in enumerate("aabc")
    ]
    trace = Trace("made", "native", "", rows, BLOCK, "prefix", partial_hash=False)
    case = Case(trace, [], [])
    found = {who: ramps.values([9])[0] for who, ramps in who_reuses(rows, case.reuse()).items()}
    assert found == {"same session": 8, "another session": 8, "shared root": 8}

"""Eviction orders in a cache alone: what they hit, what they evict, and what bounds them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from marks import mostly_long
from trees import BLOCK, Case, random_case

from kvsim.engines.sglang.ranks import make_rank
from kvsim.errors import ConfigError
from kvsim.explain.cache_curve import lru_tokens, optimum_tokens
from kvsim.explain.cache_eviction import (
    POLICIES,
    RADIX,
    prompts,
    rank_policies,
    replay,
    replay_radix,
)
from kvsim.policies.eviction import EVICTIONS
from kvsim.policies.order import Replacement
from kvsim.workload.keys import streams
from kvsim.workload.reuse import Counting, find_reuse

ORDERS = [name for name in POLICIES if not name.startswith(RADIX)]
CLOSED_BY_THEMSELVES = ("lru", "vllm-0.6.3")


def tokens(case: Case, name: str, capacity: int, *, closed: bool) -> int:
    asked = prompts(case.trace.rows, streams(case.trace), Counting(BLOCK))
    if name.startswith(RADIX):
        rank = make_rank(name.removeprefix(RADIX), {})
        return sum(replay_radix(asked, rank, capacity, BLOCK))
    return sum(replay(asked, EVICTIONS[name], capacity, BLOCK, closed=closed))


@pytest.mark.parametrize("group", mostly_long(4, quick=1))
@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_beats_the_optimum(name: str, group: int) -> None:
    hits = 0
    for seed in range(group, 40, 4):
        rng = Random(seed)
        case = random_case(rng, 60, 5, wide=3)
        capacity = rng.randint(5, 30)
        best = optimum_tokens(case.reuse(), [capacity])[0]
        for closed in (False, True):
            found = tokens(case, name, capacity, closed=closed)
            assert found <= best, f"seed {seed}"
            hits += found
    assert hits > 0


@pytest.mark.parametrize("name", CLOSED_BY_THEMSELVES)
def test_the_orders_of_vllm_equal_the_curve_and_evict_ends_only(name: str) -> None:
    for seed in range(40):
        rng = Random(seed)
        case = random_case(rng, 60, 5, wide=3)
        capacity = rng.randint(5, 30)
        assert tokens(case, name, capacity, closed=False) == lru_tokens(case.reuse(), [capacity])[0]


@pytest.mark.parametrize("name", sorted(set(ORDERS) - set(CLOSED_BY_THEMSELVES)))
def test_a_closed_cache_never_loses_the_beginning_of_what_it_keeps(name: str) -> None:
    evicted = 0
    for seed in range(20):
        case = random_case(Random(seed), 60, 5, wide=3)
        asked = prompts(case.trace.rows, streams(case.trace), Counting(BLOCK))
        before = {key: keys[d - 1] for keys in case.keys for d, key in enumerate(keys) if d}
        here: set[int] = set()

        class Spied(EVICTIONS[name]):  # type: ignore[misc]
            """Says what is in the cache."""

            def store(self, block: int, key: int, here: set[int] = here) -> None:
                here.add(key)
                super().store(block, key)

            def pop(self, here: set[int] = here) -> int:
                keys = dict(self._keys)
                block: int = super().pop()
                here.discard(keys[block])
                return block

        for number in range(1, len(asked) + 1, 7):
            here.clear()
            replay(asked[:number], Spied, 12, BLOCK, closed=True)
            assert all(before[key] in here for key in here if key in before), f"seed {seed}"
            evicted += len({key for keys in case.keys[:number] for key in keys}) - len(here)
    assert evicted > 0


def accesses(seed: int, number: int) -> list[int]:
    rng = Random(seed)
    hot = [min(int(rng.paretovariate(0.6)), number) for _ in range(8000)]
    return [key if rng.random() < 0.7 else number + rng.randrange(3 * number) for key in hot]


def found(make: Callable[[int, int], Any], capacity: int, keys: list[int]) -> list[int]:
    """1 for each access that hits, in a cache of single blocks."""
    order, block_of, key_of, hits = make(0, capacity), dict[int, int](), dict[int, int](), []
    for key in keys:
        block = block_of.get(key)
        hits.append(int(block is not None))
        if block is not None:
            order.hit(block)
        else:
            order.missed(key)
            block = len(key_of)
            if block == capacity:
                block = order.pop()
                del block_of[key_of[block]]
            block_of[key], key_of[block] = block, key
            order.store(block, key)
        order.put(block, key, BLOCK, 0)
    return hits


@pytest.mark.parametrize(
    ("name", "theirs", "points"),
    [
        ("fifo", "FIFO", 0),
        ("lfu", "LFU", 0),
        ("arc", "ARC", 0),
        ("2q", "TwoQ", 0),
        ("sieve", "Sieve", 0),
        ("s3-fifo", "S3FIFO", 0.5),
        ("lirs", "LIRS", 0.5),
        ("w-tinylfu", "WTinyLFU", 0.5),
    ],
)
@pytest.mark.parametrize(("capacity", "number"), [(100, 1000), (400, 3000)])
def test_the_same_accesses_hit_as_in_libcachesim(
    name: str, theirs: str, points: float, capacity: int, number: int
) -> None:
    """Every access where `points` is 0. The others leave some freedom: in S3-FIFO what enters
    before the cache is first full, in LIRS the size of its memory, in W-TinyLFU a sketch."""
    lib = pytest.importorskip("libcachesim", reason="pip install 'kvsim[twins]'")
    keys = accesses(capacity, number)
    cache, expected = getattr(lib, theirs)(capacity), []
    for key in keys:
        request = lib.Request()
        request.obj_id, request.obj_size = key, 1
        expected.append(int(cache.get(request)))
    mine = found(EVICTIONS[name], capacity, keys)
    if points:
        assert abs(sum(mine) - sum(expected)) <= points / 100 * len(keys)
    else:
        assert mine == expected
    assert 0 < sum(mine) < len(keys)


def lirs_from_the_paper(size: int, keys: list[int]) -> list[int]:
    """1 for each access that hits: section 3.3 of Jiang and Zhang (SIGMETRICS 2002), on lists, with
    a hundredth of the cache for blocks that are not LIR, and a memory of twice its size."""
    stack, queue, lost, hits = list[int](), list[int](), list[int](), list[int]()
    lir: set[int] = set()
    most_lir = size - max(1, size // 100)

    def push(key: int) -> None:
        if key in stack:
            stack.remove(key)
        stack.append(key)

    def prune() -> None:
        while stack and stack[0] not in lir:
            if (key := stack.pop(0)) in lost:
                lost.remove(key)

    def make_lir(key: int) -> None:
        lir.add(key)
        push(key)
        if len(lir) > most_lir:
            lir.remove(stack[0])
            queue.append(stack[0])
            prune()

    for key in keys:
        hits.append(int(key in lir or key in queue))
        if not hits[-1] and len(lir) + len(queue) == size:
            victim = queue.pop(0)
            if victim in stack:
                lost.append(victim)
                if len(lost) > 2 * size:
                    stack.remove(lost.pop(0))
        if key in lir:
            push(key)
            prune()
        elif key in stack or len(lir) < most_lir:
            for each in (queue, lost):
                if key in each:
                    each.remove(key)
            make_lir(key)
        else:
            push(key)
            if key in queue:
                queue.remove(key)
            queue.append(key)
    return hits


@pytest.mark.parametrize(("capacity", "number"), [(10, 60), (100, 1000), (200, 2000)])
def test_lirs_is_that_of_the_paper(capacity: int, number: int) -> None:
    keys = accesses(capacity, number)[:4000]
    assert found(EVICTIONS["lirs"], capacity, keys) == lirs_from_the_paper(capacity, keys)


def arc_from_the_paper(size: int, keys: list[int]) -> list[int]:
    """1 for each access that hits: figure 4 of Megiddo and Modha (FAST 2003), on lists."""
    once, twice, once_lost, twice_lost = (list[int]() for _ in range(4))
    target, hits = 0.0, list[int]()

    def replace(again: bool) -> None:
        if once and (len(once) > target or (again and len(once) == target)):
            once_lost.append(once.pop(0))
        else:
            twice_lost.append(twice.pop(0))

    for key in keys:
        hits.append(int(key in once or key in twice))
        if hits[-1]:
            (once if key in once else twice).remove(key)
            twice.append(key)
        elif key in once_lost:
            target = min(target + max(len(twice_lost) / len(once_lost), 1), size)
            replace(again=False)
            once_lost.remove(key)
            twice.append(key)
        elif key in twice_lost:
            target = max(target - max(len(once_lost) / len(twice_lost), 1), 0)
            replace(again=True)
            twice_lost.remove(key)
            twice.append(key)
        else:
            known = len(once) + len(twice) + len(once_lost) + len(twice_lost)
            if len(once) == size:
                once.pop(0)
            elif len(once) + len(once_lost) == size:
                once_lost.pop(0)
                replace(again=False)
            elif known >= size:
                if known == 2 * size:
                    twice_lost.pop(0)
                replace(again=False)
            once.append(key)
    return hits


@pytest.mark.parametrize(("capacity", "number"), [(10, 60), (100, 1000), (200, 2000)])
def test_arc_is_that_of_the_paper(capacity: int, number: int) -> None:
    keys = accesses(capacity, number)[:4000]
    assert found(EVICTIONS["arc"], capacity, keys) == arc_from_the_paper(capacity, keys)


class PlainSieve(Replacement):
    """SIEVE as its paper has it: the hand goes through the queue block by block."""

    def __init__(self, first: int = 0, size: int = 0) -> None:
        super().__init__(first, size)
        self.queue: list[int] = []
        self.hand = 0
        self.visited: set[int] = set()

    def stored(self, block: int, key: int) -> None:
        self.queue.append(block)

    def used(self, block: int) -> None:
        self.visited.add(block)

    def choose(self) -> int:
        while (block := self.queue[self.hand]) not in self._idle or block in self.visited:
            if block in self._idle:
                self.visited.remove(block)
            self.hand = (self.hand + 1) % len(self.queue)
        del self.queue[self.hand]
        self.hand = self.hand % len(self.queue) if self.queue else 0
        return block


def test_sieve_with_blocks_in_use_is_that_of_the_paper() -> None:
    hits = 0
    for seed in range(40):
        rng = Random(seed)
        case = random_case(rng, 60, 5, wide=3)
        asked = prompts(case.trace.rows, streams(case.trace), Counting(BLOCK))
        capacity = rng.randint(5, 30)
        one, other = (
            replay(asked, make, capacity, BLOCK, closed=True)
            for make in (EVICTIONS["sieve"], PlainSieve)
        )
        assert one == other, f"seed {seed}"
        hits += sum(one)
    assert hits


def test_partial_blocks_are_counted_as_the_curve_counts_them() -> None:
    for seed in range(20):
        rng = Random(seed)
        case = random_case(rng, 60, 5, wide=3)
        counting = Counting(BLOCK, True, True)
        asked = prompts(case.trace.rows, streams(case.trace), counting)
        reuse = find_reuse(case.trace.rows, streams(case.trace), counting)
        for capacity in (7, 15, 40):
            hits = sum(replay(asked, EVICTIONS["lru"], capacity, BLOCK, closed=False))
            assert [hits] == lru_tokens(reuse, [capacity]), f"seed {seed}"


def test_policies_that_cannot_be_replayed() -> None:
    trace = random_case(Random(0), 5, 3).trace
    with pytest.raises(ConfigError, match="belady sees the future"):
        rank_policies(trace, ["belady"], [4], Counting(BLOCK))
    with pytest.raises(ConfigError, match="unknown 'lur'; did you mean 'lru'"):
        rank_policies(trace, ["lur"], [4], Counting(BLOCK))


def test_hints_keep_the_beginning_of_prompts_for_a_time() -> None:
    order = EVICTIONS["retained"](0, 4)
    for block, (tokens_upto, access_s) in enumerate([(16, 0), (2048, 1), (2064, 2)]):
        order.store(block, block)
        order.put(block, block, tokens_upto, access_s * 10**9)
    assert order.pop() == 1  # Not block 0, which is older, but begins a prompt.
    order.store(3, 3)
    order.put(3, 3, 4096, 301 * 10**9)
    assert order.pop() == 0  # Nobody has used it for 300 s.
    assert [order.pop(), order.pop()] == [2, 3]

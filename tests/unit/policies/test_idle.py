"""Orders of idle blocks."""

import pickle
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import mostly_long
from twins.evictor import WalkingEvictor

from kvsim.policies import eviction, replacement
from kvsim.policies.eviction import EVICTIONS, Evictor
from kvsim.policies.order import Queue


@given(st.lists(st.tuples(st.sampled_from(["pop", "put", "remove"]), st.integers(0, 99))))
def test_a_queue_is_a_list_taken_from_its_front(moves: list[tuple[str, int]]) -> None:
    queue, plain = Queue(), list(range(3, 8))
    for block in plain:
        queue.put(block, None, 4, 0)
    held: list[int] = []
    for move, pick in moves:
        if move == "pop" and plain:
            held.append(plain.pop(0))
            assert queue.pop() == held[-1]
        elif move == "put" and held:
            plain.append(held.pop(pick % len(held)))
            queue.put(plain[-1], None, 4, 0)
        elif move == "remove" and list(queue):
            block = list(queue)[pick % len(list(queue))]
            plain.remove(block)
            held.append(block)
            queue.hit(block)
        assert list(queue) == plain
        assert len(queue) == len(plain)


def test_a_run_of_equal_times_gives_up_its_longest_prefix_first() -> None:
    evictor = Evictor()
    for block, tokens in ((1, 16), (2, 32), (3, 48)):
        evictor.put(block, block, tokens, access_ns=5)
    assert [evictor.pop() for _ in range(3)] == [3, 2, 1]


def test_an_older_entry_behind_a_newer_one_is_not_preferred_for_its_age() -> None:
    evictor = Evictor()
    evictor.put(1, 1, 16, access_ns=9)
    evictor.put(2, 2, 16, access_ns=3)
    assert evictor.pop() == 1


def test_the_walk_compares_with_the_current_candidate() -> None:
    evictor = Evictor()
    evictor.put(1, 1, 16, access_ns=9)
    evictor.put(2, 2, 32, access_ns=3)  # longer: the candidate from here on, with its own time
    evictor.put(3, 3, 64, access_ns=5)  # later than 3: the walk ends, although 5 is below 9
    assert evictor.pop() == 2


@pytest.mark.parametrize("name", [name for name in EVICTIONS if name != "belady"])
def test_what_is_hit_again_and_again_takes_no_memory(name: str) -> None:
    order: Any = EVICTIONS[name](1, 50)
    blocks, tokens = list(range(1, 51)), [16 * place for place in range(1, 51)]
    order.store_table(blocks, blocks)
    sizes = []
    for now in range(400):
        order.put_table(blocks, blocks, tokens, now)
        sizes.append(len(pickle.dumps(order)))
        for block in blocks:
            order.hit(block)
    assert max(sizes[100:]) <= 1.5 * max(sizes[:100])


def evicted(name: str, seed: int) -> list[int]:
    """What goes, in order, while blocks come, are hit, and go at random."""
    rng, found = random.Random(seed), []
    order: Any = EVICTIONS[name](1, 20)
    here, idle, now = list(range(1, 21)), set[int](), 0
    for block in here:
        order.store(block, block)
    for now in range(400):
        block = rng.choice(here)
        if block not in idle:
            order.put(block, block, 16 * rng.randint(1, 9), now // 3)
            idle.add(block)
        elif rng.random() < 0.7:
            order.hit(block)
            idle.remove(block)
        else:
            found.append(order.pop())
            idle.remove(found[-1])
            order.store(found[-1], found[-1])
    return found


@pytest.mark.parametrize("name", ["vllm-0.6.3", "filo", "mru", "lfu"])
@pytest.mark.parametrize("seed", range(5))
def test_what_is_forgotten_in_time_changes_no_choice(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = evicted(name, seed)
    for module in (eviction, replacement):
        monkeypatch.setattr(module, "out_of_date", lambda idle: idle + 1)
    assert len(expected) > 20 and evicted(name, seed) == expected


@pytest.mark.parametrize("seed", mostly_long(30, quick=8))
@settings(deadline=None)
@given(data=st.data())
def test_eviction_equals_the_walk_of_the_engine(seed: int, data: st.DataObject) -> None:
    rng = random.Random(data.draw(st.integers(0, 2**32)) + seed)
    clever, dull = Evictor(), WalkingEvictor()
    now, fresh = 0, 0
    gone: list[int] = []
    for _ in range(rng.randint(1, 60)):
        kind = rng.random()
        if kind < 0.45:
            now += rng.choice((0, 0, 1))
            last = rng.choice((now, now, now, -1, rng.randint(-1, now + 1)))
            length, whole, first = rng.randint(1, 6), rng.random() < 0.3, rng.randint(0, 3)
            blocks = list(range(fresh, fresh + length))
            fresh += length
            if gone and rng.random() < 0.3:
                blocks[0] = gone.pop()  # Blocks come back.
            if whole:
                upto = [16 * (first + place + 1) for place in range(length)]
                clever.put_table(blocks, blocks, upto, last)
            for place, block in enumerate(blocks):
                tokens = 16 * (place + 1 if rng.random() < 0.8 else rng.randint(1, 6))
                if whole:
                    tokens = 16 * (first + place + 1)
                else:
                    clever.put(block, block, tokens, last)
                dull.add(block, tokens, last)
        elif dull.entries and kind < 0.65:
            block = rng.choice(list(dull.entries))
            clever.hit(block)
            dull.remove(block)
            gone.append(block)
        elif dull.entries and kind < 0.8:
            gone.append(dull.evict())
            assert clever.pop() == gone[-1]
        elif dull.entries:
            number = rng.randint(0, len(dull.entries))
            evicted = [dull.evict() for _ in range(number)]
            assert clever.pop_many(number) == evicted
            gone += evicted
        assert len(clever) == len(dull.entries)
        assert set(clever) == set(dull.entries)
    while dull.entries:
        assert clever.pop() == dull.evict()

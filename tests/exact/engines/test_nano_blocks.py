"""Block tables of nano-vllm: exact ids, who hits whom, and books that always balance."""

import random
from collections.abc import Sequence as Seq
from typing import Any

import pytest
from twins.nano import August2025, Head
from twins.steps import generated

from kvsim.against.conform.step_log import RuleStream
from kvsim.core.request import Request
from kvsim.core.vectors import numbers
from kvsim.engines.nano.blocks import NanoPool, NanoTables, NanoTables2025


class KeysOnly:
    """A stream that knows its blocks only together with what is before them."""

    knows_tokens = False

    def __init__(self, stream: RuleStream) -> None:
        self.keys = self.contents = stream.keys


def request(prompt: Seq[int], name: str = "r", *, contents: bool = True) -> Request:
    stream = RuleStream(name, prompt)
    return Request(0, name, len(prompt), stream if contents else KeysOnly(stream))


def hits(tables: NanoTables, each: Request) -> list[int]:
    """The blocks that an admission would share."""
    tables.find(each)
    return list(tables.hits)


def allocate(tables: NanoTables, each: Request) -> None:
    tables.find(each)
    tables.allocate(each)


def run(tables: NanoTables, each: Request) -> int:
    """Allocates and computes a prompt; returns the tokens hit."""
    allocate(tables, each)
    tables.publish(each, each.length)
    return each.seen


def test_freed_blocks_wait_behind_all_others_last_block_first() -> None:
    tables = NanoTables(2, 5)
    a = request([1, 2, 3, 4, 5])
    run(tables, a)
    tables.free(a)
    b = request([6, 6, 7, 7, 8, 8, 9, 9])
    allocate(tables, b)
    assert (a.table, b.table) == ([], [3, 4, 2, 1])


def test_blocks_are_hit_once_computed_but_never_the_last_one() -> None:
    tables = NanoTables(2, 9)
    prompt = [1, 2, 3, 4]
    a, b, c = request(prompt), request(prompt), request(prompt)
    allocate(tables, a)
    assert hits(tables, b) == []
    tables.publish(a, 3)
    assert run(tables, c) == 2
    assert c.table == [0, 2]
    assert tables.lookups == (4, 1)


def test_of_equal_blocks_the_one_registered_last_is_hit() -> None:
    tables = NanoTables(2, 9)
    prompt = [1, 2, 3]
    a, b, c = request(prompt), request(prompt), request(prompt)
    allocate(tables, a)
    allocate(tables, b)
    for each in (b, a):
        tables.publish(each, 3)
    assert hits(tables, c) == [a.table[0]]


def test_content_outlives_its_prefix() -> None:
    """The prompt of a and b is registered twice. The blocks of b are hit until they are
    overwritten; those of a, which it goes on to hold, never again."""
    tables = NanoTables(1, 7)
    a, b, other, c = (request(each) for each in ([1, 2, 3], [1, 2, 3], [4, 5, 6], [1, 2, 3, 9]))
    for each in (a, b):
        allocate(tables, each)
    for each in (a, b):
        tables.publish(each, 3)
    tables.free(b)
    assert hits(tables, c) == [3, 4, 5]
    run(tables, other)
    assert other.table == [6, 5, 4]
    assert hits(tables, c) == [3]
    assert tables.gpu.cached == 1
    tables.audit([a, other])


def test_an_admission_needs_a_block_for_every_hit_that_is_free() -> None:
    tables = NanoTables(2, 4)
    a, b = request([1, 2, 3, 4, 5]), request([1, 2, 3, 4, 6])
    run(tables, a)
    tables.find(b)
    assert tables.need(b) == 1
    tables.free(a)
    tables.find(b)
    assert tables.need(b) == 3
    assert tables.gpu.cached == 2
    run(tables, b)
    assert (b.table, tables.gpu.cached) == ([0, 1, 3], 0)
    tables.audit([b])


def test_a_block_is_opened_by_the_token_that_needs_it() -> None:
    tables = NanoTables(2, 4)
    a = request([1, 2, 3])
    run(tables, a)
    held = []
    for _ in range(3):
        a.length += 1
        tables.append(a)
        held.append(len(a.table))
        tables.audit([a])
    assert held == [2, 3, 3]


def stale_tables(*, contents: bool) -> tuple[NanoTables2025, Request]:
    """A block that held [5, 5] behind [1, 1] now holds [5, 5] behind [2, 2]."""
    tables = NanoTables2025(2, 3)
    for name, prompt in (("a", [1, 1, 5, 5, 9]), ("b", [2, 2, 5, 5])):
        each = request(prompt, name, contents=contents)
        allocate(tables, each)
        tables.free(each)
    return tables, request([1, 1, 5, 5, 7], "c", contents=contents)


def test_an_overwritten_block_is_hit_if_its_own_tokens_agree() -> None:
    tables, c = stale_tables(contents=True)
    assert len(hits(tables, c)) == 2


def test_without_contents_only_the_whole_prefix_is_hit() -> None:
    tables, c = stale_tables(contents=False)
    assert len(hits(tables, c)) == 1


def test_what_follows_a_stale_hit_is_chained_to_its_finder() -> None:
    tables = NanoTables2025(2, 6)
    a, y = request([1, 1, 5, 5, 9], "a"), request([8, 8, 8, 8, 8], "y")
    for each in (a, y):
        allocate(tables, each)
    for each in (a, y):
        tables.free(each)
    x, c = request([2, 2, 5, 5], "x"), request([1, 1, 5, 5, 7], "c")
    allocate(tables, x)
    allocate(tables, c)
    assert (x.table, c.table) == ([2, 1], [0, 1, 5])
    for _ in range(2):
        x.length += 1
        tables.append(x)
    output = [generated("x", 0), generated("x", 1)]
    behind_c, behind_x = request([1, 1, 5, 5, *output]), request([2, 2, 5, 5, *output])
    assert len(hits(tables, behind_c)) == 3
    assert len(hits(tables, behind_x)) == 2


def test_the_last_block_may_hit_so_that_nothing_is_left_to_compute() -> None:
    tables = NanoTables2025(2, 9)
    a, b = request([1, 2, 3, 4]), request([1, 2, 3, 4])
    allocate(tables, a)
    allocate(tables, b)
    assert b.table == a.table
    assert b.seen == b.length


# -- the pool --------------------------------------------------------------------------------------


class Held:
    """A table of the twin."""

    def __init__(self, table: list[int]) -> None:
        self.table = table


@pytest.mark.parametrize("kind", [Head, August2025])
@pytest.mark.parametrize("seed", range(30))
def test_a_pool_gives_out_the_blocks_that_a_plain_list_gives(kind: Any, seed: int) -> None:
    """Tables are taken, registered in part for three contents, hit, and given back."""
    rng = random.Random(seed)
    pool = NanoPool(9, forgets=kind is Head)
    config = {"block_size": 1, "max_num_seqs": 1, "max_num_batched_tokens": 1, "num_gpu_blocks": 9}
    plain = kind(config)
    tables: list[list[int]] = []
    shared = 0
    for _ in range(120):
        move = rng.randrange(4)
        if move == 0 and pool.free:
            taken = [pool.take() for _ in range(rng.randint(1, min(3, pool.free)))]
            assert taken == [plain.take() for _ in taken], f"seed {seed}"
            tables.append(taken)
        elif move == 1 and tables:
            block, content = rng.choice(rng.choice(tables)), rng.randint(1, 3)
            if kind is August2025 or not plain.key[block]:  # A block gets no other content there.
                pool.register(block, content)
                plain.store(block, content, content)
        elif move == 2:
            content = rng.randint(1, 3)
            block = pool.find(content)
            assert block == plain.map.get(content, -1)
            if block >= 0 and pool.content[block] == content:
                pool.hit(numbers([block]))
                plain.share(block)
                tables.append([block])
                shared += 1
        elif tables:
            table = tables.pop(rng.randrange(len(tables)))
            pool.release(numbers(table), 1, 0)
            plain.release(Held(table))
        pool.audit()
        assert pool.free == len(plain.free), f"seed {seed}"
        assert pool.references == {b: n for b, n in enumerate(plain.count) if n}
        served = [b for b in plain.free if plain.key[b] and plain.map.get(plain.key[b]) == b]
        assert sorted(pool.cached_blocks()) == sorted(served), f"seed {seed}"
    assert shared > 2


@pytest.mark.parametrize("fault", ["num_free", "num_cached", "refs", "content"])
def test_a_planted_fault_is_found(fault: str) -> None:
    tables = NanoTables(1, 9)
    a, b = request([1, 2, 3]), request([1, 2, 9])
    for each in (a, b):
        run(tables, each)
    tables.free(b)
    tables.audit([a])
    pool: Any = tables.gpu
    if fault in ("refs", "content"):
        vector = getattr(pool, fault)
        vector[a.table[0]] += 1
    else:
        setattr(pool, fault, getattr(pool, fault) + 1)
    with pytest.raises(AssertionError):
        tables.audit([a])

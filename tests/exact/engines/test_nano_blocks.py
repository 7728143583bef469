"""Block tables of nano-vllm: exact ids, who hits whom, and books that always balance."""

import random
from collections.abc import Sequence as Seq
from typing import Any

import pytest
from twins.nano import August2025, Head
from twins.steps import generated

from kvsim.against.conform.step_log import RuleStream
from kvsim.core.pool import CONTENT, FIELDS, REFS
from kvsim.core.request import Request
from kvsim.core.vectors import EMPTY, numbers
from kvsim.engines.nano import NanoTables, NanoTables2025
from kvsim.policies.order import Queue


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
    assert (a.table, b.table) == ([], [4, 5, 3, 2])


def test_blocks_are_hit_once_computed_but_never_the_last_one() -> None:
    tables = NanoTables(2, 9)
    prompt = [1, 2, 3, 4]
    a, b, c = request(prompt), request(prompt), request(prompt)
    allocate(tables, a)
    assert hits(tables, b) == []
    tables.publish(a, 3)
    assert run(tables, c) == 2
    assert c.table == [1, 3]
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
    assert hits(tables, c) == [4, 5, 6]
    run(tables, other)
    assert other.table == [7, 6, 5]
    assert hits(tables, c) == [4]
    assert tables.gpu.cached == 1
    tables.audit([a, other])


class Noted(Queue):
    """An order that notes which blocks were hit."""

    def __init__(self, first: int, size: int) -> None:
        super().__init__(first, size)
        self.hits: list[int] = []

    def hit(self, block: int) -> None:
        super().hit(block)
        self.hits.append(block)


def test_to_an_order_a_prefix_was_used_after_its_continuation() -> None:
    tables = NanoTables(1, 9, eviction=Noted)
    a, b = request([1, 2, 3, 4]), request([1, 2, 3, 9])
    run(tables, a)
    run(tables, b)
    assert b.table[:3] == a.table[:3]
    assert tables.gpu.order.hits == a.table[2::-1]


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
    assert (b.table, tables.gpu.cached) == ([1, 2, 4], 0)
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
    assert (x.table, c.table) == ([3, 2], [1, 2, 6])
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
    made = NanoTables(1, 9) if kind is Head else NanoTables2025(1, 9)
    pool = made.gpu
    config = {"block_size": 1, "max_num_seqs": 1, "max_num_batched_tokens": 1, "num_gpu_blocks": 9}
    plain = kind(config)
    tables: list[list[int]] = []
    shared = 0
    for _ in range(120):
        move = rng.randrange(4)
        if move == 0 and pool.free:
            taken = list(made.extended(EMPTY, rng.randint(1, min(3, pool.free))))
            assert taken == [plain.take() + 1 for _ in taken], f"seed {seed}"
            tables.append(taken)
        elif move == 1 and tables:
            block, content = rng.choice(rng.choice(tables)), rng.randint(1, 3)
            if kind is August2025 or not plain.key[block - 1]:  # Here, none gets another content.
                made.register(block, content, 1)
                plain.store(block - 1, content, content)
        elif move == 2:
            content = rng.randint(1, 3)
            stale = isinstance(made, NanoTables2025)
            block = made.known.get(content, 0) if stale else pool.find(content)
            assert block == plain.map.get(content, -1) + 1
            holds = made.numbers.get(block, 0) if stale else pool.content(block)
            if block and holds == content:
                pool.touch(block)
                plain.share(block - 1)
                tables.append([block])
                shared += 1
        elif tables:
            table = tables.pop(rng.randrange(len(tables)))
            pool.release(numbers(table), 0, len(table), 0)
            plain.release(Held([block - 1 for block in table]))
        pool.audit()
        assert pool.free == len(plain.free), f"seed {seed}"
        assert pool.references == {b: n for b, n in enumerate(plain.count, 1) if n}
        served = [b + 1 for b in plain.free if plain.key[b] and plain.map.get(plain.key[b]) == b]
        assert sorted(pool.cached_blocks()) == sorted(served), f"seed {seed}"
    assert shared > 2


@pytest.mark.parametrize("fault", ["num_free", "num_cached", REFS, CONTENT])
def test_a_planted_fault_is_found(fault: str | int) -> None:
    tables = NanoTables(1, 9)
    a, b = request([1, 2, 3]), request([1, 2, 9])
    for each in (a, b):
        run(tables, each)
    tables.free(b)
    tables.audit([a])
    pool: Any = tables.gpu
    if isinstance(fault, int):
        pool._cells[a.table[0] * FIELDS + fault] += 1
    else:
        setattr(pool, fault, getattr(pool, fault) + 1)
    with pytest.raises(AssertionError):
        tables.audit([a])

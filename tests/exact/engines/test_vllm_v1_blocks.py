"""The pool and the tables of vLLM V1."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from twins.content_pool import ListPool

from kvsim.engine.request import Request, Sequence
from kvsim.engines.vllm_v1_blocks import ContentPool, VllmV1PrefixTables, VllmV1Tables
from kvsim.rules.eviction import make_eviction


class Chain:
    """A stream whose first `shared` blocks are those of every other one."""

    def __init__(self, own: int, shared: int) -> None:
        self.own, self.shared = own, shared

    def keys(self, first: int, last: int, block_size: int) -> list[int]:
        return [i if i < self.shared else 1000 * self.own + i for i in range(first, last)]

    def sample(self, index: int) -> "Chain":
        return self


def sequence(length: int, own: int = 1, shared: int = 0) -> Sequence:
    return Request(own, f"r{own}", length, Chain(own, shared)).sequences[0]


def admit(tables: VllmV1Tables, one: Sequence) -> list[int]:
    hits = tables.match(one)
    tables.hold(one, one.length, hits)
    tables.publish(one, one.length)
    return hits


def test_block_0_is_never_used() -> None:
    tables = VllmV1Tables(4, 5)
    one = sequence(16)
    admit(tables, one)
    assert one.table == [1, 2, 3, 4]
    assert tables.gpu.free == 0
    assert not tables.extend(one, 17)
    assert one.filled == 16


def test_the_last_block_of_a_released_table_is_used_first() -> None:
    tables = VllmV1Tables(4, 9)
    one, other = sequence(12), sequence(20)
    admit(tables, one)
    tables.free(one)
    admit(tables, other)
    assert other.table == [3, 2, 1, 4, 5]


def test_blank_blocks_go_first_and_the_oldest_content_goes_last() -> None:
    """A table of two full blocks and a part: the part is reused first, then what was never used."""
    tables = VllmV1PrefixTables(4, 7)
    one, other = sequence(9, own=1), sequence(24, own=2)
    admit(tables, one)
    assert one.table == [1, 2, 3]
    tables.free(one)
    assert (tables.gpu.free, tables.gpu.cached) == (6, 2)
    admit(tables, other)
    assert other.table == [3, 4, 5, 6, 2, 1]
    assert tables.gpu.block_of.keys() == set(other.keys)


def test_a_hit_that_is_idle_uses_up_a_free_block() -> None:
    tables = VllmV1PrefixTables(4, 7)
    one, same = sequence(9, own=1, shared=2), sequence(9, own=2, shared=2)
    admit(tables, one)
    hits = tables.match(same)
    assert (hits, tables.need(same, 9, hits)) == ([1, 2], 1)
    tables.free(one)
    assert (tables.match(same), tables.need(same, 9, hits)) == ([1, 2], 3)
    admit(tables, same)
    assert same.table == [1, 2, 3]
    assert tables.lookups == (4, 2)
    tables.audit([same.request])


def test_the_last_token_is_always_computed() -> None:
    tables = VllmV1PrefixTables(4, 20)
    one, same = sequence(8, own=1, shared=2), sequence(8, own=2, shared=2)
    admit(tables, one)
    assert admit(tables, same) == [1]
    assert same.table == [1, 3]  # its second block is a duplicate of block 2
    tables.free(one)
    # The first one labelled is served as long as it keeps its content.
    assert admit(tables, sequence(9, own=3, shared=2)) == [1, 2]


MOVES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**30)), max_size=60)


@given(MOVES)
@settings(max_examples=150)
def test_the_pool_gives_out_the_blocks_that_a_plain_list_gives(
    moves: list[tuple[int, int]],
) -> None:
    """Tables are taken, labelled in part with few different keys, hit, and dropped."""
    pool, plain = ContentPool(9, 1, make_eviction("lru")), ListPool(9, first=1)
    tables: list[list[int]] = []
    for move, seed in moves:
        rng = random.Random(seed)
        if move == 0:
            number = rng.randint(0, pool.free)
            table = pool.take_many(number)
            assert table == plain.take_many(number)
            keys = rng.sample(range(5), rng.randint(0, min(number, 5)))
            pool.label(table[: len(keys)], keys)
            plain.label(table[: len(keys)], keys)
            tables.append(table)
        elif move == 1:
            found = {key: pool.block_of.get(key) for key in range(5)}
            assert found == {key: plain.find(key) for key in range(5)}
            hits = list({block for block in found.values() if block is not None})
            pool.hit(hits)
            plain.hit(hits)
            tables.append(hits)
        elif tables:
            table = tables.pop(rng.randrange(len(tables)))
            pool.drop_keyed_table(table, 4, 0)
            plain.drop_table(table)
        assert (pool.free, pool.used) == (len(plain.free), plain.used)
        pool.audit()

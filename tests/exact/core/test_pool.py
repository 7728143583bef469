"""The pool of blocks decides what its rule, worded as one plain list, decides."""

import random

import pytest
from librt.vecs import append, vec
from twins.content_pool import ListPool

from kvsim.core.contents import WIDTH
from kvsim.core.pool import CONTENT, FIELDS, REFS, Pool
from kvsim.core.vectors import EMPTY
from kvsim.policies.eviction import make_eviction

SIZE, CONTENTS = 9, range(1, 6)


def release(pool: Pool, table: list[int]) -> None:
    """Gives back a whole table."""
    held: vec = EMPTY
    for block in table:
        held = append(held, block)
    pool.release(held, 0, len(held), 0)


def agree(pool: Pool, plain: ListPool) -> None:
    """Both have the same free blocks, holders and contents."""
    pool.audit()
    assert (pool.free, pool.used) == (len(plain.free), plain.used)
    assert pool.labelled == len(plain.key)
    assert sorted(pool.cached_blocks()) == sorted(b for b in plain.free if b in plain.key)
    assert pool.cached == len(pool.cached_blocks())
    assert pool.references == {block: held for block, held in plain.count.items() if held}
    for content in CONTENTS:
        assert pool.find(content) == (plain.find(content) or 0)


@pytest.mark.parametrize("eviction", [None, "lru"])
@pytest.mark.parametrize("seed", range(40))
def test_a_pool_gives_out_the_blocks_that_a_plain_list_gives(
    seed: int, eviction: str | None
) -> None:
    """Tables are taken, labelled in part with few different contents, hit, labelled anew, and
    dropped. The order of the queue is the pool's own, or that of a policy that says the same."""
    rng = random.Random(seed)
    first = (1, 700)[seed % 2]
    pool = Pool(SIZE, eviction and make_eviction(eviction), first=first)
    pool.keys = {content: content for content in CONTENTS}
    plain = ListPool(SIZE, first)
    tables: list[list[int]] = []
    for _ in range(80):
        move = rng.randrange(5)
        if move == 0:
            number = rng.randint(0, pool.free)
            table = pool.take_many(number)
            assert table == plain.take_many(number), f"seed {seed}"
            contents = rng.sample(CONTENTS, rng.randint(0, min(number, len(CONTENTS))))
            for place, content in enumerate(contents):
                pool.label(table[place], content, place + 1)
            plain.label(table[: len(contents)], contents)
            tables.append(table)
        elif move == 1:
            hits = sorted({block for content in CONTENTS if (block := plain.find(content))})
            rng.shuffle(hits)
            pool.hit(hits)
            plain.hit(hits)
            tables.append(hits)
        elif tables and move == 2:
            table = rng.choice(tables)
            for block in table[: rng.randint(0, 2)]:
                pool.unname(block)
                if block in plain.key:
                    del plain.key[block]
                    plain.labelled.remove(block)
        elif tables and move == 3:
            for block in rng.choice(tables)[:1]:
                content = rng.choice(CONTENTS)
                pool.label(block, content, 1)
                if block in plain.key:
                    plain.labelled.remove(block)
                plain.label([block], [content])
        elif tables:
            table = tables.pop(rng.randrange(len(tables)))
            release(pool, table)
            plain.drop_table(table)
        agree(pool, plain)
        if eviction is None:
            assert list(pool.free_list()) == plain.free, f"seed {seed}"


@pytest.mark.parametrize("seed", range(10))
def test_what_blocks_hold_is_what_a_dictionary_knows(seed: int) -> None:
    """Neighbours collide, and so do equal places of different streams; the table grows."""
    rng = random.Random(seed)
    pool = Pool(6000)
    free = pool.take_many(6000)
    rng.shuffle(free)
    holders: dict[int, list[int]] = {}
    drawn = [
        rng.randrange(1, 6) * WIDTH + rng.randrange(rng.choice((3, 40, 4000))) for _ in range(6000)
    ]
    for content in drawn:
        if rng.random() < 0.7:
            holders.setdefault(content, []).append(free.pop())
            pool.label(holders[content][-1], content, 1)
        elif content in holders:
            place = rng.randrange(len(holders[content]))
            free.append(holders[content].pop(place))
            pool.unname(free[-1])
            if not holders[content]:
                del holders[content]
        asked = rng.choice(drawn)
        assert pool.find(asked) == holders.get(asked, [0])[0], f"seed {seed}"
    assert len(holders) > 1024
    assert all(pool.find(content) == holders.get(content, [0])[0] for content in drawn)
    pool.audit()


def test_runs_of_moves_reach_what_is_rare() -> None:
    """Contents of several blocks, whose first one is evicted, and all blocks taken."""
    pool = Pool(4)
    first, second = pool.take_many(1), pool.take_many(1)
    pool.label(first[0], 7, 1)
    pool.label(second[0], 7, 1)
    release(pool, first)
    release(pool, second)
    assert pool.find(7) == first[0]
    assert pool.take_many(3) == [3, 4, first[0]]
    assert pool.find(7) == second[0]
    assert pool.take_many(1) == second
    assert (pool.find(7), pool.free) == (0, 0)


def test_a_part_of_a_table_is_given_back_last_block_first() -> None:
    pool = Pool(6)
    held: vec = EMPTY
    for block in (*pool.take_many(3), 0, *pool.take_many(1)):  # 0 stands for no block
        held = append(held, block)
    pool.label(held[1], 5, 2)
    pool.release(held, 1, len(held), 0)
    assert list(pool.free_list()) == [4, 3, 5, 6, 2]
    assert pool.references == {1: 1}


@pytest.mark.parametrize("fault", ["refs", "num_free", "num_cached", "content"])
def test_an_audit_finds_what_is_wrong(fault: str) -> None:
    pool = Pool(4)
    (block,) = pool.take_many(1)
    pool.label(block, 7, 1)
    release(pool, [block])
    pool.audit()
    cells = pool._cells
    if fault == "refs":
        cells[block * FIELDS + REFS] = 1
    elif fault == "num_free":
        pool.num_free -= 1
    elif fault == "num_cached":
        pool.num_cached += 1
    else:
        cells[block * FIELDS + CONTENT] = 8
    with pytest.raises(AssertionError):
        pool.audit()

"""Block tables of nano-vllm: exact ids, who hits whom, and books that always balance."""

from collections.abc import Sequence as Seq

from hypothesis import given
from hypothesis import strategies as st
from twins.steps import generated

from kvsim.conform.tokens import RuleStream
from kvsim.engine.idle import Queue
from kvsim.engine.request import Request, Sequence
from kvsim.engines.nano_blocks import NanoTables, NanoTables2025


class KeysOnly:
    """A stream that knows its blocks only together with what is before them."""

    def __init__(self, stream: RuleStream) -> None:
        self.keys = self.contents = stream.keys


def sequence(prompt: Seq[int], name: str = "r", *, contents: bool = True) -> Sequence:
    stream = RuleStream(name, prompt)
    chosen = stream if contents else KeysOnly(stream)
    return Request(0, name, len(prompt), chosen).sequences[0]  # type: ignore[arg-type]


def run(tables: NanoTables, each: Sequence) -> int:
    """Allocate and compute a prompt; returns the tokens hit."""
    tables.allocate(each)
    tables.publish(each, each.length)
    return each.seen * tables.block_size


@given(st.lists(st.tuples(st.sampled_from(["pop", "put", "remove"]), st.integers(0, 99))))
def test_a_queue_is_a_list_taken_from_its_front(moves: list[tuple[str, int]]) -> None:
    queue, plain = Queue(3, 5), list(range(3, 8))
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
        assert [*queue.fresh, *queue] == plain
        assert len(queue) == len(plain)


def test_freed_blocks_wait_behind_all_others_last_block_first() -> None:
    tables = NanoTables(2, 5, 0)
    a = sequence([1, 2, 3, 4, 5])
    run(tables, a)
    tables.free(a)
    b = sequence([6, 6, 7, 7, 8, 8, 9, 9])
    tables.allocate(b)
    assert (a.table, b.table) == ([], [3, 4, 2, 1])


def test_blocks_are_hit_once_computed_but_never_the_last_one() -> None:
    tables = NanoTables(2, 9, 0)
    prompt = [1, 2, 3, 4]
    a, b, c = sequence(prompt), sequence(prompt), sequence(prompt)
    tables.allocate(a)
    assert tables.match(b) == []
    tables.publish(a, 3)
    assert run(tables, c) == 2
    assert c.table == [0, 2]
    assert tables.lookups == (4, 1)


def test_of_equal_blocks_the_one_registered_last_is_hit() -> None:
    tables = NanoTables(2, 9, 0)
    prompt = [1, 2, 3]
    a, b, c = sequence(prompt), sequence(prompt), sequence(prompt)
    tables.allocate(a)
    tables.allocate(b)
    for each in (b, a):
        tables.publish(each, 3)
    assert tables.match(c) == [a.table[0]]


def test_an_admission_needs_a_block_for_every_hit_that_is_idle() -> None:
    tables = NanoTables(2, 4, 0)
    a, b = sequence([1, 2, 3, 4, 5]), sequence([1, 2, 3, 4, 6])
    run(tables, a)
    assert tables.admission_need(b.request) == 1
    tables.free(a)
    assert tables.admission_need(b.request) == 3
    assert tables.gpu.cached == 2
    run(tables, b)
    assert (b.table, tables.gpu.cached) == ([0, 1, 3], 0)
    tables.audit([b.request])


def test_a_block_is_opened_by_the_token_that_needs_it() -> None:
    tables = NanoTables(2, 4, 0)
    a = sequence([1, 2, 3])
    run(tables, a)
    needs = []
    for _ in range(3):
        a.length += 1
        needs.append(tables.growth_need(a))
        tables.append(a)
    assert needs == [0, 1, 0]


def stale_tables(*, contents: bool) -> tuple[NanoTables2025, Sequence]:
    """A block that held [5, 5] behind [1, 1] now holds [5, 5] behind [2, 2]."""
    tables = NanoTables2025(2, 3, 0)
    for name, prompt in (("a", [1, 1, 5, 5, 9]), ("b", [2, 2, 5, 5])):
        each = sequence(prompt, name, contents=contents)
        tables.allocate(each)
        tables.free(each)
    return tables, sequence([1, 1, 5, 5, 7], "c", contents=contents)


def test_an_overwritten_block_is_hit_if_its_own_tokens_agree() -> None:
    tables, c = stale_tables(contents=True)
    assert len(tables.match(c)) == 2


def test_without_contents_only_the_whole_prefix_is_hit() -> None:
    tables, c = stale_tables(contents=False)
    assert len(tables.match(c)) == 1


def test_what_follows_a_stale_hit_is_chained_to_its_finder() -> None:
    tables = NanoTables2025(2, 6, 0)
    a, y = sequence([1, 1, 5, 5, 9], "a"), sequence([8, 8, 8, 8, 8], "y")
    for each in (a, y):
        tables.allocate(each)
    for each in (a, y):
        tables.free(each)
    x, c = sequence([2, 2, 5, 5], "x"), sequence([1, 1, 5, 5, 7], "c")
    tables.allocate(x)
    tables.allocate(c)
    assert (x.table, c.table) == ([2, 1], [0, 1, 5])
    for _ in range(2):
        x.length += 1
        tables.append(x)
    output = [generated("x", 0), generated("x", 1)]
    behind_c, behind_x = sequence([1, 1, 5, 5, *output]), sequence([2, 2, 5, 5, *output])
    assert len(tables.match(behind_c)) == 3
    assert len(tables.match(behind_x)) == 2


def test_the_last_block_may_hit_so_that_nothing_is_left_to_compute() -> None:
    tables = NanoTables2025(2, 9, 0)
    a, b = sequence([1, 2, 3, 4]), sequence([1, 2, 3, 4])
    tables.allocate(a)
    tables.allocate(b)
    assert b.table == a.table
    assert tables.scheduled(b, 0) == b.length
